"""Who waits for the answer to a push: told once, with values if they are of a new step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from inside import sync_of
from ps_cluster import hold
from psync.errors import TrainingEnded
from psync.net.peer import Reply
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet
from psync.sync.group import Answer, Refuse
from psync.sync.token_waits import PushKey, TokenWaits
from psync.wire.sync_messages import Contributed
from sync_cluster import GROUP, SyncCluster

pytestmark = pytest.mark.asyncio

REPLICA = ("/job:worker/task:0", 5)
KEY: PushKey = (GROUP, REPLICA, 1)
CONTRIBUTED = Contributed("accepted", 0, 1, False, 2)


def answer(number: int = 1) -> Answer:
    return Answer(GROUP, REPLICA, number, "accepted", 0, 1, False, 2)


@asynccontextmanager
async def waits(step_ps: int = 0) -> AsyncIterator[tuple[SyncCluster, TokenWaits, list[PushKey]]]:
    left: list[PushKey] = []
    async with SyncCluster(2, step_ps=step_ps) as cluster:
        sync = sync_of(cluster.ps[0])
        sync.define(GROUP, cluster.config)
        yield cluster, TokenWaits(sync, left.append), left


async def test_all_who_wait_for_a_push_are_told() -> None:
    async with waits() as (_, waiting, left):
        both = [waiting.add(KEY, None) for _ in range(2)]
        other = waiting.add((GROUP, REPLICA, 2), None)
        assert len(waiting) == 2
        waiting.answer(answer())
        assert [waiter.outcome for waiter in both] == [Reply(CONTRIBUTED)] * 2
        error = TrainingEnded("over")
        waiting.answer(Refuse(GROUP, REPLICA, 2, error))
        assert other.outcome is error
        waiting.answer(answer(3))  # nobody waits for it
        assert (len(waiting), left) == (0, [])


async def test_a_push_is_left_when_the_last_one_who_waits_gives_up() -> None:
    async with waits() as (_, waiting, left):
        one, two = (waiting.add(KEY, None) for _ in range(2))
        one.give_up()
        assert left == []
        two.give_up()
        assert left == [KEY]
        assert len(waiting) == 0


async def test_at_the_end_all_are_told_why() -> None:
    async with waits() as (_, waiting, left):
        waiter = waiting.add(KEY, None)
        error = TrainingEnded("over")
        waiting.refuse_all(error)
        waiter.give_up()
        assert (waiter.outcome, left) == (error, [])


async def test_values_go_with_the_tokens_of_a_new_step_only() -> None:
    async with waits(step_ps=1) as (cluster, waiting, _):
        w = await cluster.create("w", np.arange(3, dtype=np.float32))  # on ps 0
        v = await cluster.create("v", np.arange(3, dtype=np.float32))  # on ps 1
        step = cluster.step.shards[0]
        members = [(shard.ps, *shard.key) for shard in (w.shards[0], v.shards[0])]
        numbers = ShareNumbers(2, "/job:ps/task:0")
        wanted = WholeSet(members, numbers)
        with_step = WholeSet([(0, *w.shards[0].key), (1, *step.key)], numbers)

        def values_with(known: WholeSet) -> Any:
            waiter = waiting.add(KEY, known)
            shares = waiting.wanted_shares(GROUP)
            theirs = memoryview(b"theirs")
            waiting.bring({share.number: [theirs for _ in share.members] for share in shares})
            waiting.answer(answer())
            waiting.done()
            assert isinstance(waiter.outcome, Reply)
            return waiter.outcome.segments

        mine, theirs = values_with(wanted)
        assert np.frombuffer(b"".join(mine), np.float32).tolist() == [0, 1, 2]
        assert bytes(theirs) == b"theirs"
        assert list(values_with(with_step)) == []  # the step is raised later, and elsewhere
        release = hold(cluster.ps[0], w)
        assert list(values_with(wanted)) == []
        release()
        waiter = waiting.add(KEY, wanted)
        waiting.answer(answer())  # a token that was left
        assert waiter.outcome == Reply(CONTRIBUTED, ())
        assert waiting.wanted_shares(GROUP) == ()
        waiting.add(KEY, wanted)
        sync_of(cluster.ps[0]).define(GROUP + 1, cluster.config)
        assert waiting.wanted_shares(GROUP) == ()  # each pull says how far all groups are
