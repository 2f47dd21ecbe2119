"""What closures end with that have no value, and which of that a join raises.

**Errors.** They are kept in order until they are collected: the first is what a join raises, the
others are named with it. ``closures`` sees to it that the first one ends everything.

**Inputs.** A closure whose input ended without a value fails with ClosureInputError, whose cause is
the first error of the chain. That is an error like any other; but where the input's own error has
just ended everything, it is not listed once more.

**End of data.** EndOfData ends the closure that met it, and those that needed its value, and
nothing else: other workers may have data left. The first one is kept and collected behind the
errors, so that a join raises it once, when all is done and there was no error.
"""

from __future__ import annotations

from psync.closures.closure import Closure
from psync.errors import ClosureCancelled, ClosureError, ClosureInputError, WorkerLost


class QueueErrors:
    """What has ended everything, and what is to be raised for it."""

    def __init__(self) -> None:
        self.pending: list[BaseException] = []  # in order, until they are collected
        self.ending: str | None = None  # why everything is being cancelled; None if it is not
        self.stopped = False  # everything is cancelled for good
        self._end_of_data: BaseException | None = None  # the first, until it is collected

    def note_end_of_data(self, closure: Closure) -> None:
        """A closure ended because its data, or that of an input, had ended."""
        if self._end_of_data is None:
            self._end_of_data = root_of(closure)

    def collect(self) -> tuple[BaseException, tuple[BaseException, ...]] | None:
        """Take what is to be raised, (first, further), or None. Nothing is cancelled then."""
        errors = self.pending
        if self._end_of_data is not None:
            errors.append(self._end_of_data)
        self.pending, self._end_of_data = [], None
        if not self.stopped:
            self.ending = None
        return (errors[0], tuple(errors[1:])) if errors else None

    def cancelled(self, closure: Closure) -> ClosureCancelled:
        """Return the error of a closure that is cancelled, alone or with everything."""
        if self.ending is None:
            return ClosureCancelled(f"{closure} was cancelled")
        return ClosureCancelled(
            f"{closure} was cancelled: {self.ending}",
            hint=None if self.stopped else "schedule it again after join has raised the error",
        )


def input_error(closure: Closure, source: Closure) -> ClosureInputError:
    """Return the error of a closure whose input ``source`` ended without a value."""
    cause = root_of(source)
    error = ClosureInputError(
        f"{closure} was not run: its input, {source}, ended with "
        f"{type(cause).__name__}: {cause.args[0] if cause.args else cause}"
    )
    error.__cause__ = cause
    return error


def loss_error(closure: Closure) -> ClosureError:
    """Return the error of a closure that was lost with too many workers."""
    error = ClosureError(
        f"{closure} was lost with its worker {closure.attempts} times: "
        f"{', '.join(closure.lost_on)}",
        hint="it seems to kill its process: look for a crash or lack of memory in their logs",
    )
    error.__cause__ = WorkerLost(closure.worker, f"was lost while it held {closure}")
    return error


def error_of(closure: Closure) -> BaseException:
    """Return what a closure ended with that has no value."""
    assert closure.error is not None, f"{closure} ended without a value and without an error"
    return closure.error


def root_of(closure: Closure) -> BaseException:
    """Return the error behind the error of a closure, so that those of inputs are never nested."""
    error = error_of(closure)
    while isinstance(error, ClosureInputError) and error.__cause__ is not None:
        error = error.__cause__
    return error
