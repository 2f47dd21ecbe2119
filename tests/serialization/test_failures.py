"""Exceptions of user code: their own type on the other side, and never a second failure."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from psync.client.context import ClosureContext, DatasetContext, forbid_in_dataset, inside
from psync.errors import ClosureInputError, ParameterServerLost, RemoteError, UsageError
from psync.serialization.payloads import (
    MAX_EXCEPTION_BYTES,
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    Payload,
    describe_exception,
    pack,
    rebuild_exception,
)

TASK = "/job:worker/task:1"


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def there(exc: BaseException) -> Exception:
    """What the coordinator raises for an exception of a worker."""
    described = describe_exception(raised(exc))
    segments = [bytearray(segment) for segment in described.payload.segments]
    return rebuild_exception(TASK, *described.texts, Payload.from_segments(segments))


class Divergence(Exception):
    def __init__(self, loss: float) -> None:
        super().__init__(loss)
        self.loss = loss


# --- the user's own exception -----------------------------------------------------------------


def test_the_exception_arrives_with_its_type_and_the_remote_traceback_as_cause() -> None:
    exc = there(Divergence(3.5))
    assert type(exc) is Divergence
    assert exc.loss == 3.5
    remote = exc.__cause__
    assert isinstance(remote, RemoteError)
    assert remote.task == TASK
    assert remote.type_name == f"{__name__}.Divergence"
    assert remote.message == f"{__name__}.Divergence on {TASK}: 3.5"
    assert "in raised\n    raise exc\n" in remote.traceback_text


def test_a_failed_input_keeps_its_own_cause_which_gets_the_remote_traceback() -> None:
    original = Divergence(1)
    error = ClosureInputError("dataset failed")
    error.__cause__ = original
    exc = there(error)
    assert type(exc) is ClosureInputError
    assert type(exc.__cause__) is Divergence
    assert isinstance(exc.__cause__.__cause__, RemoteError)


def test_a_failed_input_whose_cause_cannot_be_sent_is_still_a_failed_input() -> None:
    class Unsendable(Exception):
        def __reduce__(self) -> Any:
            raise RuntimeError

    error = ClosureInputError("dataset failed")
    error.__cause__ = Unsendable("x")
    exc = there(error)
    assert type(exc) is ClosureInputError
    assert isinstance(exc.__cause__, RemoteError)
    assert "Unsendable: x" in exc.__cause__.traceback_text


# --- what cannot be rebuilt -------------------------------------------------------------------


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


class Exits(Exception):
    def __reduce__(self) -> Any:
        return exit_now, ()


def exit_now() -> None:
    raise SystemExit(3)


def test_why_an_exception_is_not_raised_as_itself_is_said() -> None:
    (note,) = there(NeedsTwo(1, 2)).__notes__
    start = f"not raised as {__name__}.NeedsTwo, which cannot be unpickled here: TypeError: "
    assert note.startswith(start)
    assert "missing 1 required positional argument: 'b'" in note


def test_how_psync_found_that_a_task_is_lost_is_not_told() -> None:
    error = ParameterServerLost("/job:ps/task:0", "cannot be reached")
    error.__cause__ = ConnectionRefusedError("refused")
    assert "refused" not in describe_exception(error).texts[2]
    other = ValueError("x")
    other.__cause__ = ConnectionRefusedError("refused")
    assert "refused" in describe_exception(other).texts[2]


class TurnsIntoText(Exception):
    def __reduce__(self) -> Any:
        return str, ("text",)


class RefusesCause(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_what_cannot_be_raised_again_becomes_a_remote_error() -> None:
    for exc in [
        Unpicklable("x"),
        NeedsTwo(1, 2),
        Exits(),
        TurnsIntoText(),
        RefusesCause(),
        ValueError(b"x" * (MAX_EXCEPTION_BYTES + 1)),
        SystemExit(1),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        StopIteration(1),
        StopAsyncIteration(),
    ]:
        remote = there(exc)
        assert type(remote) is RemoteError
        assert type(exc).__name__ in remote.type_name
        assert "Traceback" in remote.traceback_text


def test_a_payload_that_is_no_exception_makes_a_remote_error() -> None:
    for payload in [
        Payload(b""),
        Payload(b"no pickle"),
        pack(1),
        pack((1, None)),
        pack((1, 2, 3)),
    ]:
        remote = rebuild_exception(TASK, "ValueError", "bad", "Traceback: …", payload)
        assert type(remote) is RemoteError
        assert str(remote) == (
            f"ValueError on {TASK}: bad\nremote traceback ({TASK}):\nTraceback: …"
        )


# --- the texts --------------------------------------------------------------------------------


def test_an_exception_without_a_usable_text_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_exception(raised(Mute())).texts[1] == "its text cannot be had"


def test_texts_are_cut_in_the_middle() -> None:
    described = describe_exception(raised(ValueError("a" * 10_000 + "z")))
    assert len(described.texts[1]) < MAX_MESSAGE_CHARS + 100
    assert described.texts[1].startswith("aaa")
    assert "… 5905 characters left out …" in described.texts[1]
    assert described.texts[1].endswith("az")
    described = describe_exception(raised(ValueError("a" * 100_000)))
    assert len(described.texts[2]) < MAX_TRACEBACK_CHARS + 100


def test_texts_are_valid_unicode() -> None:
    message = describe_exception(ValueError("a\udc80b")).texts[1]
    assert message == "a\\udc80b"
    message.encode()


def test_the_traceback_starts_in_user_code() -> None:
    """psync's runner and the thread machinery tell the author of a step nothing."""
    runner = types.ModuleType("psync.runner")
    exec(
        "import asyncio\n"
        "def run(step): return step()\n"
        "async def serve(step): return await asyncio.to_thread(run, step)\n",
        runner.__dict__,
    )

    def step() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        asyncio.run(runner.serve(step))
    frames = caught.tb.tb_next  # a worker has no frame of this test
    text = describe_exception(caught.value.with_traceback(frames)).texts[2]
    assert text.startswith(f'Traceback (most recent call last):\n  File "{__file__}", line ')
    assert text.count("File") == 1


def test_psync_frames_below_user_code_stay() -> None:
    with inside(DatasetContext(0)), pytest.raises(UsageError) as caught:
        forbid_in_dataset("pull")
    assert "in forbid_in_dataset" in describe_exception(caught.value).texts[2]


def test_a_traceback_of_psync_alone_stays_whole() -> None:
    closed = ClosureContext(worker_index=0, closure_id=1)
    closed.closed = True
    with pytest.raises(UsageError) as caught:
        closed.check_open()
    frames = caught.tb.tb_next  # a worker has no frame of this test
    text = describe_exception(caught.value.with_traceback(frames)).texts[2]
    assert "in check_open" in text
