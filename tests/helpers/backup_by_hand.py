"""A primary and its backup without a network or an event loop: a test ships entry by entry.

Needs the fixture ``turns``. What is small both do in the turn in which an entry comes.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar, cast

from asked import Asked, spawn
from inside import staged_on
from ps_by_hand import COORDINATOR, PsByHand, joined
from psync.net.connection import AsIfFrom
from psync.ps.executor import Entry
from psync.ps.snapshots import Contents, unpack_answer
from psync.store.ledger import Ledger
from psync.store.snapshot import SnapshotState, load_snapshot
from psync.store.store import ShardStore
from psync.wire.codec import decode

T = TypeVar("T")


class BackupByHand(PsByHand):
    """A backup of a ps that has what that has, and is fed its log from now on.

    Args:
        primary: The ps. It is idle.
    """

    def __init__(self, primary: PsByHand) -> None:
        services = primary.services
        executor = services.executor
        executor.log.give_up()  # the one before
        executor.advance()
        executor.begin_copy(services.groups())
        frozen, _ = services.freeze()
        store = ShardStore(primary.task, primary.pool)
        state = SnapshotState.from_bytes(frozen.state.to_bytes(), "a snapshot")
        loaded = load_snapshot(state, store, Ledger(COORDINATOR[1]), unpack_answer)
        for item, known in enumerate(frozen.state.items):
            if not known.is_constant:
                data = memoryview(joined(frozen.part(item, 0, known.nbytes)))
                for _ in loaded.write(item, 0, data):
                    pass
        contents = Contents.restored(loaded, {}, (), {})
        super().__init__(index=primary.index, num_ps=primary.num_ps, contents=contents)
        self.primary = primary
        self._of_log: dict[str, Any] = {}  # sets, by their numbers in the log
        for section in services.sections:
            for each in done_now(section.entries()):
                self.read(executor.in_full(*each))
        executor.log.pair()

    def read(self, entry: Entry) -> None:
        """Execute an entry."""
        message = decode(entry.header)
        handler = self.services.replayed.get(type(message)) or self._handlers[type(message)]
        body = [memoryview(bytes(segment)) for segment in entry.body]
        peer = AsIfFrom(entry.client, self._of_log, spawn)
        handler.serve(Asked(peer, message, body))

    def follow(self) -> Iterator[Entry]:
        """Take all entries that there are, one after the other; the primary executes each, too.

        Yields:
            Each entry, when both have executed it.
        """
        executor = self.primary.services.executor
        while batch := executor.log.to_ship(1, 1 << 20):
            self.read(batch[0].entry)
            executor.log.note_taken(batch[0].number)
            executor.advance()
            yield batch[0].entry

    def catch_up(self, entries: int = 1000) -> None:
        """Take so many entries, and be equal after each."""
        self.check_equal()
        for _, entry in zip(range(entries), self.follow(), strict=False):
            self.check_equal(decode(entry.header))

    def read_ahead(self, entries: int) -> None:
        """Take so many entries, of which the primary does not know that they are here."""
        for each in self.primary.services.executor.log.to_ship(entries, 1 << 20):
            self.read(each.entry)

    def check_equal(self, after: object = None) -> None:
        """Check that both are in the same state."""
        mine, other = state_of(self), state_of(self.primary)
        for part in mine:
            assert mine[part] == other[part], f"{part}, after {after}"
        assert self.services.digest() == self.primary.services.digest(), f"after {after}"

    def promote(self) -> None:
        """Serve; the coordinator has said so."""
        addresses = [f"ps{number}:1" for number in range(self.num_ps)]
        self.primary.services.executor.depose()
        self.services.moved(addresses, 1)


def done_now(work: Coroutine[Any, Any, T]) -> T:
    """Return what it returns, which has to wait for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("it has to wait")


def state_of(ps: PsByHand) -> dict[str, Any]:
    """What judging and computing have made of a ps, but for arrays that are being computed."""
    services, closer = ps.services, ps.services.closer
    return {
        "rule": None if closer is None else closer.steps.snapshot(),
        "staged": staged_on(services),
        "steps": sorted(services.sync.staging.steps()),
        "groups": services.sync.raw_configs(),
        "values": {
            key: joined(ps.store.read(key)) for key in ps.store.keys() if not ps.store.busy(key)
        },
    }
