"""The checkpoints of a program: their numbers, which are kept, and which is gone back to."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, training
from psync.api.cluster_coordinator import coordinator_of
from psync.checkpoints.files import NewestCheckpoints
from psync.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.virtual_time


async def test_the_newest_are_kept_and_some_for_ever(tmp_path: Path) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(1), name="w")
        manager = psync.CheckpointManager(
            psync.Checkpoint(w=w), tmp_path / "run", max_to_keep=np.uint8(2), keep_every_n_steps=3
        )
        assert manager.latest_checkpoint is None
        assert await manager.restore_or_initialize() is None
        for number in range(7):
            await w.assign([number])
            await manager.save()
        names = [path.name for path in manager.checkpoints]
        assert names == [f"ckpt-{number:08d}" for number in (3, 6, 7)]
        assert manager.latest_checkpoint == manager.checkpoints[-1]
        await w.assign([50])
        assert await manager.restore_or_initialize() == manager.latest_checkpoint
        assert (await w.read())[0] == 6
        await psync.Checkpoint(w=w).restore(manager.checkpoints[0])
        assert (await w.read())[0] == 2


async def test_a_number_may_be_given_once(tmp_path: Path) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(1), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
        assert (await manager.save(np.array(7))).name == "ckpt-00000007"  # type: ignore[arg-type]
        assert (await manager.save(checkpoint_number=120)).name == "ckpt-00000120"
        with pytest.raises(CheckpointError, match="already exists"):
            await manager.save(checkpoint_number=120)
        assert (await manager.save()).name == "ckpt-00000121"


async def test_one_that_has_lost_its_commit_is_named_and_keeps_its_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(1), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
        first, second = await manager.save(), await manager.save()
        (second / "COMMIT").unlink()
        assert await manager.restore_or_initialize() == first
        third = await manager.save()
        assert third.name == "ckpt-00000003"
        assert await manager.restore_or_initialize() == third
        (said,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
        assert said.startswith(f"{second} is passed over: it has no COMMIT")


async def test_what_a_program_left_that_died_over_a_checkpoint_goes_with_the_next_save(
    tmp_path: Path,
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(1), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
        removed = await manager.save()
        removed.rename(removed.with_name(f"{removed.name}.tmp"))
        (tmp_path / "ckpt-00000002.abandoned.tmp").mkdir()
        written = tmp_path / "ckpt-00000009.tmp"  # perhaps
        written.mkdir()
        path = await manager.save(checkpoint_number=8)
        assert sorted(tmp_path.glob("ckpt-*")) == [path, written]


@pytest.mark.parametrize("number", [-1, 1.5, "8", True, 10**18])
def test_a_number_is_a_whole_one(tmp_path: Path, number: Any) -> None:
    manager = psync.CheckpointManager(psync.Checkpoint(state=psync.SavedState(x=1)), tmp_path)
    with pytest.raises(ConfigurationError, match="expected a whole number from 0"):
        at_once(manager.save(number))
    assert manager.checkpoints == []


def test_arguments_that_are_none_are_refused(tmp_path: Path) -> None:
    checkpoint = psync.Checkpoint(state=psync.SavedState())
    with pytest.raises(ConfigurationError, match="expected max_to_keep above 0"):
        psync.CheckpointManager(checkpoint, tmp_path, max_to_keep=0)
    with pytest.raises(ConfigurationError, match="expected a Checkpoint, got str"):
        psync.CheckpointManager("checkpoint", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_to_keep", "keep_every_n_steps"])
def test_how_many_are_kept_is_a_whole_number(name: str, tmp_path: Path) -> None:
    checkpoint = psync.Checkpoint(state=psync.SavedState())
    for number in (True, 1.5, "2", -1):
        with pytest.raises(ConfigurationError, match=f"expected {name} above 0, or None, got"):
            psync.CheckpointManager(checkpoint, tmp_path, **{name: number})
    psync.CheckpointManager(checkpoint, tmp_path, **{name: np.int64(2)})


def newest_of(strategy: psync.ParameterServerStrategy) -> NewestCheckpoints:
    """The checkpoints to which ps tasks would roll back."""
    coordinator = coordinator_of(strategy._origin)
    assert coordinator is not None
    return coordinator.recovery.checkpoints


class TestRecovery:
    async def test_what_was_saved_last_is_gone_back_to(self, tmp_path: Path) -> None:
        async with training(2, 1) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.zeros(1), name="w")
            checkpoint = psync.Checkpoint(w=w)
            manager = psync.CheckpointManager(checkpoint, tmp_path / "run", max_to_keep=2)
            await checkpoint.save(tmp_path / "elsewhere")  # which nobody keeps
            assert not newest_of(strategy).paths
            paths = [await manager.save() for _ in range(3)]
            assert newest_of(strategy).paths == paths[1:]

    async def test_of_several_managers_the_one_that_saved_last_is_asked(
        self, tmp_path: Path
    ) -> None:
        async with training() as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.zeros(1), name="w")
            checkpoint = psync.Checkpoint(w=w)
            often, best = (
                psync.CheckpointManager(checkpoint, tmp_path / name) for name in ("often", "best")
            )
            paths = [await each.save() for each in (best, often, best)]
            del often, best  # the files are there, whoever has written them
            gc.collect()
            assert newest_of(strategy).paths == paths

    async def test_what_was_restored_is_gone_back_to_until_something_is_saved(
        self, tmp_path: Path
    ) -> None:
        paths: list[Path] = []
        for _ in range(2):
            async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
                with strategy.scope():
                    w = psync.Variable(np.zeros(2), name="w")
                manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
                await manager.restore_or_initialize()
                assert newest_of(strategy).paths == paths
                paths.append(await manager.save())
                assert newest_of(strategy).paths == paths
                paths[:] = paths[-1:]

    @pytest.mark.parametrize(
        ("num_ps", "num_shards", "rate", "reason"),
        [
            (3, 3, 0.1, "the checkpoint is of 2 ps tasks, here are 3"),
            (2, 2, 0.1, 'the checkpoint has no shard "w/part_0" as it is declared here'),
            (2, 3, 0.2, "the checkpoint has another optimizer 1"),
            (
                2,
                3,
                0.0,
                "the checkpoint has another optimizer 2",
            ),  # another was made before
        ],
    )
    async def test_what_was_restored_into_something_else_is_not_gone_back_to(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        num_ps: int,
        num_shards: int,
        rate: float,
        reason: str,
    ) -> None:
        for ps, shards, each in ((2, 3, 0.1), (num_ps, num_shards, rate)):
            async with training(ps, 1, psync.FixedShardsPartitioner(shards)) as (strategy, _):
                with strategy.scope():
                    w = psync.Variable(np.zeros(6), name="w")
                sgd = psync.optimizers.SGD(each or 0.1)
                sgd.number = 1 if each else 2  # that of a process of its own
                manager = psync.CheckpointManager(psync.Checkpoint(w=w, sgd=sgd), tmp_path)
                with caplog.at_level(logging.INFO, "psync.training.checkpoint"):
                    found = await manager.restore_or_initialize()
                if found is not None:
                    assert not newest_of(strategy).paths
                    assert reason in caplog.text
                await sgd.apply_gradients([(np.ones(6), w)])
                await manager.save()
                assert newest_of(strategy).paths

    async def test_what_is_being_gone_back_to_is_not_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training() as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.zeros(1), name="w")
            checkpoint = psync.Checkpoint(w=w)
            manager = psync.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
            first = await manager.save()
            newest = newest_of(strategy)
            written = checkpoint._saved

            async def recovery_begins(*arguments: Any) -> Any:
                saved = await written(*arguments)  # the cut was taken before the ps was lost
                assert newest.use_newest() == first
                return saved

            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, "_saved", recovery_begins)
                second = await manager.save()
            assert manager.checkpoints == [first, second]
            newest.in_use = None
            third = await manager.save()
            assert manager.checkpoints == [third]


@contextlib.contextmanager
def held_by_another(directory: Path) -> Iterator[None]:
    """What another process that saves there looks like."""
    directory.mkdir(exist_ok=True)
    with open(directory / "OWNER", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"program": "other.py", "pid": 7, "host": "here", "since": 1.5e9}')
        file.flush()
        yield


async def test_who_saves_where_another_program_does_is_told_of_it(tmp_path: Path) -> None:
    taken = r"other\.py \(process 7 on here, since 2017-07-1\d \S+\) saves its checkpoints into"
    early = psync.CheckpointManager(psync.Checkpoint(state=psync.SavedState(x=1)), tmp_path)
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.ones(3), name="w")
        checkpoint = psync.Checkpoint(w=w)
        path = await checkpoint.save(tmp_path)
        with held_by_another(tmp_path):
            with pytest.raises(ConfigurationError, match=taken) as caught:
                psync.CheckpointManager(checkpoint, tmp_path)
            assert "psync.latest_checkpoint(directory)" in str(caught.value.hint)
            saves = (early.save, early.restore_or_initialize, lambda: checkpoint.save(tmp_path))
            for awaited in saves:
                with pytest.raises(ConfigurationError, match=taken):
                    await awaited()
            assert psync.latest_checkpoint(tmp_path) == path  # reading needs no owner
            assert early.checkpoints == [path]
            await checkpoint.restore(path)
            assert (await checkpoint.read(path))["w"].tolist() == [1, 1, 1]
        (tmp_path / "OWNER").unlink()
        await early.save()


async def test_a_directory_is_owned_until_the_coordinator_is_closed(tmp_path: Path) -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            checkpoint = psync.Checkpoint(w=psync.Variable(np.ones(3), name="w"))
        await checkpoint.save(tmp_path)
        assert not (tmp_path / "OWNER").exists()  # one save alone
        managers = [psync.CheckpointManager(checkpoint, tmp_path) for _ in range(2)]
        assert (tmp_path / "OWNER").exists()
        for manager in managers:  # of one process, there may be several
            await manager.save()
        await coordinator.close()
        assert not (tmp_path / "OWNER").exists()


async def test_where_nothing_can_be_written_a_manager_reads(tmp_path: Path) -> None:
    (tmp_path / "OWNER").mkdir()
    async with training() as (strategy, _):
        with strategy.scope():
            checkpoint = psync.Checkpoint(w=psync.Variable(np.ones(3), name="w"))
        path = await checkpoint.save(tmp_path)
        manager = psync.CheckpointManager(checkpoint, tmp_path)
        assert await manager.restore_or_initialize() == path
