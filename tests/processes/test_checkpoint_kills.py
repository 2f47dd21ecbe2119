"""Checkpoints of real processes: saved while they train, killed in the middle, on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from live_program import PSYNC, program
from psync.checkpoints.files import Reader, stored_snapshots
from psync.errors import CheckpointError
from real_training import ONE_LOOP, coordinated, run, training
from tasks_by_hand import plain_environ, script

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROWS = 6


class Program:
    """A table and a number, through momentum: after n pushes both are n (n + 1) / 2."""

    def __init__(self, strategy: psync.ParameterServerStrategy, width: int = 64) -> None:
        self.width = width
        with strategy.scope():
            self.w = psync.Variable(np.zeros((ROWS, width), np.float32), name="w")
            self.b = psync.Variable(np.float32(0), name="b")
        self.momentum = psync.optimizers.SGD(1.0, momentum=1.0)
        self.checkpoint = psync.Checkpoint(w=self.w, b=self.b, momentum=self.momentum)

    def schedule(self, coordinator: psync.ClusterCoordinator, count: int) -> list[Any]:
        w, b, momentum, shape = self.w, self.b, self.momentum, (ROWS, self.width)

        async def step() -> None:
            ones = np.full(shape, -1, np.float32)
            await momentum.apply_gradients([(ones, w), (np.float32(-1), b)])

        return [coordinator.schedule(step) for _ in range(count)]

    async def assert_whole(self, path: Path) -> int:
        """Every push is in the checkpoint wholly or not at all; return how many are."""
        values = await self.checkpoint.read(path, slots=True)
        count = values["momentum"]["momentum"]["b"]
        total = count * (count + 1) / 2
        assert (values["w"] == total).all()
        assert values["b"] == total
        assert (values["momentum"]["momentum"]["w"] == count).all()
        assert values["momentum"]["step"] >= count  # pushes may overtake each other on the way
        assert len(stored_snapshots(path)) > 0
        return int(count)


@pytest.mark.promise("checkpoints.any-cluster-size")
@pytest.mark.parametrize("stream", ["0", "1"])
def test_what_is_saved_while_workers_train_goes_on_in_any_other_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setenv("PSYNC_CHECKPOINT_STREAM", stream)
    paths: list[Path] = []

    async def save() -> None:
        async with psync.LocalCluster(2, 2) as cluster:
            async with coordinated(cluster, 3) as (strategy, coordinator):
                trained = Program(strategy, 40_000)
                for _ in range(3):
                    values = trained.schedule(coordinator, 40)
                    await values[10]
                    paths.append(await trained.checkpoint.save(tmp_path))
                await coordinator.join()
                assert await trained.b.read() == 120 * 121 / 2
                counts = [await trained.assert_whole(path) for path in paths]
                assert 0 < counts[0] <= counts[1] <= counts[2] <= 120

    async def restore(num_ps: int, num_shards: int) -> None:
        async with psync.LocalCluster(num_ps, 1) as cluster:
            async with coordinated(cluster, num_shards) as (strategy, coordinator):
                trained = Program(strategy, 40_000)
                count = await trained.assert_whole(paths[1])
                await trained.checkpoint.restore(paths[1])
                trained.schedule(coordinator, 5)
                await coordinator.join()
                total = (count + 5) * (count + 6) / 2
                assert await trained.b.read() == total
                assert (await trained.w.read() == total).all()

    run(save)
    for num_ps, num_shards in (3, 5), (1, 1):
        run(lambda num_ps=num_ps, num_shards=num_shards: restore(num_ps, num_shards))  # type: ignore[misc]


@ONE_LOOP
async def test_a_ps_that_cannot_write_goes_on_and_so_does_training(tmp_path: Path) -> None:
    """No file may be larger than 64 KiB, for one ps: as on a disk that is full."""
    async with training(2, 2) as (cluster, strategy, coordinator):
        trained = Program(strategy, 100_000)
        manager = psync.CheckpointManager(trained.checkpoint, tmp_path)
        trained.schedule(coordinator, 5)
        first = await manager.save()
        pids = [task.pid for task in cluster.tasks.values()]
        victim = cluster.tasks["ps-1"].pid
        unlimited = resource.prlimit(victim, resource.RLIMIT_FSIZE)
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (1 << 16, unlimited[1]))
        trained.schedule(coordinator, 20)
        with pytest.raises(CheckpointError, match="File too large"):
            await manager.save()
        assert list(tmp_path.glob("ckpt-*")) == [first]
        await coordinator.join()
        resource.prlimit(victim, resource.RLIMIT_FSIZE, unlimited)
        second = await manager.save()
        assert await trained.assert_whole(first) <= await trained.assert_whole(second) == 25
        assert [task.pid for task in cluster.tasks.values()] == pids


@ONE_LOOP
async def test_a_ps_that_is_killed_while_it_writes_takes_nothing_with_it_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_FAILPOINTS", "checkpoint.ps.write=kill@2")
    async with training(2, 2) as (_, strategy, coordinator):
        trained = Program(strategy)
        manager = psync.CheckpointManager(trained.checkpoint, tmp_path)
        await coordinator.fetch(trained.schedule(coordinator, 5))
        first = await manager.save()
        trained.schedule(coordinator, 20)
        # It fails, or is begun anew when both are back.
        with contextlib.suppress(CheckpointError):
            await manager.save()
        assert not list(tmp_path.glob("*.tmp"))
        await coordinator.join()  # both have been recovered from the first one
        last = await manager.save()
        assert {first, last} <= set(manager.checkpoints)
        assert await trained.assert_whole(first) == 5
        for path in manager.checkpoints:
            await trained.assert_whole(path)


def test_before_its_first_save_a_program_goes_back_to_what_it_has_restored(tmp_path: Path) -> None:
    async def life(victim: str | None) -> None:
        async with training(2, 2) as (cluster, strategy, coordinator):
            trained = Program(strategy)
            trained.momentum.number = 1  # that of a process of its own
            manager = psync.CheckpointManager(trained.checkpoint, tmp_path)
            await manager.restore_or_initialize()
            await coordinator.fetch(trained.schedule(coordinator, 5))
            if victim is None:
                await manager.save()
                return
            cluster.tasks[victim].kill()
            await coordinator.fetch(trained.schedule(coordinator, 3))
            path = await manager.save()
            # Five are there again, three were pushed since; the five in between are undone.
            assert await trained.assert_whole(path) == 8

    run(lambda: life(None))
    run(lambda: life("ps-1"))


@pytest.mark.promise("checkpoints.complete-or-absent")
@pytest.mark.parametrize("place", ["checkpoint.before_commit", "checkpoint.before_rename"])
def test_a_program_that_is_killed_while_it_saves_goes_on_from_the_one_before(
    tmp_path: Path, place: str
) -> None:
    def saving(failpoints: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "psync", "run", *script("saves.py", "--", str(tmp_path))]
        environ = {**plain_environ(), "PSYNC_FAILPOINTS": failpoints}
        return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=60)

    killed = saving(f"{place}=kill@2")
    assert killed.returncode == 137, killed.stderr
    assert sorted(os.listdir(tmp_path)) == ["OWNER", "ckpt-00000001", "ckpt-00000002.tmp"]
    assert Reader(tmp_path / "ckpt-00000001").manifest.states["progress"] == {"epoch": 1}
    again = saving("")
    assert again.returncode == 0, again.stderr
    assert "began at epoch 1 from ckpt-00000001\n" in again.stdout
    assert "ended with [12.0, 12.0, 12.0, 12.0], step 12\n" in again.stdout
    assert sorted(os.listdir(tmp_path)) == [f"ckpt-0000000{number}" for number in (1, 2, 3)]


@pytest.mark.promise("checkpoints.one-program-per-directory")
def test_of_two_programs_in_one_directory_the_second_is_told_of_the_first_at_once(
    tmp_path: Path,
) -> None:
    directory, environ = tmp_path / "run", plain_environ()
    command = [*PSYNC, "run", *script("owning.py", "--", str(directory))]
    with program(command, environ) as first:
        assert (first.greeting, first.ask("")) == ("opened", "ckpt-00000001")
        second = subprocess.run(command, env=environ, text=True, capture_output=True)
        assert second.returncode == 1
        assert second.stdout == ""
        owner = json.loads((directory / "OWNER").read_text())
        named = rf"owning.py \(process {owner['pid']} on \S+, since 20\S+ \S+\) saves its"
        assert re.search(named, second.stderr)
        assert "give each program a directory of its own" in second.stderr
        reading = [*PSYNC, "checkpoint", "inspect", str(directory / "ckpt-00000001")]
        assert subprocess.run(reading, capture_output=True).returncode == 0
        assert first.ask("") == "ckpt-00000002"
        os.kill(owner["pid"], signal.SIGKILL)
        first.end()
    assert (directory / "OWNER").exists()
    with program(command, environ) as third:  # at once, although the owner left its name
        assert third.ask("") == "ckpt-00000003"
