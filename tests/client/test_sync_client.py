"""Synchronous pushes as a worker makes them, to real ps tasks on a network in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from inside import closer_of, handlers_of, pushes_of
from ps_cluster import OTHER, WORKER, PsCluster, heard, pull, until
from psync.client import plans
from psync.client.ps_client import PsClient
from psync.client.sync_client import SyncClient
from psync.errors import (
    ConfigurationError,
    RemoteProtocolError,
    TrainingEnded,
    ValueMismatchError,
)
from psync.net.peer import Handler, Reply
from psync.numerics.rules import SGD
from psync.ps_task import PsTask
from psync.specs import VariableSpec
from psync.store.sync_config import SyncConfig
from psync.testing.sabotage import FailpointError, Failpoints
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStep,
    Contribute,
    Contributed,
    Done,
    EndTraining,
    InitTokens,
    Staged,
    StagePush,
)

LARGE = 1 << 15  # elements of float32: 128 KiB, more than goes whole to ps 0
HUGE = 1 << 19  # 2 MiB, beyond what is sent without asking
GROUP = 7

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(10)]


class Cluster(PsCluster):
    """Two workers and a group of theirs, on two ps tasks unless said otherwise."""

    def __init__(self, num_ps: int = 2, **options: Any) -> None:
        super().__init__(num_ps, **options)
        self.raw: dict[str, Any] = {}

    async def group(self, needed: int, total: int | None = None, **more: Any) -> None:
        """Say what the group is: R of N."""
        step = await self.create("global_step", np.int64(0))
        (shard,) = step.shards
        self.step = step
        self.raw = SyncConfig(
            name="opt",
            optimizer=SGD(1.0).to_config(),
            replicas_to_aggregate=needed,
            total_num_replicas=total or needed,
            global_step=(shard.ps, *shard.key),
            **more,
        ).to_config()

    async def variable(self, name: str, size: int = 4) -> VariableSpec:
        """Declare a variable of zeros with a shard on each ps."""
        return await self.create(name, np.zeros(size, np.float32), shards=len(self.ps))

    def worker(self, task: str = WORKER, **options: Any) -> tuple[PsClient, SyncClient]:
        client = self.client(task, **options)
        return client, client.parts.of(SyncClient)(client)

    async def push(
        self,
        worker: tuple[PsClient, SyncClient],
        variables: VariableSpec | Sequence[VariableSpec],
        value: float = 1.0,
        local_step: int = -1,
        *,
        group: int = GROUP,
        closure: int = -1,
        ordinal: int = 0,
        weight: float = 1.0,
        raw: dict[str, Any] | None = None,
    ) -> Contributed:
        specs = (variables,) if isinstance(variables, VariableSpec) else tuple(variables)
        client, sync = worker
        return await sync.contribute(
            client.plan(specs),
            [np.full(spec.shape, value, np.float32) for spec in specs],
            group=group, config=raw or self.raw, local_step=local_step, closure=closure,
            ordinal=ordinal, weight=weight,
        )  # fmt: skip


def answer_with(task: PsTask, kind: type[Message], message: Message) -> None:
    """Let a ps answer all messages of a kind like this."""
    handlers_of(task)[kind] = Handler(lambda *_: Reply(message))


@contextlib.asynccontextmanager
async def in_background(*pushes: Any) -> AsyncIterator[list[asyncio.Task[Contributed]]]:
    tasks = [asyncio.ensure_future(push) for push in pushes]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TestContributing:
    @pytest.mark.parametrize(
        ("values", "weights"), [((1.0, 3.0), (1.0, 1.0)), ((1.0, 5.0), (3.0, 1.0))]
    )
    async def test_the_weighted_mean_of_two_workers_is_applied_on_all_ps_tasks(
        self, values: tuple[float, float], weights: tuple[float, float]
    ) -> None:
        async with Cluster() as cluster:
            await cluster.group(2)
            v = await cluster.variable("v")
            workers = cluster.worker(), cluster.worker(OTHER)
            answers = await asyncio.gather(
                *(
                    cluster.push(worker, v, value, weight=weight)
                    for worker, value, weight in zip(workers, values, weights, strict=True)
                )
            )
            assert answers == [Contributed("accepted", 0, 1, False, 2)] * 2
            assert (await pull(cluster.chief, v))[0].tolist() == [-2, -2, -2, -2]
            assert (await pull(cluster.chief, cluster.step))[0] == 1

    async def test_a_stale_push_is_answered_with_a_token(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1, 3)
            v = await cluster.variable("v")
            worker, late = cluster.worker(), cluster.worker(OTHER)
            await cluster.push(worker, v, local_step=0)
            await cluster.push(worker, v, local_step=1)
            answering = asyncio.create_task(cluster.push(late, v, local_step=0))
            assert await answering == Contributed("stale", 2, 2, False, 0)
            assert (await pull(cluster.chief, v))[0].tolist() == [-2, -2, -2, -2]

    async def test_pushes_are_numbered_and_the_last_token_is_remembered_in_each_group(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v")
            worker = cluster.worker()
            contributed = heard(cluster.ps[0], Contribute)
            assert worker[1].token(GROUP) is None
            for step in range(3):
                await cluster.push(worker, v, local_step=step)
            assert worker[1].token(GROUP) == 3
            assert worker[1].token(GROUP + 1) is None
            await cluster.push(worker, v, group=GROUP + 1)
            assert [(m.group, m.push, m.acked_below) for m in contributed] == [
                (GROUP, 1, 1), (GROUP, 2, 2), (GROUP, 3, 3), (GROUP + 1, 1, 1),
            ]  # fmt: skip

    async def test_the_digest_is_of_the_set_of_variables_whatever_their_order(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v, w = await cluster.variable("v"), await cluster.variable("w")
            worker = cluster.worker()
            contributed = heard(cluster.ps[0], Contribute)
            for step, variables in enumerate([(v, w), (w, v), (v,)]):
                await cluster.push(worker, variables, local_step=step)
            first, second, third = (message.variable_set for message in contributed)
            assert len(first) == 16
            assert first == second != third

    async def test_another_run_of_a_closure_is_a_duplicate(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1, 2)
            v = await cluster.variable("v")
            one, two = cluster.worker(), cluster.worker(OTHER)
            assert (await cluster.push(one, v, closure=5)).outcome == "accepted"
            assert (await cluster.push(two, v, closure=5)).outcome == "duplicate"
            assert (await pull(cluster.chief, v))[0].tolist() == [-1, -1, -1, -1]

    async def test_variables_on_one_ps_alone_are_decided_by_ps_0_all_the_same(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)  # its step is on ps 0, so the next variable goes to ps 1
            v = await cluster.create("v", np.zeros(2, np.float32))
            assert v.shards[0].ps == 1
            worker = cluster.worker()
            for step in range(2):
                assert (await cluster.push(worker, v, local_step=step)).outcome == "accepted"
            assert (await pull(cluster.chief, v))[0].tolist() == [-2, -2]


class TestConfiguration:
    async def test_it_is_sent_until_a_ps_has_answered_once(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", LARGE)
            worker = cluster.worker()
            staged = heard(cluster.ps[1], StagePush)
            contributed = heard(cluster.ps[0], Contribute)
            for step in range(2):
                await cluster.push(worker, v, local_step=step)
            for messages in (staged, contributed):
                assert [message.config is None for message in messages] == [False, True]

    async def test_a_small_push_goes_whole_to_ps_0_and_does_not_ask(self) -> None:
        async with Cluster(3) as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", 9)
            worker = cluster.worker()
            staged = [heard(task, StagePush) for task in cluster.ps]
            asked = heard(cluster.ps[0], AskStep)
            contributed = heard(cluster.ps[0], Contribute)
            for step in range(2):
                await cluster.push(worker, v, local_step=step)
            assert staged == [[], [], []]
            assert asked == []
            assert [message.members is None for message in contributed] == [False, True]
            assert sorted(ps for ps, _, _ in contributed[0].members) == [0, 1, 2]
            assert (await pull(cluster.chief, v))[0].tolist() == [-2] * 9

    async def test_a_small_part_of_ps_0_goes_along_with_the_word_that_decides(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v, large = await cluster.variable("v"), await cluster.variable("large", 4 * LARGE)
            worker = cluster.worker()
            staged = heard(cluster.ps[0], StagePush)
            contributed = heard(cluster.ps[0], Contribute)
            await cluster.push(worker, v)
            assert staged == []
            await cluster.push(worker, large, local_step=1)
            assert len(staged) == 1
            assert [message.set_id >= 0 for message in contributed] == [True, False]
            assert (await pull(cluster.chief, v))[0].tolist() == [-1] * v.shape[0]
            assert ((await pull(cluster.chief, large))[0] == -1).all()

    async def test_another_one_under_the_same_number_is_refused_each_time(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v")
            await cluster.push(cluster.worker(), v)
            worker = cluster.worker(OTHER)
            for _ in range(2):
                with pytest.raises(
                    ConfigurationError, match="a different configuration than at first"
                ):
                    await cluster.push(worker, v, raw={**cluster.raw, "strict": True})
            await cluster.push(worker, v, local_step=1)


class TestLargePushes:
    async def test_what_is_no_more_than_a_mib_is_sent_without_asking(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1, 3)
            v = await cluster.variable("v", HUGE // 2)
            asked = heard(cluster.ps[0], AskStep)
            assert (await cluster.push(cluster.worker(), v)).outcome == "accepted"
            late = await cluster.push(cluster.worker(OTHER), v, local_step=0)
            assert (late.outcome, asked) == ("stale", [])

    async def test_they_ask_first_and_what_is_stale_is_not_sent(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1, 3)
            v = await cluster.variable("v", HUGE)
            worker, late = cluster.worker(), cluster.worker(OTHER)
            for step in range(2):
                await cluster.push(worker, v, local_step=step)
            staged = heard(cluster.ps[1], StagePush)
            contributed = heard(cluster.ps[0], Contribute)
            assert await cluster.push(late, v, local_step=1) == Contributed("stale", 1, 2, False, 0)
            assert staged == []
            assert contributed[0].set_id == -1
            assert (await cluster.push(late, v, local_step=2)).outcome == "accepted"
            assert len(staged) == 1
            assert ((await pull(cluster.chief, v))[0] == -3).all()

    async def test_the_beginning_is_known_to_be_over_once_ps_0_has_moved(self) -> None:
        """-1 is the step at which the group began; ps 0 says which one that is."""
        async with Cluster() as cluster:
            await cluster.group(1, 3)
            v = await cluster.variable("v", HUGE)
            staged = heard(cluster.ps[1], StagePush)
            await cluster.push(cluster.worker(), v)  # nobody has pushed: it may count
            assert len(staged) == 1
            assert (await cluster.push(cluster.worker(OTHER), v)).outcome == "stale"
            assert len(staged) == 1

    async def test_one_that_is_of_the_first_step_counts(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(2)
            v = await cluster.variable("v", LARGE)
            async with in_background(cluster.push(cluster.worker(), v)) as (first,):
                await until(lambda: _counted(cluster) == 1)
                await cluster.push(cluster.worker(OTHER), v)
                assert (await first).count == 2


class TestWhatGoesWrong:
    async def test_a_part_that_is_refused_is_an_error_and_nothing_counts(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", LARGE)
            worker = cluster.worker()
            contributed = heard(cluster.ps[0], Contribute)

            def refuse(*_: Any) -> Reply:
                raise ValueMismatchError("no")

            handlers_of(cluster.ps[1])[StagePush] = Handler(refuse)
            with pytest.raises(ValueMismatchError, match="no"):
                await cluster.push(worker, v)
            assert contributed == []
            assert ((await pull(cluster.chief, v))[0] == 0).all()

    async def test_more_than_one_message_to_a_ps_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plans, "MEMBERS_PER_REQUEST", 2)
        async with Cluster(1) as cluster:
            await cluster.group(1)
            variables = [await cluster.variable(f"v{index}") for index in range(3)]
            staged = heard(cluster.ps[0], StagePush)
            with pytest.raises(ConfigurationError, match="a synchronous push to /job:ps/task:0"):
                await cluster.push(cluster.worker(), variables)
            assert staged == []

    @pytest.mark.parametrize(
        ("kind", "question"),
        [
            (StagePush, "a part of a push"),
            (Contribute, "a push"),
            (AskStep, "AskStep"),
            (InitTokens, "InitTokens"),
        ],
    )
    async def test_an_answer_of_another_kind(self, kind: type[Message], question: str) -> None:
        async with Cluster(1) as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", HUGE)
            answer_with(cluster.ps[0], kind, Done())
            _, sync = worker = cluster.worker()
            with pytest.raises(RemoteProtocolError, match=f"answered {question} with Done"):
                await (
                    sync.init_tokens(GROUP, cluster.raw, -1)
                    if kind is InitTokens
                    else cluster.push(worker, v)
                )

    async def test_a_part_that_is_stale_on_some_ps_only_is_still_decided_by_ps_0(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1, 3)
            v = await cluster.variable("v", 4 * LARGE)
            worker = cluster.worker()
            await cluster.push(worker, v)
            answer_with(cluster.ps[0], StagePush, Staged(True))
            assert (await cluster.push(worker, v, local_step=0)).outcome == "stale"


class TestLostConnections:
    @pytest.mark.virtual_time
    async def test_a_push_that_waits_for_its_token_is_repeated_and_counted_once(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(2)
            v = await cluster.variable("v")
            contributed = heard(cluster.ps[0], Contribute)
            worker = cluster.worker(host="w")
            async with in_background(cluster.push(worker, v, 1.0)) as (waiting,):
                await until(lambda: contributed)
                cluster.network.cut("w")
                await until(lambda: len(contributed) == 2)
                assert [(m.push, m.config is None) for m in contributed] == [(1, False)] * 2
                await cluster.push(cluster.worker(OTHER), v, 3.0)
                assert await waiting == Contributed("accepted", 0, 1, False, 2)
            assert (await pull(cluster.chief, v))[0].tolist() == [-2, -2, -2, -2]

    @pytest.mark.virtual_time
    async def test_a_part_is_staged_again(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", LARGE)
            worker = cluster.worker(host="w")
            handlers = handlers_of(cluster.ps[1])
            staging = handlers[StagePush]
            cuts = iter([True])

            def run(peer: Any, message: Any, segments: list[memoryview]) -> Any:
                if next(cuts, False):
                    cluster.network.cut("w")
                return staging.run(peer, message, segments)

            handlers[StagePush] = Handler(run, staging.prepare)
            assert (await cluster.push(worker, v)).outcome == "accepted"
            assert ((await pull(cluster.chief, v))[0] == -1).all()


class TestCancellation:
    async def test_what_is_staged_when_it_is_cancelled_does_not_count(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", LARGE)
            worker = cluster.worker()
            contributed = heard(cluster.ps[0], Contribute)
            staged = heard(cluster.ps[1], StagePush)
            async with in_background(cluster.push(worker, v)) as (pushing,):
                await until(lambda: staged)
                pushing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pushing
            assert contributed == []
            assert (await cluster.push(worker, v)).outcome == "accepted"
            assert [message.push for message in contributed] == [2]

    async def test_whoever_waits_for_a_token_can_be_cancelled_and_its_push_counts(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(2)
            v = await cluster.variable("v")
            client, _ = worker = cluster.worker()
            contributed = heard(cluster.ps[0], Contribute)
            async with in_background(cluster.push(worker, v, 1.0)) as (pushing,):
                await until(lambda: _counted(cluster) == 1)
                assert not pushes_of(client)  # nothing that the end of a step would wait for
                pushing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pushing
            answer = await cluster.push(cluster.worker(OTHER), v, 3.0)
            assert answer.count == 2
            assert (await pull(cluster.chief, v))[0].tolist() == [-2, -2, -2, -2]
            async with in_background(cluster.push(worker, v, local_step=1)):
                await until(lambda: len(contributed) == 3)
                assert [m.acked_below for m in contributed if m.push == 2] == [2]


class TestFailpoints:
    @pytest.mark.parametrize("place", ["begun", "between_ps", "staged"])
    async def test_before_ps_0_knows_nothing_counts(self, place: str) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v", LARGE)
            contributed = heard(cluster.ps[0], Contribute)
            worker = cluster.worker(failpoints=Failpoints(f"worker.push.{place}=error"))
            with pytest.raises(FailpointError):
                await cluster.push(worker, v)
            assert contributed == []
            assert (await cluster.push(worker, v)).count == 1

    async def test_afterwards_it_counts(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(1)
            v = await cluster.variable("v")
            worker = cluster.worker(failpoints=Failpoints("worker.push.answered=error"))
            with pytest.raises(FailpointError):
                await cluster.push(worker, v)
            assert (await pull(cluster.chief, v))[0].tolist() == [-1, -1, -1, -1]
            assert worker[1].token(GROUP) == 1


class TestTokensAndTheEnd:
    async def test_initial_tokens_let_one_replica_push_several_times(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(3, 1)
            v = await cluster.variable("v")
            worker = cluster.worker()
            for _ in range(2):  # the second time changes nothing
                assert await worker[1].init_tokens(GROUP, cluster.raw, 2) == 0
            answers = [await cluster.push(worker, v, value) for value in (1.0, 2.0, 6.0)]
            assert [answer.token for answer in answers] == [0, 0, 1]
            assert (await pull(cluster.chief, v))[0].tolist() == [-3, -3, -3, -3]

    async def test_whoever_waits_when_training_ends_is_told(self) -> None:
        async with Cluster() as cluster:
            await cluster.group(2)
            v = await cluster.variable("v")
            worker = cluster.worker()
            async with in_background(cluster.push(worker, v)) as (pushing,):
                await until(lambda: _counted(cluster) == 1)
                await cluster.chief.links[0].call(lambda peer: EndTraining("all done", False))
                with pytest.raises(TrainingEnded, match="all done"):
                    await pushing


def _counted(cluster: Cluster) -> int:
    """Pushes that count in the present step."""
    closer = closer_of(cluster.ps[0])
    assert closer is not None
    return next((group["counted"] for group in closer.steps.statistics().values()), 0)
