"""Synchronous pushes as a worker makes them, to real ps tasks on a network in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inside import handlers_of
from ps_cluster import OTHER, WORKER, PsCluster, heard, pull
from psync.client import plans
from psync.client.ps_client import PsClient
from psync.client.sync_client import SyncClient
from psync.errors import (
    ConfigurationError,
    RemoteProtocolError,
)
from psync.net.connection import Handler
from psync.numerics.rules import SGD
from psync.ps_task import PsTask
from psync.specs import VariableSpec
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStep,
    Contribute,
    Contributed,
    Done,
    InitTokens,
    StagePush,
)

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
    handlers_of(task)[kind] = Handler(lambda request: request.answer(message))


class TestConfiguration:
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


class TestWhatGoesWrong:
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
