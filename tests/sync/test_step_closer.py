"""Several ps tasks and replicas: who is answered, when, and what the variables are then."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import begins, closer_of, points_of, sync_of
from memory_cluster import until
from ps_cluster import CHIEF, RATE, pull
from psync.errors import (
    ConfigurationError,
    FencedError,
    PsyncError,
    UnknownVariableError,
    UsageError,
)
from psync.testing import settle
from psync.testing.sabotage import Failpoints
from psync.wire.messages import (
    AskStep,
    AttachPs,
    Contribute,
    Contributed,
    Fence,
    InitTokens,
    ReportSchedule,
    SyncStep,
)
from sync_cluster import GROUP, SyncCluster, ask

pytestmark = pytest.mark.asyncio


def accepted(token: int, count: int = 2, *, partial: bool = False) -> Contributed:
    return Contributed("accepted", 0, token, partial, count)


async def waits(*tasks: asyncio.Task[Any]) -> bool:
    """Let everything settle; tell whether none has ended."""
    await settle()
    return not any(task.done() for task in tasks)


@pytest.mark.promise("answers.synchronous", "answers.partial-step-tokens")
class TestSteps:
    async def test_replicas_train_one_model_bit_for_bit_over_two_ps(self) -> None:
        random = np.random.default_rng(5)
        async with SyncCluster(2, chunk=(1 << 10, 1 << 16)) as cluster:
            w0 = random.standard_normal((7, 3)).astype(np.float32)
            w = await cluster.create("w", w0, shards=2)
            b = await cluster.create("b", np.zeros(5, np.float32))
            cluster.configure(3, deterministic=True)
            replicas = [cluster.replica(index) for index in range(3)]
            expected = [w0, np.zeros(5, np.float32)]
            for step in range(4):
                gradients = [
                    [random.standard_normal(v.shape).astype(np.float32) for v in (w, b)]
                    for _ in replicas
                ]
                for number in range(2):
                    total = gradients[0][number] + gradients[1][number]
                    mean = (total + gradients[2][number]) / np.float32(3)
                    expected[number] = expected[number] - np.float32(RATE) * mean
                order = [(index + step) % 3 for index in range(3)]  # of arrival
                pushes = [
                    asyncio.create_task(replicas[i].push((w, b), gradients[i], step)) for i in order
                ]
                assert await asyncio.gather(*pushes) == [accepted(step + 1, 3)] * 3
            for got, value in zip(await pull(cluster.chief, w, b), expected, strict=True):
                assert np.array_equal(got, value)
            assert await cluster.global_step() == 4
            assert cluster.staged_bytes() == [0, 0]

    async def test_tokens_come_after_every_ps_has_applied_and_the_global_step_is_raised(
        self,
    ) -> None:
        seen: list[list[int]] = []
        points = Failpoints()
        async with SyncCluster(2, failpoints=points) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            step = cluster.step
            begun = cluster.versions(w, step)

            def look() -> None:
                now = cluster.versions(w, step)
                seen.append([after - before for before, after in zip(begun, now, strict=True)])
                assert not any(push.done() for push in pushes)

            points.arm("ps0.step.decided", look)
            points.arm("ps0.step.applied", look)
            pushes = [
                asyncio.create_task(cluster.replica(index).push((w,), (1.0,))) for index in range(2)
            ]
            assert await asyncio.gather(*pushes) == [accepted(1)] * 2
            assert seen == [[0, 0, 0], [1, 1, 1]]
            assert await cluster.global_step() == 1

    async def test_one_ps_needs_no_connection_to_another(self) -> None:
        async with SyncCluster(1) as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            cluster.configure(1)
            assert await cluster.replica().push((w,), (1.0,)) == accepted(1, 1)
            closer = closer_of(cluster.ps[0])
            assert closer is not None
            assert closer.all_ps._client is None

    async def test_large_and_small_steps_follow_one_another(self) -> None:
        async with SyncCluster(2) as cluster:
            v = await cluster.create("v", np.zeros((2, 1 << 20), np.float32), shards=2)
            w = await cluster.create("w", np.zeros(3, np.float32))
            replicas = [cluster.replica(index) for index in range(2)]
            for step, variables in enumerate([(v, w), (w,), (v,)]):
                gradients = [1.0] * len(variables)
                await asyncio.gather(*(r.push(variables, gradients, step) for r in replicas))
            for got in await pull(cluster.chief, v, w):
                assert (got == -2 * RATE).all()


class TestFirstStep:
    @pytest.mark.parametrize("step_ps", [0, 1])
    async def test_a_group_begins_at_the_global_step_wherever_that_is(self, step_ps: int) -> None:
        async with SyncCluster(2, step_ps=step_ps, first=41) as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            replicas = [cluster.replica(index) for index in range(2)]
            asking = replicas[0].client
            assert await ask(asking, AskStep(GROUP)) == SyncStep(-1, -1)
            message = InitTokens(GROUP, cluster.config, -1)
            for _ in range(2):
                assert await ask(cluster.chief, message) == SyncStep(41, 41)
            for step in (41, 42):
                answers = await asyncio.gather(*(r.push((w,), (1.0,), step) for r in replicas))
                assert answers == [accepted(step + 1)] * 2
            assert await ask(asking, AskStep(GROUP)) == SyncStep(43, 41)
            assert await cluster.global_step() == 43

    @pytest.mark.virtual_time
    async def test_a_new_coordinator_while_the_global_step_is_read(self) -> None:
        async with SyncCluster(2, step_ps=1) as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))  # on ps 0
            cluster.network.partition("ps1:1")
            pushing = asyncio.create_task(cluster.replica().push((w,), (1.0,)))
            await until(lambda: begins(cluster.ps[0], GROUP))
            attaching = asyncio.create_task(cluster.attach(cluster.client(CHIEF, 200), 200))
            with pytest.raises(FencedError, match="newer coordinator"):
                await pushing
            cluster.network.heal("ps1:1")
            await attaching

    async def test_a_global_step_that_is_not_there_fails_all_who_ask_and_can_be_made(self) -> None:
        async with SyncCluster() as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            cluster.configure(global_step=(0, w.variable_id + 1, 0))
            replicas = [cluster.replica(index) for index in range(2)]
            pushes = [replica.push((w,), (1.0,)) for replica in replicas]
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, UnknownVariableError)
            await cluster.create("late", np.array(7))
            answers = await asyncio.gather(*(r.push((w,), (1.0,)) for r in replicas))
            assert answers == [accepted(8)] * 2

    @pytest.mark.parametrize("value", [np.zeros(2, np.int64), np.zeros((), np.float32)])
    async def test_a_global_step_is_one_integer(self, value: np.ndarray) -> None:
        async with SyncCluster() as cluster:
            w = await cluster.create("w", value)
            cluster.configure(1, global_step=(0, *w.shards[0].key))
            v = await cluster.create("v", np.ones(3, np.float32))
            with pytest.raises(ConfigurationError, match="expected one element of int64"):
                await cluster.replica().push((v,), (1.0,))
            cluster.configure(1, global_step=(4, 0, 0))
            with pytest.raises(ConfigurationError, match="on ps 4, but there are only 1 ps tasks"):
                await ask(cluster.chief, InitTokens(GROUP + 1, cluster.config, -1))


@pytest.mark.virtual_time
class TestWaiting:
    async def test_a_request_that_is_there_twice_waits_until_both_have_gone(self) -> None:
        async with SyncCluster() as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            replica = cluster.replica(0)
            first = asyncio.create_task(replica.push((w,), (1.0,)))
            assert await waits(first)
            other = await replica.client.links[0].peer("bulk")
            message = Contribute(
                GROUP, None, 1, 1, -1, 0, replica.client.plan((w,)).digest, -1, 1.0, -1, None, -1,
                None,
            )  # fmt: skip
            again = asyncio.create_task(other.call(message))
            assert await waits(again)
            first.cancel()  # ps 0 may hear of a new connection before it hears of the old one's end
            assert await waits(again)
            assert cluster.group()["waiting"] == 1
            assert await cluster.replica(1).push((w,), (3.0,)) == accepted(1)
            assert (await again).message == accepted(1)

    @pytest.mark.parametrize("how", ["gives up", "is gone"])
    async def test_a_replica_that_gives_up_or_is_gone_leaves_its_push_and_no_claim_to_a_token(
        self, how: str
    ) -> None:
        async with SyncCluster() as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            waiting = asyncio.create_task(cluster.replica(0).push((w,), (1.0,)))
            assert await waits(waiting)
            if how == "is gone":
                cluster.network.partition("worker0")
                cluster.network.cut("worker0")
            else:
                waiting.cancel()
            await settle()
            assert cluster.group()["waiting"] == 0
            assert await cluster.replica(1).push((w,), (3.0,)) == accepted(1)
            (got,) = await pull(cluster.chief, w)
            assert (got == 1 - RATE * 2).all()
            closer = closer_of(cluster.ps[0])
            assert closer is not None
            assert len(closer._waits) == 0
            waiting.cancel()
            await asyncio.wait([waiting])

    async def test_a_replaced_incarnation_is_refused_and_waits_no_more(self) -> None:
        async with SyncCluster() as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            old = cluster.replica(0, 1000)
            await cluster.report(1, {0: 1000, 1: 1001})
            waiting = asyncio.create_task(old.push((w,), (1.0,)))
            assert await waits(waiting)
            await cluster.report(2, {0: 2000, 1: 1001})
            with pytest.raises(FencedError, match="incarnation 1000"):
                await waiting
            await ask(cluster.chief, Fence("/job:worker/task:0", 2000))
            for message in (AskStep(GROUP), InitTokens(GROUP, cluster.config, -1)):
                with pytest.raises(FencedError):
                    await ask(old.client, message)


@pytest.mark.virtual_time
class TestMembership:
    async def test_only_the_coordinator_reports(self) -> None:
        async with SyncCluster() as cluster:
            message = ReportSchedule(1, [], [], True, [])
            with pytest.raises(UsageError, match="is not a coordinator"):
                await ask(cluster.replica(0).client, message)
            with pytest.raises(FencedError, match="is not the coordinator"):
                await ask(cluster.client(CHIEF, 101), message)


@pytest.mark.virtual_time
class TestLosses:
    async def test_a_ps_that_cannot_apply_a_step_ends_the_group(self) -> None:
        async with SyncCluster(2) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            points_of(cluster.ps[1]).fail("ps.step.applied")
            pushes = [cluster.replica(index).push((w,), (1.0,)) for index in range(2)]
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, PsyncError)
                assert "ps.step.applied" in str(answer)
            with pytest.raises(PsyncError, match=r"ps\.step\.applied"):
                await cluster.replica(2).push((w,), (1.0,))

    async def test_a_step_of_an_earlier_coordinator_reaches_no_ps_that_serves_a_newer(
        self,
    ) -> None:
        async with SyncCluster(2) as cluster:
            await cluster.create("filler", np.ones(3, np.float32))
            u = await cluster.create("u", np.ones(3, np.float32))
            assert u.shards[0].ps == 0
            chief = cluster.client(CHIEF, 200)
            # Only ps 1 has heard of the new coordinator.
            await ask(chief, AttachPs(200, [link.address for link in chief.links], 15.0), ps=1)
            pushes = [cluster.replica(index).push((u,), (1.0,)) for index in range(2)]
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, FencedError)
            assert sync_of(cluster.ps[1]).steps() == []
