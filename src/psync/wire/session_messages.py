"""Messages of training sessions without a coordinator: declare, enter, leave, end of training."""

from __future__ import annotations

from psync.wire.codec import Message, message

# Who takes part.


@message(54)
class Declared(Message):
    """Chief of a session → ps 0: the variables are there, workers may enter.

    Answered by Done, when so many wait; until then nobody enters.
    """

    trains: bool  # whether the chief is a replica itself
    num_workers: int


@message(52)
class EnterSession(Message):
    """Worker → ps 0: one that no coordinator has attached takes part. Answered by SessionEntered.

    The answer waits until a chief has attached the ps and ``Declared`` was said; it is
    TrainingOver if training has ended by then.
    """

    incarnation: int  # under which the worker was started


@message(53)
class SessionEntered(Message):
    """The worker is a replica, under this incarnation, which is above the chief's."""

    incarnation: int


@message(58)
class CheckShards(Message):
    """Worker of a session → ps: do you hold these? Answered by Done."""

    # (variable name, variable id, shard index, offset, shape, dtype)
    shards: list[tuple[str, int, int, int, list[int], str]]


@message(55)
class LeaveSession(Message):
    """A worker that entered has ended its loop; answered by Done.

    From the chief it ends training, and is answered by TrainingOver when all others have left.
    """


@message(139)
class ReplicaFailed(Message):
    """A worker that entered has left by an error, which ends training; answered by Done."""

    type_name: str
    message: str
    traceback: str


# The end of training, of coordinators, too.


@message(51)
class EndTraining(Message):
    """Close the token channel: who waits, or pushes later, is told. Answered by Done."""

    reason: str
    failed: bool  # whether it ends before its time


@message(59)
class AwaitEnd(Message):
    """Answered by TrainingOver, once training has ended."""


@message(60)
class TrainingOver(Message):
    """Why training has ended, as EndTraining said it."""

    reason: str
    failed: bool
    # Of a replica: (its name, type name, message, traceback); None: no such error has ended it.
    error: tuple[str, str, str, str] | None


# Requests, by who serves them.

ON_PS_0 = (Declared, EnterSession, LeaveSession, ReplicaFailed, EndTraining, AwaitEnd)
ON_EACH_PS = (CheckShards,)
