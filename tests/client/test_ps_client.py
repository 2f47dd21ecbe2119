from __future__ import annotations

import asyncio
import functools
import gc
import logging

import numpy as np
import pytest

from inside import handlers_of, points_of, pool_of, pushes_of, work_of
from ps_cluster import OTHER, WORKER, PsCluster, hold, pull, push, until
from psync.client import plans, ps_client
from psync.client.pulled_steps import PulledSteps
from psync.errors import (
    ClosedError,
    ConfigurationError,
    RemoteProtocolError,
    UnknownVariableError,
    ValueMismatchError,
)
from psync.net.peer import Handler, Reply
from psync.numerics.rules import SGD
from psync.specs import ShardSpec, VariableSpec
from psync.testing.sabotage import FailpointError, Failpoints
from psync.wire.codec import Message
from psync.wire.messages import Done, Pull, Pulled, Push, Pushed

LARGE = 1 << 18  # elements of float32: 1 MiB, beyond what is applied at once

pytestmark = pytest.mark.asyncio


class TestPlans:
    async def test_a_plan_is_made_once_and_the_least_recently_used_goes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ps_client, "MAX_PLANS", 2)
        async with PsCluster() as cluster:
            a, b, c = [await cluster.create(name, np.float32(1)) for name in "abc"]
            client = cluster.chief
            first, second = client.plan((a,)), client.plan((b,))
            assert client.plan((a,)) is first
            client.plan((c,))
            assert client.plan((a,)) is first
            assert client.plan((b,)) is not second
            assert (await client.pull(second))[0] == 1  # who still has it may use it

    async def test_a_shard_alone_is_not_the_whole_variable(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.arange(6, dtype=np.float32), shards=2)
            (shard,) = v.shards[1:]
            alone = VariableSpec(
                "v/part_1", 0, (3,), "float32", True,
                (ShardSpec("v", 0, 1, 0, (3,), "float32", shard.ps),), "train.py:1",
            )  # fmt: skip
            for _ in range(2):
                assert (await pull(cluster.chief, v))[0].tolist() == [0, 1, 2, 3, 4, 5]
                assert (await pull(cluster.chief, alone))[0].tolist() == [3, 4, 5]

    async def test_a_set_may_take_several_requests_to_a_ps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plans, "MEMBERS_PER_REQUEST", 2)
        async with PsCluster(2) as cluster:
            variables = [await cluster.create(f"v{i}", np.full(3, i, np.float32)) for i in range(9)]
            client, other = cluster.client(WORKER), cluster.client(OTHER)
            assert len(client.plan(variables).requests) == 5
            answers = await push(client, variables, [2.0] * 9, closure=1)
            again = await push(other, variables, [2.0] * 9, closure=1)
            assert {answer.outcome for answer in answers} == {"accepted"}
            assert {answer.outcome for answer in again} == {"duplicate"}
            assert [value[0] for value in await pull(client, *variables)] == [
                i - 1 for i in range(9)
            ]


class TestArrays:
    async def test_they_are_read_only_unless_a_writable_copy_is_asked_for(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones((2, 3), np.float32))
            s = await cluster.create("s", np.float64(4))
            for array in await pull(cluster.chief, v, s):
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
            a, b = await pull(cluster.chief, v, s, writable=True)
            a[...] = 7
            assert (a.shape, b.shape, float(b)) == ((2, 3), (), 4)

    async def test_they_may_be_the_callers_own(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.arange(6, dtype=np.float32), shards=2)
            w = await cluster.create("w", np.full(LARGE, 3, np.float32))
            x = await cluster.create("x", np.ones(2, np.int64))
            out = np.empty(6, np.float32)
            mine = np.empty(LARGE, np.float32)
            taken: list[int] = []
            pool = pool_of(cluster.chief)
            take = pool.take
            pool.take = lambda n: (taken.append(n), take(n))[1]  # type: ignore[method-assign]
            got = await pull(cluster.chief, v, w, x, out=[out, mine, None])
            assert (got[0] is out, got[1] is mine) == (True, True)
            assert out.tolist() == [0, 1, 2, 3, 4, 5]
            assert (mine == 3).all()
            assert got[2].tolist() == [1, 1]
            assert LARGE * 4 not in taken

    async def test_the_steps_of_all_answers_are_noted(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.zeros(4, np.float32), shards=2)
            for task, step in zip(cluster.ps, (5, 4), strict=True):
                answer = Reply(Pulled([(7, step), (8, 1)]), [bytes(8)])
                handlers_of(task)[Pull] = Handler(lambda *_, answer=answer: answer)
            seen = PulledSteps()
            client = cluster.client()
            await pull(client, v)
            assert seen.lowest(7) is None
            await pull(client, v, seen=seen)
            assert (seen.lowest(7), seen.lowest(8), seen.lowest(9)) == (4, 1, -1)

    async def test_recycled_memory_is_never_seen_by_who_holds_an_old_array(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            small = await cluster.create("small", np.zeros(2000, np.float32))
            client = cluster.client()
            kept: list[tuple[int, np.ndarray]] = []
            for step in range(12):
                first, second = await pull(client, v, small)
                if step % 2:
                    kept += [(step, first[5:9]), (step, second.reshape(2, -1)[1])]  # views only
                del first, second
                await push(client, (v, small), (-2.0, -2.0))
            for step, view in kept:
                assert (view == step).all()
            assert pool_of(client).statistics().hits > 0

    async def test_a_pull_that_is_cancelled_writes_no_more(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(LARGE, np.float32))
            client = cluster.client()
            release = hold(cluster.ps[0], v)
            out = np.zeros(LARGE, np.float32)
            reading = asyncio.create_task(pull(client, v, out=[out]))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            release()
            assert (await pull(client, v))[0].all()
            assert not out.any()


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        (Pull, Reply(Pulled([]), [bytes(8)]), "sent wrong sizes for .*: expected 12 bytes, got 8"),
        (Pull, Reply(Pulled([]), []), "sent wrong sizes for .*: expected 12 bytes, got 0"),
        (Pull, Reply(Done(), [bytes(12)]), "answered a pull with Done"),
        (Push, Reply(Done()), "answered an update with Done"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused(
    kind: type[Message], answer: Reply, text: str
) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(3, np.float32))
        handlers_of(cluster.ps[0])[kind] = Handler(lambda *_: answer)
        with pytest.raises(RemoteProtocolError, match=f"^/job:ps/task:0 {text}"):
            await (pull(cluster.chief, v) if kind is Pull else push(cluster.chief, (v,), (1.0,)))


class TestPushes:
    async def test_a_push_that_does_not_fit_is_refused_by_the_ps(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            with pytest.raises(
                ValueMismatchError, match=r"expected shape \(3,\) float32 \(12 bytes\)"
            ):
                await push(cluster.chief, (v,), (np.zeros(3, np.float16),))
            shard = ShardSpec("u", 7, 0, 0, (3,), "float32", 0)
            unknown = VariableSpec("u", 7, (3,), "float32", True, (shard,), "")
            with pytest.raises(UnknownVariableError, match="no shard 0 of variable 7"):
                await pull(cluster.chief, unknown)

    async def test_an_optimizer_is_sent_until_a_ps_has_taken_it(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            await push(cluster.client(OTHER), (v,), (1.0,))
            client = cluster.client()
            for _ in range(2):  # and not silently taken for the other one the second time
                with pytest.raises(ConfigurationError, match=r"optimizer 1 .* is already defined"):
                    await push(client, (v,), (1.0,), config=SGD(0.1).to_config())
            await push(client, (v,), (1.0,))
            assert (await pull(client, v))[0].tolist() == [-1, -1, -1]

    @pytest.mark.parametrize("size", [3, LARGE], ids=["control", "bulk"])
    async def test_once_begun_it_is_shielded_from_cancellation(self, size: int) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(size, np.float32))
            client = cluster.client()
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(client, (v,), (2.0,)))
            await until(lambda: pushes_of(client))
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            draining = asyncio.create_task(client.outgoing.drain())
            await until(lambda: work_of(cluster.ps[0]).waiting)
            assert not draining.done()
            release()
            await draining
            assert ((await pull(client, v))[0] == -1).all()

    async def test_one_that_fails_after_that_is_only_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            with caplog.at_level(logging.INFO):
                pushing = asyncio.create_task(push(cluster.chief, (v,), (np.zeros(2, np.int8),)))
                await until(lambda: pushes_of(cluster.chief))
                pushing.cancel()
                await cluster.chief.outgoing.drain()
                await asyncio.gather(pushing, return_exceptions=True)
            assert 'a push whose step was cancelled failed: "v/part_0" on' in caplog.text

    async def test_closing_ends_those_that_wait(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client = cluster.client()
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(client, (v,), (2.0,)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            await client.close()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            assert not pushes_of(client)
            with pytest.raises(ClosedError):
                await pull(client, v)
            release()
            gc.collect()


class TestFailpoints:
    async def test_before_between_and_after(self) -> None:
        places = ("worker.push.begun", "worker.push.between_ps", "worker.push.answered")
        for place, reached in zip(places, (0, 1, 2), strict=True):
            async with PsCluster(2) as cluster:
                v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
                client = cluster.client(failpoints=Failpoints(f"{place}=error"))
                with pytest.raises(FailpointError, match=f"failpoint {place}"):
                    await push(client, (v,), (2.0,))
                assert sum(task.statistics()["pushes"] for task in cluster.ps) == reached


async def test_optimizers_are_defined_on_every_ps() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
        await cluster.chief.define_optimizer(1, SGD(0.5, momentum=0.9).to_config())
        plan = cluster.chief.plan((v,))
        (slot,) = await cluster.chief.pull(plan, optimizer=1, slot="momentum")
        assert slot.tolist() == [[0, 0], [0, 0]]


async def test_averages_of_all_ps_tasks_are_updated_and_no_value_travels() -> None:
    async with PsCluster(2, chunk=(1 << 16, 1 << 20), check_buffers=False) as cluster:
        value = np.ones((4, 1 << 20), np.float32)
        v = await cluster.create("v", value, shards=4)
        s = await cluster.create("s", np.zeros_like(value), shards=4)
        links = [
            link for task in cluster.ps for link in cluster.network.links(cluster.address(task))
        ]
        before = sum(link.to_server.delivered_bytes for link in links)
        originals = {s.variable_id: v.variable_id}
        chief = cluster.chief
        answers = await chief.average(
            chief.plan((s,)), originals, decay=0.75, closure=-1, ordinal=0
        )
        assert answers == [Pushed("accepted", 0)] * 2
        assert sum(link.to_server.delivered_bytes for link in links) - before < 1000
        (got,) = await pull(chief, s)  # with a plan whose sets the ps has not been told yet
        assert (got == 0.25).all()


async def test_an_average_whose_answer_was_lost_happens_once() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.ones(3, np.float32))
        s = await cluster.create("s", np.zeros(3, np.float32))
        task = cluster.ps[0]
        cut = functools.partial(cluster.network.cut, cluster.address(task))
        points_of(task).arm("ps.assign.applied", cut)
        client = cluster.client()
        plan = client.plan((s,))
        originals = {s.variable_id: v.variable_id}
        await client.average(plan, originals, decay=0.5, closure=-1, ordinal=0)
        assert (await pull(client, s))[0].tolist() == [0.5] * 3
