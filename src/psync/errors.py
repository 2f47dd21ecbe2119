"""The exceptions of psync, in one tree.

The class answers one question: who must act.

    PsyncError
    ├── UsageError                        the caller; never retried
    │   ├── ConfigurationError (ValueError)    cluster spec, options, arguments, environment
    │   │   └── DuplicateTaskError (KeyError)  two descriptions of one task
    │   ├── ContextError (RuntimeError,        in another scope, context or task than it is for,
    │   │                 ValueError)          or not on all replicas
    │   ├── UnsupportedError (NotImplementedError)  objects of this kind cannot do that
    │   ├── PartitionError (ValueError)        shape, dtype or shard mismatch
    │   ├── ValueMismatchError (ValueError)         a gradient that does not fit its variable
    │   ├── ReplicaValueError (ValueError)     values of replicas that do not fit each other
    │   ├── UnknownVariableError (LookupError)
    │   ├── VariableIndexError (IndexError)    an index that the variable does not have
    │   │   ├── IndexTypeError (TypeError)     it is none, such as a float or another variable
    │   │   └── IndexValueError (ValueError)   such as a step of 0
    │   ├── SerializationError (TypeError)           a step that cannot be sent to a worker
    │   ├── ClosedError                        you closed it
    │   └── BusyError                          two tasks used what only one may
    ├── TransportError                    the network; state of the request unknown
    │   ├── ConnectFailed (OSError)
    │   └── ConnectionLost (OSError)
    ├── ProtocolError
    │   ├── LocalProtocolError                 we would have sent nonsense: a bug here
    │   └── RemoteProtocolError                they sent nonsense
    │       ├── FrameTooLarge
    │       └── VersionMismatch
    ├── AuthenticationError               the peer does not hold the cluster's secret
    ├── DeadlineExceeded (TimeoutError)
    ├── TaskLost                          membership's verdict
    │   ├── WorkerLost                         its closures run again elsewhere
    │   └── ParameterServerLost                shards are gone
    ├── FencedError                       an older incarnation of a task spoke
    ├── RemoteError                       a handler or step on the peer raised
    │   └── RuleError                          an update rule or schedule of the user's, on a ps
    ├── ClosureError
    │   ├── ClosureCancelled                   not run, or stopped; schedule it again
    │   └── ClosureInputError                  an input of the closure had failed
    ├── LockLost                          a lock on shards ended before its time
    ├── NotEnoughReplicas                 fewer living workers than a synchronous step needs
    ├── AttachError                       ps tasks do not hold what the program would go on with
    ├── TrainingEnded                     the token channel was closed: there is no further step
    ├── EndOfData                         a per-worker dataset is exhausted
    └── CheckpointError
        ├── CheckpointNotFound                 there is none
        ├── CheckpointCorrupt                  it is not as it was saved; restore an older one
        └── CheckpointMismatch                 it fits other variables than those declared

A stale or duplicate push is an outcome, not an error.

Messages are lower-case fragments that name the thing, what was expected and
what came; a remedy goes into ``hint`` and is shown on a line of its own.
"""

from __future__ import annotations

from typing import Any


class PsyncError(Exception):
    """Base of every exception that psync raises itself.

    Args:
        message: What happened: the thing, what was expected, what came.
        hint: What to do about it, or None.
    """

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt without calling __init__, so that subclasses may have any signature.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[PsyncError], args: tuple[Any, ...], state: dict[str, Any]) -> PsyncError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(PsyncError):
    """The caller broke the API; the program must change. Never retried."""


def other_loop(operation: str) -> UsageError:
    """Return the error of what is awaited on an event loop where its answer would never come."""
    return UsageError(
        f"{operation} on a different event loop than the cluster's",
        hint="in a plain step or with psync.blocking, use psync.wait(…) instead of asyncio.run(…); "
        "in another thread of the program, use asyncio.run_coroutine_threadsafe(…, loop)",
    )


class ConfigurationError(UsageError, ValueError):
    """A cluster description, argument, option or environment variable is wrong."""


class DuplicateTaskError(ConfigurationError, KeyError):
    """Two descriptions of one cluster give the same task."""


class ContextError(UsageError, RuntimeError, ValueError):
    """A call in another scope, context or task than it is for, or not made by all replicas.

    TensorFlow raises now a RuntimeError, now a ValueError where such a call is wrong.
    """


class UnsupportedError(UsageError, NotImplementedError):
    """An operation that objects of this kind do not have, or not here, though others do."""


class PartitionError(UsageError, ValueError):
    """A shape, dtype or partition list does not fit a variable or its shards."""


class ValueMismatchError(UsageError, ValueError):
    """A gradient or value does not fit the variable it is meant for."""


class ReplicaValueError(UsageError, ValueError):
    """Values of replicas do not fit each other, or what is to be done with them."""


class UnknownVariableError(UsageError, LookupError):
    """A ps was asked for a variable or shard that it does not hold."""


class VariableIndexError(UsageError, IndexError):
    """An index or row number that a variable does not have."""


class IndexTypeError(VariableIndexError, TypeError):
    """Something that is not an index, such as a float or another variable."""


class IndexValueError(VariableIndexError, ValueError):
    """An index that makes no sense for any array, such as a slice with step 0."""


class SerializationError(UsageError, TypeError):
    """A step, its captures or its arguments cannot be sent to a worker."""


class ClosedError(UsageError):
    """The object was closed by this program before this call."""


class BusyError(UsageError):
    """Two tasks used at once what only one may use."""


class TransportError(PsyncError):
    """The network failed. Whether the request took effect is unknown."""


class ConnectFailed(TransportError, OSError):
    """No connection could be made to a task's address."""


class ConnectionLost(TransportError, OSError):
    """An established connection ended; ``__cause__`` says why where that is known."""


class ProtocolError(PsyncError):
    """Bytes or messages broke the wire protocol; see the two subclasses."""


class LocalProtocolError(ProtocolError):
    """This side would have broken the protocol: a bug in psync."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is closed."""


class FrameTooLarge(RemoteProtocolError):
    """The peer declared a size above the limit; nothing was allocated for it."""


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the protocol."""


class AuthenticationError(PsyncError):
    """The peer did not prove that it knows the cluster's secret."""


class DeadlineExceeded(PsyncError, TimeoutError):
    """A deadline given by the caller passed first."""


class TaskLost(PsyncError):
    """A task of the cluster was declared lost.

    Args:
        task: Name of the task, as in ``/job:ps/task:0``.
        message: What was observed.
        hint: What to do about it.
    """

    def __init__(self, task: str, message: str = "was lost", *, hint: str | None = None) -> None:
        super().__init__(f"{task} {message}", hint=hint)
        self.task = task


class WorkerLost(TaskLost):
    """A worker died or became unreachable; its closures run again elsewhere, if there is any."""


class ParameterServerLost(TaskLost):
    """A ps died, restarted empty or became unreachable; its shards are gone."""


class FencedError(PsyncError):
    """The request came from an incarnation that a newer one has replaced."""


class NotServedError(FencedError):
    """The process does not serve that ps: it was started again, or a backup elsewhere serves it."""


class RemoteError(PsyncError):
    """Code on another task raised.

    Args:
        task: Name of the task on which it was raised.
        type_name: Qualified name of the exception's type there.
        message: Its text.
        traceback_text: The remote traceback, as text: data, never executed.
    """

    def __init__(self, task: str, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"{type_name} on {task}: {message}")
        self.task = task
        self.type_name = type_name
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        if not self.traceback_text:
            return self.message
        return f"{self.message}\nremote traceback ({self.task}):\n{self.traceback_text.rstrip()}"


class RuleError(RemoteError):
    """An update rule, or a schedule, of a plugin raised on a ps; see ``psync.rules``.

    The shard and its slots are as they were; the other shards of the push have been updated. The
    same push, sent again, or made again by another run of its closure, gets the same error.
    """

    def __init__(
        self, task: str, what: str, type_name: str, message: str, traceback_text: str = ""
    ) -> None:
        """Tell of an error.

        Args:
            task: Name of the ps.
            what: The rule or schedule, and the variable.
            type_name: As for ``RemoteError``, as all that follow.
            message: Likewise.
            traceback_text: Likewise.
        """
        super().__init__(task, type_name, message, traceback_text)
        self.message = f"{what} raised {type_name} on {task}: {message}"
        self.args = (self.message,)


class ClosureError(PsyncError):
    """A scheduled closure did not produce a value."""


class ClosureCancelled(ClosureError):
    """The closure was not run, or was stopped, because another one failed or it was cancelled.

    Not ``asyncio.CancelledError``: that one means that the *caller* was cancelled.
    """


class ClosureInputError(ClosureError):
    """An input of the closure (per-worker dataset, RemoteValue) had failed.

    ``__cause__`` is the original error; it is never another ClosureInputError.
    """


class LockLost(PsyncError):
    """A lock on shards ended before that for which it was taken; the message says what was done."""


class CutLost(PsyncError):
    """A cut over all ps tasks could not be taken, or is over; nothing has changed: try again."""


class NotEnoughReplicas(PsyncError):
    """Fewer living workers than ``min_replicas`` for too long; the message names the missing."""


class AttachError(PsyncError):
    """A program cannot go on with what the ps tasks hold; nothing was changed."""


class TrainingEnded(PsyncError):
    """Training has ended: no further synchronous step will be closed."""


class EndOfData(PsyncError):
    """A per-worker dataset has no further element."""

    # Of the iterator that raised it. They travel with the error, and tell the queue what to do.
    data: tuple[str, int] | None = None  # its uid, and the pass over its data
    batches = 0  # that this worker had
    updates = 0  # that the closure had begun, which therefore cannot run elsewhere instead


class CheckpointError(PsyncError):
    """A checkpoint cannot be saved or restored."""


class CheckpointNotFound(CheckpointError, LookupError):
    """There is no checkpoint where one was expected."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is not as it was saved; nothing was restored from it."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit what is declared; the message lists the names."""


# Earlier names, until 0.2.
GradientError = ValueMismatchError
CaptureError = SerializationError
