"""A backup of ps 0 that serves: the last step of a group is closed once more, everywhere."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from psync.sync.followed_steps import FollowedSteps, LastStep

from inside import closer_of, steps_from, sync_of
from ps_cluster import heard, pull
from psync.errors import RemoteProtocolError
from psync.specs import VariableSpec
from psync.sync.group import Close, Contribution
from psync.sync.step_rounds import ClosedStep, StepRounds, go_on
from psync.wire.sync_messages import CloseStep
from sync_cluster import GROUP, SyncCluster

pytestmark = pytest.mark.asyncio

CLOSED = ClosedStep(Close(GROUP, 0, (), partial=False), [], None, None)


def rounds_of(cluster: SyncCluster) -> StepRounds:
    closer = closer_of(cluster.ps[0])
    assert closer is not None
    return closer._rounds


async def stepped(cluster: SyncCluster) -> VariableSpec:
    """One step is made, of a variable with a shard on each ps."""
    v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
    cluster.configure(2)
    pushes = [cluster.replica(index).push([v], [1.0]) for index in range(2)]
    await asyncio.gather(*pushes)
    return v


async def takes_over(
    cluster: SyncCluster, last: LastStep[ClosedStep] | None = None, *left: int
) -> int:
    replica = ("/job:worker/task:0", 1000)
    pushes = [(step, Contribution(replica, 9, 0, 7, 1, b"", step, 1.0)) for step in left]
    return await go_on(GROUP, last, pushes, sync_of(cluster.ps[0]), rounds_of(cluster))


async def test_a_group_without_a_closed_step_goes_on_where_its_first_push_counts() -> None:
    async with SyncCluster(2) as cluster:
        sync_of(cluster.ps[0]).define(GROUP, cluster.config)
        assert await takes_over(cluster, None, 5, 5, 6) == 5


@pytest.mark.parametrize(
    ("last", "left"), [(LastStep(0, CLOSED), ()), (None, (1,))], ids=["closed", "in the snapshot"]
)
async def test_where_the_last_step_was_applied_everywhere_nothing_changes(
    last: LastStep[ClosedStep] | None, left: tuple[int, ...]
) -> None:
    async with SyncCluster(2) as cluster:
        v = await stepped(cluster)
        assert await takes_over(cluster, last, *left) == 1
        (value,) = await pull(cluster.chief, v)
        assert (value == -0.5).all()
        assert await cluster.global_step() == 1


async def test_what_no_other_ps_has_heard_of_is_closed_there_and_the_global_step_raised() -> None:
    async with SyncCluster(2) as cluster:
        sync_of(cluster.ps[0]).define(GROUP, cluster.config)
        sync_of(cluster.ps[0]).staging.closed(GROUP, 0)  # as the log has it
        assert await takes_over(cluster, LastStep(0, CLOSED)) == 1
        assert [sync_of(task).steps() for task in cluster.ps] == [[(GROUP, 1)]] * 2
        assert await cluster.global_step() == 1


async def test_it_says_why_a_step_cannot_be_closed() -> None:
    async with SyncCluster(2) as cluster:
        sync_of(cluster.ps[1]).define(GROUP, cluster.config)
        steps_from(cluster.ps[1], GROUP, closing=7)
        sync_of(cluster.ps[0]).define(GROUP, cluster.config)
        with pytest.raises(RemoteProtocolError, match="step 7 is being applied"):
            await takes_over(cluster, LastStep(0, CLOSED))


async def test_nothing_is_counted_where_the_last_step_cannot_be_closed() -> None:
    async with SyncCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        cluster.configure(2)
        sync_of(cluster.ps[1]).define(GROUP, cluster.config)
        steps_from(cluster.ps[1], GROUP, closing=7)
        told = heard(cluster.ps[1], CloseStep)
        closer = closer_of(cluster.ps[0])
        assert closer is not None
        sync_of(cluster.ps[0]).define(GROUP, cluster.config)
        followed: FollowedSteps[ClosedStep] = FollowedSteps()
        followed.close(GROUP, 0, (), CLOSED)
        for number in (1, 2):
            replica = ("/job:worker/task:0", 1000)
            followed.count(GROUP, 1, Contribution(replica, number, 0, 7, number, b"", 1, 1.0))
        closer.follow(followed, ())
        await closer.phases.pause("until all is done")
        closer.resume("until all is done")
        await closer.phases.pause("until all is done")
        assert [message.step for message in told] == [0]
        with pytest.raises(RemoteProtocolError, match="step 7 is being applied"):
            await cluster.replica(0).push([v], [1.0])
