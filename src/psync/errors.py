"""The exceptions of psync, in one tree.

The class says who must act.

    PsyncError
    ├── UsageError                             the caller's mistake; never retried
    │   ├── ConfigurationError (ValueError)    cluster spec, options, arguments, environment
    │   │   └── DuplicateTaskError (KeyError)  two descriptions of one task
    │   ├── ContextError (RuntimeError,        call in the wrong scope, context or task,
    │   │                 ValueError)          or not made by all replicas
    │   ├── UnsupportedError (NotImplementedError)  operation that this object does not support
    │   ├── PartitionError (ValueError)        shape, dtype or shard mismatch
    │   ├── ValueMismatchError (ValueError)    gradient or value that does not fit its variable
    │   ├── ReplicaValueError (ValueError)     values of replicas that do not fit each other
    │   ├── UnknownVariableError (LookupError)  variable or shard that a ps does not hold
    │   ├── VariableIndexError (IndexError)    index that the variable does not have
    │   │   ├── IndexTypeError (TypeError)     not an index, such as a float
    │   │   └── IndexValueError (ValueError)   invalid index, such as a slice with step 0
    │   ├── SerializationError (TypeError)     step that cannot be sent to a worker
    │   ├── ClosedError                        object that this program has closed
    │   └── BusyError                          concurrent use of an object with a single user
    ├── TransportError                    network failure; the state of the request is unknown
    │   ├── ConnectFailed (OSError)
    │   └── ConnectionLost (OSError)
    ├── ProtocolError
    │   ├── LocalProtocolError                 invalid message from this side: a bug in psync
    │   └── RemoteProtocolError                invalid message from the peer
    │       ├── FrameTooLarge
    │       └── VersionMismatch
    ├── AuthenticationError               the peer does not hold the cluster's secret
    ├── DeadlineExceeded (TimeoutError)
    ├── TaskLost                          a task was declared lost
    │   ├── WorkerLost                         its closures run again elsewhere
    │   └── ParameterServerLost                its shards are lost
    ├── FencedError                       request from an older incarnation of a task
    ├── RemoteError                       a handler or step on the peer raised
    │   └── RuleError                          a user's update rule or schedule raised on a ps
    ├── ClosureError
    │   ├── ClosureCancelled                   not run, or stopped; schedule it again
    │   └── ClosureInputError                  an input of the closure had failed
    ├── LockLost                          a lock on shards ended early
    ├── NotEnoughReplicas                 fewer living workers than a synchronous step needs
    ├── AttachError                       ps tasks do not hold the state the program expects
    ├── TrainingEnded                     the token channel was closed: there is no further step
    ├── EndOfData                         a per-worker dataset is exhausted
    └── CheckpointError
        ├── CheckpointNotFound                 there is no checkpoint
        ├── CheckpointCorrupt                  it is damaged; restore an older one
        └── CheckpointMismatch                 it does not fit the declared variables

A stale or duplicate push is an outcome, not an error.

Messages are lower-case fragments that name the object, the expectation and the actual value. The
remedy is in ``hint``, which is shown on a separate line.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator
from typing import Any


class PsyncError(Exception):
    """Base class of all exceptions that psync raises.

    Args:
        message: Description of the error: the object, the expectation, the actual value.
        hint: Remedy, or None.
    """

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Made again without calling __init__, so that subclasses may have any signature. OSError
        # does not take its args then, so they are part of the state.
        return copyreg.__newobj__, (type(self), *self.args), {**vars(self), "args": self.args}  # type: ignore[attr-defined]


class UsageError(PsyncError):
    """The caller misused the API, so the program must change. Never retried."""


def other_loop(operation: str) -> UsageError:
    """Return the error for an await on an event loop that would never see the result."""
    return UsageError(
        f"{operation} on a different event loop than the cluster's",
        hint="in a plain step or with psync.blocking, use psync.wait(…) instead of asyncio.run(…); "
        "in another thread of the program, use asyncio.run_coroutine_threadsafe(…, loop)",
    )


class ConfigurationError(UsageError, ValueError):
    """A cluster description, argument, option or environment variable is wrong."""


def check_fits(
    fits: bool,
    expected: str,
    value: object,
    hint: str | None = None,
    *,
    error: type[PsyncError] = ConfigurationError,
) -> None:
    """Refuse a value that does not fit.

    Raises:
        PsyncError: ``fits`` is False; ``error`` is raised with ``expected``, then the actual value.
    """
    if not fits:
        raise error(f"{expected}, got {value!r}", hint=hint)


@contextlib.contextmanager
def os_errors(what: str, hint: str | None = None) -> Iterator[None]:
    """Return a context in which an OSError is raised as a ConfigurationError.

    Args:
        what: Begins the message; the reason of the operating system follows.
        hint: Remedy, or None.
    """
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(f"{what}: {exc.strerror or exc}", hint=hint) from exc


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Return a context in which the message of a UsageError begins with what it is about."""
    try:
        yield
    except UsageError as exc:
        raise type(exc)(f"{what}: {exc.message}", hint=exc.hint) from None


class DuplicateTaskError(ConfigurationError, KeyError):
    """Two descriptions of one cluster give the same task."""


class ContextError(UsageError, RuntimeError, ValueError):
    """A call was made in the wrong scope, context or task, or not by all replicas.

    It is both a RuntimeError and a ValueError, because TensorFlow raises either for such calls.
    """


class UnsupportedError(UsageError, NotImplementedError):
    """An operation is not supported by this object or in this place."""


class PartitionError(UsageError, ValueError):
    """A shape, dtype or partition list does not fit a variable or its shards."""


class ValueMismatchError(UsageError, ValueError):
    """A gradient or value does not fit its variable."""


class ReplicaValueError(UsageError, ValueError):
    """Values of replicas do not fit each other, or do not fit the requested operation."""


class UnknownVariableError(UsageError, LookupError):
    """A ps was asked for a variable or shard that it does not hold."""


class VariableIndexError(UsageError, IndexError):
    """The variable does not have the given index or row number."""


class IndexTypeError(VariableIndexError, TypeError):
    """A value that is not an index was used as one, such as a float or another variable."""


class IndexValueError(VariableIndexError, ValueError):
    """An index is invalid for any array, such as a slice with step 0."""


class SerializationError(UsageError, TypeError):
    """A step, its captures or its arguments cannot be sent to a worker."""


class ClosedError(UsageError):
    """This program had already closed the object."""


class BusyError(UsageError):
    """Two tasks used an object at the same time that allows only one user."""


class TransportError(PsyncError):
    """The network failed. Whether the request took effect is unknown."""


class ConnectFailed(TransportError, OSError):
    """No connection could be made to a task's address."""


class ConnectionLost(TransportError, OSError):
    """An established connection ended; ``__cause__`` is the reason, if known."""


class ProtocolError(PsyncError):
    """Bytes or messages broke the wire protocol; see the two subclasses."""


class LocalProtocolError(ProtocolError):
    """This side would have broken the protocol, which is a bug in psync."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is closed."""


class PlanForgotten(RemoteProtocolError):
    """A ps does not know what a client calls by a number; the client says it again."""


class FrameTooLarge(RemoteProtocolError):
    """The peer declared a size above the limit; no memory was allocated for it."""


class VersionMismatch(RemoteProtocolError):
    """The peer speaks a different version of the protocol."""


class AuthenticationError(PsyncError):
    """The peer did not prove that it knows the cluster's secret."""


class DeadlineExceeded(PsyncError, TimeoutError):
    """A deadline set by the caller passed before the result arrived."""


class TaskLost(PsyncError):
    """A task of the cluster was declared lost.

    Args:
        task: Name of the task, such as ``/job:ps/task:0``.
        message: Observed failure.
        hint: Remedy, or None.
    """

    def __init__(self, task: str, message: str = "was lost", *, hint: str | None = None) -> None:
        super().__init__(f"{task} {message}", hint=hint)
        self.task = task


class WorkerLost(TaskLost):
    """A worker died or became unreachable; its closures run again elsewhere, if possible."""


class ParameterServerLost(TaskLost):
    """A ps died, restarted empty or became unreachable; its shards are lost."""


class FencedError(PsyncError):
    """The request came from an old incarnation of a task that a newer one has replaced."""


class NotServedError(FencedError):
    """The process does not serve that ps: it has restarted, or a backup ps elsewhere serves it."""


class RemoteError(PsyncError):
    """Code on another task raised.

    Args:
        task: Name of the task that raised.
        type_name: Qualified name of the exception's type on that task.
        message: Text of the exception.
        traceback_text: Remote traceback as text, which is never executed.
    """

    def __init__(self, task: str, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"{type_name} on {task}: {message}")
        self.task = task
        self.type_name = type_name
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        trace = self.traceback_text.rstrip()
        return super().__str__() + (f"\nremote traceback ({self.task}):\n{trace}" if trace else "")


class RuleError(RemoteError):
    """An update rule or schedule of a plugin raised on a ps; see ``psync.rules``.

    The shard and its slots are unchanged; the other shards of the push have been updated. When the
    same push is sent again, or repeated by another run of its closure, it gets the same error.
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
        super().__init__(task, f"{what} raised {type_name}", message, traceback_text)
        self.type_name = type_name


class ClosureError(PsyncError):
    """A scheduled closure did not produce a value."""


class ClosureCancelled(ClosureError):
    """The closure was cancelled, or another one failed, so it was stopped or never started.

    This is not ``asyncio.CancelledError``, which means that the *caller* was cancelled.
    """


class ClosureInputError(ClosureError):
    """An input of the closure (per-worker dataset, RemoteValue) had failed.

    ``__cause__`` is the original error and never another ClosureInputError.
    """


class LockLost(PsyncError):
    """A lock on shards ended before the work it protected; the message says what was done."""


class CutLost(PsyncError):
    """A cut over all ps tasks failed or ended early. Nothing has changed; try again."""


class NotEnoughReplicas(PsyncError):
    """Too few workers: below ``min_replicas`` for too long; the message names the missing ones."""


class AttachError(PsyncError):
    """The program cannot continue from the state that the ps tasks hold; nothing was changed."""


class TrainingEnded(PsyncError):
    """Training has ended; no further synchronous step will be completed."""


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
    """A checkpoint is damaged; nothing was restored from it."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        older = "restore an older checkpoint; this one was changed or damaged after saving"
        super().__init__(message, hint=hint or older)


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit the declared variables; the message lists the names."""


# Earlier names, until 0.2.
GradientError = ValueMismatchError
CaptureError = SerializationError
