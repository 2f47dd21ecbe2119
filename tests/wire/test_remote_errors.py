"""Exceptions travel as messages: those of psync as themselves, others as text."""

from __future__ import annotations

import inspect

import pytest

from psync import errors
from psync.errors import (
    PsyncError,
    RemoteError,
    ValueMismatchError,
    WorkerLost,
)
from psync.wire.codec import decode, encode
from psync.wire.limits import DEFAULT_LIMITS
from psync.wire.messages import Failure
from psync.wire.remote_errors import MAX_TEXT_CHARS, exception_of, failure_of

PS = "/job:ps/task:0"
KNOWN = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PsyncError)
]


def travel(exc: BaseException, task: str = PS) -> PsyncError:
    header = encode(failure_of(exc))
    assert len(header) <= DEFAULT_LIMITS.header_bytes
    failure = decode(header)
    assert isinstance(failure, Failure)
    return exception_of(failure, task)


def test_every_exception_of_psync_arrives_as_itself() -> None:
    for kind in KNOWN:
        if issubclass(kind, errors.TaskLost):
            sent: PsyncError = kind("/job:worker/task:3", hint="do this")
        elif issubclass(kind, RemoteError):
            sent = kind("/job:worker/task:3", "ValueError", "bad", "Traceback …")
        else:
            sent = kind("what happened", hint="do this")
        got = travel(sent)
        assert type(got) is kind
        assert got.message == sent.message
        assert got.hint == sent.hint
        assert str(got) == str(sent)
        assert got.args == (sent.message,)
        assert getattr(got, "task", None) == getattr(sent, "task", None)


def test_a_foreign_exception_arrives_with_its_traceback_as_text() -> None:
    try:
        {}["no such key"]
    except KeyError as exc:
        got = travel(exc)
    assert type(got) is RemoteError
    assert got.task == PS
    assert got.type_name == "KeyError"
    assert got.message == f"KeyError on {PS}: 'no such key'"
    assert '{}["no such key"]' in got.traceback_text
    assert str(got).startswith(
        f"KeyError on {PS}: 'no such key'\nremote traceback ({PS}):\nTraceback"
    )


def test_a_remote_error_that_is_passed_on_still_tells_of_its_origin() -> None:
    first = travel(ValueError("bad"), task=PS)
    second = travel(first, task="/job:worker/task:0")
    assert isinstance(second, RemoteError)
    assert second.task == PS
    assert second.type_name == "ValueError"
    assert str(second) == str(first)


def test_a_subclass_of_our_own_that_psync_does_not_know_is_foreign() -> None:
    class WorkerLost(errors.WorkerLost):
        pass

    got = travel(WorkerLost("/job:worker/task:0"))
    assert type(got) is RemoteError
    assert got.type_name == "WorkerLost"


@pytest.mark.parametrize("name", ["annotations", "Any", "_rebuild", "Exception", "__name__", "x"])
def test_a_peer_can_name_only_exceptions_of_psync(name: str) -> None:
    got = exception_of(Failure(name, "T", "", "m", None, ""), PS)
    assert type(got) is RemoteError
    assert got.message == f"T on {PS}: m"


def test_texts_of_any_size_fit_into_a_header() -> None:
    text = "ü" * 2_000_000
    for sent in (
        ValueError(text),
        ValueMismatchError(text, hint=text),
        WorkerLost("/job:worker/task:0", text),
    ):
        assert len(travel(sent).message) <= MAX_TEXT_CHARS + 100
    relayed = travel(RemoteError(PS, "E", "m", text))
    assert isinstance(relayed, RemoteError)
    assert len(relayed.traceback_text) == MAX_TEXT_CHARS


def test_of_a_long_traceback_the_end_is_kept() -> None:
    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 70_000 + " the end")
        recurse(depth - 1)

    with pytest.raises(ValueError, match="the end") as caught:
        recurse(50)
    got = travel(caught.value)
    assert isinstance(got, RemoteError)
    assert got.traceback_text.rstrip().endswith("the end")


def test_text_that_utf8_cannot_say_is_escaped() -> None:
    assert travel(OSError("file \udcff")).message == f"OSError on {PS}: file \\udcff"


def test_an_exception_that_cannot_be_printed_is_still_told_of() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert travel(Mute()).message == f"Mute on {PS}: its text cannot be had"
