"""The services of one ps without a network or an event loop, called as connections call them.

What is small and idle a ps answers in the turn in which it comes: a test of that needs no loop. A
request that would have to wait fails the test; it needs a ``PsCluster``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from psync.cluster import task_name
from psync.errors import UsageError
from psync.net.peer import AsIfFrom, Later, Peer, Reply
from psync.net.platform import Platform
from psync.numerics.block_pool import BlockPool
from psync.numerics.update_rule import SGD
from psync.ps.cooperative_work import LongWork
from psync.ps.life import Life
from psync.ps.snapshots import Contents
from psync.specs import ShardSpec, dtype_name, dtype_of
from psync.store.store import Key
from psync.store.sync_config import SyncConfig
from psync.sync.ps_services import PsProcess, PsServices
from psync.wire.codec import Message, decode, encode
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import AttachPs, Pull, Pulled
from psync.wire.tensors import to_bytes_view

COORDINATOR = ("/job:chief/task:0", 100)
A, B = ("/job:worker/task:0", 1000), ("/job:worker/task:1", 1000)
READER = ("/job:worker/task:99", 1000)


class PsByHand:
    """A ps beside ps 0: it applies synchronous steps and decides none.

    Or another one: ps 0, alone, decides steps as well. Its test needs the fixture ``turns``.

    Args:
        limits: Of its process.
        serves: False: no coordinator has attached it.
        index: 0: it is ps 0.
        num_ps: Number of ps tasks.
        contents: What it begins with; given to a backup.
    """

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        serves: bool = True,
        index: int = 1,
        num_ps: int = 2,
        contents: Contents | None = None,
    ) -> None:
        self.stopped = False  # it is to end, since an update failed half-way
        self.task = task_name("ps", index)
        platform, self.pool = Platform(cast(Any, None), limits=limits), BlockPool()
        self.work = LongWork(self.task, self._stop)
        process = PsProcess(
            self.task, index, platform, self.pool, self.work, _check_coordinator, lambda: None,
            lambda: None,
        )  # fmt: skip
        addresses = [f"ps{number}:1" for number in range(num_ps)]
        attach = AttachPs(COORDINATOR[1], addresses, 15.0) if serves else None
        life = Life.SERVING if serves else Life.EMPTY
        if contents is None:
            contents = Contents.empty(platform.parts, self.task, self.pool)
        else:
            life = Life.HOSTED
        self.services = PsServices(process, life, attach, 0, contents)
        self.services.updates.counted = lambda: None  # there is no loop in which to tell others
        self.store, self.sync = self.services.store, self.services.sync
        self.index, self.num_ps = index, num_ps
        self._handlers = self.services.handlers()
        self._peers: dict[tuple[str, int], AsIfFrom] = {}

    def _stop(self) -> None:
        self.stopped = True

    def create(self, name: str, value: Any) -> Key:
        """Create a variable of one shard; return its key."""
        array = np.asarray(value)
        key = (len(self.store.keys()), 0)
        spec = ShardSpec(name, *key, 0, array.shape, dtype_name(array.dtype), self.index)
        self.store.create(spec, to_bytes_view(array))
        return key

    def peer(self, client: tuple[str, int]) -> Peer:
        """The connection of a client."""
        return cast(Peer, self._peers.setdefault(client, AsIfFrom(*client, {})))

    def arrives(
        self, client: tuple[str, int], message: Message, *segments: Any
    ) -> list[memoryview]:
        """Let the segments of a message come in; return them where the ps has put them."""
        prepare = self._handlers[type(message)].prepare
        whole = b"".join(map(bytes, segments))
        if prepare is None or not segments:
            return [memoryview(bytes(segment)) for segment in segments]
        body, at = [], 0
        for view in prepare(self.peer(client), message, tuple(map(len, segments))):
            view[:] = whole[at : at + len(view)]
            at += len(view)
            body.append(view)
        assert at == len(whole)
        return body

    def answer(
        self, client: tuple[str, int], message: Message, body: Iterable[memoryview] = ()
    ) -> Reply:
        """Let a message be served whose segments have come; its answer is there at once."""
        reply = self._handlers[type(message)].run(self.peer(client), message, list(body))
        assert isinstance(reply, Reply), f"{message} has to wait"
        return reply

    def call(self, client: tuple[str, int], message: Message, *segments: Any) -> Reply:
        """Send a message; return the answer."""
        sent = decode(encode(message))
        return self.answer(client, sent, self.arrives(client, sent, *segments))

    def ask(self, client: tuple[str, int], message: Message, *segments: Any) -> Message:
        """Send a message; return the answer without its segments."""
        return self.call(client, message, *segments).message

    def tell(self, client: tuple[str, int], message: Message, *segments: Any) -> None:
        """Send a message that has no answer."""
        body = list(map(memoryview, segments))
        assert self._handlers[type(message)].run(self.peer(client), message, body) is None

    def begin(
        self, client: tuple[str, int], message: Message, *segments: Any
    ) -> Reply | Later | asyncio.Task[Reply] | None:
        """Send a message; return its answer, or what will be that; None: it has none."""
        sent = decode(encode(message))
        body = self.arrives(client, sent, *segments)
        outcome = self._handlers[type(message)].run(self.peer(client), sent, body)
        if outcome is None or isinstance(outcome, Reply | Later):
            return outcome
        return asyncio.get_running_loop().create_task(cast(Any, outcome))

    def pull(self, key: Key) -> tuple[np.ndarray, list[Any]]:
        """The value of a shard, and the steps of groups that it is at least of."""
        reply = self.call(READER, Pull(77, [key], -1, ""))
        assert isinstance(reply.message, Pulled)
        spec = self.store.spec(key)
        value = np.frombuffer(joined(reply.segments), dtype_of(spec.dtype)).reshape(spec.shape)
        return value, reply.message.steps

    def value(self, key: Key) -> np.ndarray:
        """The value of a shard."""
        return self.pull(key)[0]


def joined(segments: Sequence[Any]) -> bytes:
    """All bytes of an answer."""
    return b"".join(
        joined(each) if isinstance(each, list | tuple) else bytes(each) for each in segments
    )


def group_config(**more: Any) -> dict[str, Any]:
    """The configuration of a group of two replicas that takes steps of SGD(0.5)."""
    values: dict[str, Any] = {
        "name": "sync", "optimizer": SGD(0.5).to_config(), "replicas_to_aggregate": 2,
        "total_num_replicas": 2, "global_step": (0, 99, 0),
    }  # fmt: skip
    return SyncConfig(**(values | more)).to_config()


def _check_coordinator(peer: Peer) -> None:
    if (peer.task, peer.incarnation) != COORDINATOR:
        raise UsageError(f"{peer.task} is not a coordinator")
