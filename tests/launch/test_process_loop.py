"""The loop of a task's process, and what ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
