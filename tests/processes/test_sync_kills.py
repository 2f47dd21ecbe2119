"""Tasks that are killed in the middle of synchronous steps.

A synchronous push counts whole or not at all, so two shards never mix two runs of a closure. To
see that, each run pushes a number of its own, the process id of its worker, in a column that
belongs to its closure; a row of the variable lies on each ps.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync import Outcome
from psync.errors import ParameterServerLost
from real_training import DEADLY, ONE_LOOP, assert_nothing_is_staged, group_of, training
from tasks_by_hand import by_hand, ended, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Program:
    """Two workers, and a step that says in a variable which run of it was counted."""

    def __init__(
        self,
        strategy: psync.ParameterServerStrategy,
        count: int,
        place: Path,
        num_ps: int = 2,
        *,
        pull_ahead: bool = False,
    ) -> None:
        with strategy.scope():
            self.marks = psync.Variable(np.zeros((num_ps, count), np.float32))
            self.global_step = psync.get_or_create_global_step()
        self.place = place
        self.options = {"pull_ahead": pull_ahead}
        self.step = self._step()

    def _step(self) -> Callable[..., Any]:
        marks, global_step, place = self.marks, self.global_step, self.place
        optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), 2, reduction="sum", **self.options
        )

        async def step(closure: int, waits: bool = False) -> tuple[int, Outcome]:
            mine = os.getpid()
            (place / f"{closure} of {mine}").touch()
            while waits and not (place / "go on").exists():  # noqa: ASYNC110  # the test's word
                await asyncio.sleep(0.01)
            gradient = np.zeros_like(await marks.read())
            gradient[:, closure] = -mine
            result = await optimizer.apply_gradients([(gradient, marks)], global_step)
            return mine, result.outcome

        return step

    def runs_of(self, closure: int) -> set[int]:
        """The processes that have run a closure."""
        return {int(path.name.split()[-1]) for path in self.place.glob(f"{closure} of *")}

    async def counted(self) -> list[int]:
        """Which run of each closure was counted: the process id, 0 for none."""
        first, *others = (await self.marks.read()).tolist()  # of each ps
        assert others == [first] * len(others)
        return [int(mark) for mark in first]


# --- workers -----------------------------------------------------------------------------------


@pytest.mark.promise("steps.push-whole-or-not")
@pytest.mark.parametrize(
    ("point", "num_ps", "pull_ahead"),
    [
        ("begun", 2, False),
        ("begun", 2, True),
        ("between_ps", 3, False),
        ("sent", 2, False),
        ("answered", 2, False),
        ("answered", 2, True),
    ],
)
@ONE_LOOP
async def test_a_push_counts_once_and_whole_although_workers_die_all_the_time(
    point: str,
    num_ps: int,
    pull_ahead: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 8
    monkeypatch.setenv("PSYNC_FAILPOINTS", f"worker.push.{point}=kill@3")  # of each life
    async with training(num_ps, 2, **DEADLY) as (_, strategy, coordinator):
        program = Program(strategy, count, tmp_path, num_ps, pull_ahead=pull_ahead)
        values = [coordinator.schedule(program.step, (n,)) for n in range(count)]
        await coordinator.join()
        outcomes = set()
        results = await coordinator.fetch(values)
        for closure, mark in enumerate((await program.counted())[:count]):
            last, outcome = results[closure]
            outcomes.add(outcome)
            if outcome is Outcome.ACCEPTED:
                assert mark == last
            elif outcome is Outcome.DUPLICATE:
                assert mark in program.runs_of(closure) - {last}
            else:
                assert mark == 0
        assert len({last for last, _ in results}) > 2  # workers came back and took part
        if point == "answered":
            assert Outcome.DUPLICATE in outcomes
        elif point != "sent":  # what is sent may have come
            assert Outcome.DUPLICATE not in outcomes  # whose parts lie there until the next step
            await assert_nothing_is_staged(coordinator)


@pytest.mark.smoke
@ONE_LOOP
async def test_a_worker_that_is_killed_while_it_waits_has_contributed(tmp_path: Path) -> None:
    async with training(2, 2) as (cluster, strategy, coordinator):
        program = Program(strategy, 2, tmp_path)
        first = coordinator.schedule(program.step, (0,))
        second = coordinator.schedule(program.step, (1, True))
        while (await group_of(coordinator)).get("waiting") != 1:
            pass
        (pid,) = program.runs_of(0)
        (victim,) = [task for task in cluster.tasks.values() if task.pid == pid]
        victim.kill()
        last, outcome = await first  # its step did not wait for the second closure
        assert (outcome, last != pid) == (Outcome.DUPLICATE, True)
        assert await program.global_step.read() == 1
        assert await program.counted() == [pid, 0]
        (tmp_path / "go on").touch()
        await coordinator.join()
        last, outcome = await second
        assert outcome is Outcome.ACCEPTED
        assert await program.global_step.read() == 2
        assert await program.counted() == [pid, last]
        await assert_nothing_is_staged(coordinator)


# --- a ps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["", "ps.step.applied", "ps0.step.decided", "ps0.step.applied"])
@ONE_LOOP
async def test_a_killed_ps_ends_synchronous_training_with_a_clear_error_soon(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if point:
        monkeypatch.setenv("PSYNC_FAILPOINTS", f"{point}=kill@2")
    async with training(2, 2) as (cluster, strategy, coordinator):
        program = Program(strategy, 200, tmp_path)
        waits = not point  # one replica for the other, and that one for a word of this test
        values = [coordinator.schedule(program.step, (n, waits and not n)) for n in range(200)]
        if waits:
            while (await group_of(coordinator)).get("waiting") != 1:
                pass
            cluster.tasks["ps-1"].kill()
        began = time.monotonic()
        with pytest.raises(ParameterServerLost, match="no checkpoint or complete backup"):
            await coordinator.join()
        assert time.monotonic() - began < 15  # two seconds, on a machine that does nothing else
        assert all(value.done() for value in values)


# --- the coordinator ---------------------------------------------------------------------------


def test_a_new_coordinator_trains_on_after_one_that_was_killed_in_the_middle_of_a_step() -> None:
    with by_hand(2, 2) as cluster:
        tasks = cluster.serve_all()
        for name in ("waiting", "endless"):
            chief = cluster.start("chief", 0, script("sync_steps.py", name))
            wait_for_line(chief, name, "stdout")
            chief.kill()
        run = cluster.run("chief", 0, script("sync_steps.py", "counts"))
        assert run.code == 0, run.err
        assert run.out == "counted [2] step 3 values [-3.0, -6.0]\n"
        assert [ended(task).code for task in tasks] == [0, 0, 0, 0]
