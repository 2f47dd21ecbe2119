"""Ps 0 and its backup: equal after every entry, whatever they are told of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backup_by_hand import BackupByHand
from ps_by_hand import A, B, COORDINATOR, PsByHand, group_config
from psync.net.peer import Later, Reply
from psync.wire.sync_messages import Contribute, Contributed, InitTokens, ReportSchedule
from turns import Turns

GROUP = 9


class Ps0(PsByHand):
    """Ps 0, alone, with a variable of two elements, the global step, and a group of two."""

    def __init__(self, turns: Turns, **more: Any) -> None:
        super().__init__(index=0, num_ps=1)
        self.turns = turns
        self.w = self.create("w", np.zeros(2, np.float32))
        self.step = self.create("step", np.array(0))
        self.config = group_config(global_step=(0, *self.step), **more)
        self.begin(COORDINATOR, InitTokens(GROUP, self.config, -1))
        turns.settle()
        self._pushes: dict[tuple[str, int], int] = {}


def push(
    ps: PsByHand, client: tuple[str, int], number: int, w: Any, config: Any, step: int = -1
) -> Later:
    """Send a push of w, which comes along whole."""
    members = [(0, *w)]
    message = Contribute(
        GROUP, config, number, number, -1, 0, b"w", step, 1.0, number, members, -1, None
    )
    answer = ps.begin(client, message, np.ones(2, np.float32).tobytes())
    if not isinstance(answer, Later):
        ps.turns.settle()
        answer = answer.result()
    return answer


def test_it_works(turns: Turns) -> None:
    ps = Ps0(turns)
    one = push(ps, A, 1, ps.w, ps.config)
    backup = BackupByHand(ps)
    backup.catch_up()
    two = push(ps, B, 1, ps.w, ps.config)
    backup.catch_up()
    assert one.outcome.message == Contributed("accepted", 0, 1, False, 2)
    assert ps.value(ps.w).tolist() == [-0.5, -0.5]
    assert ps.value(ps.step) == 1
