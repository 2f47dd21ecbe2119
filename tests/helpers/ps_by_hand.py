"""The services of one ps without a network or an event loop, called as connections call them.

What is small and idle a ps answers in the turn in which it comes: a test of that needs no loop. A
request that would have to wait fails the test; it needs a ``PsCluster``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from asked import Asked, Reply, arrived, peer_of
from psync.cluster import task_name
from psync.errors import UsageError
from psync.net.connection import AsIfFrom, Connection
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.numerics.rules import SGD
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
            lambda: None, lambda: None,
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

    def peer(self, client: tuple[str, int]) -> Connection:
        """The connection of a client."""
        return cast(Connection, self._peers.setdefault(client, peer_of(client)))

    def arrives(self, client: tuple[str, int], message: Message, *segments: Any) -> Asked:
        """Let a message come in; its body is where the ps has put it, and it is not served yet."""
        handler = self._handlers[type(message)]
        if not client[0].startswith("/job:ps/"):  # a connection is cut when its task is replaced
            self.services.ledger.check_incarnation(*client)
        return arrived(handler, self.peer(client), decode(encode(message)), segments)

    def answer(self, asked: Asked) -> Reply:
        """Let a message be served that has come in; its answer is there at once."""
        self._handlers[type(asked.message)].serve(asked)
        return asked.result()

    def call(self, client: tuple[str, int], message: Message, *segments: Any) -> Reply:
        """Send a message; return the answer."""
        return self.answer(self.arrives(client, message, *segments))

    def ask(self, client: tuple[str, int], message: Message, *segments: Any) -> Message:
        """Send a message; return the answer without its segments."""
        return self.call(client, message, *segments).message

    def tell(self, client: tuple[str, int], message: Message, *segments: Any) -> None:
        """Send a message that has no answer."""
        self._handlers[type(message)].serve(self.arrives(client, message, *segments))

    def begin(self, client: tuple[str, int], message: Message, *segments: Any) -> Asked:
        """Send a message; return what gets its answer."""
        asked = self.arrives(client, message, *segments)
        self._handlers[type(message)].serve(asked)
        return asked

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


def _check_coordinator(peer: Connection) -> None:
    if (peer.task, peer.incarnation) != COORDINATOR:
        raise UsageError(f"{peer.task} is not a coordinator")
