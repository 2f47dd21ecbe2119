"""Accumulated pushes, tokens and membership together, driven at random.

The machine plays workers that pull, push and wait, die and come back, a coordinator that says who
lives and what is left to do, and ps tasks that apply what is closed. A plain model beside it knows
which pushes were counted.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from psync.store.sync_config import SyncConfig
from psync.sync.steps import Action, Answer, Close, Contribution, Refuse, SyncSteps
from sync_tools import GROUP, config

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


class SyncMachine(RuleBasedStateMachine):
    @initialize(
        needed=st.integers(1, 4),
        total=st.integers(1, WORKERS),
        mode=st.sampled_from(["free", "strict", "deterministic", "compat"]),
    )
    def begin(self, needed: int, total: int, mode: str) -> None:
        options: dict[str, Any] = {
            "free": {}, "strict": {"strict": True}, "deterministic": {"deterministic": True},
            "compat": {"tensorflow_compat": True},
        }[mode]  # fmt: skip
        if mode == "deterministic":
            needed = total
        self.config: SyncConfig = config(needed, total, **options)
        self.steps = SyncSteps()
        self.steps.define(GROUP, self.config, 0)
        self.workers = [Worker() for _ in range(total)]
        self.closing: Close | None = None
        self.global_step = 0  # raised when a step has been applied
        self.applied: list[tuple[tuple[str, int, int, float], ...]] = []
        self.counted: set[tuple[str, int, int]] = set()  # accepted, by (task, incarnation, number)
        self.closures = 0
        self.open: dict[int, int] = {}  # closure that a worker holds: worker
        self.queue: list[int] = []  # closures that lost their worker
        self.calls: set[int] = set()  # closures that were counted
        self.report()

    def task(self, index: int) -> str:
        return f"/job:worker/task:{index}"

    # What the rule returned.

    def perform(self, actions: list[Action]) -> None:
        for act in actions:
            if isinstance(act, Close):
                assert self.closing is None
                assert act.step == self.global_step
                assert act.pushes
                self.closing = act
            elif isinstance(act, Answer):
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
        self.perform(self.steps.members(alive, [], 0.0))
        self.perform(self.steps.schedule(bool(self.queue) or self.more, list(self.open)))

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
        if not late:
            worker.pulled = self.global_step
        worker.number += 1
        worker.waiting = True
        contribution = Contribution(
            (self.task(index), worker.incarnation), worker.number, worker.number, closure, 0,
            b"w", worker.pulled, 1.0,
        )  # fmt: skip
        self.report()  # which may close a step, before the push comes
        if worker.pulled >= self.steps.step(GROUP) and closure not in self.calls:
            self.calls.add(closure)
            self.counted.add((self.task(index), worker.incarnation, worker.number))
        self.perform(self.steps.contribute(GROUP, contribution))

    @precondition(lambda self: self.closing is not None)
    @rule()
    def applied_by_every_ps(self) -> None:
        assert self.closing is not None
        close, self.closing = self.closing, None
        self.applied.append(close.pushes)
        self.global_step += 1
        self.perform(self.steps.closed(GROUP, close.step))

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
        self.perform(self.steps.fence(self.task(index), worker.incarnation + 1))
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
        self.steps.forget(GROUP, replica, worker.number)
        self.perform(
            self.steps.contribute(
                GROUP,
                Contribution(
                    replica, worker.number, worker.number, worker.closure, 0, b"w", worker.pulled,
                    1.0,
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

    # What always holds.

    @invariant()
    def tokens_are_conserved(self) -> None:
        if not hasattr(self, "steps"):
            return
        (group,) = self.steps.statistics().values()
        tokens = group["tokens"]
        assert tokens["published"] == tokens["taken"] + tokens["void"] + tokens["left"]

    @invariant()
    def every_push_is_counted_once(self) -> None:
        if not hasattr(self, "steps"):
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
        if not hasattr(self, "steps"):
            return
        assert self.global_step == len(self.applied)
        assert self.steps.step(GROUP) == self.global_step + (self.closing is not None)

    @invariant()
    def never_do_all_wait(self) -> None:
        if not hasattr(self, "steps") or self.closing is not None:
            return
        taking_part = [worker for worker in self.workers if worker.alive and worker.has_data]
        assert not taking_part or not all(worker.waiting for worker in taking_part)
        if not self.more and not self.queue and self.open:
            assert not all(self.workers[index].waiting for index in self.open.values())

    @invariant()
    def bound_tokens_let_nobody_contribute_twice(self) -> None:
        if not hasattr(self, "steps") or not self.config.bound:
            return
        for pushes in self.applied:
            replicas = [push[:2] for push in pushes]
            for replica in replicas:
                assert replicas.count(replica) <= self.config.allowance

    @invariant()
    def a_deterministic_sum_is_in_order(self) -> None:
        if not hasattr(self, "steps") or not self.config.deterministic:
            return
        for pushes in self.applied:
            assert list(pushes) == sorted(pushes)


TestSyncMachine = SyncMachine.TestCase
TestSyncMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
