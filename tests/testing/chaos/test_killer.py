"""The killer: whom it kills, whom it leaves alone, and that everybody goes on at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psync.testing.chaos import killer as killer_module
from psync.testing.chaos.evidence import Journal, PushMarks, Victim, victims_of
from psync.testing.chaos.killer import Killer, KillPlan

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TASKS = {"chief": 1, "ps": 1, "worker": 2}

# As psync run: starts all tasks, and those that die again. Workers push all the time.
LAUNCHER = """
import json, os, subprocess, sys, time
task = '''
import json, os, time
from psync.testing.chaos.evidence import PushMarks
me = json.loads(os.environ["TF_CONFIG"])["task"]
marks = PushMarks(os.path.join(DIRECTORY, "marks"))
while os.getppid() == LAUNCHER:
    if me["type"] == "worker":
        with marks.pushing(me["index"]):
            time.sleep(0.005)
    time.sleep(0.005)
'''.replace("DIRECTORY", repr(sys.argv[1])).replace("LAUNCHER", str(os.getpid()))
def start(job, index):
    config = json.dumps({"cluster": {}, "task": {"type": job, "index": index}})
    return subprocess.Popen([sys.executable, "-c", task], env={**os.environ, "TF_CONFIG": config})
names = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
tasks = {name: start(*name) for name in names}
try:
    while os.getppid() == int(sys.argv[2]):
        for name, process in tasks.items():
            if process.poll() is not None:
                tasks[name] = start(*name)
        time.sleep(0.01)
finally:
    for process in tasks.values():
        process.kill()
        process.wait()
"""


@contextlib.contextmanager
def launched(directory: Path) -> Iterator[int]:
    command = [sys.executable, "-c", LAUNCHER, str(directory), str(os.getpid())]
    launcher = subprocess.Popen(command)
    try:
        yield launcher.pid
    finally:
        launcher.kill()
        launcher.wait()  # its tasks see that, and end


def killer_of(launcher: int, directory: Path, plan: KillPlan, seed: int = 3) -> Killer:
    return Killer(launcher, directory, TASKS, plan, random.Random(seed))


def only(job: str, name: str) -> KillPlan:
    return KillPlan({job: 1.0}, {job: {name: 1.0}}, pause_s=0.02, stop_s=0.05)


Looks = asyncio.Queue[dict[tuple[str, int], Victim]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What the killer sees, each time it looks who is there."""
    looks = Looks()

    def look(launcher: int) -> dict[tuple[str, int], Victim]:
        looks.put_nowait(found := victims_of(launcher))
        return found

    monkeypatch.setattr(killer_module, "victims_of", look)
    return looks


async def look_in_vain(looks: Looks, directory: Path) -> None:
    """Wait until the killer has looked some more times since all tasks take part."""
    while not looks.empty():
        looks.get_nowait()
    with contextlib.closing(PushMarks(directory / "marks")) as marks:
        take_part = False
        while not take_part:
            there = await looks.get()
            pushing = {pid for pid, *_ in marks.snapshot(TASKS["worker"]).values()}
            workers = {victim.pid for victim in there.values() if victim.job == "worker"}
            take_part = len(there) == sum(TASKS.values()) and workers == pushing
    for _ in range(5):
        await looks.get()


@pytest.mark.slow
async def test_workers_are_killed_again_and_again_once_they_take_part(
    tmp_path: Path, looks: Looks
) -> None:
    journal = Journal(tmp_path)
    with launched(tmp_path) as launcher:
        killer = killer_of(launcher, tmp_path, only("worker", "SIGKILL"))
        running = asyncio.create_task(killer.run(50.0))
        await look_in_vain(looks, tmp_path)
        assert not killer.kills, "training has not begun"
        journal.say("done", closures=[])
        while len(killer.kills) < 6:
            await looks.get()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert {kill.signal for kill in killer.kills} == {"SIGKILL"}
    assert {kill.job for kill in killer.kills} == {"worker"}
    assert sum(kill.in_flight for kill in killer.kills), "they push half of the time"
    journal.close()


async def test_two_workers_are_never_asked_to_leave(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.say("done", closures=[])
    with launched(tmp_path) as launcher:
        killer = killer_of(launcher, tmp_path, only("worker", "SIGTERM"))
        await killer.run(1.0)
    assert {kill.signal for kill in killer.kills} == {"SIGKILL"}, "there are but two"
    journal.close()


async def test_a_ps_is_killed_once_and_again_when_training_has_gone_on(
    tmp_path: Path, looks: Looks
) -> None:
    journal = Journal(tmp_path)
    journal.say("done", closures=[])
    with launched(tmp_path) as launcher:
        killer = killer_of(launcher, tmp_path, only("ps", "SIGKILL"))
        running = asyncio.create_task(killer.run(20.0))
        while len(killer.kills) < 1:
            await looks.get()
        await look_in_vain(looks, tmp_path)
        assert len(killer.kills) == 1
        journal.say("done", closures=[])
        while len(killer.kills) < 2:
            await looks.get()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    journal.close()


async def test_who_was_stopped_goes_on_at_the_end(tmp_path: Path, looks: Looks) -> None:
    journal = Journal(tmp_path)
    journal.say("done", closures=[])
    plan = KillPlan({"chief": 1.0}, {"chief": {"SIGSTOP": 1.0}}, pause_s=0.02, stop_s=600.0)
    with launched(tmp_path) as launcher:
        killer = killer_of(launcher, tmp_path, plan)
        running = asyncio.create_task(killer.run(20.0))
        while not killer.kills:
            await looks.get()
        pid = victims_of(launcher)["chief", 0].pid
        while state_of(pid) != "T":  # noqa: ASYNC110  a signal takes its time
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while state_of(pid) == "T":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    journal.close()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
