"""One ps at a time: parts come in, ps 0 (whom the test plays) says which of them count."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, store_of, sync_of, work_of
from ps_cluster import CHIEF, OTHER, RATE, WORKER, hold, is_busy, pull, until
from psync.client.ps_client import PsClient
from psync.errors import (
    ConfigurationError,
    FencedError,
    GradientError,
    PsyncError,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
)
from psync.numerics.blocks import Block, BlockArray, BlockPool
from psync.numerics.update_rule import SGD
from psync.schedules import PiecewiseConstantDecay
from psync.specs import VariableSpec
from psync.store.store import ShardStore, Work
from psync.store.sync_config import SyncConfig
from psync.testing.link import Link
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.ps_messages import Fence, Pull, Pulled
from psync.wire.sync_messages import CloseStep, Staged, StagePush
from psync.wire.tensors import to_bytes_view
from sync_cluster import GROUP, SyncCluster, ask

CLOSER = "/job:ps/task:0"
MiB = 1 << 20
LARGE = 8 * MiB // 4  # elements of float32: several blocks, applied with the loop running between

pytestmark = pytest.mark.asyncio


async def stage(
    cluster: SyncCluster,
    client: PsClient,
    gradients: dict[VariableSpec, Any],
    *,
    push: int = 1,
    local_step: int = -1,
    config: dict[str, Any] | None = None,
) -> Staged:
    """Send a part: one gradient, an array or a number, for each variable's first shard."""
    arrays = [
        gradient
        if isinstance(gradient, np.ndarray)
        else np.full(variable.shape, gradient, variable.dtype)
        for variable, gradient in gradients.items()
    ]
    members = [variable.shards[0].key for variable in gradients]
    message = StagePush(GROUP, config or cluster.config, push, local_step, push, members)
    answer = await ask(client, message, [to_bytes_view(array) for array in arrays])
    assert isinstance(answer, Staged)
    return answer


def closing(
    cluster: SyncCluster, step: int, *pushes: tuple[PsClient, int] | tuple[PsClient, int, float]
) -> CloseStep:
    named = []
    for client, push, *weight in pushes:
        endpoint = endpoint_of(client.links[0])
        named.append((endpoint.task, endpoint.incarnation, push, weight[0] if weight else 1.0))
    return CloseStep(GROUP, cluster.config, step, named)


async def steps_of(client: PsClient, variable: VariableSpec) -> list[Any]:
    answer = await ask(client, Pull(77, [variable.shards[0].key], -1, ""))
    assert isinstance(answer, Pulled)
    return answer.steps


class Two:
    """One ps with a variable of three elements, two workers, and a stand-in for ps 0."""

    def __init__(self, **options: Any) -> None:
        self.cluster = SyncCluster(1, **options)

    async def __aenter__(self) -> Two:
        await self.cluster.__aenter__()
        self.w = await self.cluster.create("w", np.ones(3, np.float32))
        self.a, self.b = self.cluster.client(WORKER), self.cluster.client(OTHER)
        self.closer = self.cluster.client(CLOSER, 100)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.cluster.__aexit__(*error)

    async def close(self, step: int, *pushes: Any) -> Message:
        return await ask(self.closer, closing(self.cluster, step, *pushes))

    async def value(self, variable: VariableSpec | None = None) -> np.ndarray:
        (got,) = await pull(self.cluster.chief, variable or self.w)
        return got


class TestStaging:
    async def test_a_part_leaves_no_trace_but_memory_and_that_goes_with_its_step(self) -> None:
        async with Two() as two:
            before = two.cluster.versions(two.w)
            assert await stage(two.cluster, two.a, {two.w: 1.0}) == Staged(False)
            assert two.cluster.staged_bytes() == [12]
            assert (await two.value() == 1).all()
            assert await two.close(0) == Done()
            assert two.cluster.staged_bytes() == [0]
            assert two.cluster.versions(two.w) == before
            assert (await two.value() == 1).all()

    async def test_a_part_for_a_step_that_is_over_is_not_kept(self) -> None:
        async with Two() as two:
            await two.close(0)
            before = two.cluster.versions(two.w)
            for local_step in (-1, 0):
                answer = await stage(two.cluster, two.a, {two.w: 1.0}, local_step=local_step)
                assert answer == Staged(True)
            assert two.cluster.staged_bytes() == [0]
            assert two.cluster.versions(two.w) == before
            assert await stage(two.cluster, two.a, {two.w: 1.0}, local_step=1) == Staged(False)

    async def test_a_part_whose_step_ends_while_it_travels_is_not_kept(self) -> None:
        async with Two(chunk=(1 << 16, 1 << 16)) as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            stalled: list[Link] = []

            def stall(link: Link, direction: str, _: int) -> None:
                if direction == "to_server" and link.to_server.delivered_bytes > 1 << 20:
                    link.to_server.stall()
                    stalled.append(link)

            two.cluster.network.trace_deliveries(stall)
            coming = asyncio.create_task(stage(two.cluster, two.a, {v: 1.0}))
            await until(lambda: stalled)
            assert two.cluster.staged_bytes() == [LARGE * 4]
            await two.close(0)
            stalled[0].to_server.flow()
            two.cluster.network.trace_deliveries(None)
            assert await coming == Staged(True)
            assert two.cluster.staged_bytes() == [0]

    async def test_what_does_not_fit_is_refused_before_memory_is_taken(self) -> None:
        async with Two() as two:
            with pytest.raises(GradientError, match=r"expected shape \(3,\) float32"):
                await stage(two.cluster, two.a, {two.w: np.zeros(2, np.float32)})
            unknown = StagePush(GROUP, two.cluster.config, 1, -1, 1, [(99, 0)])
            with pytest.raises(UnknownVariableError):
                await ask(two.a, unknown, [to_bytes_view(np.zeros(3, np.float32))])
            nothing = StagePush(GROUP, two.cluster.config, 1, -1, 1, [two.w.shards[0].key])
            with pytest.raises(GradientError, match="0 arrays for 1 shards"):
                await ask(two.a, nothing)
            assert sync_of(two.cluster.ps[0]).statistics()["peak_bytes"] == 0

    async def test_gradients_of_integers_are_refused(self) -> None:
        async with Two() as two:
            with pytest.raises(GradientError, match="int64"):
                await stage(two.cluster, two.a, {two.cluster.step: np.array(1)})

    async def test_a_replaced_incarnation_may_not_stage(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            await ask(two.cluster.chief, Fence(WORKER, 5000))
            with pytest.raises(FencedError):
                await stage(two.cluster, two.a, {two.w: 1.0}, push=2)
            assert sync_of(two.cluster.ps[0]).statistics()["parts"] == 1

    async def test_a_part_that_travels_while_its_worker_is_replaced_is_dropped(self) -> None:
        async with Two(chunk=(1 << 16, 1 << 16)) as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            coming = asyncio.create_task(stage(two.cluster, two.a, {v: 1.0}))
            await until(lambda: two.cluster.staged_bytes() == [LARGE * 4])
            await ask(two.cluster.chief, Fence(WORKER, 5000))
            with pytest.raises(FencedError):
                await coming
            assert two.cluster.staged_bytes() == [0]

    async def test_a_step_that_does_not_fit_the_budget_is_refused_at_its_first_push(self) -> None:
        async with Two(staging_bytes=35) as two:  # two tokens a step and one worker started anew
            with pytest.raises(ConfigurationError, match="budget is 35 bytes"):
                await stage(two.cluster, two.a, {two.w: 1.0})
            assert two.cluster.staged_bytes() == [0]
        async with Two(staging_bytes=36) as two:
            assert await stage(two.cluster, two.a, {two.w: 1.0}) == Staged(False)

    async def test_a_group_is_what_it_was_at_first(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            other = two.cluster.config | {"reduction": "sum"}
            with pytest.raises(ConfigurationError, match="another configuration than at first"):
                await stage(two.cluster, two.b, {two.w: 1.0}, config=other)
            undefined = StagePush(GROUP + 1, None, 1, -1, 1, [two.w.shards[0].key])
            with pytest.raises(RemoteProtocolError, match="group 10 is not defined"):
                await ask(two.a, undefined, [to_bytes_view(np.zeros(3, np.float32))])


class TestClosing:
    async def test_the_mean_is_applied_bit_for_bit_in_the_order_given(self) -> None:
        async with Two() as two:
            random = np.random.default_rng(3)
            x, y = (random.standard_normal(3).astype(np.float32) for _ in range(2))
            await stage(two.cluster, two.b, {two.w: y})
            await stage(two.cluster, two.a, {two.w: x})
            await two.close(0, (two.a, 1), (two.b, 1))
            mean = (x + y) / np.float32(2)
            expected = np.ones(3, np.float32) - np.float32(RATE) * mean
            assert np.array_equal(await two.value(), expected)
            assert two.cluster.staged_bytes() == [0]

    async def test_weights_and_sums(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            await stage(two.cluster, two.b, {two.w: 5.0})
            await two.close(0, (two.a, 1, 3.0), (two.b, 1, 1.0))
            assert (await two.value() == 1 - RATE * 2).all()
        async with Two() as two:
            two.cluster.configure(reduction="sum")
            await stage(two.cluster, two.a, {two.w: 1.0})
            await stage(two.cluster, two.b, {two.w: 5.0})
            await two.close(0, (two.a, 1), (two.b, 1))
            assert (await two.value() == 1 - RATE * 6).all()

    async def test_only_the_named_pushes_count(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            await stage(two.cluster, two.b, {two.w: 7.0})
            await two.close(0, (two.a, 1))
            assert (await two.value() == 1 - RATE).all()
            assert two.cluster.staged_bytes() == [0]

    async def test_each_shard_gets_the_mean_of_the_pushes_that_carry_it(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros((), np.float32))
            await stage(two.cluster, two.a, {two.w: 1.0, v: 2.0})
            await stage(two.cluster, two.b, {two.w: 3.0})
            await two.close(0, (two.b, 1, 3.0), (two.a, 1, 1.0))
            assert (await two.value() == 1 - RATE * 2.5).all()
            assert await two.value(v) == -RATE * 2

    async def test_a_push_may_have_no_part_here(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            await two.close(0, (two.b, 1), (two.a, 1))
            assert (await two.value() == 1 - RATE).all()

    async def test_a_repetition_changes_nothing(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            for _ in range(3):
                assert await two.close(0, (two.a, 1)) == Done()
            assert (await two.value() == 1 - RATE).all()
            assert await steps_of(two.a, two.w) == [[GROUP, 1]]

    async def test_a_repetition_while_the_step_is_applied_waits_for_the_same_end(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            before = two.cluster.versions(v)[0]
            await stage(two.cluster, two.a, {v: 1.0})
            first = asyncio.create_task(two.close(0, (two.a, 1)))
            await until(is_busy(two.cluster.ps[0], v))
            again = asyncio.create_task(two.close(0, (two.a, 1)))
            with pytest.raises(RemoteProtocolError, match="while step 0 is being applied"):
                await two.close(1)
            assert not again.done()
            await asyncio.gather(first, again)
            assert two.cluster.versions(v) == [before + 1]
            assert (await two.value(v) == -RATE).all()

    async def test_only_ps_0_may_close_a_step(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            message = closing(two.cluster, 0, (two.a, 1))
            strangers = [two.a, two.cluster.chief, two.cluster.client("/job:ps/task:1")]
            for stranger in strangers:
                with pytest.raises(UsageError, match="may not close a step"):
                    await ask(stranger, message)
            assert two.cluster.staged_bytes() == [12]
            assert (await two.value() == 1).all()

    async def test_ps_0_of_an_earlier_coordinator_is_refused(self) -> None:
        async with Two() as two:
            await two.close(0)
            chief = two.cluster.client(CHIEF, 200)
            await two.cluster.attach(chief, 200)
            with pytest.raises(FencedError):
                await two.close(1)
            assert sync_of(two.cluster.ps[0]).steps() == []

    async def test_who_reads_holds_what_was_there_before_the_step(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            store = store_of(two.cluster.ps[0])
            held = [store.read(variable.shards[0].key) for variable in (two.w, v)]
            await stage(two.cluster, two.a, {two.w: 1.0, v: 1.0})
            await two.close(0, (two.a, 1))
            assert (np.concatenate([np.asarray(block) for block in held[1]]) == 0).all()
            assert (np.asarray(held[0][0]).view(np.float32) == 1).all()
            assert (await two.value() == 1 - RATE).all()
            assert (await two.value(v) == -RATE).all()

    async def test_large_shards_are_applied_with_the_loop_running(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            await stage(two.cluster, two.a, {v: 1.0})
            ending = asyncio.create_task(two.close(0, (two.a, 1)))
            await until(is_busy(two.cluster.ps[0], v))
            assert (await two.value() == 1).all()  # another variable is read meanwhile
            assert store_of(two.cluster.ps[0]).busy(v.shards[0].key)
            await ending
            assert (await two.value(v) == -RATE).all()

    async def test_a_step_waits_for_shards_that_others_update(self) -> None:
        async with Two() as two:
            release = hold(two.cluster.ps[0], two.w)
            await stage(two.cluster, two.a, {two.w: 1.0})
            ending = asyncio.create_task(two.close(0, (two.a, 1)))
            await until(lambda: work_of(two.cluster.ps[0]).waiting)
            assert sync_of(two.cluster.ps[0]).steps() == []
            release()
            await ending
            assert (await two.value() == 1 - RATE).all()

    async def test_a_step_once_begun_is_applied_whatever_becomes_of_its_request(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            await stage(two.cluster, two.a, {v: 1.0})
            ending = asyncio.create_task(two.close(0, (two.a, 1)))
            await until(is_busy(two.cluster.ps[0], v))
            ending.cancel()
            assert (await two.value(v) == -RATE).all()
            await until(lambda: sync_of(two.cluster.ps[0]).steps() == [(GROUP, 1)])
            with pytest.raises(asyncio.CancelledError):
                await ending

    async def test_a_weight_that_is_none_is_refused_before_anything_changes(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            for weight in (0.0, -1.0, float("nan"), 1e300):
                with pytest.raises(GradientError, match="weight"):
                    await two.close(0, (two.a, 1, weight))
            assert not two.cluster.ps[0].is_torn
            assert await two.close(0, (two.a, 1)) == Done()
            assert (await two.value() == 1 - RATE).all()

    @pytest.mark.parametrize("size", [3, LARGE])
    async def test_a_step_of_which_only_some_shards_are_applied_ends_the_task(
        self, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(size, np.float32))
            task = two.cluster.ps[0]
            await stage(two.cluster, two.a, {two.w: 1.0, v: 1.0})
            await stage(two.cluster, two.b, {two.w: 1.0})
            begin = ShardStore.apply_mean

            def fail(store: ShardStore, group: int, key: Any, *rest: Any, **more: Any) -> Work:
                if key == v.shards[0].key:
                    raise MemoryError
                return begin(store, group, key, *rest, **more)

            monkeypatch.setattr(ShardStore, "apply_mean", fail)
            with pytest.raises(PsyncError, match="MemoryError"):
                await two.close(0, (two.a, 1), (two.b, 1))
            assert task.is_torn
            assert task.stopped.is_set()

    async def test_a_step_that_fails_half_way_ends_the_task(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            task = two.cluster.ps[0]
            await stage(two.cluster, two.a, {two.w: 1.0, v: 1.0})
            writable = BlockArray.writable

            def no_memory(array: BlockArray, i: int, pool: BlockPool) -> Block:
                if i == 1:
                    raise MemoryError
                return writable(array, i, pool)

            monkeypatch.setattr(BlockArray, "writable", no_memory)
            with pytest.raises(PsyncError, match="MemoryError"):
                await two.close(0, (two.a, 1))
            assert task.is_torn
            assert task.stopped.is_set()
            with pytest.raises(PsyncError, match="failed half-way"):
                await two.close(0, (two.a, 1))  # nobody hears that it was applied

    async def test_schedules_follow_the_steps_of_the_group(self) -> None:
        async with Two() as two:
            rule = SGD(PiecewiseConstantDecay([100], [1.0, 0.25]))
            two.cluster.configure(optimizer=rule.to_config())
            await stage(two.cluster, two.a, {two.w: 1.0}, local_step=100)
            await two.close(100, (two.a, 1))
            assert (await two.value() == 0).all()
            await stage(two.cluster, two.a, {two.w: 1.0}, local_step=101, push=2)
            await two.close(101, (two.a, 2))
            assert (await two.value() == -0.25).all()


class TestSteps:
    async def test_pulls_say_which_step_the_values_are_at_least_of(self) -> None:
        async with Two() as two:
            assert await steps_of(two.a, two.w) == []
            await two.close(4)
            assert await steps_of(two.a, two.w) == [[GROUP, 5]]

    async def test_a_pull_that_waits_says_what_was_true_when_it_began(self) -> None:
        async with Two() as two:
            release = hold(two.cluster.ps[0], two.w)
            asking = asyncio.create_task(steps_of(two.a, two.w))
            await until(lambda: work_of(two.cluster.ps[0]).waiting)
            await two.close(0)
            release()
            assert await asking == []

    async def test_a_new_coordinator_begins_without_groups(self) -> None:
        async with Two() as two:
            await stage(two.cluster, two.a, {two.w: 1.0})
            await two.close(0)
            await stage(two.cluster, two.a, {two.w: 1.0}, push=2, local_step=1)
            chief = two.cluster.client(CHIEF, 200)
            await two.cluster.attach(chief, 200)
            assert two.cluster.staged_bytes() == [0]
            assert sync_of(two.cluster.ps[0]).steps() == []
            with pytest.raises(UnknownVariableError):
                await stage(two.cluster, two.a, {two.w: 1.0}, push=3, local_step=1)


class TestAverages:
    async def start(self, two: Two, shadow: Any, value: Any = None) -> VariableSpec:
        average = await two.cluster.create("average", shadow)
        two.cluster.configure(decay=0.75, averages=((two.w.variable_id, average.variable_id),))
        return average

    async def test_averages_move_after_the_update(self) -> None:
        async with Two() as two:
            average = await self.start(two, np.ones(3, np.float32))
            await stage(two.cluster, two.a, {two.w: 4.0})
            await two.close(0, (two.a, 1))
            assert (await two.value() == -1).all()
            assert (await two.value(average) == 1 - 0.25 * 2).all()
            await two.close(1)  # whether or not anything was pushed
            assert (await two.value(average) == 0.5 - 0.25 * 1.5).all()

    async def test_a_repetition_moves_no_average(self) -> None:
        async with Two() as two:
            average = await self.start(two, np.zeros(3, np.float32))
            for _ in range(2):
                await two.close(0)
            assert (await two.value(average) == 0.25).all()

    async def test_an_average_that_is_busy_is_waited_for(self) -> None:
        async with Two() as two:
            average = await self.start(two, np.zeros(3, np.float32))
            release = hold(two.cluster.ps[0], average)
            ending = asyncio.create_task(two.close(0))
            await until(lambda: work_of(two.cluster.ps[0]).waiting)
            release()
            await ending
            assert (await two.value(average) == 0.25).all()

    async def test_averages_of_large_shards_follow_what_has_been_applied(self) -> None:
        async with Two() as two:
            v = await two.cluster.create("v", np.zeros(LARGE, np.float32))
            average = await two.cluster.create("average", np.zeros(LARGE, np.float32))
            two.cluster.configure(decay=0.75, averages=((v.variable_id, average.variable_id),))
            await stage(two.cluster, two.a, {v: 8.0})
            await two.close(0, (two.a, 1))
            assert (await two.value(v) == -4).all()
            assert (await two.value(average) == -1).all()

    async def test_the_decay_begins_low_where_it_follows_the_step(self) -> None:
        async with Two() as two:
            average = await self.start(two, np.zeros(3, np.float32))
            two.cluster.config = two.cluster.config | {"num_updates": True}
            await two.close(0)
            decay = SyncConfig.from_config(two.cluster.config).decay_at(1)
            assert np.allclose(await two.value(average), 1 - decay)

    @pytest.mark.parametrize("shadow", [np.ones(2, np.float32), np.ones(3)], ids=["shape", "dtype"])
    async def test_an_average_of_another_kind_is_refused_before_anything_changes(
        self, shadow: np.ndarray
    ) -> None:
        async with Two() as two:
            await self.start(two, shadow)
            await stage(two.cluster, two.a, {two.w: 4.0})
            with pytest.raises(ConfigurationError, match=r"expected shape \(3,\) float32"):
                await two.close(0, (two.a, 1))
            assert (await two.value() == 1).all()
            assert not two.cluster.ps[0].is_torn

    async def test_an_average_must_be_beside_its_variable(self) -> None:
        async with Two() as two:
            two.cluster.configure(decay=0.5, averages=((two.w.variable_id, 99),))
            with pytest.raises(ConfigurationError, match="must be on the same ps tasks"):
                await two.close(0)


async def test_a_part_comes_with_a_closing_to_one_that_does_not_know_the_group() -> None:
    """A backup that serves: the one before was asked whether the part fits, and is lost."""
    async with SyncCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        closer = cluster.client("/job:ps/task:0", 100)
        message = CloseStep(
            GROUP, cluster.config, 0, [("/job:worker/task:0", 1000, 1, 1.0)], [5],
            [(5, [v.shards[0].key])],
        )  # fmt: skip
        assert await ask(closer, message, [memoryview(np.ones(2, np.float32).tobytes())]) == Done()
        (value,) = await pull(cluster.chief, v)
        assert value.tolist() == [-0.5, -0.5]
