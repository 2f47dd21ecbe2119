"""Ps tasks tell each other how many pushes they have counted: soon, seldom, and only news."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from inside import heard_by, store_of
from ps_by_hand import PsByHand
from ps_cluster import PsCluster, push
from psync.client import plans
from psync.errors import FencedError, UsageError
from psync.numerics.rules import SGD
from psync.ps.count_teller import INTERVAL_S
from psync.wire.messages import TellCounts

CONFIG = SGD(1.0).to_config()


def elsewhere(cluster: PsCluster) -> list[int]:
    found = [store_of(task).optimizers().get(1) for task in cluster.ps]
    return [0 if each is None else each.count.elsewhere for each in found]


@pytest.mark.virtual_time
async def test_all_ps_tasks_learn_of_pushes_without_a_part_on_them() -> None:
    async with PsCluster(3) as cluster:
        zeros = np.zeros(2, np.float32)
        first, second, third = [await cluster.create(f"v{k}", zeros) for k in range(3)]
        for variables in ([third], [second], [third], [first, second], [first, second, third]):
            await push(cluster.chief, variables, [1.0] * len(variables))
        await asyncio.sleep(4 * INTERVAL_S)  # of virtual time
        assert elsewhere(cluster) == [3, 2, 2]


@pytest.mark.virtual_time
async def test_they_learn_of_a_push_in_several_messages_to_one_ps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "MEMBERS_PER_REQUEST", 1)
    async with PsCluster(3) as cluster:
        zeros = np.zeros(2, np.float32)
        made = [await cluster.create(f"v{k}", zeros) for k in range(9)]
        of_ps = [made[k::3] for k in range(3)]
        for variables in (of_ps[0], of_ps[1] + of_ps[2]):
            await push(cluster.chief, variables, [1.0] * len(variables))
        await asyncio.sleep(4 * INTERVAL_S)
        assert elsewhere(cluster) == [1, 1, 1]
        own = [store_of(task).optimizers()[1].count.own for task in cluster.ps]
        assert own == [{(): 1}, {(2,): 1}, {}]


@pytest.mark.virtual_time
async def test_messages_are_few_and_none_is_sent_where_nothing_is_news() -> None:
    async with PsCluster(3) as cluster:
        zeros = np.zeros(2, np.float32)
        both = [await cluster.create(f"v{k}", zeros) for k in range(3)][1:]
        with ExitStack() as stack:
            told: list[list[Any]] = [
                stack.enter_context(heard_by(task, TellCounts)) for task in cluster.ps
            ]
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(200):
                await push(cluster.chief, both, [1.0] * 2)
                await asyncio.sleep(INTERVAL_S / 10)
            most = (loop.time() - began) / INTERVAL_S + 2
            await asyncio.sleep(4 * INTERVAL_S)
            assert elsewhere(cluster) == [200, 0, 0]
            assert 2 <= len(told[0]) <= most
            assert told[1:] == [[], []]  # they have seen all pushes themselves


class TestRefusals:
    """A ps at index 1 of two; the coordinator has incarnation 100."""

    @pytest.mark.parametrize(
        ("sender", "error"),
        [
            (("/job:ps/task:0", 99), FencedError),  # of an earlier program
            (("/job:ps/task:0", 101), FencedError),  # of another timeline
            (("/job:ps/task:1", 100), UsageError),  # itself
            (("/job:ps/task:2", 100), UsageError),
            (("/job:worker/task:0", 100), UsageError),
        ],
    )
    def test_only_other_ps_tasks_of_this_timeline_are_heard(
        self, sender: tuple[str, int], error: type[Exception]
    ) -> None:
        ps = PsByHand()
        with pytest.raises(error):
            ps.ask(sender, TellCounts([(1, CONFIG, 0, [(1, 5)])]))
        assert not ps.store.optimizers()

    @pytest.mark.parametrize(
        ("base", "row"), [(-1, [(1, 5)]), (0, [(1, -5)]), (0, [(2, 5)]), (0, [(1, 1 << 44)])]
    )
    def test_numbers_that_cannot_be_are_refused(
        self, base: int, row: list[tuple[int, int]]
    ) -> None:
        ps = PsByHand()
        with pytest.raises(UsageError, match="/job:ps/task:0 has counted"):
            ps.ask(("/job:ps/task:0", 100), TellCounts([(1, CONFIG, base, row)]))
        assert not ps.store.optimizers()

    def test_what_is_told_again_changes_nothing(self) -> None:
        ps = PsByHand()
        for count in (5, 5, 3):
            ps.ask(("/job:ps/task:0", 100), TellCounts([(1, CONFIG, 0, [(1, count)])]))
        assert ps.store.push_count(1).elsewhere == 5
