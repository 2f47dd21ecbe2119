"""The program of a chaotic run: it goes on from a checkpoint with what is not done."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of
from psync.testing.chaos import oracle
from psync.testing.chaos.evidence import Journal, marks_at, read_journal
from psync.testing.chaos.program import FINAL, STOP, Parts, Program, Settings


def settings_of(directory: Path, mode: str) -> Settings:
    return Settings(str(directory), mode, num_workers=2, batch=6, checkpoint_every=1, rows=256)


async def live(settings: Settings, *, to_the_end: bool) -> None:
    """One life of the program; one that is not to come to its end dies in its second batch."""
    async with cluster_of(2, settings.num_workers) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                parts = Parts(settings)
            with contextlib.closing(Journal(settings.directory)) as journal:
                program = Program(settings, coordinator, parts, journal)
                if to_the_end:
                    Path(settings.directory, STOP).touch()
                    await program.run()
                    return
                again = await program._resume()
                await program._batch(again, 0)
                for each in range(6, 9):  # then it dies: these are in no checkpoint
                    coordinator.schedule(program._step, (each,))
                await coordinator.join()


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_run_counts_each_closure_once_and_says_so(mode: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, mode)
    await live(settings, to_the_end=True)
    expected = oracle.read(read_journal(tmp_path))
    assert expected.stop == len(expected.done) == 6
    assert expected.checkpoints == 2
    with np.load(tmp_path / FINAL) as found:
        assert oracle.check(expected, found, 2, settings.rows) == []
        assert found["total"].tolist() == [6.0, 6.0] or mode == "sync"
    marks_at(str(tmp_path / "marks")).close()


async def test_a_second_life_goes_on_from_the_checkpoint_and_all_is_counted_once(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, "async")
    await live(settings, to_the_end=False)
    await live(settings, to_the_end=True)
    expected = oracle.read(read_journal(tmp_path))
    assert (expected.lives, expected.stop) == (2, 12)
    with np.load(tmp_path / FINAL) as found:
        assert oracle.check(expected, found, 2, settings.rows) == []
        assert found["total"].tolist() == [12.0, 12.0]
    marks_at(str(tmp_path / "marks")).close()


async def test_what_a_checkpoint_took_in_the_midst_of_a_batch_is_told_apart(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "async")
    async with cluster_of(2, 2) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                parts = Parts(settings)
            with contextlib.closing(Journal(tmp_path)) as journal:
                program = Program(settings, coordinator, parts, journal)
                one = psync.IndexedSlices(np.ones((2, 1), np.float32), [1, 257])
                await parts.rows.scatter_add(one)
                assert await program._traces([0, 1, 2]) == ([0, 1, 0], [0, 0, 0])
