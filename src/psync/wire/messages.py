"""Messages that all tasks share: handshake, generic replies, statistics, shutdown.

Messages lie by the pair of tasks that exchange them, each a frozen class with a number of its own;
``catalogue`` names the modules. Fields of tuples come back as lists: msgpack knows one kind of
array.
"""

from __future__ import annotations

from typing import Any

from psync.wire.codec import Message, message

# Handshake. ``mac`` and nonces: 32 bytes.


@message(1)
class Hello(Message):
    """Client's first word."""

    oldest_version: int
    newest_version: int
    task: str  # name of the client's task
    incarnation: int  # of the client
    lane: str  # one of handshake.LANES
    nonce: bytes
    secured: bool  # whether the client holds a secret


@message(2)
class Challenge(Message):
    """Server's answer: proves first, so that a client never proves itself to a stranger."""

    version: int
    task: str
    incarnation: int
    nonce: bytes
    secured: bool
    mac: bytes


@message(3)
class Proof(Message):
    """Client's proof."""

    mac: bytes


@message(4)
class Welcome(Message):
    """The connection is open."""


@message(5)
class Refused(Message):
    """The connection ends here."""

    reason: str  # "version", "authentication", "tls", "protocol", "fenced", "full", "early"
    detail: str


# Replies that several requests share.


@message(8)
class Done(Message):
    """The request was carried out; there is nothing more to say."""


@message(9)
class Failure(Message):
    """Header of an ERROR frame."""

    error: str  # class name in psync.errors, or "" for any other exception
    type_name: str  # of any exception
    task: str  # that it tells of (TaskLost, RemoteError); else ""
    message: str
    hint: str | None
    traceback: str


# To any task.


@message(27)
class Shutdown(Message):
    """Finish and exit; answered by Done."""

    reason: str


@message(28)
class AskStatistics(Message):
    """Answered by Statistics."""


@message(29)
class Statistics(Message):
    """Counters of a task."""

    counters: dict[str, Any]


@message(138)
class AskSpans(Message):
    """Record what this task does, and tell what was recorded; answered by Statistics.

    Segments of the answer: readings, see ``net.tracing.recorder``. It records from the first
    question of a reader on, until all have said that it was their last, or have gone.
    """

    reader: str  # tells apart who asks
    last: bool
