"""Pushes whose gradients lie where ps tasks can read them: nothing is copied, and what counts is
computed from the bytes that were pushed, although the caller writes to the arrays at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from inside import sync_of
from memory_cluster import until
from ps_cluster import CONFIG, RATE, PsCluster, heard, hold, pull
from psync.client.ps_client import PsClient
from psync.errors import NotEnoughReplicas, PsyncError
from psync.net.shared.bodies import Sharing
from psync.net.shared.loans import Loan
from psync.specs import VariableSpec
from psync.testing import memory_sharing
from psync.wire.frames import Buffer
from psync.wire.messages import AskStep, Contributed, Push
from sync_cluster import GROUP, SyncCluster, SyncReplica

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

SIZE = 1 << 16  # elements of float32: 256 KiB, half of it on each of two ps tasks

OVERWRITTEN = np.float32(1e30)


@pytest.fixture(autouse=True)
def every_region_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_sharing, "REFUSED", 0.0)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were copied of each body that was lent."""
    seen: list[int] = []
    lend = Sharing.lend

    def noted(
        self: Sharing, buffers: Sequence[Buffer], nbytes: int, *, copied: bool = False
    ) -> Loan | None:
        loan = lend(self, buffers, nbytes, copied=copied)
        assert loan is not None
        seen.append(loan.copied_bytes)
        return loan

    monkeypatch.setattr(Sharing, "lend", noted)
    return seen


class Arrays:
    """Gradients of one task, in memory that is overwritten after each push."""

    def __init__(self, client: PsClient, *variables: VariableSpec) -> None:
        memory = client.memory
        self.arrays = [memory.empty(each.shape, np.dtype(each.dtype)) for each in variables]

    def filled(self, value: float) -> list[np.ndarray]:
        for array in self.arrays:
            array.fill(value)
        return self.arrays

    def overwrite(self) -> None:
        self.filled(OVERWRITTEN)


ORDINALS: Iterator[int] = itertools.count()


async def push(client: PsClient, variables: Sequence[VariableSpec], arrays: Arrays) -> list[str]:
    answers = await client.push(
        client.plan(tuple(variables)), arrays.arrays, optimizer=1, config=CONFIG, elsewhere={},
        closure=1, ordinal=next(ORDINALS),
    )  # fmt: skip
    arrays.overwrite()
    return [answer.outcome for answer in answers]


async def is_uniform(client: PsClient, variable: VariableSpec, expected: float) -> bool:
    (value,) = await pull(client, variable)
    return bool((value == expected).all())


# --- asynchronous pushes ---------------------------------------------------------------------


async def two_and_a_counter(cluster: PsCluster) -> list[VariableSpec]:
    zeros = np.zeros(SIZE, np.float32)
    return [
        await cluster.create("first", zeros, shards=2),
        await cluster.create("second", zeros, shards=2),
        await cluster.create("counter", np.zeros((), np.float32)),
    ]


async def test_a_push_that_is_repeated_on_another_connection_counts_once_and_as_it_was() -> None:
    async with PsCluster(2, shares_memory=True) as cluster:
        variables = await two_and_a_counter(cluster)
        client = cluster.client(host="worker")
        await pull(client, variables[0])
        arrays = Arrays(client, *variables)
        for _ in range(3):
            releases = [
                hold(cluster.ps[shard.ps], variable, shard.index)
                for variable in variables
                for shard in variable.shards
            ]
            arrays.filled(1)
            pushes = [heard(task, Push) for task in cluster.ps]
            pushed = asyncio.ensure_future(push(client, variables, arrays))
            await until(lambda pushes=pushes: all(pushes))
            cluster.network.cut("worker")
            await until(lambda pushes=pushes: min(map(len, pushes)) == 2)  # repeated
            for release in releases:
                release()
            assert await pushed == ["accepted"] * 2
        for variable in variables:
            assert await is_uniform(client, variable, -3 * RATE)


# --- synchronous pushes ----------------------------------------------------------------------


class Steps:
    """Replicas, each of which overwrites its gradients whenever a push has returned."""

    def __init__(self, cluster: SyncCluster, variables: list[VariableSpec]) -> None:
        self.cluster = cluster
        self.variables = variables

    async def replica(self, index: int) -> tuple[SyncReplica, Arrays]:
        made = self.cluster.replica(index, 1000 + index)
        await pull(made.client, self.variables[0])  # connected
        return made, Arrays(made.client, *self.variables)

    async def push(
        self, replica: tuple[SyncReplica, Arrays], value: float, local_step: int
    ) -> Contributed:
        made, arrays = replica
        try:
            answer = await made.push(self.variables, arrays.filled(value), local_step)
        except PsyncError:
            arrays.overwrite()
            raise
        arrays.overwrite()  # not where it is cancelled: its step may still read them
        return answer


async def large_steps(cluster: SyncCluster) -> Steps:
    zeros = np.zeros(SIZE, np.float32)
    return Steps(cluster, [await cluster.create(name, zeros, shards=2) for name in ("v", "w")])


async def test_steps_are_of_what_was_pushed_and_nothing_is_copied(copied: list[int]) -> None:
    async with SyncCluster(2, shares_memory=True) as cluster:
        cluster.configure(2)
        steps = await large_steps(cluster)
        replicas = [await steps.replica(index) for index in range(2)]
        total = 0.0
        for step in range(5):
            if step == 1:
                copied.clear()
            answers = await asyncio.gather(
                *(steps.push(each, at + step, step or -1) for at, each in enumerate(replicas))
            )
            assert [answer.outcome for answer in answers] == ["accepted"] * 2
            total += step + 0.5
        assert set(copied) == {0}
        for variable in steps.variables:
            assert await is_uniform(cluster.chief, variable, -total * RATE)


async def with_a_token_to_spare(cluster: SyncCluster, steps: Steps) -> tuple[SyncReplica, Arrays]:
    """Close the first step with two pushes, of which one waits for no token."""
    first, second = [await steps.replica(index) for index in range(2)]
    await first[0].sync.init_tokens(GROUP, first[0].config, -1)
    gone = asyncio.ensure_future(steps.push(second, 1, -1))
    await until(lambda: cluster.group()["counted"] == 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await second[0].client.close()
    answer = await steps.push(first, 1, -1)
    assert (answer.token, answer.count) == (1, 2)
    return first


async def test_a_push_that_takes_a_token_of_its_own_step_is_copied_before_it_returns(
    copied: list[int],
) -> None:
    async with SyncCluster(2, shares_memory=True) as cluster:
        cluster.configure(2)
        steps = await large_steps(cluster)
        first = await with_a_token_to_spare(cluster, steps)
        left = cluster.group()["tokens"]["left"]
        copied.clear()
        early = await steps.push(first, 2, 1)
        assert (left, early.token, early.count) == (1, 1, 0)
        assert (copied[:2], min(copied[2:])) == ([0, 0], SIZE * 4)
        assert sync_of(cluster.ps[0]).statistics()["parts"] == 1  # of the step that is open
        third = await steps.replica(2)
        await steps.push(third, 4, 1)
        for variable in steps.variables:
            (value,) = await pull(cluster.chief, variable)
            assert value[0] == value[-1] == -(1 + 3) * RATE


async def test_a_push_that_is_refused_while_its_step_is_open_is_copied_before_it_raises(
    copied: list[int],
) -> None:
    async with SyncCluster(2, shares_memory=True) as cluster:
        cluster.configure(2, min_replicas=2, patience_s=0.1)
        steps = await large_steps(cluster)
        first, second = [await steps.replica(index) for index in range(2)]
        await cluster.report(1, {0: 1000})
        with pytest.raises(NotEnoughReplicas):
            await steps.push(first, 1, -1)
        assert max(copied) == SIZE * 4
        await cluster.report(2, {0: 1000, 1: 1001})
        answer = await steps.push(second, 3, -1)
        assert (answer.outcome, answer.count) == ("accepted", 2)
        for variable in steps.variables:
            assert await is_uniform(cluster.chief, variable, -2 * RATE)


async def test_a_step_is_asked_for_only_before_bytes_that_travel() -> None:
    for shares, asked in ((True, 0), (False, 1)):
        async with SyncCluster(2, shares_memory=shares) as cluster:
            cluster.configure(1)
            variable = await cluster.create("huge", np.zeros(1 << 20, np.float32), shards=2)
            steps = Steps(cluster, [variable])
            replica = await steps.replica(0)
            asks = heard(cluster.ps[0], AskStep)
            await steps.push(replica, 1, -1)
            assert len(asks) == asked
            assert await is_uniform(cluster.chief, variable, -RATE)
