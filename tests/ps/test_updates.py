"""Pushes and assigns: each is applied once, whatever is lost, repeated or run again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, ledger_of, points_of, work_of
from ps_cluster import (
    OTHER,
    WORKER,
    PsCluster,
    assign,
    hold,
    pull,
    push,
    until,
)
from psync.client.ps_client import PsClient
from psync.errors import (
    GradientError,
    PartitionError,
    UnknownVariableError,
    UsageError,
)
from psync.specs import VariableSpec
from psync.store.ledger import Fresh
from psync.testing.sabotage import Failpoints
from psync.wire.codec import Message
from psync.wire.messages import AskStatistics, Statistics
from psync.wire.ps_messages import AverageShards, FinalBelow, Pushed

MiB = 1 << 20
LARGE = 8 * MiB // 4  # elements of float32: several blocks, applied with the loop running between

pytestmark = pytest.mark.asyncio


async def ask(client: PsClient, message: Message, segments: Any = (), ps: int = 0) -> Message:
    received = await client.links[ps].call(lambda peer: message, segments)
    return received.message


async def counters(cluster: PsCluster, ps: int = 0) -> dict[str, Any]:
    answer = await ask(cluster.chief, AskStatistics(), ps=ps)
    assert isinstance(answer, Statistics)
    return answer.counters


def outcomes(answers: list[Any]) -> list[str]:
    return [answer.outcome for answer in answers]


class TestIdentity:
    """Each update is applied at most once."""

    async def value(self, cluster: PsCluster, v: VariableSpec) -> float:
        (got,) = await pull(cluster.chief, v)
        assert (got == got.flat[0]).all()
        return float(got.flat[0])

    @pytest.mark.parametrize("size", [3, LARGE], ids=["control", "bulk"])
    @pytest.mark.parametrize("op", ["push", "add"])
    async def test_a_lost_answer_is_given_again(self, size: int, op: str) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros(size, np.float32))
            client = cluster.client(host="w")
            failpoint = "ps.push.applied" if op == "push" else "ps.assign.applied"
            points_of(cluster.ps[0]).arm(failpoint, lambda: cluster.network.cut("w"))
            if op == "push":
                (answer,) = await push(client, (v,), (2.0,), closure=1)
                assert (answer.outcome, answer.step) == ("accepted", 1)
            else:
                (answer,) = await assign(client, v, np.full(size, -1, np.float32), "add")
                assert answer.outcome == "accepted"
            assert await self.value(cluster, v) == -1
            assert (await counters(cluster))["ledger"]["duplicate"] == 1

    @pytest.mark.parametrize("size", [3, LARGE], ids=["control", "bulk"])
    async def test_a_retry_waits_while_the_first_is_being_applied(self, size: int) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros(size, np.float32))
            ledger = ledger_of(cluster.ps[0])
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(cluster.client(host="w"), (v,), (2.0,)))
            await until(lambda: ledger.statistics().fresh)
            cluster.network.cut("w")
            await until(lambda: ledger.statistics().in_progress)
            release()
            assert outcomes(await pushing) == ["accepted"]
            assert await self.value(cluster, v) == -1

    async def test_a_retry_that_finds_a_log_begun_meanwhile_does_not_wait_for_itself(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            ps = cluster.ps[0]
            release = hold(ps, v)
            pushing = asyncio.create_task(push(cluster.client(host="w"), (v,), (2.0,)))
            await until(lambda: ledger_of(ps).statistics().fresh)
            committer = ps.services.backup.committer
            committer.is_begun = True
            cluster.network.cut("w")
            await until(lambda: ledger_of(ps).statistics().in_progress)
            assert committer.waiting == 1
            release()
            assert outcomes(await pushing) == ["accepted"]
            assert await self.value(cluster, v) == -1
            committer.end()

    async def test_the_second_run_of_a_closure_is_a_duplicate_on_each_shard(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.zeros((4, 2), np.float32), shards=2)
            first, second = cluster.client(WORKER), cluster.client(OTHER)
            assert outcomes(await push(first, (v,), (2.0,), closure=5)) == ["accepted"] * 2
            assert outcomes(await push(second, (v,), (8.0,), closure=5)) == ["duplicate"] * 2
            assert outcomes(await push(second, (v,), (2.0,), closure=5, ordinal=1)) == (
                ["accepted"] * 2
            )
            assert await self.value(cluster, v) == -2

    async def test_where_the_first_run_has_not_come_the_second_counts(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
            first_dies: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            points = Failpoints()
            points.arm("worker.push.between_ps", lambda: first_dies.set_result(None))
            first, second = cluster.client(WORKER, failpoints=points), cluster.client(OTHER)
            pushing = asyncio.create_task(push(first, (v,), (2.0,), closure=5))
            await first_dies
            await first.close()
            assert outcomes(await push(second, (v,), (4.0,), closure=5)) == [
                "duplicate",
                "accepted",
            ]
            (got,) = await pull(second, v)
            assert got[:, 0].tolist() == [-1, -2]
            await asyncio.gather(pushing, return_exceptions=True)

    async def test_an_update_goes_on_although_its_sender_gives_up(self) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            task = cluster.ps[0]
            v = await cluster.create("v", np.zeros((2, LARGE // 4), np.float32), shards=2)
            sender = cluster.client(WORKER)
            release = hold(task, v)
            pushing = asyncio.create_task(push(sender, (v,), (2.0,), closure=5))
            await until(lambda: work_of(task).waiting)
            (peer,) = [peer for peer in endpoint_of(task).peers if peer.task == WORKER]
            await sender.close()
            await until(lambda: peer.is_closed)
            release()
            answers = await push(cluster.client(OTHER), (v,), (8.0,), closure=5)
            assert outcomes(answers) == ["duplicate"]
            assert await self.value(cluster, v) == -1
            await asyncio.gather(pushing, return_exceptions=True)

    async def test_another_set_of_variables_in_the_second_run_is_an_error(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            w = await cluster.create("w", np.zeros(3, np.float32))
            await push(cluster.client(WORKER), (v,), (2.0,), closure=5)
            with pytest.raises(
                UsageError,
                match=r"closure 5, call 0 updates other variables \(w\) than in its first run "
                r"\(v\)",
            ):
                await push(cluster.client(OTHER), (w,), (2.0,), closure=5)
            assert await self.value(cluster, w) == 0

    @pytest.mark.parametrize("size", [3, LARGE], ids=["control", "bulk"])
    async def test_the_second_run_waits_while_the_first_is_being_applied(self, size: int) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros(size, np.float32))
            first, second = cluster.client(WORKER), cluster.client(OTHER)
            ledger = ledger_of(cluster.ps[0])
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(first, (v,), (2.0,), closure=5))
            await until(lambda: ledger.statistics().fresh)
            again = asyncio.create_task(push(second, (v,), (8.0,), closure=5))
            await until(lambda: ledger.statistics().in_progress)
            assert not again.done()
            release()
            assert outcomes(await again) == ["duplicate"]
            assert outcomes(await pushing) == ["accepted"]
            assert await self.value(cluster, v) == -1

    async def test_the_second_run_counts_if_the_first_ends_in_an_error(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            task = cluster.ps[0]
            call = ((WORKER, 5000), 1, 1, 5, 0, hash(((v.variable_id, 0),)))
            judged = ledger_of(task).begin(*call)
            assert isinstance(judged, Fresh)
            again = asyncio.create_task(push(cluster.client(OTHER), (v,), (2.0,), closure=5))
            await until(lambda: work_of(task).waiting)
            work_of(task).wake()  # something else has ended
            await until(lambda: work_of(task).waiting)
            ledger_of(task).fail(judged.ticket)
            work_of(task).wake()
            assert outcomes(await again) == ["accepted"]
            assert await self.value(cluster, v) == -1

    async def test_the_second_run_is_applied_if_the_first_is_refused(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.array([True, False]))
            first, second = cluster.client(WORKER), cluster.client(OTHER)
            bad = np.array([7, 0], np.uint8).view(np.bool_)
            with pytest.raises(GradientError, match="bytes other than 0 and 1"):
                await assign(first, v, bad, closure=5)
            answers = await assign(second, v, np.array([False, True]), closure=5)
            assert outcomes(answers) == ["accepted"]

    async def test_final_closures_are_forgotten_and_count_no_more(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client, late = cluster.client(WORKER), cluster.client(OTHER)
            for closure in range(20):
                await push(client, (v,), (2.0,), closure=closure)
            assert (await counters(cluster))["ledger"]["calls"] == 20
            client.links[0].notify(FinalBelow(20))  # a worker does not decide that
            await pull(client, v)
            assert (await counters(cluster))["ledger"]["calls"] == 20
            cluster.chief.links[0].notify(FinalBelow(18))
            ledger = (await counters(cluster))["ledger"]
            assert (ledger["calls"], ledger["answers"]) == (2, 1)
            assert outcomes(await push(late, (v,), (2.0,), closure=3)) == ["duplicate"]
            assert await self.value(cluster, v) == -20


def average_of(
    spec: VariableSpec, original: VariableSpec, decay: float = 0.5, **identity: int
) -> AverageShards:
    """What moves the first shard of ``spec`` towards that of ``original``."""
    given = {"sequence": 1, "acked_below": 0, "closure": -1, "ordinal": 0} | identity
    return AverageShards(*given.values(), [(spec.variable_id, original.variable_id, 0)], decay)


class TestAverages:
    async def test_an_average_that_is_repeated_happens_once(self) -> None:
        async with PsCluster() as cluster:
            s = await cluster.create("s", np.zeros(3, np.float32))
            v = await cluster.create("v", np.ones(3, np.float32))
            client, other = cluster.client(), cluster.client(OTHER)
            message = average_of(s, v, closure=5)
            assert await ask(client, message) == Pushed("accepted", 0)
            assert await ask(client, message) == Pushed("accepted", 0)  # the same answer
            again = average_of(s, v, closure=5)  # the closure's next run
            assert await ask(other, again) == Pushed("duplicate", 0)
            assert (await pull(client, s))[0].tolist() == [0.5] * 3
            assert (await counters(cluster))["assigns"] == 1

    @pytest.mark.parametrize("busy", ["average", "original"])
    async def test_a_busy_shard_on_either_side_is_waited_for(self, busy: str) -> None:
        async with PsCluster() as cluster:
            s = await cluster.create("s", np.zeros(3, np.float32))
            v = await cluster.create("v", np.ones(3, np.float32))
            release = hold(cluster.ps[0], s if busy == "average" else v)
            client = cluster.client()
            averaging = asyncio.create_task(ask(client, average_of(s, v)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            assert not averaging.done()
            release()
            assert await averaging == Pushed("accepted", 0)
            assert (await pull(client, s))[0].tolist() == [0.5] * 3

    async def test_what_does_not_fit_is_refused_before_anything_is_averaged(self) -> None:
        async with PsCluster() as cluster:
            s = await cluster.create("s", np.zeros(3, np.float32))
            v = await cluster.create("v", np.ones(3, np.float32))
            wide = await cluster.create("wide", np.ones(4, np.float32))
            count = await cluster.create("count", np.ones(3, np.int32))
            client = cluster.client()
            good = average_of(s, v).shards[0]

            async def refused(shards: list[tuple[int, int, int]], decay: float) -> None:
                await ask(client, AverageShards(1, 0, -1, 0, shards, decay))

            with pytest.raises(PartitionError, match=r"expected shape \(4,\) float32, as "):
                await refused([good, (s.variable_id, wide.variable_id, 0)], 0.5)
            with pytest.raises(GradientError, match="only floating-point variables have moving"):
                await refused([good, (count.variable_id, count.variable_id, 0)], 0.5)
            with pytest.raises(UnknownVariableError, match="holds no shard 0 of variable 99"):
                await refused([good, (s.variable_id, 99, 0)], 0.5)
            with pytest.raises(UnknownVariableError, match="holds no shard 0 of variable 99"):
                await refused([good, (99, v.variable_id, 0)], 0.5)
            for decay in (1.0, -0.5, float("nan")):
                with pytest.raises(GradientError, match=r"expected decay in \[0, 1\), got"):
                    await refused([good], decay)
            assert not (await pull(client, s))[0].any()
            assert await ask(client, average_of(s, v)) == Pushed("accepted", 0)
