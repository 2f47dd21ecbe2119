"""Snapshots of a ps: frozen in place at a cut, and restored.

To freeze is to hold references to blocks: no copy is made, and updates go on, which replace the
blocks that are held (see ``numerics.memory``). To load is to make a store and a ledger from a
state. The arrays of that store are empty at first, but for constant ones; the caller fills them
piece by piece, and knows when all of them are there.

Frozen contents, and those being filled, may be handed to a thread; one at a time uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from psync.errors import BusyError, CheckpointCorrupt, CheckpointError, UsageError
from psync.numerics.memory import BLOCK_BYTES, BlockArray, bytes_of
from psync.numerics.rows import RowBlocks
from psync.specs import dtype_of
from psync.store.ledger import Ledger
from psync.store.snapshot_state import (
    OptimizerSnapshot,
    ShardSnapshot,
    SnapshotItem,
    SnapshotState,
    unpack_answer,
)
from psync.store.store import ShardStore
from psync.store.work import Shard

_LOOK_AT_ONCE = 256
"""Blocks, a microsecond or a few for each."""


class Frozen:
    """What a ps held at a cut.

    Args:
        state: All but the bytes.
        arrays: Of each item a view of each block; of constant ones nothing.
    """

    def __init__(self, state: SnapshotState, arrays: Sequence[list[memoryview]]) -> None:
        self.state = state
        self._arrays: dict[int, list[memoryview]] = dict(enumerate(arrays))
        self._dropped = False

    def views(self, place: int) -> list[memoryview]:
        """Return the bytes of an item, in order; of a constant one the same view several times.

        Args:
            place: Of the item in the state.

        Raises:
            CheckpointError: They were let go of, or there is no such item.
        """
        views = self._arrays.get(place)
        if views is None:
            raise CheckpointError(f"item {place} of a snapshot is no longer held, or never was")
        item = self.state.items[place]
        if item.fill is None:
            return list(views)
        return constant_views(item)

    def part(self, place: int, start: int, stop: int) -> list[memoryview]:
        """Return bytes ``start`` to ``stop`` of an item, as ``views`` does.

        Raises:
            CheckpointError: As ``views``, or it has not as many.
        """
        views = self.views(place)
        if not 0 <= start <= stop <= self.state.items[place].nbytes:
            raise CheckpointError(f"{self.state.items[place]}: no bytes {start} to {stop}")
        size = views[0].nbytes if views else 1  # all but the last are of one size
        found = []
        while start < stop:
            i, first = divmod(start, size)
            view = views[i][first : first + stop - start]
            found.append(view)
            start += view.nbytes
        return found

    def letting_go(self, place: int) -> Iterator[memoryview]:
        """Yield what ``views`` returns, and hold each block only until the next is asked for.

        Raises:
            CheckpointError: As ``views``; also in the midst of it, if ``drop`` is called.
        """
        views = self.views(place)[::-1]
        del self._arrays[place]
        while views:
            if self._dropped:
                raise CheckpointError(f"{self.state.items[place]}: its snapshot is no longer held")
            yield views.pop()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._dropped = True
        self._arrays.clear()


def constant_views(item: SnapshotItem) -> list[memoryview]:
    """Return the bytes of an array that is constant, in order."""
    assert item.fill is not None, "the caller has looked"
    size, itemsize = item.nbytes, len(item.fill)
    block = bytes_of(item.fill * (min(size, BLOCK_BYTES) // itemsize)).data
    return [block[: size - start] for start in range(0, size, BLOCK_BYTES)]


def freeze(store: ShardStore, state: SnapshotState) -> Frozen:
    """Hold what a ps holds now. Nothing is copied.

    Args:
        store: Its shards and optimizers.
        state: All else that it holds now.

    Raises:
        BusyError: An update is under way.
    """
    held = store.shards().values()
    for shard in held:
        if shard.busy:
            raise BusyError(f"{shard.spec}: an update is in progress, so no snapshot can be taken")
    arrays: list[list[memoryview]] = []
    shards = []
    for shard in held:
        fills = []
        for optimizer, slot, array in _arrays_of(shard):
            constant = array.is_constant
            fills.append((optimizer, slot, element(array.fill, array.dtype) if constant else None))
            arrays.append([] if constant else array.export())
        spec = shard.spec
        shards.append(
            ShardSnapshot(
                variable=spec.variable, id=spec.variable_id, index=spec.index, offset=spec.offset,
                shape=spec.shape, dtype=spec.dtype, ps=spec.ps, version=shard.version,
                fill=fills[0][2], slots=tuple(fills[1:]),
                pushes=tuple(each for each in shard.pushes.items() if each[0] >= 0),
            )
        )  # fmt: skip
    optimizers = store.optimizers.items()
    state = replace(
        state,
        shards=tuple(shards),
        optimizers=tuple(
            OptimizerSnapshot(
                number, each.config, each.rule.learning_rate.to_config(), each.count.marked
            )
            for number, each in optimizers
        ),
        counts=tuple((number, each.count.state) for number, each in optimizers),
    )
    return Frozen(state, arrays)


def settling(store: ShardStore) -> Iterator[None]:
    """Write out, block by block, what is constant in blocks of rows that were written in part.

    Nothing depends on it, but freezing does it all at once else.
    """
    for shard in list(store.shards().values()):
        for _, _, array in list(_arrays_of(shard)):
            if not isinstance(array, RowBlocks):
                continue
            for i in range(array.num_blocks):
                if (not shard.busy and array.settle(i)) or not i % _LOOK_AT_ONCE:
                    yield


def _arrays_of(shard: Shard) -> Iterator[tuple[int, str, BlockArray]]:
    yield -1, "", shard.values
    for (optimizer, slot), array in shard.slots.items():
        if optimizer >= 0:  # else nobody has adopted it yet
            yield optimizer, slot, array


def element(fill: float | np.ndarray, dtype: np.dtype) -> bytes:
    """Return an element as ``SnapshotItem.fill`` has it."""
    return bytes(bytes_of(np.full(1, fill, dtype)))


class Loaded:
    """A new store and a new ledger that are becoming what a snapshot says.

    Args:
        state: Of the snapshot.
        store: Without a shard. It gets those of the snapshot, without their bytes.
        ledger: That remembers nothing. It gets what that of the snapshot does.

    Attributes:
        wanted: Places of the items that are not filled.
    """

    def __init__(
        self,
        state: SnapshotState,
        store: ShardStore,
        ledger: Ledger,
    ) -> None:
        self.state = state
        self.store = store
        self.ledger = ledger
        for number, config, rate, _ in state.optimizers:
            store.define_optimizer(number, config)
            store.set_learning_rate(number, rate)
        for number, count in state.counts:
            store.restore_count(number, count)
        for known in state.shards:
            value, *slots = known.items
            store.create(known.spec, fill=_fill(value))
            shard = store.shards()[value.key]
            for slot in slots:
                store.make_slot(shard, slot.optimizer, slot.slot, _fill(slot))
            shard.version = known.version
            shard.pushes.update(known.pushes)
        ledger.restore(state, unpack_answer)
        self._given_up = False
        # Bytes that are there of each item, from its beginning on; by place.
        self._filled = {
            place: 0
            for place, item in enumerate(state.items)
            if item.nbytes and not item.is_constant
        }
        self.wanted = dict.fromkeys(self._filled)

    def write(self, place: int, start: int, data: memoryview) -> Iterator[None]:
        """Fill the next part of an item, one block for each ``next``; again changes nothing.

        Args:
            place: Of the item in the state.
            start: First byte.
            data: The bytes from there on.

        Raises:
            UsageError: It has no such bytes, or others come before them, or is constant, or there
                is no such item.
            CheckpointCorrupt: They are no array of its dtype.
            CheckpointError: ``give_up`` was called.
        """
        if place not in self._filled:
            raise UsageError(f"item {place} of a snapshot has no bytes to be filled")
        item, source = self.state.items[place], bytes_of(data)
        shard = self.store.shards()[item.key]
        array = shard.slots[item.optimizer, item.slot] if item.slot else shard.values
        stop = start + source.size
        if not 0 <= start <= stop <= array.nbytes:
            raise UsageError(f"{item}: no bytes {start} to {stop}")
        if start > self._filled[place]:
            raise UsageError(f"{item}: bytes from {start} on follow {self._filled[place]}")
        size = array.bounds(0)[1] * array.dtype.itemsize
        at = start
        while at < stop:
            if self._given_up:
                raise CheckpointError("another snapshot is to be loaded instead of this one")
            i, first = divmod(at, size)
            count = min(stop - at, size - first)
            block = array.block(i).array.view(np.uint8)
            block[first : first + count] = source[at - start : at - start + count]
            at += count
            yield
        if item.dtype == "bool" and stop == item.nbytes:
            for i in range(array.num_blocks):
                if array.block(i).array.view(np.uint8).max() > 1:
                    raise CheckpointCorrupt(f"{item}: bytes other than 0 and 1 for bool")
        self._filled[place] = max(self._filled[place], stop)
        if stop == item.nbytes:
            self.wanted.pop(place, None)

    def check_whole(self, what: str) -> None:
        """Raise UsageError, which names the snapshot, if an item is not filled."""
        for place in self.wanted:
            raise UsageError(f"{what} is incomplete: {self.state.items[place]} is missing")

    def give_up(self) -> None:
        """Let whoever fills it stop."""
        self._given_up = True


def _fill(item: SnapshotItem) -> float | np.ndarray:
    return 0 if item.fill is None else bytes_of(item.fill).view(dtype_of(item.dtype))
