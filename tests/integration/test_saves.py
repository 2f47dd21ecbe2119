"""Checkpoints as a program sees them: of one instant and whole, or an error without effect."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from chief_lives import silence
from local_training import training
from memory_cluster import MemoryCluster, coordinating, event_of, note, running
from psync.errors import CheckpointError, CheckpointMismatch
from psync.testing import MemoryNetwork, settle
from psync.wire.messages import Freeze, OpenGate, Update


def declared(strategy: psync.ParameterServerStrategy) -> tuple[Any, Any]:
    """Variables on two ps tasks."""
    with strategy.scope():
        return tuple(psync.Variable(np.zeros(2), name=name) for name in "ab")  # type: ignore[return-value]


@pytest.mark.promise("checkpoints.one-instant", "updates.tests-notice")
@pytest.mark.virtual_time
@pytest.mark.parametrize("gated", [True, False])
async def test_a_push_is_in_a_checkpoint_wholly_or_not_at_all_unless_there_is_no_gate(
    gated: bool, tmp_path: Path
) -> None:
    network = MemoryNetwork(latency=(0.001, 0.05))
    without = frozenset[str]() if gated else frozenset({"one_cut"})
    async with running(MemoryCluster(2, 3, network=network, without=without)) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            both = declared(coordinator.strategy)
            sgd = psync.optimizers.SGD(1.0)
            checkpoint = psync.Checkpoint(both=both, sgd=sgd)
            paths: list[Path] = []

            async def push() -> None:
                await sgd.apply_gradients([(-np.ones(2), each) for each in both])

            for _ in range(60):
                coordinator.schedule(push)
            while not coordinator.done():
                paths.append(await checkpoint.save(tmp_path / str(len(paths))))
            await coordinator.join()
            counts, torn = [], 0
            for path in paths:
                await checkpoint.restore(path)
                counts.append(int(await sgd.iterations.read()))
                torn += any((value != counts[-1]).any() for value in await psync.pull(both))
            assert counts == sorted(counts)
            assert len(set(counts)) > 2
            assert (torn == 0) is gated


@pytest.mark.promise("checkpoints.mismatch-named")
async def test_all_that_does_not_fit_is_named_before_anything_changes(tmp_path: Path) -> None:
    async with training() as (strategy, _):
        a, b = declared(strategy)
        with strategy.scope():
            other = psync.Variable(np.ones(5), name="other")
            third = psync.Variable(np.ones(5), name="third")
        path = await psync.Checkpoint(a=a, b=b, gone=third).save(tmp_path)
        await a.assign(np.ones(2))
        with pytest.raises(CheckpointMismatch) as caught:
            await psync.Checkpoint(a=a, b=other, new=b).restore(path)
        for text in ("missing in it: new", "b: saved as (2,) float64, declared as (5,)", "gone"):
            assert text in str(caught.value)
        assert (await a.read() == 1).all()


@pytest.mark.promise("checkpoints.damage-detected", "checkpoints.damage-changes-nothing")
async def test_a_damaged_byte_anywhere_is_an_error_and_nothing_is_restored(tmp_path: Path) -> None:
    async with training() as (strategy, _):
        both = declared(strategy)
        momentum = psync.optimizers.Momentum(1.0)  # its slots have names of variables
        checkpoint = psync.Checkpoint(both=both, momentum=momentum)
        path = await checkpoint.save(tmp_path)
        for each in both:
            await each.assign(np.ones(2))
        files = sorted(path.iterdir())
        assert len(files) == 7
        for file in files:
            whole = file.read_bytes()
            for at in range(0, len(whole), 11):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with pytest.raises(CheckpointError, match=f"{path}.*{file.name}"):
                    await checkpoint.restore(path)
            file.write_bytes(whole)
        assert all((value == 1).all() for value in await psync.pull(both))
        await checkpoint.restore(path)
        assert not any(value.any() for value in await psync.pull(both))


@pytest.mark.promise("input.not-a-file")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
async def test_something_else_in_the_place_of_a_file_is_an_error_at_once(
    make: Any, tmp_path: Path
) -> None:
    async with training() as (strategy, _):
        checkpoint = psync.Checkpoint(both=declared(strategy))
        names = [file.name for file in (await checkpoint.save(tmp_path)).iterdir()]
        for name in names:
            path = await checkpoint.save(tmp_path)
            (path / name).unlink()
            make(path / name)
            with pytest.raises(CheckpointError, match=str(path)):
                await checkpoint.restore(path)


class Picky:
    """Refuses the state that it has saved."""

    def checkpoint_state(self) -> Any:
        return [1]

    def restore_checkpoint_state(self, state: Any) -> None:
        raise TypeError("not this one")


@pytest.mark.promise("checkpoints.bad-state-named")
async def test_an_object_that_cannot_load_its_state_is_named_before_anything_changes(
    tmp_path: Path,
) -> None:
    async with training() as (strategy, _):
        both = declared(strategy)
        progress = psync.SavedState(epoch=1)
        checkpoint = psync.Checkpoint(both=both, progress=progress, picky=Picky())
        path = await checkpoint.save(tmp_path)
        await both[0].assign(np.ones(2))
        progress.epoch = 2
        with pytest.raises(CheckpointMismatch, match=r"picky.*not this one"):
            await checkpoint.restore(path)
        assert (await both[0].read() == 1).all()
        assert progress.epoch == 2


# --- updates meanwhile -----------------------------------------------------------------------


@pytest.mark.promise("checkpoints.save-delays-little", "updates.received-is-applied")
@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["killed", "cut off", "silent ps"])
async def test_a_save_that_does_not_go_on_delays_updates_for_a_while(
    how: str, tmp_path: Path
) -> None:
    """Its program is killed, or cut off, or hears no more from a ps: whatever, they go on."""
    loop = asyncio.get_running_loop()
    async with coordinating(2, 1, tapped=True, ps_timeout=1000) as (cluster, coordinator):
        both = declared(coordinator.strategy)
        sgd = psync.optimizers.SGD(1.0)

        async def push() -> None:
            await note("begun")
            await sgd.apply_gradients([(-np.ones(2), each) for each in both])

        await psync.pull(both)
        manager = psync.CheckpointManager(psync.Checkpoint(both=both), tmp_path)
        with (
            cluster.tap("ps-1").at(Freeze, lambda: False) as frozen,
            cluster.tap("ps-0").at(OpenGate, lambda: how != "silent ps"),
        ):
            saving = asyncio.create_task(manager.save())
            await frozen.wait()
            coordinator.schedule(push)
            await event_of("begun").wait()
            await settle()
            began = loop.time()
            waits = [cluster.ps(f"ps-{n}").statistics()["pushes"] for n in range(2)]
            assert waits == [0, 0], "updates wait for the end of the save"
            if how == "killed":
                silence(cluster, coordinator)
            elif how == "cut off":
                cluster.network.partition("chief-0")

            def are_applied() -> bool:
                return all(cluster.ps(f"ps-{n}").statistics()["pushes"] for n in range(2))

            while not are_applied():  # noqa: ASYNC110  what is waited for tells nobody
                await asyncio.sleep(0.1)
            assert loop.time() - began < (1 if how == "killed" else 120)
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
        if how == "cut off":
            cluster.network.heal("chief-0")


@pytest.mark.virtual_time
async def test_a_save_is_begun_anew_when_a_connection_is_lost(tmp_path: Path) -> None:
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        both = declared(coordinator.strategy)
        await psync.pull(both)
        checkpoint = psync.Checkpoint(both=both)
        cuts = iter(["ps-1:1", "chief-0"])
        with cluster.tap("ps-1").at(Freeze, lambda: cluster.network.cut(next(cuts, "nobody"))):
            path = await checkpoint.save(tmp_path)
        assert list(cuts) == []
        await checkpoint.restore(path)


@pytest.mark.virtual_time
async def test_a_save_an_atomic_assign_and_a_push_do_not_wait_for_each_other_for_ever(
    tmp_path: Path,
) -> None:
    """The push waits for the lock of the assign, which comes to a gate that is shut."""
    async with running(MemoryCluster(2, 1, tapped=True)) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(4, np.float32), name="v")
            sgd = psync.optimizers.SGD(1.0)

            async def push() -> None:
                await sgd.apply_gradients([(-np.ones(4, np.float32), v)])

            await v.read()
            go_on = asyncio.Event()
            with cluster.tap("ps-1").at(Update, go_on.wait) as sent:
                writing = asyncio.create_task(v.assign(np.ones(4, np.float32), atomic=True))
                await sent.wait()
                coordinator.schedule(push)
                await asyncio.sleep(1)
                saving = asyncio.create_task(psync.Checkpoint(v=v).save(tmp_path))
                await asyncio.sleep(1)
                assert "the gate is shut for cut" in " ".join(cluster.ps("ps-1").describe())
                go_on.set()
                await asyncio.gather(writing, coordinator.join(timeout=60), saving)
            assert (await v.read() == 2).all()
