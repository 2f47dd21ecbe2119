"""Accumulated pushes, tokens and membership together, driven at random.

The machine plays workers that pull, push and wait, die and come back, a coordinator that says who
lives and what is left to do, and ps tasks that apply what is closed. A plain model beside it knows
which pushes were counted. At any time the rule gets a backup, which is told the same and must
answer alike, and at any time that is promoted. The second machine says anything in any order.
"""

from __future__ import annotations

from dataclasses import replace
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

from psync.errors import PsyncError, TransportError
from psync.store.snapshot_state import NOTHING
from psync.store.sync_config import SyncConfig
from psync.sync.steps import Action, Answer, Close, Contribution, Refuse, SyncSteps
from sync_tools import GROUP, Pair, call_of_push, config, ledger_of

WORKERS = 3


class Worker:
    """One worker: idle, or waiting for an answer; with what it pulled last."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.alive = True
        self.pulled = 0
        self.number = 0
        self.closure: int | None = None
        self.waiting = False
        self.has_data = True
        self.token = 0


class SyncMachine(RuleBasedStateMachine):
    @initialize(
        needed=st.integers(1, 4),
        total=st.integers(1, WORKERS),
        mode=st.sampled_from(["free", "strict", "deterministic", "compat"]),
        others=st.integers(0, 1),
    )
    def begin(self, needed: int, total: int, mode: str, others: int) -> None:
        options: dict[str, Any] = {
            "free": {}, "strict": {"strict": True}, "deterministic": {"deterministic": True},
            "compat": {"tensorflow_compat": True},
        }[mode]  # fmt: skip
        if mode == "deterministic":
            needed = total
        self.config: SyncConfig = config(needed, total, **options)
        self.pair = Pair(others)
        self.pair.define(GROUP, self.config, 0)
        self.workers = [Worker() for _ in range(total)]
        self.closing: Close | None = None
        self.answers: list[Answer] = []  # that come when the step is applied
        self.global_step = 0  # raised when a step has been applied
        self.applied: list[tuple[tuple[str, int, int, float], ...]] = []
        self.counted: set[tuple[str, int, int]] = set()  # accepted, by (task, incarnation, number)
        self.closures = 0
        self.open: dict[int, int] = {}  # closure that a worker holds: worker
        self.queue: list[int] = []  # closures that lost their worker
        self.calls: set[int] = set()  # closures that were counted
        self.report()

    @property
    def steps(self) -> SyncSteps:
        return self.pair.rule

    def task(self, index: int) -> str:
        return f"/job:worker/task:{index}"

    # What the rule returned.

    def perform(self, actions: list[Action]) -> None:
        for act in actions:
            if isinstance(act, Close):
                assert self.closing is None
                assert act.step == self.global_step
                assert act.pushes
                self.closing, self.answers = act, [*act.answers]
            elif isinstance(act, Answer):
                self.workers[int(act.replica[0][-1])].token = act.token
                self.answered(act.replica, act.number)
                if act.outcome == "accepted":
                    assert act.staleness == 0
            else:
                assert isinstance(act, Refuse)
                self.answered(act.replica, act.number, refused=True)

    def answered(self, replica: tuple[str, int], number: int, *, refused: bool = False) -> None:
        index = int(replica[0][-1])
        worker = self.workers[index]
        if worker.incarnation != replica[1] or not worker.alive:
            assert refused  # nobody listens to what a dead replica is told
            return
        assert worker.number == number
        assert worker.waiting
        worker.waiting = False
        if worker.closure is not None:
            self.open.pop(worker.closure, None)
            worker.closure = None
        self.report()

    def report(self) -> None:
        if not any(w.alive and w.has_data for w in self.workers):
            for worker in self.workers:  # as the coordinator does: those that are left count again
                worker.has_data = True
        alive = {
            self.task(i): w.incarnation
            for i, w in enumerate(self.workers)
            if w.alive and w.has_data
        }
        self.perform(self.pair.tell("members", alive, [], 0.0))
        self.perform(self.pair.tell("schedule", bool(self.queue) or self.more, list(self.open)))

    more = True  # closures that nobody has begun are queued

    # What happens.

    @precondition(lambda self: any(w.alive and not w.waiting for w in self.workers))
    @rule(data=st.data(), late=st.booleans())
    def push(self, data: st.DataObject, late: bool) -> None:
        """A worker runs a closure: it pulled before (late: long ago), and pushes now."""
        free = [i for i, w in enumerate(self.workers) if w.alive and not w.waiting]
        index = data.draw(st.sampled_from(free))
        worker = self.workers[index]
        if self.queue:
            closure = self.queue.pop()
        elif self.more:
            closure, self.closures = self.closures, self.closures + 1
        else:
            return
        worker.closure, self.open[closure] = closure, index
        if not late:  # who has heard from every ps may know more than ps 0
            worker.pulled = max(self.global_step, worker.token)
        worker.number += 1
        worker.waiting = True
        contribution = Contribution(
            (self.task(index), worker.incarnation), worker.number, worker.number,
            call_of_push(closure), b"w", worker.pulled, 1.0, [],
        )  # fmt: skip
        self.report()  # which may close a step, before the push comes
        if worker.pulled >= self.steps.present(GROUP) and closure not in self.calls:
            self.calls.add(closure)
            self.counted.add((self.task(index), worker.incarnation, worker.number))
        self.perform(self.pair.tell("contribute", GROUP, contribution))

    @precondition(lambda self: self.answers)
    @rule()
    def applied_here(self) -> None:
        answers, self.answers = self.answers, []
        for act in answers:
            worker = self.workers[int(act.replica[0][-1])]
            if worker.alive and worker.waiting:
                if (worker.incarnation, worker.number) == (act.replica[1], act.number):
                    self.perform([act])

    @precondition(lambda self: self.closing is not None)
    @rule()
    def applied_by_every_ps(self) -> None:
        assert self.closing is not None
        self.applied_here()
        close, self.closing = self.closing, None
        self.applied.append(close.pushes)
        self.global_step += 1
        self.perform(self.pair.tell("closed", GROUP, close.step))

    @precondition(lambda self: sum(w.alive for w in self.workers) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, w in enumerate(self.workers) if w.alive]))
        worker = self.workers[index]
        worker.alive = worker.waiting = False
        if worker.closure is not None:
            del self.open[worker.closure]
            self.queue.append(worker.closure)
            worker.closure = None
        self.perform(self.pair.tell("fence", self.task(index), worker.incarnation + 1))
        self.report()

    @precondition(lambda self: sum(w.alive and w.has_data for w in self.workers) > 1)
    @rule(data=st.data())
    def run_out_of_data(self, data: st.DataObject) -> None:
        """A living worker takes part no more, though it may push, and wait, all the same."""
        having = [i for i, w in enumerate(self.workers) if w.alive and w.has_data]
        self.workers[data.draw(st.sampled_from(having))].has_data = False
        self.report()

    @precondition(lambda self: any(not w.alive for w in self.workers))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, w in enumerate(self.workers) if not w.alive]))
        worker = self.workers[index]
        worker.alive, worker.has_data, worker.number = True, True, 0
        worker.incarnation += 1
        worker.pulled = self.global_step
        self.report()

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A connection was lost while a worker waited, and the request is repeated."""
        waiting = [i for i, w in enumerate(self.workers) if w.waiting]
        if not waiting:
            return
        index = data.draw(st.sampled_from(waiting))
        worker = self.workers[index]
        replica = (self.task(index), worker.incarnation)
        self.pair.tell("forget", GROUP, replica, worker.number)
        self.answers = [each for each in self.answers if each.replica != replica]
        self.perform(
            self.pair.tell(
                "contribute",
                GROUP,
                Contribution(
                    replica, worker.number, worker.number, call_of_push(worker.closure), b"w",
                    worker.pulled, 1.0, [],
                ),
            )
        )  # fmt: skip

    @rule()
    def end_the_schedule(self) -> None:
        self.more = False
        self.report()

    @rule()
    def schedule_more(self) -> None:
        self.more = True
        self.report()

    @rule()
    def back_up(self) -> None:
        self.pair.copy()

    @rule()
    def promote(self) -> None:
        self.pair.promote()

    # What always holds.

    @invariant()
    def tokens_are_conserved(self) -> None:
        if not hasattr(self, "pair"):
            return
        (group,) = self.steps.statistics().values()
        tokens = group["tokens"]
        assert tokens["published"] == tokens["taken"] + tokens["void"] + tokens["left"]

    @invariant()
    def every_push_is_counted_once(self) -> None:
        if not hasattr(self, "pair"):
            return
        closed = [push[:3] for pushes in self.applied for push in pushes]
        closing = [push[:3] for push in self.closing.pushes] if self.closing else []
        assert len(set(closed + closing)) == len(closed + closing)
        assert set(closed + closing) <= self.counted
        open_pushes = len(self.counted) - len(closed + closing)
        (group,) = self.steps.statistics().values()
        assert open_pushes == group["counted"]

    @invariant()
    def the_global_step_is_the_number_of_applied_updates(self) -> None:
        if not hasattr(self, "pair"):
            return
        assert self.global_step == len(self.applied)
        present = self.steps.present(GROUP)
        assert present == self.global_step + (self.closing is not None)

    @invariant()
    def never_do_all_wait(self) -> None:
        if not hasattr(self, "pair") or self.closing is not None:
            return
        taking_part = [worker for worker in self.workers if worker.alive and worker.has_data]
        assert not taking_part or not all(worker.waiting for worker in taking_part)
        if not self.more and not self.queue and self.open:
            assert not all(self.workers[index].waiting for index in self.open.values())

    @invariant()
    def bound_tokens_let_nobody_contribute_twice(self) -> None:
        if not hasattr(self, "pair") or not self.config.strict:
            return
        for pushes in self.applied:
            replicas = [push[:2] for push in pushes]
            for replica in replicas:
                assert replicas.count(replica) <= self.config.allowance

    @invariant()
    def a_deterministic_sum_is_in_order(self) -> None:
        if not hasattr(self, "pair") or not self.config.deterministic:
            return
        for pushes in self.applied:
            assert list(pushes) == sorted(pushes)


TestSyncMachine = pytest.mark.promise("steps.never-stuck")(SyncMachine.TestCase)
TestSyncMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


TASKS = st.sampled_from([f"/job:worker/task:{index}" for index in range(2)])
BORN = st.integers(1, 2)
GROUPS = st.integers(0, 1)
CLOSURES = st.integers(0, 3)


class AnythingMachine(RuleBasedStateMachine):
    """Inputs as no cluster sends them: rule and backup decide, or refuse, the same."""

    @initialize(
        needed=st.integers(1, 2),
        fewest=st.integers(1, 2),
        mode=st.sampled_from(["free", "strict", "tensorflow_compat"]),
        noted=st.booleans(),
        others=st.integers(0, 1),
    )
    def begin(self, needed: int, fewest: int, mode: str, noted: bool, others: int) -> None:
        more: dict[str, Any] = {} if mode == "free" else {mode: True}
        self.group_config = config(needed, 2, min_replicas=fewest, patience_s=5.0, **more)
        counted = ((0, 1, 0, b"w"), (1, 2, 1, b"w"))
        before = replace(NOTHING, counted=counted, final_below=1) if noted else NOTHING
        self.pair = Pair(others, ledger_of(before))
        self.closing: dict[int, int] = {}  # group: the step that is being closed
        self.now = 0.0
        self.pair.define(0, self.group_config, 0)
        self.pair.copy()

    def tell(self, what: str, *args: Any) -> None:
        try:
            actions = self.pair.tell(what, *args)
        except PsyncError:
            return
        self.closing |= {act.group: act.step for act in actions if isinstance(act, Close)}

    @rule(group=GROUPS, step=st.integers(0, 3))
    def define(self, group: int, step: int) -> None:
        self.pair.define(group, self.group_config, step)

    @rule(
        group=GROUPS,
        task=TASKS,
        born=BORN,
        number=st.integers(1, 6),
        unheard=st.integers(0, 2),
        closure=st.none() | CLOSURES,
        ordinal=st.integers(0, 1),
        variables=st.sampled_from([b"w", b"w", b"v"]),
        age=st.sampled_from([0, 0, 0, 1, 2, -1]),
    )
    def contribute(
        self, group: int, task: str, born: int, number: int, unheard: int, closure: int | None,
        ordinal: int, variables: bytes, age: int,
    ) -> None:  # fmt: skip
        present = self.pair.rule.present(group)
        local_step = max(-1, present - age)
        push = Contribution(
            (task, born), number, number - unheard, call_of_push(closure, ordinal), variables,
            local_step, 1.0, [],
        )  # fmt: skip
        self.tell("contribute", group, push)

    @rule(group=GROUPS, task=TASKS, born=BORN, number=st.integers(1, 4))
    def forget(self, group: int, task: str, born: int, number: int) -> None:
        self.tell("forget", group, (task, born), number)

    @precondition(lambda self: self.closing)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def end_step(self, data: st.DataObject, failed: bool) -> None:
        group = data.draw(st.sampled_from(sorted(self.closing)))
        step = self.closing.pop(group)
        if failed:
            self.tell("close_failed", group, TransportError("a ps is lost"))
        else:
            self.tell("closed", group, step)

    @rule(alive=st.dictionaries(TASKS, BORN), seconds=st.integers(0, 4))
    def members(self, alive: dict[str, int], seconds: int) -> None:
        self.now += seconds
        self.tell("members", alive, ["/job:worker/task:1"], self.now)

    @rule(seconds=st.integers(0, 6))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.tell("tick", self.now)

    @rule(queued=st.booleans(), in_flight=st.lists(CLOSURES))
    def schedule(self, queued: bool, in_flight: list[int]) -> None:
        self.tell("schedule", queued, in_flight)

    @rule(task=TASKS, below=st.integers(1, 3))
    def fence(self, task: str, below: int) -> None:
        self.tell("fence", task, below)

    @rule(group=GROUPS, count=st.integers(-1, 3))
    def init_tokens(self, group: int, count: int) -> None:
        self.tell("init_tokens", group, count)

    @rule(closure=CLOSURES)
    def final_below(self, closure: int) -> None:
        self.tell("final_below", closure)

    @rule()
    def finish(self) -> None:
        self.tell("finish")

    @rule(sure=st.integers(0, 9))
    def end(self, sure: int) -> None:
        if not sure:
            self.tell("end", "done")

    @rule()
    def back_up(self) -> None:
        self.pair.copy()

    @rule()
    def promote(self) -> None:
        self.pair.promote()


TestAnythingMachine = AnythingMachine.TestCase
TestAnythingMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
