"""Ps 0 and its backup: equal after every entry of the log, whatever is said of steps, and when.

The machine plays workers whose answers are lost, a coordinator, a clock, cuts, and a ps 0 that dies
after any entry.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ps_by_hand import COORDINATOR
from psync.wire.messages import FinalBelow
from step_world import WORKERS, World
from turns import Turns


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns, self.patch = Turns(), pytest.MonkeyPatch()
        self.patch.setattr(asyncio, "get_running_loop", lambda: self.turns)

    @initialize(
        needed=st.integers(1, 3),
        total=st.integers(1, WORKERS),
        mode=st.sampled_from(["free", "strict", "tensorflow_compat"]),
        fewest=st.integers(1, 2),
    )
    def begin(self, needed: int, total: int, mode: str, fewest: int) -> None:
        more: dict[str, Any] = {} if mode == "free" else {mode: True}
        self.world = World(
            self.turns, replicas_to_aggregate=needed, total_num_replicas=total,
            min_replicas=min(fewest, total), patience_s=5.0, **more,
        )  # fmt: skip
        self.closures = 0
        self.lost: list[int] = []  # closures whose worker was lost
        self.finals = 0

    @rule(index=st.integers(0, WORKERS - 1), staged=st.booleans(), again=st.booleans())
    def push(self, index: int, staged: bool, again: bool) -> None:
        worker = self.world.workers[index]
        if worker.request is not None:
            if again:
                self.world.send(worker)
            return
        if self.lost:
            closure = self.lost.pop()
        else:
            closure, self.closures = self.closures, self.closures + 1
        self.world.push(worker, staged=staged, closure=closure)

    @rule(index=st.integers(0, WORKERS - 1))
    def give_up(self, index: int) -> None:
        """A connection is lost."""
        worker = self.world.workers[index]
        if worker.answer is not None:
            worker.answer.give_up()
            worker.answer = None

    @rule(index=st.integers(0, WORKERS - 1))
    def fence(self, index: int) -> None:
        request = self.world.workers[index].request
        if request is not None:
            self.lost.append(request.closure)
        self.world.fence(self.world.workers[index])

    @rule(alive=st.sets(st.integers(0, WORKERS - 1)), queued=st.booleans())
    def report(self, alive: set[int], queued: bool) -> None:
        self.world.report(sorted(alive), queued=queued)

    @rule()
    def final_below(self) -> None:
        held = [each.request.closure for each in self.world.workers if each.request is not None]
        below = min([*held, *self.lost, self.closures])
        self.world.ps.begin(COORDINATOR, FinalBelow(below))

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.turns.advance(seconds)
        self.world.hear()

    @rule(entries=st.sampled_from([1, 2, 1000]))
    def ship(self, entries: int) -> None:
        self.world.ship(entries)

    @rule()
    def back_up(self) -> None:
        self.world.back_up()

    @precondition(lambda self: self.world.backup is not None)
    @rule(ahead=st.integers(0, 3))
    def die(self, ahead: int) -> None:
        self.world.die(ahead)

    @precondition(lambda self: not self.world.is_cut)
    @rule()
    def cut(self) -> None:
        self.world.cut()

    @precondition(lambda self: self.world.is_cut)
    @rule()
    def resume(self) -> None:
        self.world.resume()

    @invariant()
    def what_was_accepted_counts_once(self) -> None:
        world = self.world
        open_pushes = len(world.ps.services.closer.steps.pending())
        assert world.accepted <= world.counted() + open_pushes
        assert world.counted() <= world.sent

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.settle()
                counted = self.world.counted()
                assert self.world.accepted <= counted <= self.world.accepted + self.world.unknown
                (group,) = self.world.ps.services.statistics()["sync"].values()
                assert self.world.ps.value(self.world.step) == group["steps"] == group["step"]
                self.world.end()
        finally:
            self.patch.undo()


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
