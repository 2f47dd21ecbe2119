"""The chief dies, the ps tasks live, and the next chief goes on with them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from chief_lives import life_of, silence
from memory_cluster import MemoryCluster, event_of, note, running, shared
from psync.errors import AttachError, FencedError
from psync.testing import settle
from psync.testing.seams import another_process, fresh_process
from psync.wire.messages import (
    AdoptShards,
    AttachPs,
    CloseStep,
    Gate,
    LogEntries,
    TellCounts,
    Update,
)
from snapshot_store import keep_snapshots

pytestmark = [pytest.mark.virtual_time, pytest.mark.promise("failures.chief-attach")]


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


@contextlib.asynccontextmanager
async def tapped(num_workers: int, num_ps: int = 2) -> AsyncIterator[MemoryCluster]:
    """A running cluster without a chief."""
    async with running(MemoryCluster(num_ps, num_workers, tapped=True)) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def life(
    cluster: MemoryCluster, *, attach: bool = True, partitioner: Any = None, **options: Any
) -> AsyncIterator[tuple[psync.ParameterServerStrategy, psync.ClusterCoordinator]]:
    """A chief, from its start to its end: to the other tasks an end is an end."""
    strategy = cluster.strategy(partitioner or psync.FixedShardsPartitioner(2))
    async with life_of(strategy, attach=attach, **options) as coordinator:
        yield strategy, coordinator


async def train(coordinator: psync.ClusterCoordinator, w: Any, optimizer: Any, count: int) -> None:
    async def step() -> None:
        await optimizer.apply_gradients([(np.ones(4, np.float32), w)])

    for _ in range(count):
        coordinator.schedule(step)
    await coordinator.join()


async def first_life(cluster: MemoryCluster, count: int = 5) -> dict[str, Any]:
    async with life(cluster) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.ones(4, np.float32), name="w")
            counter = psync.Variable(0, name="counter")
        adam = psync.optimizers.Adam(0.1)
        await train(coordinator, w, adam, count)
        await counter.assign_add(7)
        await adam.set_learning_rate(0.25)
        return {
            "w": (await w.read()).tolist(),
            "m": (await adam.get_slot(w, "m").read()).tolist(),
        }


async def test_values_slots_steps_and_learning_rates_go_on() -> None:
    async with tapped(2) as cluster:
        before = await first_life(cluster)
        async with life(cluster) as (strategy, coordinator):
            assert coordinator.attached
            adam = psync.optimizers.Adam(0.1)
            with strategy.scope():
                psync.Variable(np.ones(2, np.float32), name="more")  # so all have other numbers
                w = psync.Variable(np.ones(4, np.float32), name="w")
                counter = psync.Variable(0, name="counter")
            assert (await w.read()).tolist() == before["w"]
            assert await counter.read() == 7
            assert (await adam.get_slot(w, "m").read()).tolist() == before["m"]
            assert await adam.iterations.read() == 5
            assert adam.learning_rate == 0.25
            await train(coordinator, w, adam, 3)
            assert await adam.iterations.read() == 8


async def test_what_the_program_does_not_declare_is_dropped_when_it_schedules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with tapped(2) as cluster:
        await first_life(cluster)
        async with life(cluster) as (strategy, coordinator):
            adam = psync.optimizers.Adam(0.1)
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
            await w.read()
            assert "is dropped" not in caplog.text
            await train(coordinator, w, adam, 1)
            assert 'variable "counter" is removed' in caplog.text
            with strategy.scope():
                counter = psync.Variable(0, name="counter")
            assert await counter.read() == 0


@pytest.mark.parametrize("early", [True, False], ids=["at the start", "at the first use"])
async def test_misfits_are_an_error_that_names_them_all_and_changes_nothing(early: bool) -> None:
    async with tapped(2) as cluster:
        before = await first_life(cluster)
        another_process()
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        coordinator = psync.ClusterCoordinator(strategy, attach=True)

        def declare() -> Any:
            with strategy.scope():
                psync.Variable(np.ones(6, np.float32), name="w")
                return psync.Variable(0.0, name="counter")

        if early:
            declare()
            with pytest.raises(AttachError, match=r'"w" declared(.|\n)*"counter" declared'):
                await coordinator.start()
        else:
            async with coordinator:
                counter = declare()
                for _ in range(2):
                    with pytest.raises(AttachError, match=r'"w" declared(.|\n)*"counter" decl'):
                        await counter.read()
                coordinator.schedule(note, ("never",))
                with pytest.raises(AttachError):
                    await coordinator.join()
        async with life(cluster) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
            assert (await w.read()).tolist() == before["w"]


async def test_a_ps_that_was_started_again_is_named() -> None:
    async with tapped(2) as cluster:
        await first_life(cluster)
        await cluster.stop("ps-1")
        await cluster.start("ps-1")
        for _ in range(2):  # also once a program has attached it
            with pytest.raises(AttachError, match="/job:ps/task:1 has lost its shards"):
                async with life(cluster):
                    pass
        async with life(cluster, attach=False) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.zeros(4, np.float32), name="w")
            await w.assign_add(np.full(4, 2, np.float32))
        async with life(cluster) as (strategy, _):  # which is of one piece again
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
            assert (await w.read()).tolist() == [2.0] * 4


# Chiefs that die before there is anything to go on with.


@contextlib.asynccontextmanager
async def of_checkpoints(
    cluster: MemoryCluster, directory: Path, *, attach: bool = True
) -> AsyncIterator[tuple[psync.ClusterCoordinator, list[Any], psync.CheckpointManager]]:
    """A chief with variables over two ps tasks, and their checkpoints."""
    async with life(cluster, attach=attach) as (strategy, coordinator):
        with strategy.scope():
            variables = [psync.Variable(np.zeros(4, np.float32), name=f"v{n}") for n in range(3)]
        checkpoint = psync.Checkpoint(v=variables)
        yield coordinator, variables, psync.CheckpointManager(checkpoint, directory)


async def save_sevens(cluster: MemoryCluster, directory: Path) -> None:
    async with of_checkpoints(cluster, directory) as (_, variables, manager):
        for variable in variables:
            await variable.assign(np.full(4, 7, np.float32))
        await manager.save()


async def firsts(variables: Sequence[Any]) -> list[float]:
    """The first elements of variables, all of whose elements are equal."""
    arrays = await psync.pull(list(variables))
    assert all((array == array[0]).all() for array in arrays)
    return [float(array[0]) for array in arrays]


@pytest.mark.promise("failures.chief-unfinished-restore")
@pytest.mark.parametrize("before", ["nothing", "another restore", "steps"])
@pytest.mark.parametrize("first", [0, 2], ids=["before a value", "between values"])
async def test_values_of_which_a_restore_was_cut_short_are_not_attached_to(
    before: str, first: int, tmp_path: Path
) -> None:
    async with tapped(1) as cluster:
        await save_sevens(cluster, tmp_path)
        async with of_checkpoints(cluster, tmp_path, attach=False) as (
            coordinator, variables, manager,
        ):  # fmt: skip
            if before == "another restore":
                await manager.restore_or_initialize()
            elif before == "steps":
                await variables[0].assign_add(np.ones(4, np.float32))
            await firsts(variables)
            came = itertools.count()
            with cluster.tap("ps-1").at(Update, lambda: next(came) < first) as is_sent:
                restoring = asyncio.create_task(manager.restore_or_initialize())
                await is_sent.wait()
                await asyncio.sleep(1.0)
                silence(cluster, coordinator)
                restoring.cancel()
                await asyncio.gather(restoring, return_exceptions=True)
        async with of_checkpoints(cluster, tmp_path) as (coordinator, variables, manager):
            assert not coordinator.attached
            assert await firsts(variables) == [0, 0, 0]
            await manager.restore_or_initialize()
            await variables[0].assign_add(np.ones(4, np.float32))
        async with of_checkpoints(cluster, tmp_path) as (coordinator, variables, _):
            assert coordinator.attached
            assert await firsts(variables) == [8, 7, 7]


@pytest.mark.promise("failures.chief-unfinished-restore")
@pytest.mark.parametrize("restores", [False, True])
async def test_values_that_nothing_has_updated_are_not_attached_to(
    restores: bool, tmp_path: Path
) -> None:
    """So a program may restore several checkpoints, one after the other, wherever it dies."""
    async with tapped(1) as cluster:
        await save_sevens(cluster, tmp_path)
        for attach in (False, True, True):
            async with of_checkpoints(cluster, tmp_path, attach=attach) as (
                coordinator, variables, manager,
            ):  # fmt: skip
                assert not coordinator.attached
                assert await firsts(variables) == [0, 0, 0]
                if restores:
                    await manager.restore_or_initialize()


@pytest.mark.promise("failures.chief-unfinished-restore")
async def test_a_chief_that_dies_while_it_begins_anew_is_no_hindrance(tmp_path: Path) -> None:
    """One ps has dropped what it had, the other one has not."""
    async with tapped(1) as cluster:
        async with of_checkpoints(cluster, tmp_path, attach=False) as (_, variables, _):
            await firsts(variables)
        asked = itertools.count()
        with cluster.tap("ps-1").at(AdoptShards, lambda: next(asked) == 0) as is_sent:
            starting = asyncio.create_task(of_checkpoints(cluster, tmp_path).__aenter__())
            await is_sent.wait()
            await asyncio.sleep(1.0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        async with of_checkpoints(cluster, tmp_path) as (coordinator, variables, _):
            assert not coordinator.attached
            assert await firsts(variables) == [0, 0, 0]


@pytest.mark.promise("failures.chief-attach")
async def test_a_restore_that_has_ended_leaves_what_was_trained_before(tmp_path: Path) -> None:
    async with tapped(1) as cluster:
        await save_sevens(cluster, tmp_path)
        for updates in (7, 8):
            async with of_checkpoints(cluster, tmp_path) as (coordinator, variables, _):
                assert coordinator.attached
                assert await firsts(variables) == [updates, 7, 7]
                part = psync.Checkpoint(one=variables[1])
                await part.restore(await part.save(tmp_path / "part"))
                if updates == 7:
                    await variables[0].assign_add(np.ones(4, np.float32))


async def synchronous_life(cluster: MemoryCluster, rounds: int) -> tuple[int, float, Any]:
    """Rounds of two replicas; return the global step, the value, and what ps 0 counted."""
    async with life(cluster) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.Momentum(0.5, 0.9), 2, 2)

        async def step() -> str:
            await w.read()
            one = np.ones(3, np.float32)
            return (await optimizer.apply_gradients([(one, w)], global_step)).outcome.value

        values = [coordinator.schedule(step) for _ in range(2 * rounds)]
        await coordinator.join()
        assert set(await coordinator.fetch(values)) <= {"accepted"}
        counters = (await coordinator.ps_statistics())[0]["sync"]
        return int(await global_step.read()), float((await w.read())[0]), counters


async def test_synchronous_groups_go_on_at_the_present_step_with_new_tokens() -> None:
    async with tapped(2) as cluster:
        whole = await synchronous_life(cluster, 6)
    async with tapped(2) as cluster:
        first = await synchronous_life(cluster, 3)
        second = await synchronous_life(cluster, 3)
    assert (first[0], second[0]) == (3, 6)
    assert second[1] == whole[1]  # with the momentum that there was
    (one,), (other,) = first[2].values(), second[2].values()
    assert other["steps"] == one["steps"] == 3
    assert other["tokens"] == one["tokens"]  # none on top of those of before


async def test_updates_under_way_of_a_chief_that_lives_are_refused_by_every_ps() -> None:
    """It is cut off in the middle of a push over two ps tasks, and hears of it when it is back."""
    async with tapped(1) as cluster:
        async with life(cluster) as (strategy, old):
            with strategy.scope():
                w = psync.Variable(np.zeros(4, np.float32), name="w")
            await w.read()
            for link in cluster.network.links("ps-1:1"):
                link.to_server.stall()
            adding = asyncio.create_task(w.assign_add(np.ones(4, np.float32)))
            await asyncio.sleep(1)  # ps 0 has its part
            async with life(cluster) as (strategy, _):
                with strategy.scope():
                    again = psync.Variable(np.zeros(4, np.float32), name="w")
                assert (await again.read()).tolist() == [1.0, 1.0, 0.0, 0.0]
                for link in cluster.network.links("ps-1:1"):
                    link.to_server.flow()
                with pytest.raises(FencedError):
                    await adding
                for act in (w.assign_add(np.ones(4, np.float32)), w.read()):
                    with pytest.raises(FencedError):
                        await act
                old.schedule(note, ("never",))
                with pytest.raises(FencedError):
                    await old.join()
                assert (await again.read()).tolist() == [1.0, 1.0, 0.0, 0.0]
                assert "never" not in shared


async def test_workers_of_the_chief_that_died_change_nothing_any_more() -> None:
    """A step that cannot be cancelled pushes after the next chief has come."""
    async with tapped(1) as cluster:
        async with life(cluster) as (strategy, coordinator):
            with strategy.scope():
                w = psync.Variable(np.zeros(4, np.float32), name="w")

            async def stubborn() -> None:
                await note("begun")
                while not event_of("go on").is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await event_of("go on").wait()
                try:
                    await w.assign_add(np.ones(4, np.float32))
                except BaseException as exc:
                    memory_cluster.shared["error"] = exc
                    raise

            coordinator.schedule(stubborn)
            await event_of("begun").wait()
        async with life(cluster) as (strategy, coordinator):
            with strategy.scope():
                again = psync.Variable(np.zeros(4, np.float32), name="w")
            await again.read()
            event_of("go on").set()
            await asyncio.sleep(5)
            assert shared["error"] is not None
            assert (await again.read()).tolist() == [0.0] * 4


@pytest.mark.parametrize("num_attached", [0, 1])
async def test_the_chief_died_before_every_ps_was_attached(num_attached: int) -> None:
    async with tapped(1) as cluster:
        before = await first_life(cluster)
        for name in ("ps-0", "ps-1")[num_attached:]:
            cluster.network.partition(f"{name}:1")
        dying = asyncio.create_task(life(cluster, connect_timeout=1e6).__aenter__())
        await asyncio.sleep(30)
        assert not dying.done()
        dying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dying
        for name in ("ps-0", "ps-1")[num_attached:]:
            cluster.network.heal(f"{name}:1")
        async with life(cluster) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
            assert (await w.read()).tolist() == before["w"]


async def test_the_chief_died_when_it_had_adopted_some() -> None:
    async with tapped(1) as cluster:
        before = await first_life(cluster)
        async with life(cluster) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
            assert (await w.read()).tolist() == before["w"]  # its slots and the counter wait
        async with life(cluster) as (strategy, coordinator):
            adam = psync.optimizers.Adam(0.1)
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")
                counter = psync.Variable(0, name="counter")
            assert (await w.read()).tolist() == before["w"]
            assert await counter.read() == 7
            assert (await adam.get_slot(w, "m").read()).tolist() == before["m"]
            await train(coordinator, w, adam, 1)
            assert await adam.iterations.read() == 6


async def test_a_ps_that_is_attached_anew_while_the_program_runs_is_of_no_life() -> None:
    """It may have been started again, and empty: the next coordinator must hear of that."""
    async with tapped(1) as cluster:
        with cluster.tap("ps-1").hearing(AttachPs) as seen:
            async with life(cluster, attach=False):
                cluster.network.cut("ps-1:1")
                await asyncio.sleep(5)
        assert [message.keep for message in seen] == [False, True]


async def count_up(coordinator: psync.ClusterCoordinator, counter: Any, count: int) -> None:
    async def step() -> None:
        await counter.assign_add(np.ones_like(await counter.read()))

    for _ in range(count):
        coordinator.schedule(step)
    await coordinator.join()


async def test_ps_tasks_that_went_back_to_a_cut_are_attached_to(tmp_path: Path) -> None:
    async with tapped(1) as cluster:
        async with life(cluster) as (strategy, coordinator):
            with strategy.scope():
                counters = [psync.Variable(0, name=f"counter{index}") for index in range(2)]
            await count_up(coordinator, counters[1], 5)
            await keep_snapshots(coordinator, tmp_path)
            await count_up(coordinator, counters[1], 3)
            await cluster.stop("ps-1")
            await cluster.start("ps-1")
            await anext(coordinator.events())
            await count_up(coordinator, counters[1], 1)
        async with life(cluster) as (strategy, coordinator):
            assert coordinator.attached
            with strategy.scope():
                counters = [psync.Variable(0, name=f"counter{index}") for index in range(2)]
            assert await counters[1].read() == 6


@pytest.mark.promise("failures.chief-unfinished-rollback")
async def test_ps_tasks_that_went_back_and_no_program_was_told_are_not_attached_to(
    tmp_path: Path,
) -> None:
    async with tapped(1) as cluster:
        async with life(cluster) as (strategy, coordinator):
            with strategy.scope():
                counters = [psync.Variable(0, name=f"counter{index}") for index in range(2)]
            await count_up(coordinator, counters[1], 5)
            await keep_snapshots(coordinator, tmp_path)
            await count_up(coordinator, counters[1], 3)
            with cluster.tap("ps-0").at(AdoptShards, lambda: False) as told:
                await cluster.stop("ps-1")
                await cluster.start("ps-1")
                await told.wait()
        with pytest.raises(AttachError, match="/job:ps/task:0 may be inconsistent"):
            async with life(cluster):
                pass


@pytest.mark.promise("failures.chief-torn-step")
async def test_a_step_that_was_not_applied_everywhere_is_not_attached_to() -> None:
    async with tapped(1) as cluster:
        async with life(cluster, ps_timeout=3.0) as (strategy, coordinator):
            with strategy.scope():
                w = psync.Variable(np.zeros(4, np.float32), name="w")
                global_step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1, 1)

            async def step() -> None:
                await optimizer.apply_gradients([(np.ones(4, np.float32), w)], global_step)

            coordinator.schedule(step)
            await coordinator.join()
            with cluster.tap("ps-1").at(CloseStep, lambda: False) as closing:
                coordinator.schedule(step)
                await closing.wait()
            cluster.network.partition("ps-0", "ps-1")
            with pytest.raises(psync.PsyncError, match="cannot be reached"):
                await coordinator.join()
            cluster.network.heal("ps-0", "ps-1")
        with pytest.raises(AttachError, match="/job:ps/task:0 may be inconsistent"):
            async with life(cluster):
                pass
        async with life(cluster, attach=False):
            pass


async def test_a_checkpoint_of_the_earlier_program_does_not_take_closures_of_the_next_for_its_own(
    tmp_path: Path,
) -> None:
    async with tapped(1) as cluster:
        for lives in range(2):
            async with life(cluster, attach=False) as (strategy, coordinator):
                with strategy.scope():
                    counter = psync.Variable(np.zeros(2, np.int64), name="counter")
                manager = psync.CheckpointManager(psync.Checkpoint(counter=counter), tmp_path)
                await manager.restore_or_initialize()
                await count_up(coordinator, counter, 5 if lives == 0 else 3)
                if lives == 0:
                    await manager.save()
                    continue
                await cluster.stop("ps-1")
                await cluster.start("ps-1")
                event = await anext(coordinator.events())
                assert len(event.closures) == 3
                await count_up(coordinator, counter, 2)
                assert (await counter.read()).tolist() == [7, 7]


# Pushes that are under way when the chief dies.


@contextlib.asynccontextmanager
async def one_push(
    cluster: MemoryCluster, recovery: str
) -> AsyncIterator[tuple[psync.ClusterCoordinator, psync.Variable, Any]]:
    """A chief with a variable on two ps tasks, and a step that adds 1 to it; it dies in the end."""
    strategy = cluster.strategy(psync.FixedShardsPartitioner(2), ps_recovery=recovery)
    async with life_of(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
        sgd = psync.optimizers.SGD(1.0)

        async def step() -> None:
            await sgd.apply_gradients([(np.full(2, -1, np.float32), w)])

        await coordinator.backed_up()
        yield coordinator, w, step
        silence(cluster, coordinator)


@pytest.mark.promise("failures.chief-updates-in-progress")
@pytest.mark.parametrize("recovery", ["checkpoint", "backup"])
async def test_a_part_of_a_push_that_waits_for_the_end_of_a_save_does_not_die_with_the_chief(
    recovery: str, tmp_path: Path
) -> None:
    """Its worker hears first that the chief is dead, and gives its push up."""
    async with tapped(1) as cluster:
        async with one_push(cluster, recovery) as (coordinator, w, step):
            await w.read()
            with (
                cluster.tap("ps-0").at(Gate, lambda: False),
                cluster.tap("ps-1").at(Gate, lambda: True) as is_shut,
            ):
                manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
                saving = asyncio.create_task(manager.save())
                await is_shut.wait()
                coordinator.schedule(step)
                await settle()
                assert (await w.read()).tolist() == [1.0, 0.0]
                cluster.network.partition("chief-0")
                for link in cluster.network.links("worker-0"):
                    if link.ends.are("chief-0", "worker-0"):
                        link.cut()
                await settle()
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)
        cluster.network.heal("chief-0")
        async with one_push(cluster, recovery) as (coordinator, w, _):
            assert coordinator.attached
            assert (await w.read()).tolist() == [1.0, 1.0]
            assert coordinator.partial_updates == 0


@pytest.mark.promise("updates.received-is-applied")
async def test_a_part_of_a_push_that_waits_for_the_backup_does_not_die_with_the_chief() -> None:
    async with tapped(1) as cluster:
        async with one_push(cluster, "backup") as (coordinator, w, step):
            await w.read()
            with cluster.tap("ps-1").at(LogEntries, lambda: False) as is_sent:
                coordinator.schedule(step)
                await is_sent.wait()
                await settle()
                assert (await w.read()).tolist() == [0.0, 1.0]
                silence(cluster, coordinator)
        async with one_push(cluster, "backup") as (coordinator, w, _):
            assert coordinator.attached
            assert (await w.read()).tolist() == [1.0, 1.0]
            assert coordinator.partial_updates == 0


@pytest.mark.promise("failures.chief-updates-in-progress")
async def test_a_push_of_which_a_ps_has_not_received_its_part_is_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with tapped(1) as cluster:
        async with one_push(cluster, "checkpoint") as (coordinator, w, step):
            coordinator.schedule(step)
            await coordinator.join()
            with cluster.tap("ps-1").at(Update, lambda: False) as is_sent:
                coordinator.schedule(step)
                await is_sent.wait()
                await settle()
            assert coordinator.partial_updates == 0
        async with one_push(cluster, "checkpoint") as (coordinator, w, step):
            assert coordinator.partial_updates == 1
            assert "1 updates of the earlier program" in caplog.text
            assert (await w.read()).tolist() == [2.0, 1.0]
            coordinator.schedule(step)
            await coordinator.join()
        async with one_push(cluster, "checkpoint") as (coordinator, w, _):
            assert coordinator.partial_updates == 0
            assert (await w.read()).tolist() == [3.0, 2.0]


async def test_pushes_of_which_no_other_ps_has_heard_are_told_after_the_attach() -> None:
    """Schedules on other ps tasks go on from them, though nothing more is pushed there."""
    async with tapped(1, 3) as cluster:
        for attached in (False, True):
            async with life_of(cluster.strategy(), attach=True) as coordinator:
                with coordinator.strategy.scope():
                    heads = [psync.Variable(np.zeros(2), name=f"head{k}") for k in range(3)]
                rate = psync.schedules.PiecewiseConstantDecay([29], [1.0, 0.0])
                optimizer = psync.optimizers.SGD(rate)

                async def step(head: Any, optimizer: Any = optimizer) -> None:
                    await optimizer.apply_gradients([(-np.ones(2), head)])

                if attached:
                    await asyncio.sleep(1.0)
                    coordinator.schedule(step, (heads[1],))
                    await coordinator.join()
                    assert (await heads[1].read()).tolist() == [0, 0]
                    assert await optimizer.iterations.read() == 61
                    continue
                await heads[0].read()
                with contextlib.ExitStack() as stack:
                    for ps in (1, 2):
                        unheard = cluster.tap(f"ps-{ps}").at(TellCounts, lambda: False)
                        stack.enter_context(unheard)
                    for _ in range(60):
                        coordinator.schedule(step, (heads[0],))
                    await coordinator.join()
                    silence(cluster, coordinator)


@pytest.mark.promise("failures.chief-updates-in-progress")
async def test_a_push_of_a_data_shard_that_may_come_again_is_counted_too() -> None:
    """Another closure raises, so the shard's run is final, and its calls are kept."""
    async with tapped(2) as cluster:
        async with one_push(cluster, "checkpoint") as (coordinator, w, step):

            async def visit(shard: int) -> None:
                await step()

            async def fails() -> None:
                raise ValueError("a test")

            await w.read()
            with cluster.tap("ps-1").at(Update, lambda: False) as is_sent:
                coordinator.distribute_once([0]).schedule(visit)
                await is_sent.wait()
                coordinator.schedule(fails)
                await asyncio.sleep(5)
                silence(cluster, coordinator)
        async with one_push(cluster, "checkpoint") as (coordinator, w, step):
            assert (await w.read()).tolist() == [1.0, 0.0]
            assert coordinator.partial_updates == 1
