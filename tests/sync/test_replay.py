"""What a backup does when it reads of synchronous steps in its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from psync.sync.followed_steps import LastStep
from psync.sync.replay import SyncFollower

from ps_by_hand import PsByHand, group_config
from psync.net.peer import Reply
from psync.ps.backup_host import AsIfFrom
from psync.store.store import Key
from psync.sync.cross_ps_sets import ShareNumbers
from psync.sync.group import Close, Contribution
from psync.wire.codec import Message
from psync.wire.recovery_messages import CountPush, SetSteps
from psync.wire.sync_messages import CloseStep, StagePush
from sync_cluster import GROUP

WORKER = "/job:worker/task:0"
REPLICA = (WORKER, 1000)
ONES = memoryview(np.ones(2, np.float32).tobytes())


class Reader(PsByHand):
    """Reads a log, as the backup of a ps does."""

    def __init__(self, *, of_ps_0: bool = True) -> None:
        super().__init__()
        self.config = group_config()
        shares = ShareNumbers(2, "/job:ps/task:0") if of_ps_0 else None
        self.follower = SyncFollower("/job:ps/task:0", self.sync, shares)
        self._log = self.follower.handlers()
        self._state: dict[str, Any] = {}  # of the log, whoever an entry is of

    def read(self, message: Message, *body: memoryview) -> None:
        peer: Any = AsIfFrom(*REPLICA, self._state)
        assert isinstance(self._log[type(message)].run(peer, message, list(body)), Reply)

    def staged(self, key: Key, push: int = 1) -> StagePush:
        return StagePush(GROUP, self.config, push, 0, 0, [key])

    def counted(self, push: int = 1, *members: Sequence[int], step: int = 0) -> CountPush:
        return CountPush(
            GROUP, self.config, step, push, 7, push, b"set", 0, 1.0,
            0 if members else -1, [(ps, v, i) for ps, v, i in members] or None,
            [8] * len(members), None, spread=False,
        )  # fmt: skip

    def closed(self, *pushes: int, step: int = 0) -> CloseStep:
        named = [(*REPLICA, push, 1.0) for push in pushes]
        return CloseStep(GROUP, self.config, step, named)


def contribution(push: int = 1) -> Contribution:
    return Contribution(REPLICA, push, 0, 7, push, b"set", 0, 1.0)


def test_parts_are_kept_pushes_counted_and_the_step_is_applied() -> None:
    reader = Reader()
    v = reader.create("v", np.zeros(2, np.float32))
    reader.read(reader.staged(v), ONES)
    reader.read(reader.counted())
    assert reader.follower.steps.left() == {GROUP: [(0, contribution())]}
    assert reader.value(v).tolist() == [0, 0]
    reader.read(reader.closed(1))
    assert reader.value(v).tolist() == [-0.5, -0.5]
    assert (reader.follower.steps.left(), reader.sync.steps()) == ({}, [(GROUP, 1)])
    assert reader.follower.steps.calls() == [(GROUP, 7, 1, b"set")]
    assert reader.sync.statistics()["bytes"] == 0


def test_a_push_that_came_whole_is_kept_with_what_belongs_to_others() -> None:
    """So that the last step can be closed everywhere once more."""
    reader = Reader()
    v = reader.create("v", np.zeros(2, np.float32))
    two = memoryview(np.array([1, 1, 2, 2], np.float32).tobytes())
    reader.read(reader.counted(1, (0, *v), (1, v[0], 1)), two)
    reader.read(reader.closed(1))
    assert reader.value(v).tolist() == [-0.5, -0.5]
    last = reader.follower.steps.last[GROUP]
    assert isinstance(last, LastStep)
    assert last.closing.close == Close(GROUP, 0, ((*REPLICA, 1, 1.0),), partial=False)
    (((share, body),),) = last.closing.along
    assert (share.ps, bytes(body)) == (1, bytes(two[8:]))


def test_the_backup_of_another_ps_remembers_no_step_and_keeps_nothing_of_others() -> None:
    reader = Reader(of_ps_0=False)
    v = reader.create("v", np.zeros(2, np.float32))
    reader.read(reader.staged(v), ONES)
    reader.read(reader.closed(1))
    assert (reader.follower.steps.last, reader.sync.steps()) == ({}, [(GROUP, 1)])
    assert reader.value(v).tolist() == [-0.5, -0.5]


def test_an_snapshot_says_how_far_groups_are() -> None:
    reader = Reader()
    groups = [(GROUP, reader.config, 5, 4), (GROUP + 1, reader.config, -1, -1)]
    reader.read(SetSteps(groups))
    assert reader.sync.steps() == [(GROUP, 5)]
    assert reader.sync.global_steps.raised(GROUP) == 4
    assert reader.sync.global_steps.raised(GROUP + 1) == -1
    assert set(reader.sync.raw_configs()) == {GROUP, GROUP + 1}


def test_a_group_with_a_variable_on_several_ps_tasks_is_known_as_one() -> None:
    reader = Reader()
    reader.read(reader.counted())
    assert not reader.follower.spread
    reader.read(replace(reader.counted(2), spread=True))
    assert reader.follower.spread == {GROUP}
