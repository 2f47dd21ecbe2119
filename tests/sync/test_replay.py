"""What a backup does when it reads of synchronous steps in its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inside import closer_of, sync_of
from ps_cluster import pull
from psync.net.peer import Reply
from psync.ps.backup_host import AsIfFrom
from psync.specs import VariableSpec
from psync.sync.followed_steps import LastStep
from psync.sync.group import Close, Contribution
from psync.sync.replay import SyncFollower
from psync.wire.codec import Message
from psync.wire.recovery_messages import CountPush, SetSteps
from psync.wire.sync_messages import CloseStep, StagePush
from sync_cluster import GROUP, SyncCluster

pytestmark = pytest.mark.asyncio

WORKER = "/job:worker/task:0"
REPLICA = (WORKER, 1000)
ONES = memoryview(np.ones(2, np.float32).tobytes())


class Reader:
    """Reads a log to ps 0 of a cluster, as if that were a backup."""

    def __init__(self, cluster: SyncCluster, *, of_ps_0: bool = True) -> None:
        self.cluster = cluster
        self.sync = sync_of(cluster.ps[0])
        closer = closer_of(cluster.ps[0])
        assert closer is not None
        shares = closer.shares if of_ps_0 else None
        self.follower = SyncFollower("/job:ps/task:0", self.sync, shares)
        self._handlers = self.follower.handlers()
        self._state: dict[str, Any] = {}  # of the log, whoever an entry is of

    async def read(self, message: Message, *body: memoryview) -> None:
        peer: Any = AsIfFrom(*REPLICA, self._state)
        outcome = self._handlers[type(message)].run(peer, message, list(body))
        if not isinstance(outcome, Reply):
            await outcome  # type: ignore[misc]

    def staged(self, variable: VariableSpec, push: int = 1) -> StagePush:
        members = [variable.shards[0].key]
        return StagePush(GROUP, self.cluster.config, push, 0, 0, members)

    def counted(self, push: int = 1, *members: Sequence[int], step: int = 0) -> CountPush:
        return CountPush(
            GROUP, self.cluster.config, step, push, 7, push, b"set", 0, 1.0,
            0 if members else -1, [(ps, v, i) for ps, v, i in members] or None,
            [8] * len(members), None, spread=False,
        )  # fmt: skip

    def closed(self, *pushes: int, step: int = 0) -> CloseStep:
        named = [(*REPLICA, push, 1.0) for push in pushes]
        return CloseStep(GROUP, self.cluster.config, step, named)


def contribution(push: int = 1) -> Contribution:
    return Contribution(REPLICA, push, 0, 7, push, b"set", 0, 1.0)


async def value(cluster: SyncCluster, variable: VariableSpec) -> list[float]:
    (array,) = await pull(cluster.chief, variable)
    return [float(each) for each in array]


async def test_parts_are_kept_pushes_counted_and_the_step_is_applied() -> None:
    async with SyncCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        cluster.configure(2)
        reader = Reader(cluster)
        await reader.read(reader.staged(v), ONES)
        await reader.read(reader.counted())
        assert reader.follower.steps.left() == {GROUP: [(0, contribution())]}
        assert await value(cluster, v) == [0, 0]
        await reader.read(reader.closed(1))
        assert await value(cluster, v) == [-0.5, -0.5]
        assert (reader.follower.steps.left(), reader.sync.steps()) == ({}, [(GROUP, 1)])
        assert reader.follower.steps.calls() == [(GROUP, 7, 1, b"set")]
        assert cluster.staged_bytes() == [0]


async def test_a_push_that_came_whole_is_kept_with_what_belongs_to_others() -> None:
    """So that the last step can be closed everywhere once more."""
    async with SyncCluster(2) as cluster:
        v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
        cluster.configure(2)
        reader = Reader(cluster)
        members = [(shard.ps, *shard.key) for shard in sorted(v.shards, key=lambda s: s.ps)]
        two = memoryview(np.array([1, 1, 2, 2], np.float32).tobytes())
        await reader.read(reader.counted(1, *members), two)
        await reader.read(reader.closed(1))
        last = reader.follower.steps.last[GROUP]
        assert isinstance(last, LastStep)
        assert last.closing.close == Close(GROUP, 0, ((*REPLICA, 1, 1.0),), partial=False)
        (((share, body),),) = last.closing.along
        assert (share.ps, bytes(body)) == (1, bytes(two[8:]))


async def test_the_backup_of_another_ps_remembers_no_step_and_keeps_nothing_of_others() -> None:
    async with SyncCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        cluster.configure(2)
        reader = Reader(cluster, of_ps_0=False)
        await reader.read(reader.staged(v), ONES)
        await reader.read(reader.closed(1))
        assert (reader.follower.steps.last, reader.sync.steps()) == ({}, [(GROUP, 1)])
        assert await value(cluster, v) == [-0.5, -0.5]


async def test_an_image_says_how_far_groups_are() -> None:
    async with SyncCluster() as cluster:
        reader = Reader(cluster)
        groups = [(GROUP, cluster.config, 5, 4), (GROUP + 1, cluster.config, -1, -1)]
        await reader.read(SetSteps(groups))
        assert reader.sync.steps() == [(GROUP, 5)]
        assert reader.sync.global_steps.raised(GROUP) == 4
        assert reader.sync.global_steps.raised(GROUP + 1) == -1
        assert set(reader.sync.raw_configs()) == {GROUP, GROUP + 1}


async def test_a_group_with_a_variable_on_several_ps_tasks_is_known_as_one() -> None:
    async with SyncCluster() as cluster:
        reader = Reader(cluster)
        await reader.read(reader.counted())
        assert not reader.follower.spread
        await reader.read(replace(reader.counted(2), spread=True))
        assert reader.follower.spread == {GROUP}
