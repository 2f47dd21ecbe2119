"""One ps at a time: parts come in, ps 0 (whom the test plays) says which of them count."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, sync_of, work_of
from memory_cluster import until
from ps_by_hand import COORDINATOR, PS_0, A, B, PsByHand, group_config
from ps_cluster import CHIEF, OTHER, RATE, WORKER, hold, pull
from psync.client.ps_client import PsClient
from psync.errors import (
    ConfigurationError,
    FencedError,
    PsyncError,
    RemoteProtocolError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import Block, BlockArray, BlockPool
from psync.specs import VariableSpec
from psync.store.store import Key, ShardStore, Work
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.limits import Limits
from psync.wire.messages import CloseStep, Done, Fence, Staged, StagePush
from psync.wire.tensors import to_bytes_view
from sync_cluster import GROUP, SyncCluster, ask

MiB = 1 << 20
LARGE = 8 * MiB // 4  # elements of float32: several blocks, applied with the loop running between

Named = tuple[tuple[str, int], int] | tuple[tuple[str, int], int, float]
"""A push of a step: whose, its number, its weight."""


class Group(PsByHand):
    """One ps with a variable of three elements, and a group of two replicas."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(limits=Limits(**limits))
        self.w = self.create("w", np.ones(3, np.float32))
        self.configure()

    def configure(self, **more: Any) -> None:
        self.config = group_config(**more)

    def part(
        self,
        gradients: dict[Key, Any],
        push: int = 1,
        local_step: int = -1,
        config: dict[str, Any] | None = None,
    ) -> tuple[StagePush, list[memoryview]]:
        """A message that brings gradients, each an array or a number for all elements."""
        bodies = []
        for key, gradient in gradients.items():
            spec = self.store.spec(key)
            array = np.full(spec.shape, gradient, spec.dtype) if np.isscalar(gradient) else gradient
            bodies.append(to_bytes_view(array))
        keys = list(gradients)
        return StagePush(GROUP, config or self.config, push, local_step, push, keys), bodies

    def stage(self, client: tuple[str, int], gradients: dict[Key, Any], **more: Any) -> Message:
        """Send a part."""
        message, bodies = self.part(gradients, **more)
        return self.ask(client, message, *bodies)

    def close(self, step: int, *pushes: Named, closer: tuple[str, int] = PS_0) -> Message:
        named = [(*client, push, *(weight or (1.0,))) for client, push, *weight in pushes]
        return self.ask(closer, CloseStep(GROUP, self.config, step, named))  # type: ignore[arg-type]

    @property
    def staged_bytes(self) -> int:
        return self.sync.statistics()["bytes"]


async def stage(
    cluster: SyncCluster,
    client: PsClient,
    gradients: dict[VariableSpec, float],
    push: int = 1,
    local_step: int = -1,
) -> None:
    """Send a part: a number for all elements of each variable's first shard."""
    arrays = [np.full(each.shape, value, each.dtype) for each, value in gradients.items()]
    members = [variable.shards[0].key for variable in gradients]
    message = StagePush(GROUP, cluster.config, push, local_step, push, members)
    assert await ask(client, message, [to_bytes_view(array) for array in arrays]) == Staged(False)


class Two:
    """One ps with a variable of three elements, two workers, and a stand-in for ps 0."""

    async def __aenter__(self) -> Two:
        self.cluster = SyncCluster(1)
        await self.cluster.__aenter__()
        self.w = await self.cluster.create("w", np.ones(3, np.float32))
        self.a, self.b = self.cluster.client(WORKER), self.cluster.client(OTHER)
        self.closer = self.cluster.client(*PS_0)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.cluster.__aexit__(*error)

    async def close(self, step: int, *pushes: tuple[PsClient, int]) -> Message:
        named = []
        for client, push in pushes:
            endpoint = endpoint_of(client.links[0])
            named.append((endpoint.task, endpoint.incarnation, push, 1.0))
        return await ask(self.closer, CloseStep(GROUP, self.cluster.config, step, named))

    async def value(self, variable: VariableSpec | None = None) -> np.ndarray:
        (got,) = await pull(self.cluster.chief, variable or self.w)
        return got


class TestStaging:
    def test_gradients_of_integers_are_refused(self) -> None:
        ps = Group()
        step = ps.create("step", np.array(0))
        with pytest.raises(ValueMismatchError, match="int64"):
            ps.stage(A, {step: 1})

    def test_a_replaced_incarnation_may_not_stage(self) -> None:
        ps = Group()
        ps.stage(A, {ps.w: 1.0})
        ps.ask(COORDINATOR, Fence(WORKER, 5000))
        with pytest.raises(FencedError):
            ps.stage(A, {ps.w: 1.0}, push=2)
        assert ps.sync.statistics()["parts"] == 1

    def test_a_part_that_travels_while_its_worker_is_replaced_is_dropped(self) -> None:
        ps = Group()
        message, bodies = ps.part({ps.w: 1.0})
        ps.arrives(A, message, *bodies)
        assert ps.staged_bytes == 12
        ps.ask(COORDINATOR, Fence(WORKER, 5000))  # which cuts its connection, too
        assert ps.staged_bytes == 0

    def test_a_step_that_does_not_fit_the_budget_is_refused_at_its_first_push(self) -> None:
        ps = Group(staging_bytes=35)  # two tokens a step and one worker started anew
        with pytest.raises(ConfigurationError, match="budget is 35 bytes"):
            ps.stage(A, {ps.w: 1.0})
        assert ps.staged_bytes == 0
        ps = Group(staging_bytes=36)
        assert ps.stage(A, {ps.w: 1.0}) == Staged(False)

    def test_a_group_is_what_it_was_at_first(self) -> None:
        ps = Group()
        ps.stage(A, {ps.w: 1.0})
        with pytest.raises(ConfigurationError, match="a different configuration than at first"):
            ps.stage(B, {ps.w: 1.0}, config=ps.config | {"reduction": "sum"})
        undefined = StagePush(GROUP + 1, None, 1, -1, 1, [ps.w])
        with pytest.raises(RemoteProtocolError, match="group 10 is not defined"):
            ps.ask(A, undefined, bytes(12))


class TestClosing:
    async def test_a_repetition_while_the_step_is_applied_waits_for_the_same_end(self) -> None:
        async with Two() as two:
            release = hold(two.cluster.ps[0], two.w)
            await stage(two.cluster, two.a, {two.w: 1.0})
            closing = [asyncio.create_task(two.close(0, (two.a, 1))) for _ in range(2)]
            await settle()
            assert sync_of(two.cluster.ps[0]).steps() == []
            assert not any(each.done() for each in closing)
            release()
            await asyncio.gather(*closing)
            assert (await two.value() == 1 - RATE).all()

    def test_only_ps_0_may_close_a_step(self) -> None:
        ps = Group()
        ps.stage(A, {ps.w: 1.0})
        for stranger in (A, COORDINATOR, ("/job:ps/task:1", 1000)):
            with pytest.raises(UsageError, match="may not close a step"):
                ps.close(0, (A, 1), closer=stranger)
        assert ps.staged_bytes == 12
        assert (ps.value(ps.w) == 1).all()

    async def test_ps_0_of_an_earlier_coordinator_is_refused(self) -> None:
        async with Two() as two:
            await two.close(0)
            chief = two.cluster.client(CHIEF, 200)
            await two.cluster.attach(chief, 200)
            with pytest.raises(FencedError):
                await two.close(1)
            assert sync_of(two.cluster.ps[0]).steps() == []

    @pytest.mark.parametrize("busy", ["variable", "average"])
    async def test_a_step_waits_for_shards_that_others_update(self, busy: str) -> None:
        async with Two() as two:
            average = await two.cluster.create("average", np.zeros(3, np.float32))
            two.cluster.configure(decay=0.75, averages=((two.w.variable_id, average.variable_id),))
            release = hold(two.cluster.ps[0], average if busy == "average" else two.w)
            await stage(two.cluster, two.a, {two.w: 1.0})
            ending = asyncio.create_task(two.close(0, (two.a, 1)))
            await until(lambda: work_of(two.cluster.ps[0]).waiting)
            assert sync_of(two.cluster.ps[0]).steps() == []
            release()
            await ending
            assert (await two.value() == 1 - RATE).all()
            assert (await two.value(average) == 0.25 * (1 - RATE)).all()

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1e300])
    def test_a_weight_that_is_none_is_refused_before_anything_changes(self, weight: float) -> None:
        ps = Group()
        ps.stage(A, {ps.w: 1.0})
        with pytest.raises(ValueMismatchError, match="weight"):
            ps.close(0, (A, 1, weight))
        assert not ps.stopped
        assert ps.close(0, (A, 1)) == Done()
        assert (ps.value(ps.w) == 1 - RATE).all()

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
            with pytest.raises(PsyncError, match="failed partway"):
                await two.close(0, (two.a, 1))  # nobody hears that it was applied


class TestAverages:
    def start(self, shadow: Any) -> tuple[Group, Key]:
        ps = Group()
        average = ps.create("average", shadow)
        ps.configure(decay=0.75, averages=((ps.w[0], average[0]),))
        return ps, average

    @pytest.mark.parametrize("shadow", [np.ones(2, np.float32), np.ones(3)], ids=["shape", "dtype"])
    def test_an_average_of_another_kind_is_refused_before_anything_changes(
        self, shadow: np.ndarray
    ) -> None:
        ps, _ = self.start(shadow)
        ps.stage(A, {ps.w: 4.0})
        with pytest.raises(ConfigurationError, match=r"expected shape \(3,\) float32"):
            ps.close(0, (A, 1))
        assert (ps.value(ps.w) == 1).all()
        assert not ps.stopped

    def test_an_average_must_be_beside_its_variable(self) -> None:
        ps = Group()
        ps.configure(decay=0.5, averages=((ps.w[0], 99),))
        with pytest.raises(ConfigurationError, match="must be on the same ps tasks"):
            ps.close(0)
