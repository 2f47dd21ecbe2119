"""Creation of shards on a ps: from values that are sent, as copies, or filled with one element.

One object serves one coordinator, with its store; a newer one gets another. Creating is idempotent,
so a lost connection repeats it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from psync.errors import RemoteProtocolError, ValueMismatchError
from psync.net.connection import Connection, Handler, Request
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.ps.plans import NO_BYTES, memory_for
from psync.specs import ShardSpec, dtype_of
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message
from psync.wire.messages import CreateShards
from psync.wire.tensors import array_from_bytes

Source = Key | np.ndarray | None
"""What a shard begins as: a copy of another, so many of one element, or a value that is sent."""


class ShardCreation:
    """Creates the shards of one ps, as entries of the log: ``Executor`` answers Done.

    Args:
        task: Name of the ps.
        index: Of it.
        store: Takes the shards.
        work: What takes long.
        pool: Memory for what comes in.
        check_coordinator: Raises unless a peer is the coordinator that is served.
    """

    def __init__(
        self,
        task: str,
        index: int,
        store: ShardStore,
        work: LongWork,
        pool: BlockPool,
        check_coordinator: Callable[[Connection], None],
    ) -> None:
        self._task = task
        self._index = index
        self._store = store
        self._work = work
        self._pool = pool
        self._check_coordinator = check_coordinator

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {CreateShards: Handler(self._create, self._prepare)}

    def _prepare(self, request: Request[CreateShards]) -> Sequence[memoryview]:
        peer, message = request.peer, request.message
        lengths = request.lengths
        self._check_coordinator(peer)
        shards = self._to_create(message)
        if lengths != tuple(spec.nbytes for spec, source in shards if source is None):
            raise ValueMismatchError(f"{self._task}: initial values do not have the shards' sizes")
        return memory_for(self._pool, sum(lengths))

    def _create(self, request: Request[CreateShards]) -> asyncio.Future[None]:
        message, body = request.message, request.segments
        self._check_coordinator(request.peer)
        shards = self._to_create(message)
        if not body and None in message.sources:
            raise ValueMismatchError(f"{self._task}: no initial values for {len(shards)} shards")
        return self._work.to_the_end(self._fill(shards, *body))

    async def _fill(
        self, shards: Sequence[tuple[ShardSpec, Source]], body: memoryview = NO_BYTES
    ) -> None:
        store, start = self._store, 0
        for spec, source in shards:
            if isinstance(source, np.ndarray):
                store.create(spec, fill=source)
                continue
            if source is not None:
                await self._copy(spec, source)
                continue
            size = spec.nbytes
            view = body[start : start + size]
            start += size
            if size <= INLINE_BYTES:
                store.create(spec, view)
            elif store.create(spec):
                await self._work.finish(store.assign(spec.key, "assign", view))

    async def _copy(self, spec: ShardSpec, source: Key) -> None:
        """Take up a shard that begins as another one is now."""
        work = await self._work.when_idle(self._store.copy, spec, source)
        if spec.nbytes <= INLINE_BYTES:
            self._work.finish_now(work)
        else:
            await self._work.finish(work)

    def _to_create(self, message: CreateShards) -> list[tuple[ShardSpec, Source]]:
        """Return each shard, and that of which it is to be a copy, or what each element is."""
        if len(message.sources) != len(message.shards):
            raise RemoteProtocolError(
                f"{self._task}: {len(message.sources)} sources for {len(message.shards)} shards"
            )
        shards: list[tuple[ShardSpec, Source]] = []
        for declared, source in zip(message.shards, message.sources, strict=True):
            name, variable_id, index, offset, shape, dtype = declared
            if min(variable_id, index, offset, *shape) < 0:
                raise RemoteProtocolError(
                    f"{self._task}: negative numbers in the declaration of {name!r}"
                )
            dtype_of(dtype)  # raises for those that no variable has
            spec = ShardSpec(name, variable_id, index, offset, tuple(shape), dtype, self._index)
            if isinstance(source, bytes):
                shards.append((spec, self._element(spec, source)))
            else:
                shards.append((spec, None if source is None else (source[0], source[1])))
        return shards

    def _element(self, spec: ShardSpec, data: bytes) -> np.ndarray:
        """Return what all elements of a shard begin as."""
        if len(data) != dtype_of(spec.dtype).itemsize or (spec.dtype == "bool" and data[0] > 1):
            raise ValueMismatchError(
                f"{spec} on {self._task}: expected an element of {spec.dtype}, got {data[:16]!r}"
            )
        return array_from_bytes(data, (), spec.dtype)


def copied_by(message: CreateShards) -> list[Key]:
    """Return the shards whose values others begin with."""
    return [(each[0], each[1]) for each in message.sources if isinstance(each, tuple | list)]
