"""User exceptions across tasks: described where they are raised, raised again by ``join``.

The user's own exception is what ``join`` raises, with its type and attributes, so that
``except MyError`` works; the remote traceback comes along as text in a `RemoteError`, its cause.
An exception that cannot be pickled, or cannot be built again, is represented by that
`RemoteError` alone: reporting a failure must not fail.
"""

from __future__ import annotations

from traceback import format_exception
from typing import NamedTuple, TypeGuard

from psync.errors import (
    ClosureInputError,
    RemoteError,
    SerializationError,
    TaskLost,
    TransportError,
)
from psync.serialization.captures import type_name
from psync.serialization.payloads import EMPTY, Payload, outside_of, pack, unpack

MAX_MESSAGE_CHARS = 4096  # these texts travel in message headers, which are limited to 1 MiB
MAX_TRACEBACK_CHARS = 16_384
MAX_EXCEPTION_BYTES = 1 << 20  # an exception is a report, not a way to return data

_RUNNERS = frozenset({"psync", "asyncio", "concurrent", "contextvars", "threading"})
"""Packages whose frames lead to user code and tell its author nothing."""


class Described(NamedTuple):
    """An exception as it travels."""

    texts: tuple[str, str, str]  # qualified name of its type, its text, its traceback
    payload: Payload  # the exception itself, or EMPTY if it cannot be sent


def describe_exception(exc: BaseException, *, main_by_name: bool = True) -> Described:
    """Return what is told to another task about an exception of user code. Never raises."""
    frames = outside_of(_RUNNERS, exc.__traceback__)
    if frames is None and not isinstance(exc, SerializationError):
        frames = exc.__traceback__
    # How psync found that a task is lost or the network failed is no news to the user.
    chain = not isinstance(exc, (TaskLost, TransportError))
    lines = format_exception(type(exc), exc, frames, chain=chain)
    name = type_name(exc).removeprefix("__main__.")
    texts = (
        _clip(name, 256),
        _clip(text_of(exc), MAX_MESSAGE_CHARS),
        _clip("".join(lines), MAX_TRACEBACK_CHARS),
    )
    return Described(texts, _pickled(exc, main_by_name))


def rebuild_exception(
    task: str, type_name: str, message: str, traceback_text: str, payload: Payload
) -> Exception:
    """Return the exception that a task described. Never raises.

    Args:
        task: Name of the task that raised it.
        type_name: The first of the texts of `Described`.
        message: The second.
        traceback_text: The third.
        payload: See there.

    Returns:
        The user's own exception with a RemoteError as its ``__cause__``. A ClosureInputError
        keeps its own cause, and that one gets the RemoteError. Where the exception cannot be
        built, the RemoteError itself.
    """
    remote = RemoteError(task, type_name, message, traceback_text)
    if not payload.segments:
        return remote
    try:
        exc, cause = unpack(payload.data, payload.buffers)
        if not _may_be_raised(exc) or not (cause is None or _may_be_raised(cause)):
            return remote
        if cause is not None:
            cause.__cause__ = remote
        exc.__cause__ = remote if cause is None else cause
    except (Exception, SystemExit) as broken:  # constructors of user code may do anything
        remote.add_note(
            f"not raised as {type_name}, which cannot be unpickled here: "
            f"{type(broken).__name__}: {_clip(text_of(broken), 256)}"
        )
        return remote
    return exc


def _may_be_raised(exc: object) -> TypeGuard[Exception]:
    """Return whether raising it in a coroutine of the coordinator means what it says."""
    return isinstance(exc, Exception) and not isinstance(exc, (StopIteration, StopAsyncIteration))


def _pickled(exc: BaseException, main_by_name: bool) -> Payload:
    # An exception pickles without its cause. That of a ClosureInputError is what it is about.
    cause = exc.__cause__ if isinstance(exc, ClosureInputError) else None
    for pair in ((exc, cause), (exc, None)):
        try:
            payload = pack(pair, main_by_name=main_by_name)
        except (SerializationError, MemoryError):
            continue
        if payload.nbytes <= MAX_EXCEPTION_BYTES and not payload.remote_values:
            return payload
    return EMPTY


def text_of(exc: BaseException) -> str:
    """Return the text of an exception of user code. Never raises."""
    try:
        return str(exc)
    except Exception as broken:  # a __str__ of user code
        return f"<its text cannot be shown: {type(broken).__name__}>"


def _clip(text: str, max_chars: int) -> str:
    """Return ``text`` so that it can travel: valid Unicode, the middle left out if too long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= max_chars:
        return text
    head, tail = max_chars // 4, max_chars - max_chars // 4
    return f"{text[:head]}\n… {len(text) - max_chars} characters left out …\n{text[-tail:]}"
