"""Gangs among closures, workers that die and errors, in every order hypothesis finds.

The simulation is that of ``queue_machine``; a gang is begun when the queue allows it, and
is over when all its replicas are.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from psync.closures.closure import Closure, Replica, State
from psync.closures.queue import Action, Barrier
from queue_machine import ClosureQueueMachine


@dataclass(eq=False)
class Run:
    """A gang, and what keeps its place."""

    barrier: Barrier
    replicas: list[Replica]  # empty until it has begun


class GangsMachine(ClosureQueueMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    # --- what the coordinator does ---

    def perform(self, actions: list[Action]) -> None:
        super().perform(actions)
        self.look()

    def settle(self, closure: Closure) -> None:
        if not closure.is_replica:
            super().settle(closure)
            return
        assert closure.is_final
        assert closure.id not in self.final, "settled twice"
        self.final.add(closure.id)
        self.sent_to.pop(closure.id, None)
        assert (closure.error is None) == (closure.state is State.FINISHED)

    def look(self) -> None:
        if not self.runs:
            return
        run = self.runs[0]
        if not run.replicas and self.queue.ending is None:
            if self.ready() and self.queue.may_begin(run.barrier):
                self.begin(run)
        elif all(replica.is_final for replica in run.replicas):
            self.open(run)

    def begin(self, run: Run) -> None:
        assert not self.sent_to, "all workers are idle"
        assert self.final >= set(range(run.barrier.cutoff)), "all before it has ended"
        names = self.ready()
        run.replicas = [Replica(len(self.closures) + i) for i in range(len(names))]
        self.closures += run.replicas
        self.inputs += [[] for _ in names]
        self.perform(self.queue.begin_gang(list(zip(names, run.replicas, strict=True))))

    def ready(self) -> list[str]:
        """The workers of which the queue does not know that they leave."""
        return sorted(name for name, worker in self.workers.items() if not worker.retired)

    def open(self, run: Run) -> None:
        self.runs.remove(run)
        self.perform(self.queue.open_barrier(run.barrier))

    # --- what the user does ---

    @rule(num=st.sampled_from((1, 2, 3, 6, 12)), inputs=st.lists(st.integers(1, 6), max_size=2))
    def schedule(self, num: int, inputs: list[int]) -> None:
        """Schedule some closures; the first takes values of some before it, never a replica's."""
        for _ in range(num):
            before = [closure for closure in self.closures if not closure.is_replica]
            closure = Closure(
                len(self.closures),
                dependencies=[before[-i] for i in inputs if i <= len(before)],
            )
            self.closures.append(closure)
            self.inputs.append(list(closure.dependencies))
            self.perform(self.queue.schedule(closure))
            inputs = []
        self.perform(self.queue.dispatch())

    @precondition(lambda self: len(self.runs) < 3 and not self.errors)
    @rule()
    def run(self) -> None:
        self.runs.append(Run(self.queue.add_barrier(), []))
        self.look()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def cancel_run(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if not run.replicas:
            self.open(run)
        for replica in run.replicas:
            self.perform(self.queue.cancel(replica.id))

    # --- what workers do ---

    @precondition(lambda self: self.may_give_back())
    @rule(data=st.data())
    def give_back_unasked(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.may_give_back()))
        worker.give_back(tuple(worker.unstarted), is_answer=False)

    def may_give_back(self) -> list:
        return [
            worker
            for _, worker in sorted(self.workers.items())
            if worker.unstarted and not any(c.is_replica for c in worker.unstarted.values())
        ]

    # --- what holds always ---

    @invariant()
    def a_gang_shares_the_workers_with_nobody(self) -> None:
        running = {self.closures[closure_id] for closure_id in self.sent_to}
        if any(closure.is_replica for closure in running):
            assert running <= set(self.runs[0].replicas)

    @invariant()
    def nothing_overtakes_a_gang(self) -> None:
        for run in self.runs:
            for closure in self.closures[run.barrier.cutoff :]:
                if not closure.is_replica:
                    assert closure.state is State.WAITING or closure.is_final

    @invariant()
    def nobody_waits_for_nobody(self) -> None:
        """While a gang has not begun, something runs, or nothing can."""
        if self.runs and not self.runs[0].replicas:
            assert self.sent_to or self.pauses or not self.ready()


GangsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestGangs = pytest.mark.promise("gangs.all-or-none")(GangsMachine.TestCase)
