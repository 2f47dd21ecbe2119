"""Readings of recorders, understood: requests, closures, work, results and counters of each task.

A request is seen by two tasks, the one that sent it and the one that served it: two *halves*. They
belong together if both name the same connection and number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

import psync.wire.messages  # noqa: F401  # so that every message can be decoded
from psync.errors import PsyncError
from psync.wire.codec import Message, decode
from psync.wire.frames import Kind

SENT = 256  # as ``net.connection``

_REQUEST, _REPLY, _ERROR = int(Kind.REQUEST), int(Kind.REPLY), int(Kind.ERROR)
_NOTIFY, _CANCEL = int(Kind.NOTIFY), int(Kind.CANCEL)


class Reading(NamedTuple):
    """What a task has answered."""

    task: str
    body: bytes  # see ``recorder``
    asked: float  # when it was asked, and when its answer had come, by the coordinator's clock
    got: float


Link = tuple[str, int, str, int, str]
"""A connection as both ends know it: client and its incarnation, server and its, lane."""


@dataclass(slots=True, eq=False)
class Half:
    """A request as one of its two tasks saw it. Times are by that task's clock."""

    link: Link
    number: int
    is_client: bool
    message: Message
    begin: float  # it was sent, or had come
    sent: int  # bytes of bodies
    received: int
    end: float = math.nan  # its answer had come, or was sent; NaN: neither
    answer: Message | None = None
    outcome: str = ""  # "error", "given up", or "" else

    @property
    def other(self) -> str:
        """The other task's name."""
        return self.link[2] if self.is_client else self.link[0]

    @property
    def is_over(self) -> bool:
        """Whether its end is known."""
        return not math.isnan(self.end)


@dataclass(slots=True, eq=False)
class TaskLog:
    """What one process has recorded as one task.

    Attributes:
        task: Its name.
        begin, end: The first and last thing that is known of it, by its clock.
        lost: Entries that were dropped before anybody read them.
        halves: Requests that it sent or served, as they began.
        told: (time, sent?, other task, notification).
        notes: (time, name, …), see ``worker.traced``.
        facts: By name, the newest.
        asked: (when the coordinator asked, when that was answered, when the coordinator had it):
            the second by the clock of this task.
    """

    task: str
    begin: float
    end: float
    lost: int = 0
    halves: list[Half] = field(default_factory=list)
    told: list[tuple[float, bool, str, Message]] = field(default_factory=list)
    notes: list[Sequence[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[float, float, float]] = field(default_factory=list)
    _links: dict[int, Sequence[Any]] = field(default_factory=dict)
    _open: dict[tuple[int, int, bool], Half] = field(default_factory=dict)

    def add(self, reading: Mapping[str, Any]) -> None:
        """Take a further reading, the next of this process."""
        self.lost += reading["lost"]
        self.facts.update(reading["facts"])
        self._links.update(reading["connections"])
        for chunk in reading["chunks"]:
            entries = msgpack.unpackb(chunk, strict_map_key=False)
            self.begin = min(self.begin, entries[0][0])
            for entry in entries:
                if isinstance(entry[1], int):
                    self._frame(*entry)
                else:
                    self.notes.append(entry)
        self.end = max(self.end, reading["at"])

    def _frame(
        self, at: float, number: int, kind: int, request: int, header: bytes, nbytes: int
    ) -> None:
        is_sent, kind = bool(kind & SENT), kind & ~SENT
        own, own_incarnation, peer, peer_incarnation, lane = self._links[number]
        if kind == _REQUEST:
            message = _decoded(header)
            if message is None:
                return
            if is_sent:
                link = own, own_incarnation, peer, peer_incarnation, lane
            else:
                link = peer, peer_incarnation, own, own_incarnation, lane
            sent, received = (nbytes, 0) if is_sent else (0, nbytes)
            half = Half(link, request, is_sent, message, at, sent, received)
            self._open[number, request, is_sent] = half
            self.halves.append(half)
        elif kind in (_REPLY, _ERROR):
            half_ = self._open.pop((number, request, not is_sent), None)
            if half_ is not None:
                half_.end, half_.answer = at, _decoded(header)
                half_.outcome = "error" if kind == _ERROR else ""
                half_.sent += nbytes if is_sent else 0
                half_.received += 0 if is_sent else nbytes
        elif kind == _CANCEL:
            half_ = self._open.get((number, request, is_sent))
            if half_ is not None:
                half_.end, half_.outcome = at, "given up"
        elif kind == _NOTIFY:
            message = _decoded(header)
            if message is not None:
                self.told.append((at, is_sent, peer, message))


def logs_of(readings: Iterable[Reading]) -> list[TaskLog]:
    """Return what each process has recorded, in the order in which it was first heard of.

    Args:
        readings: In order.
    """
    logs: dict[tuple[str, str], TaskLog] = {}
    for task, body, asked, got in readings:
        reading = msgpack.unpackb(body, strict_map_key=False)
        key = task, reading["origin"]
        if key not in logs:
            logs[key] = TaskLog(task, reading["at"], reading["at"])
        logs[key].add(reading)
        logs[key].asked.append((asked, reading["at"], got))
    return list(logs.values())


def pairs_of(logs: Sequence[TaskLog]) -> Iterator[tuple[int, Half, int, Half]]:
    """Return both halves of each request that both tasks saw.

    Yields:
        (place of the log of the client, its half, place of that of the server, its half).
    """
    served: dict[tuple[Link, int], tuple[int, Half] | None] = {}
    for place, half in _halves(logs, is_client=False):
        key = half.link, half.number
        # Where a connection broke and came again, numbers begin again: which is which?
        served[key] = None if key in served else (place, half)
    sent: dict[tuple[Link, int], tuple[int, Half] | None] = {}
    for place, half in _halves(logs, is_client=True):
        key = half.link, half.number
        sent[key] = None if key in sent else (place, half)
    for key, client in sent.items():
        server = served.get(key)
        if client and server and type(client[1].message) is type(server[1].message):
            yield *client, *server


def _halves(logs: Sequence[TaskLog], *, is_client: bool) -> Iterator[tuple[int, Half]]:
    for place, log in enumerate(logs):
        for half in log.halves:
            if half.is_client is is_client:
                yield place, half


def _decoded(header: bytes) -> Message | None:
    """Return a message; None: this version of psync does not know it."""
    try:
        return decode(header)
    except PsyncError:
        return None
