"""Translation of exceptions to messages and back.

An exception of psync arrives as itself, so that its class still says who must act. Any
other one arrives as a RemoteError with the text of its traceback: data, never code.
"""

from __future__ import annotations

from traceback import format_exception

from psync import errors
from psync.errors import PsyncError, RemoteError, TaskLost
from psync.wire.messages import Failure

MAX_TEXT_CHARS = 60_000
"""Of each text: an error must not break the limit for headers."""


def failure_of(exc: BaseException) -> Failure:
    """Return what a peer is told of ``exc``."""
    name = type(exc).__name__
    if not isinstance(exc, PsyncError) or getattr(errors, name, None) is not type(exc):
        trace = "".join(format_exception(exc))[-MAX_TEXT_CHARS:]
        return Failure("", name, "", _clip(text_of(exc)), None, _clip(trace))
    task = exc.task if isinstance(exc, TaskLost | RemoteError) else ""
    hint = None if exc.hint is None else _clip(exc.hint)
    trace = ""
    if isinstance(exc, RemoteError):  # passed on: it tells of yet another task
        name, trace = exc.type_name, exc.traceback_text
    return Failure(type(exc).__name__, name, task, _clip(exc.message), hint, _clip(trace))


def exception_of(failure: Failure, task: str) -> PsyncError:
    """Return the exception that ``task`` tells of."""
    known = getattr(errors, failure.error, None)
    if not (isinstance(known, type) and issubclass(known, PsyncError)):
        return RemoteError(task, failure.type_name, failure.message, failure.traceback)
    # Their own initialisers make the text, which is here already.
    error = known.__new__(known, failure.message)
    PsyncError.__init__(error, failure.message, hint=failure.hint)
    if isinstance(error, TaskLost | RemoteError):
        error.task = failure.task
    if isinstance(error, RemoteError):
        error.type_name, error.traceback_text = failure.type_name, failure.traceback
    return error


def text_of(error: BaseException) -> str:
    """Return the text of an exception of user code. Never raises."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be had"


def _clip(text: str) -> str:
    """Return text of bounded length, without what UTF-8 cannot say."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()
