"""Messages between coordinator and workers: closures, their inputs and results, gangs.

``LeaveCluster`` and ``EndSession`` are in ``recovery_messages``.
"""

from __future__ import annotations

from psync.wire.codec import Message, message


@message(16)
class AttachWorker(Message):
    """The coordinator takes a worker into its cluster; answered by Done."""

    worker_index: int
    num_workers: int
    incarnation: int  # that the worker bears from now on
    coordinator: int  # incarnation of the coordinator
    origin: str  # of the strategy: marks its variables
    program: str  # of the coordinator's process: marks its optimizers
    ps_addresses: list[str]
    ps_timeout_s: float  # a ps that cannot be reached for this many seconds is lost


# Closures.


@message(17)
class RunClosures(Message):
    """Closures for a worker, in order. Segments: each closure's pickled arguments.

    A closure: (id, function key, number of segments or -1 when the worker has to fetch
    the arguments when it is about to run it, number of segments of each RemoteValue input).
    """

    closures: list[tuple[int, bytes, int, list[int]]]
    numbers: list[tuple[int, int]] | None = None
    """(id, number on ps tasks) of those that have another there: see ``closure_numbers``."""


@message(18)
class GiveBack(Message):
    """Return those of these closures that have not started."""

    closures: list[int]


@message(19)
class GivenBack(Message):
    """Worker's answer to GiveBack: these have not started and never will, here."""

    closures: list[int]


@message(20)
class CancelClosures(Message):
    """Stop these closures; each still ends with a result."""

    closures: list[int]


@message(21)
class ClosureResults(Message):
    """Closures that ended. Segments: each one's pickled result or exception.

    A result: (id, outcome, number of segments, error or None), where outcome is "ok",
    "error", "end_of_data" or "cancelled".
    """

    results: list[tuple[int, str, int, tuple[str, str, str] | None]]
    mean_seconds: float  # of those that succeeded
    # (number on ps tasks, calls that it has made) of those that succeeded and updated something
    updates: list[tuple[int, int]] | None = None
    # (step function, operation, times) of operations that were refused: their step had returned
    late: list[tuple[str, str, int]] | None = None
    stop: tuple[int, str] | None = None  # a closure's id, and why it asks for the end of training


@message(22)
class FetchFunction(Message):
    """Worker → coordinator: send a step function. Answered by Function."""

    key: bytes


@message(23)
class Function(Message):
    """A pickled function. Segments: the pickle, then its buffers."""

    name: str


@message(24)
class FetchArguments(Message):
    """Worker → coordinator: send the arguments of a closure. Answered by Arguments."""

    closure: int


@message(25)
class Arguments(Message):
    """Segments as in RunClosures."""

    segments: int
    remote_values: list[int]


# Per-worker iterators.


@message(26)
class ReleaseIterators(Message):
    """Per-worker iterators that nobody on the coordinator refers to any more."""

    uids: list[str]


@message(100)
class AskPosition(Message):
    """Coordinator → worker: how far is an iterator? Answered by IteratorPosition."""

    uid: str


@message(101)
class IteratorPosition(Message):
    """As of now."""

    position: int  # batches that steps were handed, and were before; -1: nobody has needed it yet


# Gangs: one function on all workers at once, whose replicas meet.


@message(105)
class RunReplica(Message):
    """Coordinator → worker: run this closure as one of a gang. Segments: as in RunClosures."""

    closure: tuple[int, bytes, int, list[int]]  # as in RunClosures
    replica_id: int
    num_replicas: int


@message(106)
class ReachCollective(Message):
    """Worker → coordinator: a replica has come to its next collective. Answered by Merged.

    The answer waits until all replicas have come to it. Segments: the pickled function and this
    replica's value.
    """

    closure: int
    what: str  # names it; must be the same for all replicas


@message(107)
class Merged(Message):
    """What the function of a collective returned or raised. Segments: that, pickled."""

    error: tuple[str, str, str] | None  # as in ClosureResults; None: it returned
