"""The loop of a task's process, and what ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import uvloop

from psync.closures.scaling_rule import Load
from psync.errors import ConfigurationError
from psync.launch import process_loop
from psync.launch.process_loop import end_of_run, following_launcher, loop_factory, run_loop
from psync.net.resolvers import TFConfigClusterResolver
from psync.net.workforce import Workforce
from psync.testing import settle


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSYNC_LOOP", raising=False)


def test_without_a_name_the_loop_is_uvloops() -> None:
    assert loop_factory() is uvloop.new_event_loop


def test_the_standard_loop_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_LOOP", "asyncio")
    assert loop_factory() is None


def test_another_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_LOOP", "trio")
    with pytest.raises(ConfigurationError, match="expected uvloop or asyncio, got 'trio'"):
        loop_factory()


@pytest.mark.parametrize("code", [0, 143])
def test_sigterm_cancels_what_runs_and_ends_the_process_with_its_code(code: int) -> None:
    cleaned = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    with pytest.raises(SystemExit) as caught:
        run_loop(main, terminated_code=code)
    assert caught.value.code == code
    assert cleaned == ["yes"]


def test_last_words_that_take_too_long_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    last_words = asyncio.Event()

    async def main() -> None:
        last_words.set()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(process_loop, "LAST_WORDS_S", 0.01)
    with pytest.raises(SystemExit) as caught:
        run_loop(main, last_words=last_words)
    assert caught.value.code == 143


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_first_sigterm_asks_what_runs_to_end_and_wakes_a_loop_that_sleeps(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("PSYNC_LOOP", loop)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))

    async def main() -> str:
        asked = asyncio.Event()
        with process_loop.asked_first(asked.set):
            timer.start()
            await asked.wait()
        return "the end"

    assert run_loop(main) == "the end"
    timer.join()


def test_the_second_sigterm_ends_what_was_asked_to_end() -> None:
    asked = []

    async def main() -> None:
        with process_loop.asked_first(lambda: asked.append("once")):
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(SystemExit) as caught:
        run_loop(main, terminated_code=0)
    assert caught.value.code == 0
    assert asked == ["once"]


@pytest.mark.parametrize(("terminated_code", "code"), [(None, 7), (143, 143), (0, 0)])
def test_a_handler_of_the_program_is_called_when_all_is_closed(
    terminated_code: int | None, code: int
) -> None:
    """Its exit code is that of a program, not of a task that serves."""
    heard = []

    def handler(signum: int, frame: object) -> None:
        heard.append(f"signal {signum}")
        sys.exit(7)

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            heard.append("closed")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as caught:
            run_loop(main, terminated_code=terminated_code)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["closed", "signal 15"]
    assert caught.value.code == code


def test_a_handler_of_the_program_is_called_where_a_task_leaves_in_order() -> None:
    heard = []

    async def main() -> None:
        asked = asyncio.Event()
        with process_loop.asked_first(asked.set):
            signal.raise_signal(signal.SIGTERM)
            await asked.wait()

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("heard"))
    try:
        run_loop(main)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["heard"]


# --- forked children -----------------------------------------------------------------------------

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers_of_child() -> list[Any]:
    """Fork, and return what the child says of its handlers, and of the file that wakes a loop."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        handlers = [repr(signal.getsignal(signum)) for signum in HANDLED]
        os.write(write_end, json.dumps([*handlers, signal.set_wakeup_fd(-1)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as said:
        found: list[Any] = json.load(said)
    return found


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_forked_child_has_the_handlers_that_the_program_had(
    monkeypatch: pytest.MonkeyPatch, loop: str, in_thread: bool
) -> None:
    monkeypatch.setenv("PSYNC_LOOP", loop)

    def handler(*_: object) -> None: ...

    async def main() -> list[Any]:
        ours = [signal.getsignal(signum) for signum in HANDLED]
        found = await asyncio.to_thread(handlers_of_child) if in_thread else handlers_of_child()
        assert [signal.getsignal(signum) for signum in HANDLED] == ours
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HANDLED)
        return found

    before = signal.signal(signal.SIGTERM, handler)
    try:
        told = [repr(signal.getsignal(signum)) for signum in HANDLED]
        assert run_loop(main) == [*told, -1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_as_soon_as_a_child_is_forked_ends_it() -> None:
    async def main() -> None:
        for _ in range(50):
            child = os.fork()
            if not child:
                signal.pause()
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM

    run_loop(main)


def test_a_child_hears_a_handler_that_the_program_has_set_meanwhile() -> None:
    async def main() -> list[Any]:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            return handlers_of_child()
        finally:
            signal.signal(signal.SIGTERM, before)

    assert run_loop(main)[1] == repr(signal.SIG_IGN)


# --- the end of the run --------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
async def test_the_end_of_a_pipe_is_the_end_of_the_run_also_to_one_who_listens_late(late):
    read_end, write_end = os.pipe()
    if late:
        os.close(write_end)
    with end_of_run(read_end) as over:
        await asyncio.sleep(0)
        if not late:
            assert not over.is_set()
            os.close(write_end)
        await over.wait()


async def test_the_pipe_is_closed_with_the_context() -> None:
    read_end, write_end = os.pipe()
    with end_of_run(read_end) as over:
        pass
    os.close(write_end)
    assert not over.is_set()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


@pytest.mark.parametrize(("terminated_code", "code"), [(143, 129), (0, 0)])
def test_a_hangup_ends_the_process_in_order(terminated_code: int, code: int) -> None:
    cleaned = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    with pytest.raises(SystemExit) as caught:
        run_loop(main, terminated_code=terminated_code)
    assert caught.value.code == code
    assert cleaned == ["yes"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_hangup_that_is_ignored_or_handled_stays_so(handler: Any) -> None:
    async def main() -> str:
        signal.raise_signal(signal.SIGHUP)
        await settle()  # a cancellation would come in the next turn
        return "went on"

    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert run_loop(main) == "went on"
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_chief_hears_of_workers_and_its_next_strategy_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("PSYNC_WORKERS_FD", f"{read_end}:{os.fstat(read_end).st_ino}")
    config = {"cluster": {"ps": ["a:1"], "worker": ["b:1", "b:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    workforce, follower = Workforce(), Follower()
    workforce.follow(follower)
    first = {"added": {"2": "b:3"}, "removed": [], "workers": {"0": "b:1", "1": "b:2", "2": "b:3"}}
    second = {"added": {}, "removed": [2, 1], "workers": {"0": "b:1"}}
    news = f"{json.dumps(first)}\n{json.dumps(second)}\n".encode()
    with following_launcher(workforce):
        for part in (news[:30], news[30:]):  # a pipe knows no lines
            os.write(write_end, part)
            await turns_of_io()
        os.close(write_end)
        await turns_of_io()
    assert follower.heard == [({}, []), ({2: "b:3"}, []), ({}, [2, 1])]
    assert TFConfigClusterResolver().cluster_spec().as_dict()["worker"] == ["b:1"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


async def turns_of_io() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Follower:
    def __init__(self) -> None:
        self.heard: list[tuple[dict[int, str], list[int]]] = []

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        self.heard.append((dict(added), list(removed)))
        return []

    def load(self) -> Load:
        return Load()


async def test_without_a_launcher_nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_WORKERS_FD", "0:0")  # inherited from a chief: another file is there
    with following_launcher(Workforce()):
        pass
