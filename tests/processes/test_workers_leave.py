"""Workers that are asked to leave in the middle of their work, and one that is added by hand."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest

import psync
from ports import claimed_ports
from real_training import ONE_LOOP, training
from tasks_by_hand import SECRET, SERVE, by_hand, ended, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def who_writes(pipe: Path) -> int:
    """Wait for the process id that a step writes into a named pipe, and remove the pipe."""
    pid = int(await asyncio.to_thread(pipe.read_text))
    pipe.unlink()
    return pid


@pytest.mark.promise("workers.finish-on-sigterm")
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@ONE_LOOP
async def test_a_worker_that_gets_sigterm_finishes_its_closure_and_exits_with_code_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """As on a spot machine that will be taken in two minutes."""
    monkeypatch.setenv("PSYNC_LOOP", loop)
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    for pipe in (begun, go_on):
        os.mkfifo(pipe)
    caplog.set_level(logging.INFO, "psync")
    async with training(2, 2) as (cluster, strategy, coordinator):
        with strategy.scope():
            counter = psync.Variable([0.0, 0.0])
        sgd = psync.optimizers.SGD(1.0)

        async def step(pause: bool = False) -> int:
            if pause:
                begun.write_text(str(os.getpid()))
                await asyncio.to_thread(go_on.read_text)
            await sgd.apply_gradients([([-1.0, -1.0], counter)])
            return os.getpid()

        value = coordinator.schedule(step, args=(True,))
        pid = await who_writes(begun)
        victim = next(task for task in cluster.tasks.values() if task.pid == pid)
        others = [coordinator.schedule(step) for _ in range(50)]
        victim.send_signal(signal.SIGTERM)
        for other in others:
            await other
        assert victim.returncode is None
        assert not value.done()
        go_on.write_text("")
        assert await victim.wait() == 0
        assert await value == pid, "it ran once"
        others += [coordinator.schedule(step) for _ in range(50)]
        await coordinator.join()
        assert pid not in await coordinator.fetch(others[1:])
        assert (await counter.read()).tolist() == [101.0, 101.0]
        assert coordinator.statistics()["closures"].put_back == 0
        assert cluster.tasks[victim.name] is victim, "it is not started again"
    assert "has left (SIGTERM)" in caplog.text
    assert "its closures run again" not in caplog.text


@ONE_LOOP
async def test_a_second_sigterm_ends_a_worker_at_once_and_its_closure_runs_elsewhere(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    async with training(1, 2, max_losses=1) as (cluster, _, coordinator):

        async def step() -> int:
            if begun.exists():
                begun.write_text(str(os.getpid()))
                await asyncio.Event().wait()
            return os.getpid()

        value = coordinator.schedule(step)
        pid = await who_writes(begun)
        victim = next(task for task in cluster.tasks.values() if task.pid == pid)
        victim.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(victim.wait()), 0.5)
        victim.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert await victim.wait() == 0
        assert time.monotonic() - began < 3
        assert await value not in (None, pid)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@ONE_LOOP
async def test_sigterm_is_noted_while_a_step_computes_on_the_loop_and_the_second_one_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], loop: str
) -> None:
    monkeypatch.setenv("PSYNC_LOOP", loop)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    async with training(1, 1) as (cluster, _, coordinator):

        async def computes() -> None:
            if not begun.exists():
                return
            begun.write_text(str(os.getpid()))
            while True:
                pass

        value = coordinator.schedule(computes)
        await who_writes(begun)
        victim = cluster.tasks["worker-0"]
        victim.send_signal(signal.SIGTERM)
        err = ""
        while "SIGTERM waits for a computation on the event loop" not in err:
            err += capfd.readouterr().err
            await asyncio.sleep(0.05)
        victim.send_signal(signal.SIGTERM)
        assert await victim.wait() == 128 + signal.SIGTERM
        await value  # on the worker's next life


def test_a_worker_that_was_started_by_hand_is_added_and_told_of_the_end() -> None:
    with claimed_ports(1) as (port,), by_hand(num_ps=1, num_workers=1) as cluster:
        address = f"127.0.0.1:{port}"
        tasks = cluster.serve_all()
        alone = {"cluster": {"worker": {"3": address}}, "task": {"type": "worker", "index": 3}}
        added = cluster.start("worker", 3, SERVE, environ={"TF_CONFIG": json.dumps(alone)})
        wait_for_line(added, " serves at ")
        chief = cluster.run("chief", 0, script("adds_worker.py", address, "3"))
        assert (chief.code, chief.out) == (0, "added /job:worker/task:3\ntrained\n"), chief.err
        for task in (*tasks, added):
            assert ended(task).code == 0


@pytest.mark.smoke
def test_under_psync_run_a_worker_that_leaves_is_not_started_again() -> None:
    with by_hand() as cluster:
        command = ("-m", "psync", "run", *script("steps.py"), "--workers", "2", "--", "leaves")
        run = cluster.run("chief", 0, command, environ={"TF_CONFIG": ""}, secret=SECRET)
        assert (run.code, run.out) == (0, "left; 20 more ran elsewhere\n"), run.err
        assert run.err.count("exited with code 0: it has ended by itself and is not") == 1
