"""What all tasks of a coordinator have recorded, for those who read it bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from psync.errors import PsyncError
from psync.net.connection import Connection
from psync.net.tracing.readings import Reading
from psync.net.tracing.recorder import LEASE_S, SpanRecorder
from psync.wire.messages import AskSpans

ANSWERS_WITHIN_S = 0.1
"""Whoever has not answered by then does so later: a step may compute on the loop of its worker."""

LAST_WITHIN_S = 2.0
"""For the last answer."""

ASKED_AT_ONCE = 100
"""Tasks are asked by turns: many of them cost no more than so many."""


@dataclass(slots=True, eq=False)
class _Reader:
    asked: dict[Connection, asyncio.Task[None]] = field(
        default_factory=dict
    )  # that have not answered
    known: set[Connection] = field(default_factory=set)  # asked before
    came: list[Reading] = field(default_factory=list)  # not handed out yet
    turn: int = 0  # place of the task that is asked next
    lease: asyncio.TimerHandle | None = None


class SpanCollector:
    """Asks the tasks of one coordinator.

    Args:
        recorder: Of the coordinator's own task.
        peers: Returns a connection to each of the others.
    """

    def __init__(self, recorder: SpanRecorder, peers: Callable[[], Iterable[Connection]]) -> None:
        self._recorder = recorder
        self._peers = peers
        self._readers: dict[str, _Reader] = {}

    async def read(self, name: str, *, last: bool = False) -> list[Reading]:
        """Return what has come since this reader has asked last; the first time they begin.

        Args:
            name: Of the reader, who is forgotten if it does not ask again for ten seconds.
            last: Whether it does not ask again: then tasks that compute are waited for, a while.

        Cancellation: Safe; what has come is handed out the next time.
        """
        reader = self._readers.get(name)
        if reader is None:
            reader = self._readers[name] = _Reader()
        self._renew(reader, name)
        self._ask(reader, name, last=last)
        now, body = self._recorder.now(), self._recorder.read(name, last=last)
        reader.came.append(Reading(self._recorder.task, body, now, now))
        if reader.asked:
            within_s = LAST_WITHIN_S if last else ANSWERS_WITHIN_S
            await asyncio.wait(list(reader.asked.values()), timeout=within_s)
        came, reader.came = reader.came, []
        if last:
            self._forget(name)
        return came

    def close(self) -> None:
        """Forget all readers."""
        for name in list(self._readers):
            self._forget(name)
        self._recorder.close()

    def _renew(self, reader: _Reader, name: str) -> None:
        if reader.lease is not None:
            reader.lease.cancel()
        reader.lease = asyncio.get_running_loop().call_later(LEASE_S, self._forget, name)

    def _forget(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            for task in reader.asked.values():
                task.cancel()
            if reader.lease is not None:
                reader.lease.cancel()

    def _ask(self, reader: _Reader, name: str, *, last: bool) -> None:
        """Ask those whose turn it is, those who are new, and in the end all."""
        peers = list(self._peers())
        new = [peer for peer in peers if peer not in reader.known]
        count = len(peers) if last else min(len(peers), ASKED_AT_ONCE)
        turn = [peers[(reader.turn + place) % len(peers)] for place in range(count)]
        reader.turn = (reader.turn + count) % max(1, len(peers))
        reader.known.intersection_update(peers)
        for peer in dict.fromkeys([*new, *turn]):
            if peer not in reader.asked:
                reader.known.add(peer)
                asking = self._ask_one(reader, peer, AskSpans(name, last))
                reader.asked[peer] = asyncio.get_running_loop().create_task(asking)

    async def _ask_one(self, reader: _Reader, peer: Connection, message: AskSpans) -> None:
        try:
            asked = self._recorder.now()
            received = await peer.call(message)
            got = self._recorder.now()
            for segment in received.segments:
                reader.came.append(Reading(peer.task, bytes(segment), asked, got))
        except PsyncError:
            pass  # it is gone: what it has said before is there
        finally:
            del reader.asked[peer]
