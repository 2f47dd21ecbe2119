"""What an answer means, and what becomes of an update whose answer or worker is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import memory_cluster
import psync
from local_training import in_step, training
from memory_cluster import (
    TWO_SHARDS,
    MemoryCluster,
    cluster_of,
    coordinating,
    event_of,
    note,
    running,
)
from psync.errors import ClosureError, FencedError, PsyncError
from psync.testing import MemoryNetwork, settle
from psync.wire.frames import Kind
from psync.wire.limits import Limits
from psync.wire.messages import Update
from recorder import Recorder
from wire_tools import encode_frame

virtual = pytest.mark.virtual_time

LARGE = (1 << 21) + 5  # elements of float32: some blocks, applied with the loop running between

LOSSES = {kind: {"request": 0.2, "reply": 0.2, "in_flight": 0.2, "min_each": 2}
          for kind in ("Update",)}  # fmt: skip


# --- asynchronous updates --------------------------------------------------------------------


@pytest.mark.promise("answers.asynchronous")
@pytest.mark.parametrize(
    "value",
    [
        np.float32(3),
        np.zeros((0, 4), np.float32),
        np.zeros((3, 0), np.float64),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.arange(5, dtype=np.float16),
        np.arange(-2, 3, dtype=np.int8),
        np.array(2**64 - 1, np.uint64),
        np.array([[True], [False], [True]]),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
async def test_every_kind_of_variable_arrives_as_it_was(value: np.ndarray) -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(value, name="v")
        for _ in range(2):
            got = await psync.pull(v)
            assert (got.dtype, got.shape) == (np.asarray(value).dtype, value.shape)
            assert np.array_equal(got, value)
            await v.assign(value)


@pytest.mark.promise("answers.asynchronous")
async def test_whoever_pulls_after_an_answer_sees_the_update() -> None:
    async with training(2, 2, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros((7, 3), np.float32), name="w")
            half = psync.Variable(np.ones(4, ml_dtypes.bfloat16), name="half")
        sgd, adam = psync.optimizers.SGD(0.5), psync.optimizers.Adam(0.5)

        async def step() -> float:
            await sgd.apply_gradients([(np.full((7, 3), -2, np.float32), w)])
            return float((await psync.pull(w)).min())

        seen = await coordinator.fetch([coordinator.schedule(step) for _ in range(20)])
        assert (min(seen), max(seen)) >= (1, 20)
        assert (await w.read() == 20).all()
        await in_step(coordinator, lambda: adam.apply_gradients([(half_ones(), half)]))
        assert (await half.read() == 0.5).all()  # by slots in float32


def half_ones() -> np.ndarray:
    return np.ones(4, ml_dtypes.bfloat16)


@virtual
@pytest.mark.promise(
    "updates.same-answer", "updates.rows-at-most-once", "updates.assign-at-most-once"
)
async def test_whatever_is_lost_an_update_counts_once_and_its_answer_is_the_first() -> None:
    cluster = MemoryCluster(2, 2, losses=LOSSES)
    async with running(cluster), psync.ClusterCoordinator(cluster.strategy()) as coordinator:
        with coordinator.strategy.scope():
            table = psync.Variable(np.zeros((50, 2), np.float32), name="table")
            count = psync.Variable(0, name="count")
        sgd = psync.optimizers.SGD(1.0)

        async def step(row: int) -> list[Any]:
            gradient = psync.IndexedSlices(np.full((2, 2), -1, np.float32), [row, 49])
            result = await sgd.apply_gradients([(gradient, table)])
            await count.assign_add(1)
            return [result.outcome.value, result.step]

        results = [coordinator.schedule(step, (row,)) for row in range(49)]
        outcomes = await coordinator.fetch(results)
        assert [outcome for outcome, _ in outcomes] == ["accepted"] * 49
        assert sorted(number for _, number in outcomes) == list(range(1, 50))
        assert (await table.read()).tolist() == [[1, 1]] * 49 + [[49, 49]]
        assert int(await count.read()) == 49
        assert cluster.losses is not None
        assert len(cluster.losses.lost) == 3


@virtual
@pytest.mark.promise("updates.same-answer", "updates.lost-worker-refused")
async def test_a_second_run_is_a_duplicate_and_the_first_one_changes_nothing_any_more() -> None:
    """Its worker is cut off after a push; when it is back it pushes something else."""
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
        sgd = psync.optimizers.SGD(1.0)

        async def step() -> str:
            result = await sgd.apply_gradients([(-np.ones(2, np.float32), v)])
            first = "who" not in memory_cluster.shared
            memory_cluster.shared.setdefault("who", psync.get_worker_index())
            await note("pushed")
            if first:
                with contextlib.suppress(asyncio.CancelledError):
                    await event_of("go on").wait()
                try:
                    await sgd.apply_gradients([(np.full(2, 100, np.float32), v)])
                except PsyncError as exc:
                    memory_cluster.shared["refused"] = exc
                    raise
            return str(result.outcome.value)

        value = coordinator.schedule(step)
        await event_of("pushed").wait()
        first = f"worker-{memory_cluster.shared['who']}"
        cluster.network.partition("chief-0", f"{first}:1")
        cluster.network.cut(f"{first}:1")
        assert await value == "duplicate"
        event_of("go on").set()
        await asyncio.sleep(5)
        cluster.network.heal("chief-0", f"{first}:1")
        assert "refused" in memory_cluster.shared
        assert (await v.read()).tolist() == [1, 1]


@virtual
@pytest.mark.promise("updates.remembered")
@pytest.mark.parametrize("later", [1, 300])
async def test_a_second_run_finds_the_answer_of_the_first_however_many_came_after(
    later: int,
) -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(1, np.float32), name="v")
        sgd = psync.optimizers.SGD(1.0)

        async def first() -> str:
            result = await sgd.apply_gradients([(np.full(1, -100, np.float32), v)])
            runs = memory_cluster.shared["runs"] = memory_cluster.shared.get("runs", 0) + 1
            if runs == 1:
                memory_cluster.shared["worker"] = psync.get_worker_index()
                await note("hangs")
                await asyncio.sleep(3600)
            return str(result.outcome.value)

        async def another() -> None:
            for _ in range(10):
                await sgd.apply_gradients([(np.full(1, -1, np.float32), v)])

        value = coordinator.schedule(first)
        await event_of("hangs").wait()
        await coordinator.fetch([coordinator.schedule(another) for _ in range(later)])
        cluster.network.cut(f"worker-{memory_cluster.shared['worker']}:1")
        assert await value == "duplicate"
        assert await v.read() == 100 + 10 * later


@pytest.mark.promise("updates.never-half-served")
@pytest.mark.parametrize("size", [3, LARGE])
async def test_a_ps_that_cannot_finish_an_update_serves_nothing_any_more(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinating(1, 1, ps_timeout=2.0) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(size, np.float32), name="v")
        sgd = psync.optimizers.SGD(1.0)

        async def step() -> None:
            await sgd.apply_gradients([(np.ones(v.shape, np.float32), v)])

        await in_step(coordinator, step)

        def no_memory(*_: Any, **__: Any) -> Any:
            raise MemoryError("no memory left")

        for name in ("multiply", "subtract", "add"):
            monkeypatch.setattr(np, name, no_memory)
        coordinator.schedule(step)
        with pytest.raises(PsyncError):
            await coordinator.join()
        monkeypatch.undo()
        assert cluster.ps("ps-0").stopped.is_set()
        with pytest.raises(PsyncError):
            await v.read()


@virtual
@pytest.mark.promise("schedule.join-waits-for-all")
async def test_join_waits_for_all_that_was_scheduled_before_it() -> None:
    async with coordinating(1, 2) as (_, coordinator):
        values = [coordinator.schedule(asyncio.sleep, (number % 5, number)) for number in range(20)]
        joining = asyncio.create_task(coordinator.join())
        await asyncio.sleep(1)
        late = coordinator.schedule(asyncio.sleep, (1000,))
        await joining
        assert all(value.done() for value in values)
        assert not late.done()
        late.cancel()


# --- reads -----------------------------------------------------------------------------------


@pytest.mark.promise("reads.never-torn", "reads.stable")
@pytest.mark.parametrize("shares", [False, True], ids=["copies", "shared memory"])
async def test_a_read_is_whole_and_does_not_change_afterwards_nor_end_with_its_cluster(
    shares: bool,
) -> None:
    held: list[tuple[np.ndarray, float]] = []
    network = MemoryNetwork(chunk=(1 << 18, 1 << 20), shares_memory=shares)
    async with (
        cluster_of(2, 2, network=network) as cluster,
        psync.ClusterCoordinator(cluster.strategy()) as coordinator,
    ):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(LARGE, np.float32), name="v")
        sgd = psync.optimizers.SGD(0.5)

        async def push() -> None:
            await sgd.apply_gradients([(np.full(LARGE, -2, np.float32), v)])

        for _ in range(20):
            coordinator.schedule(push)
        while not coordinator.done():
            value = await psync.pull(v)
            assert (value == value[0]).all(), "a torn read"
            held.append((value, float(value[0])))
            if len(held) > 8:
                del held[2]
        assert float((await psync.pull(v))[-1]) == 20
    assert len({was for _, was in held}) > 2
    for value, was in held:
        assert (value == was).all()


async def test_pulls_do_not_starve_under_steady_pushes() -> None:
    async with coordinating(1, 3) as (_, coordinator):
        with coordinator.strategy.scope():
            both = [psync.Variable(np.zeros(LARGE, np.float32), name=name) for name in "vw"]
        sgd = psync.optimizers.SGD(0.5)

        async def steadily() -> int:
            count = 0
            while not memory_cluster.event_of("stop").is_set():
                await sgd.apply_gradients(
                    [(np.ones(each.shape, np.float32), each) for each in both]
                )
                count += 1
            return count

        counts = [coordinator.schedule(steadily) for _ in range(3)]
        for _ in range(3):
            await psync.pull(both)
        event_of("stop").set()
        total = sum(await coordinator.fetch(counts))
        assert all((value == -0.5 * total).all() for value in await psync.pull(both))


# --- synchronous steps -----------------------------------------------------------------------


@virtual
@pytest.mark.promise("answers.synchronous", "answers.partial-step-tokens")
async def test_accepted_means_applied_everywhere_or_that_its_step_is_still_open() -> None:
    async with coordinating(2, 3) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros((2, 3), np.float32), name="v")
            w = psync.Variable(np.zeros(2, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        options = {"replicas_to_aggregate": 3, "total_num_replicas": 3}
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), **options)

        async def step() -> Any:
            await psync.pull((v, w))
            pairs = [(-np.ones((2, 3), np.float32), v), (-np.ones(2, np.float32), w)]
            result = await optimizer.apply_gradients(pairs, global_step)
            values = [float(each.min()) for each in await psync.pull((v, w))]
            return result.outcome.value, result.step, result.count, values

        results = [coordinator.schedule(step) for _ in range(25)]
        for outcome, number, count, values in await coordinator.fetch(results):
            assert outcome in ("accepted", "stale")
            if outcome == "accepted" and count:
                assert min(values) >= number
        assert (await v.read() == int(await global_step.read())).all()


@virtual
@pytest.mark.promise("answers.synchronous", "failures.connection")
@pytest.mark.parametrize("size", [100, 12_000])
async def test_ps_0_tells_another_ps_what_it_closes_though_it_has_never_said_so_there(
    size: int,
) -> None:
    """Four pushes that name a plan each, on the lane for large bodies, or on a new connection.

    However often that is: what ps 0 hears of parts there it asks for again on each.
    """
    async with running(MemoryCluster(2, 4)) as cluster:
        strategy = cluster.strategy(TWO_SHARDS)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(size, np.float32), name="v")
                global_step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 4)

            async def step() -> None:
                await optimizer.apply_gradients([(np.ones(size, np.float32), v)], global_step)

            for _ in range(20):
                for _ in range(4):
                    coordinator.schedule(step)
                await coordinator.join()
                cluster.network.cut("ps-1")
            assert (await v.read() == -20).all()


@virtual
@pytest.mark.promise("steps.target-follows-workers")
async def test_a_step_needs_fewer_gradients_while_a_worker_is_lost() -> None:
    async with coordinating(1, 3) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 3)

        async def step() -> int:
            await psync.pull(v)
            result = await optimizer.apply_gradients([(np.ones(2, np.float32), v)], global_step)
            return int(result.count)

        async def counts() -> set[int]:
            values = [coordinator.schedule(step) for _ in range(12)]
            await coordinator.join(timeout=60)
            return {count for count in await coordinator.fetch(values) if count}

        assert await counts() == {3}
        await cluster.kill_worker("worker-2")
        await asyncio.sleep(5)
        assert await counts() == {2}
        await cluster.revive("worker-2")
        await asyncio.sleep(5)
        assert 3 in await counts()


@virtual
@pytest.mark.promise("input.peers-bounded")
async def test_a_step_for_which_there_is_no_memory_is_refused_with_what_to_do() -> None:
    limits = Limits(staging_bytes=1 << 16)
    async with coordinating(1, 2, limits) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(1 << 16, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

        async def step() -> None:
            await optimizer.apply_gradients([(np.ones(1 << 16, np.float32), v)], global_step)

        coordinator.schedule(step)
        with pytest.raises(PsyncError, match="but the budget is 65536 bytes"):
            await coordinator.join()
        assert not (await v.read()).any()


# --- what comes from outside -----------------------------------------------------------------


@virtual
@pytest.mark.promise("input.documented-errors", "input.connections-bounded")
@pytest.mark.parametrize("seed", range(8))
async def test_bytes_of_strangers_end_their_connection_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    async with coordinating(1, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2), name="v")
        frame = b"".join(encode_frame(Kind.HELLO, 0, chance.randbytes(30), [b"body"]))
        for address in ("ps-0:1", "worker-0:1"):
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(3000), frame, frame[:20]):
                stranger = Recorder()
                transport, _ = await cluster.network.host("stranger").connect(
                    address, lambda stranger=stranger: stranger
                )
                transport.write(data)
                await asyncio.sleep(10)
                assert stranger.events[-1] == "lost"
        coordinator.schedule(v.assign_add, (np.ones(2),))
        await coordinator.join()
        assert (await v.read()).tolist() == [1, 1]


# --- workers that die ------------------------------------------------------------------------


@virtual
@pytest.mark.promise("closures.killer-found")
@pytest.mark.parametrize("seed", range(3))
async def test_a_closure_that_kills_its_workers_is_found_whatever_else_dies(seed: int) -> None:
    draw = random.Random(seed)
    async with coordinating(1, 4, max_losses=3) as (cluster, coordinator):
        losses = 0

        async def kills() -> None:
            memory_cluster.shared["killer"] = psync.get_worker_index()
            await note("kills")
            await asyncio.sleep(3600)

        async def works() -> None:
            await asyncio.sleep(1)

        coordinator.schedule(kills)
        joining = asyncio.create_task(coordinator.join(timeout=36_000))
        while not joining.done():
            coordinator.schedule(works)
            await asyncio.sleep(draw.uniform(0.5, 3))
            if event_of("kills").is_set():
                event_of("kills").clear()
                losses += 1
                cluster.network.cut(f"worker-{memory_cluster.shared['killer']}:1")
            elif draw.random() < 0.5:
                cluster.network.cut(f"worker-{draw.randrange(4)}:1")
        with pytest.raises(ClosureError, match="was lost with its worker"):
            await joining
        assert losses <= 15


@virtual
@pytest.mark.promise("failures.all-workers")
async def test_the_last_worker_goes_on_though_it_dies_again_and_again() -> None:
    async with coordinating(1, 2, max_losses=99) as (cluster, coordinator):

        async def works(number: int) -> int:
            await asyncio.sleep(1)
            return number

        values = [coordinator.schedule(works, (number,)) for number in range(40)]
        joining = asyncio.create_task(coordinator.join(timeout=3600))
        await cluster.kill_worker("worker-1")
        while not joining.done():
            await asyncio.sleep(2.5)
            cluster.network.cut("worker-0:1")
        await joining
        assert await coordinator.fetch(values) == list(range(40))


@virtual
async def test_one_that_was_cut_off_is_told_which_program_has_replaced_its_own() -> None:
    async with cluster_of(1, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as old:
            with old.strategy.scope():
                v = psync.Variable(np.zeros(2), name="v")
            await v.read()
            async with psync.ClusterCoordinator(cluster.strategy()) as new:
                with new.strategy.scope():
                    again = psync.Variable(np.ones(2), name="v")
                assert (await again.read()).tolist() == [1, 1]
                with pytest.raises(FencedError):
                    await v.assign(np.full(2, 7.0))
                assert (await again.read()).tolist() == [1, 1]


@virtual
@pytest.mark.parametrize("synchronous", [False, True])
async def test_a_push_on_its_way_is_answered_by_nobody_once_its_program_has_gone(
    synchronous: bool,
) -> None:
    """Whoever closes meanwhile does not wait for an answer, and the next program finds no trace."""
    async with running(MemoryCluster(1, 1, tapped=True)) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(2, np.float32), name="v")
                step = psync.get_or_create_global_step()
            sgd = psync.optimizers.SGD(1.0)
            sync = psync.SyncReplicasOptimizer(sgd, 1)

            async def push() -> None:
                pairs = [(np.ones(2, np.float32), v)]
                await (sync.apply_gradients(pairs, step) if synchronous else
                       sgd.apply_gradients(pairs))  # fmt: skip

            with cluster.tap("ps-0").at(Update, lambda: False) as sent:
                coordinator.schedule(push)
                await sent.wait()
        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(2, np.float32), name="v")
            await settle()
            assert (await v.read()).tolist() == [0, 0]
