"""The closure queue against simulated workers and connections, in every order hypothesis finds.

The simulation is the whole truth: what each worker has received, started and not yet reported. The
queue sees of it only what arrives. Messages on a connection keep their order and take any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from psync.closures import dispatcher
from psync.closures.closure import Closure, State
from psync.closures.dispatcher import Dispatch, GiveBack
from psync.closures.queue import RECENT_LOSSES, Action, Cancel, ClosureQueue, Settle
from psync.errors import ClosureCancelled, ClosureInputError, EndOfData

MAX_AHEAD = 8
MAX_AHEAD_BYTES = 100
MAX_LOSSES = 3


@dataclass(frozen=True)
class Report:
    """A message of a worker: what it tells the queue, and what is not on the worker any more."""

    tell: Callable[[ClosureQueue], list[Action]]
    given_back: tuple[int, ...] = ()
    is_answer: bool = False
    retires: bool = False
    ended: tuple[str, int] | None = None  # data
    updated: bool = False  # the closure had, when they ended


class Worker:
    """One life of a worker, and the two directions of its connection."""

    def __init__(self, name: str, *, answers_first: bool) -> None:
        self.name = name
        self.answers_first = answers_first  # and then tells what has finished
        self.to_worker: deque[Dispatch | Cancel | GiveBack] = deque()
        self.to_queue: deque[Report] = deque()
        self.unstarted: dict[int, Closure] = {}
        self.running: Closure | None = None
        self.stop_running = False  # it was asked to stop what it runs
        self.finished: list[int] = []  # not reported yet
        self.mean_s = 1.0
        self.sated = False  # gave back some of what it holds, and no end was reported since
        self.asked = False  # a GiveBack was sent to it and its answer has not arrived
        self.leaving = False  # it has said so, or is about to
        self.retired = False  # the queue has heard of it

    def leave(self) -> None:
        """Say that it leaves, and give back what it has not started."""
        self.leaving = True
        name = self.name
        self.to_queue.append(Report(lambda queue: queue.worker_leaves(name), retires=True))
        self.give_back(self.returnable, is_answer=False)

    @property
    def returnable(self) -> tuple[int, ...]:
        """What it may give back: a replica of a gang nobody else can run."""
        return tuple(i for i, closure in self.unstarted.items() if not closure.is_replica)

    def receive(self) -> None:
        match self.to_worker.popleft():
            case Dispatch(_, closures):
                self.unstarted |= {closure.id: closure for closure in closures}
                if self.leaving:  # these crossed its message
                    self.give_back(self.returnable, is_answer=False)
            case Cancel(_, ids):
                for closure_id in ids:
                    if self.unstarted.pop(closure_id, None) is not None:
                        self.flush()
                        self.to_queue.append(cancellation(self.name, closure_id))
                    elif self.running is not None and self.running.id == closure_id:
                        self.stop_running = True
            case GiveBack(_, ids):
                self.give_back(tuple(i for i in ids if i in self.unstarted), is_answer=True)

    def start(self) -> None:
        closure_id = next(iter(self.unstarted))
        self.running = self.unstarted.pop(closure_id)
        self.stop_running = False

    def end(self, report: Callable[[str, int], Report] | None) -> None:
        """End what runs: with a value if ``report`` is None."""
        assert self.running is not None
        closure_id, self.running = self.running.id, None
        if report is None:
            self.finished.append(closure_id)
        else:
            self.flush()
            self.to_queue.append(report(self.name, closure_id))

    def flush(self) -> None:
        if self.finished:
            name, ids, mean_s = self.name, tuple(self.finished), self.mean_s
            self.finished.clear()
            self.to_queue.append(Report(lambda queue: queue.finished(name, ids, mean_s)))

    def give_back(self, ids: tuple[int, ...], *, is_answer: bool) -> None:
        if not self.answers_first:
            self.flush()
        for closure_id in ids:
            del self.unstarted[closure_id]
        name = self.name
        self.to_queue.append(Report(lambda queue: queue.given_back(name, ids), ids, is_answer))


def failure(worker: str, closure_id: int) -> Report:
    return Report(lambda queue: queue.failed(worker, closure_id, ValueError(f"of {closure_id}")))


def end_of_data(worker: str, closure_id: int) -> Report:
    error = EndOfData(f"in closure {closure_id}")
    return Report(lambda queue: queue.end_of_data(worker, closure_id, error))


def end_of_needed(data: tuple[str, int], *, updated: bool) -> Callable[[str, int], Report]:
    """What a worker says of a closure that found the end of data that it is known to need."""

    def report(worker: str, closure_id: int) -> Report:
        error = EndOfData(f"in closure {closure_id}")
        error.data, error.updates = data, int(updated)
        tell = lambda queue: queue.end_of_data(worker, closure_id, error)  # noqa: E731
        return Report(tell, (closure_id,), ended=data, updated=updated)

    return report


def cancellation(worker: str, closure_id: int) -> Report:
    return Report(lambda queue: queue.cancelled(worker, closure_id))


class ClosureQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limits = pytest.MonkeyPatch()
        self.limits.setattr(dispatcher, "MAX_AHEAD", MAX_AHEAD)
        self.limits.setattr(dispatcher, "MAX_AHEAD_BYTES", MAX_AHEAD_BYTES)
        self.queue = ClosureQueue(max_losses=MAX_LOSSES)
        self.workers: dict[str, Worker] = {}
        self.closures: list[Closure] = []
        self.inputs: list[list[Closure]] = []  # of each closure
        self.cancelled: set[int] = set()  # by the user
        self.final: set[int] = set()
        self.sent_to: dict[int, str] = {}  # closure id -> the living worker that it was sent to
        self.errors: list[BaseException | None] = []  # of failed closures, until collected
        self.ends: list[BaseException | None] = []  # of exhausted ones, until collected
        self.pauses = 0
        self.stopping = False  # a step has asked for the end, and no error came since
        self.low_water = 0
        self.ended: dict[str, set[tuple[str, int]]] = {}  # by living worker: so the queue was told
        self.away: dict[str, set[tuple[str, int]]] = {}  # the same of lost ones that will be back

    def has_taker(self, closure: Closure) -> bool:
        """Whether a worker that stays, or will be back, has all data of a closure."""
        here = [self.ended[w.name] for w in self.workers.values() if not w.retired]
        return any(closure.needs.isdisjoint(ended) for ended in [*here, *self.away.values()])

    def may_take(self, name: str, closure: Closure) -> bool:
        return closure.needs.isdisjoint(self.ended[name]) or not self.has_taker(closure)

    def idle(self) -> list[str]:
        """The workers that may run something more, as far as the queue knows."""
        return [
            worker.name
            for worker in self.workers.values()
            if not worker.retired and worker.name not in self.sent_to.values()
        ]

    def teardown(self) -> None:
        self.limits.undo()

    # --- performing actions ---

    def perform(self, actions: list[Action]) -> None:
        kinds = [type(action) for action in actions]
        assert kinds == sorted(kinds, key=[Settle, Cancel, Dispatch, GiveBack].index)
        assert kinds.count(Settle) <= 1
        for action in actions:
            match action:
                case Settle(closures):
                    for closure in closures:
                        self.settle(closure)
                case Cancel(name, ids):
                    assert ids
                    assert all(self.sent_to[i] == name for i in ids)
                    self.workers[name].to_worker.append(action)
                case GiveBack(name, ids):
                    worker = self.workers[name]
                    assert ids
                    assert all(self.sent_to[i] == name for i in ids)
                    assert not worker.asked, "asked again before the answer"
                    assert not self.errors
                    assert self.stopping or not self.pauses
                    assert not worker.retired, "it gives back unasked"
                    idle = self.idle()
                    queued = [c for c in self.closures if c.state is State.QUEUED]
                    assert not any(self.may_take(other, c) for other in idle for c in queued)
                    for closure in (self.closures[i] for i in ids if not self.stopping):
                        assert any(self.may_take(other, closure) for other in idle)
                    worker.asked = True
                    worker.to_worker.append(action)
        self.perform_dispatches([action for action in actions if isinstance(action, Dispatch)])

    def settle(self, closure: Closure) -> None:
        assert closure.is_final
        assert closure.id not in self.final, "settled twice"
        self.final.add(closure.id)
        self.sent_to.pop(closure.id, None)
        match closure.state:
            case State.FINISHED:
                assert closure.error is None
            case State.CANCELLED:
                assert isinstance(closure.error, ClosureCancelled)
                asked = self.errors or self.stopping or closure.id in self.cancelled
                assert asked, "nobody asked for it"
            case State.FAILED:
                self.errors.append(closure.error)
                self.stopping = False
            case State.EXHAUSTED:
                self.ends.append(closure.error)
        if isinstance(closure.error, ClosureInputError):
            assert not isinstance(closure.error.__cause__, ClosureInputError)

    def perform_dispatches(self, dispatches: list[Dispatch]) -> None:
        if not dispatches:
            return
        assert not self.errors, "dispatched after an error"
        assert not self.pauses, "dispatched while paused"
        assert not self.stopping, "dispatched after a request to stop"
        assert len({dispatch.worker for dispatch in dispatches}) == len(dispatches)
        for dispatch in dispatches:
            worker = self.workers[dispatch.worker]
            assert not worker.retired, "sent to a worker that leaves"
            held_before = [i for i, name in self.sent_to.items() if name == worker.name]
            for closure in dispatch.closures:
                assert closure.state is State.HELD
                assert closure.worker == worker.name
                assert closure.id not in self.sent_to, "on two workers at once"
                assert self.may_take(worker.name, closure), "its data ended there"
                self.sent_to[closure.id] = worker.name
            worker.to_worker.append(dispatch)
            self.check_limits(dispatch, worker, held_before)
        queued = [c for c in self.closures if c.state is State.QUEUED]
        for dispatch in dispatches:
            mine = [c.id for c in queued if self.may_take(dispatch.worker, c)]
            last = dispatch.closures[-1].id
            assert not mine or last < min(mine), "not in the order of the queue"

    def check_limits(self, dispatch: Dispatch, worker: Worker, held_before: list[int]) -> None:
        held = [self.closures[i] for i in held_before] + list(dispatch.closures)
        statistics = self.queue.statistics()
        (ahead,) = [w.ahead for w in statistics.workers if w.worker == dispatch.worker]
        assert 1 <= ahead <= MAX_AHEAD
        assert len(held) <= 1 + ahead
        assert sum(closure.inline_bytes for closure in held[1:]) <= MAX_AHEAD_BYTES
        assert [c.id for c in dispatch.closures] == sorted(c.id for c in dispatch.closures)
        if len(held) > 1:
            assert statistics.queued >= len(self.workers), "ahead without a surplus"
            assert not any(len(closure.lost_on) for closure in held), "a lost closure runs alone"
            assert not (worker.sated and held_before), "ahead to one that has just given back"

    # --- what the user does ---

    @initialize(num_workers=st.integers(0, 3))
    def begin(self, num_workers: int) -> None:
        for index in range(num_workers):
            self.join(index, answers_first=bool(index % 2))

    @rule(
        num=st.sampled_from((1, 2, 3, 6, 12, 25)),
        inline_bytes=st.sampled_from((0, 0, 30, 70, 200)),
        inputs=st.lists(st.integers(1, 6), max_size=2),
        all_alike=st.booleans(),
        needs=st.sampled_from(("", "", "u", "v", "uv")),
    )
    def schedule(
        self, num: int, inline_bytes: int, inputs: list[int], all_alike: bool, needs: str
    ) -> None:
        """Schedule some closures; the first, or each, takes the values of some before it."""
        for _ in range(num):
            closure = Closure(
                len(self.closures),
                inline_bytes=inline_bytes,
                needs=frozenset((uid, 0) for uid in needs),
                dependencies=[self.closures[-i] for i in inputs if i <= len(self.closures)],
            )
            self.closures.append(closure)
            self.inputs.append(list(closure.dependencies))
            self.perform(self.queue.schedule(closure))
            inputs = inputs if all_alike else []
        self.perform(self.queue.dispatch())

    @precondition(lambda self: self.closures)
    @rule(back=st.integers(0, 20))
    def cancel(self, back: int) -> None:
        closure_id = max(0, len(self.closures) - 1 - back)
        self.cancelled.add(closure_id)
        self.perform(self.queue.cancel(closure_id))

    @precondition(lambda self: self.pauses < 2)
    @rule()
    def pause(self) -> None:
        self.pauses += 1
        self.queue.pause()

    @precondition(lambda self: self.pauses)
    @rule()
    def resume(self) -> None:
        self.pauses -= 1
        self.perform(self.queue.resume())

    @precondition(lambda self: self.errors and self.queue.ready_to_raise)
    @rule()
    def collect(self) -> None:
        assert not self.sent_to, "raised while something runs"
        assert len(self.final) == len(self.closures)
        collected = self.queue.collect_error()
        assert collected is not None
        first, further = collected
        assert first is self.errors[0]
        assert all(error in [*self.errors, *map(root, self.ends)] for error in further)
        self.errors.clear()
        self.ends.clear()

    @precondition(lambda self: not self.errors)
    @rule()
    def request_stop(self) -> None:
        self.stopping = True
        self.perform(self.queue.request_stop("the loss is NaN"))
        assert self.queue.requested_stop == "the loss is NaN"

    # --- what workers do ---

    @rule(index=st.integers(0, 3), answers_first=st.booleans())
    def join(self, index: int, answers_first: bool) -> None:
        name = f"w{index}"
        if name not in self.workers:
            self.ended[name] = set()  # its data begin anew
            self.away.pop(name, None)
            self.workers[name] = Worker(name, answers_first=answers_first)
            self.perform(self.queue.worker_joined(name))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.lose(data.draw(st.sampled_from(sorted(self.workers))))

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def is_given_up(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(sorted(self.away))))

    def give_up(self, name: str) -> None:
        del self.away[name]
        self.perform(self.queue.worker_will_not_return(name))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def dies_and_will_be_back(self, data: st.DataObject) -> None:
        self.lose(data.draw(st.sampled_from(sorted(self.workers))), returns=True)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def is_sent_away(self, data: st.DataObject) -> None:
        before = [closure.lost_on for closure in self.closures]
        self.lose(data.draw(st.sampled_from(sorted(self.workers))), blame=False)
        assert [closure.lost_on for closure in self.closures[: len(before)]] == before

    @precondition(lambda self: any(not w.leaving for w in self.workers.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.draw(data, lambda worker: not worker.leaving).leave()

    @precondition(lambda self: any(w.retired for w in self.workers.values()))
    @rule(data=st.data())
    def has_left(self, data: st.DataObject) -> None:
        """A worker that leaves ends what it runs, tells everything, and is gone."""
        worker = self.draw(data, lambda worker: worker.retired)
        while worker.to_worker:
            worker.receive()
        while worker.running or worker.unstarted:
            if not worker.running:
                worker.start()
            worker.end(None)
        worker.flush()
        before = [closure.lost_on for closure in self.closures]
        while worker.to_queue:
            self.take_report(worker)
        assert worker.name not in self.sent_to.values(), "nothing has to run twice"
        self.lose(worker.name, blame=False)
        assert [closure.lost_on for closure in self.closures[: len(before)]] == before

    def lose(self, name: str, *, blame: bool = True, returns: bool = False) -> None:
        """A worker is gone: what it had not told is never told."""
        del self.workers[name]
        ended = self.ended.pop(name)
        if returns:
            self.away[name] = ended
        self.sent_to = {i: other for i, other in self.sent_to.items() if other != name}
        self.perform(self.queue.worker_lost(name, blame=blame, returns=returns))
        most = MAX_LOSSES + RECENT_LOSSES
        assert all(len(c.lost_on) < most for c in self.closures if not c.is_final)

    @precondition(lambda self: any(w.to_worker for w in self.workers.values()))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.draw(data, lambda worker: worker.to_worker).receive()

    @precondition(lambda self: any(w.unstarted and not w.running for w in self.workers.values()))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.start_on(self.draw(data, lambda worker: worker.unstarted and not worker.running))

    def start_on(self, worker: Worker) -> None:
        running = [w.running for w in self.workers.values()]
        worker.start()
        assert worker.running not in running, "runs twice at the same time"
        assert worker.running is not None
        assert all(c.state is State.FINISHED for c in self.inputs[worker.running.id])

    @precondition(lambda self: any(w.running for w in self.workers.values()))
    @rule(data=st.data(), mean_s=st.sampled_from((0.0, 1e-4, 1e-3, 1.0)))
    def finish(self, data: st.DataObject, mean_s: float) -> None:
        worker = self.draw(data, lambda worker: worker.running)
        worker.mean_s = mean_s
        worker.end(None)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), num=st.integers(1, 9), mean_s=st.sampled_from((0.0, 1e-4, 1e-3, 1.0)))
    def work(self, data: st.DataObject, num: int, mean_s: float) -> None:
        """One worker receives everything and finishes some closures, and its reports arrive."""
        worker = self.draw(data, lambda _: True)
        while worker.to_worker:
            worker.receive()
        while num and (worker.running or worker.unstarted):
            if worker.running is None:
                self.start_on(worker)
            worker.end(None)
            num -= 1
        worker.mean_s = mean_s
        worker.flush()
        while worker.to_queue:
            self.take_report(worker)

    @precondition(lambda self: any(w.running for w in self.workers.values()))
    @rule(data=st.data(), how=st.sampled_from((failure, end_of_data)))
    def fail(self, data: st.DataObject, how: Callable[[str, int], Report]) -> None:
        self.draw(data, lambda worker: worker.running).end(how)

    @precondition(lambda self: any(w.running and w.running.needs for w in self.workers.values()))
    @rule(data=st.data(), updated=st.sampled_from((False, False, True)))
    def meet_the_end(self, data: st.DataObject, updated: bool) -> None:
        worker = self.draw(data, lambda worker: worker.running and worker.running.needs)
        assert worker.running is not None
        ended = data.draw(st.sampled_from(sorted(worker.running.needs)))
        worker.end(end_of_needed(ended, updated=updated))

    @precondition(lambda self: any(w.running and w.stop_running for w in self.workers.values()))
    @rule(data=st.data())
    def stop_running(self, data: st.DataObject) -> None:
        self.draw(data, lambda w: w.running and w.stop_running).end(cancellation)

    @precondition(lambda self: any(w.unstarted for w in self.workers.values()))
    @rule(data=st.data())
    def give_back_unasked(self, data: st.DataObject) -> None:
        worker = self.draw(data, lambda worker: worker.unstarted)
        worker.give_back(tuple(worker.unstarted), is_answer=False)

    @precondition(lambda self: any(w.finished for w in self.workers.values()))
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        self.draw(data, lambda worker: worker.finished).flush()

    @precondition(lambda self: any(w.to_queue for w in self.workers.values()))
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        self.take_report(self.draw(data, lambda worker: worker.to_queue))

    def take_report(self, worker: Worker) -> None:
        report = worker.to_queue.popleft()
        for closure_id in report.given_back:
            del self.sent_to[closure_id]
        if report.ended is not None:
            self.take_end(worker, report)
            return
        if report.is_answer:
            worker.asked = False
        if report.retires:
            worker.retired = True
        worker.sated = bool(report.given_back) and worker.name in self.sent_to.values()
        self.perform(report.tell(self.queue))

    def take_end(self, worker: Worker, report: Report) -> None:
        """A closure goes on where its data are, if it has updated nothing and there is a worker."""
        (closure,) = (self.closures[i] for i in report.given_back)
        stops = closure.state is State.CANCELLING or self.queue.ending is not None
        losses = closure.lost_on
        self.ended[worker.name].add(report.ended)
        goes_on = self.has_taker(closure) and not report.updated
        worker.sated = False
        self.perform(report.tell(self.queue))
        assert closure.lost_on == losses, "nobody is to blame"
        if goes_on:
            assert closure.state in ((State.CANCELLED,) if stops else (State.QUEUED, State.HELD))
        else:
            assert closure.state is State.EXHAUSTED

    def staying(self) -> list[str]:
        return sorted(worker.name for worker in self.workers.values() if not worker.leaving)

    def draw(self, data: st.DataObject, condition: Callable[[Worker], object]) -> Worker:
        return data.draw(
            st.sampled_from([w for _, w in sorted(self.workers.items()) if condition(w)])
        )

    # --- when everything has arrived ---

    @precondition(lambda self: self.errors)
    @rule(data=st.data())
    def everything_stops(self, data: st.DataObject) -> None:
        """After an error, every worker answers; then the error can be raised."""
        self.deliver_everything()
        while running := [worker for worker in self.workers.values() if worker.running]:
            for worker in running:
                worker.end(data.draw(st.sampled_from((None, cancellation, failure, end_of_data))))
            self.deliver_everything()
        self.collect()

    def deliver_everything(self) -> None:
        """Let all messages arrive and every worker start a closure; no closure ends."""
        busy, num_turns = True, 0
        while busy:
            busy, num_turns = False, num_turns + 1
            assert num_turns < 1000, "the messages do not end"
            for worker in list(self.workers.values()):
                while worker.to_worker or worker.to_queue:
                    busy = True
                    if worker.to_worker:
                        worker.receive()
                    else:
                        self.take_report(worker)
                if worker.finished:
                    busy = True
                    worker.flush()
                if worker.unstarted and worker.running is None:
                    busy = True
                    self.start_on(worker)

    @rule()
    def all_messages_arrive(self) -> None:
        """No closure waits for a worker, or behind another closure, while a worker is idle."""
        self.deliver_everything()
        if self.stopping:
            retired = [w for w in self.workers.values() if w.retired]
            assert not any(w.unstarted for w in self.workers.values() if w not in retired)
        if self.errors or self.pauses or self.stopping:
            return
        waiting = [c for worker in self.workers.values() for c in worker.unstarted.values()]
        waiting += [c for c in self.closures if c.state is State.QUEUED]
        for worker in self.workers.values():
            if worker.running is None and not worker.leaving:
                assert not any(self.may_take(worker.name, closure) for closure in waiting)

    @precondition(lambda self: len(self.staying()) > 1 and not self.errors and not self.stopping)
    @rule(data=st.data(), num_stuck=st.integers(1, 2))
    def nothing_waits_behind_a_closure_that_waits(
        self, data: st.DataObject, num_stuck: int
    ) -> None:
        """If some workers run a closure that does not end, the others run all the rest."""
        while self.pauses:
            self.resume()
        names = data.draw(st.permutations(self.staying()))
        stuck = names[: min(num_stuck, len(names) - 1)]
        self.deliver_everything()
        while running := [w for w in self.workers.values() if w.running and w.name not in stuck]:
            running[0].end(None)
            running[0].flush()
            self.deliver_everything()
        stuck_on = {self.workers[name].running for name in stuck}
        free = [name for name in self.staying() if name not in stuck]
        for closure in self.closures:
            if not (closure.is_final or closure in stuck_on or closure.state is State.WAITING):
                assert not any(self.may_take(name, closure) for name in free)

    @rule()
    def everything_ends(self) -> None:
        """If every worker runs and answers, every closure ends: no wake-up is lost."""
        while self.pauses:
            self.resume()
        for name in sorted(self.away):
            self.give_up(name)
        self.deliver_everything()
        while any(worker.running for worker in self.workers.values()):
            for worker in self.workers.values():
                if worker.running:
                    worker.end(None)
            self.deliver_everything()
        if self.staying() or self.errors or self.stopping:
            assert self.final == set(range(len(self.closures)))
            assert self.queue.low_water() == self.queue.next_id
            assert self.queue.is_settled(self.queue.next_id)
            assert self.queue.in_flight() == []
        if not self.errors and self.queue.is_settled(self.queue.next_id):
            collected = self.queue.collect_error()
            assert collected == ((root(self.ends[0]), ()) if self.ends else None)
            assert self.queue.ending is None
            self.ends.clear()
            self.stopping = False

    # --- what holds always ---

    @invariant()
    def low_water_is_right_and_never_falls(self) -> None:
        low_water = self.queue.low_water()
        assert low_water >= self.low_water
        self.low_water = low_water
        open_ids = set(range(len(self.closures))) - self.final
        assert low_water == min(open_ids, default=len(self.closures))

    @invariant()
    def final_closures_are_those_settled(self) -> None:
        assert {closure.id for closure in self.closures if closure.is_final} == self.final

    @invariant()
    def the_queue_knows_what_is_in_flight(self) -> None:
        in_flight = self.queue.in_flight()
        assert {closure.id: name for name, closure in in_flight} == self.sent_to
        assert len(in_flight) == self.queue.statistics().in_flight
        assert all(c.state in (State.HELD, State.CANCELLING) for _, c in in_flight)

    @invariant()
    def statistics_add_up(self) -> None:
        counts = self.queue.statistics()
        total = counts.waiting + counts.queued + counts.in_flight
        total += counts.finished + counts.failed + counts.exhausted + counts.cancelled
        assert total == len(self.closures)
        assert counts.queued == sum(c.state is State.QUEUED for c in self.closures)

    @invariant()
    def an_error_ends_everything_at_once(self) -> None:
        assert bool(self.queue.pending_errors) == bool(self.errors)
        states = {closure.state for closure in self.closures if not closure.is_final}
        if self.stopping:
            assert states <= {State.HELD, State.CANCELLING}
        if self.errors:
            assert states <= {State.CANCELLING}
            assert self.queue.ready_to_raise == (not states)


def root(error: BaseException | None) -> BaseException | None:
    return error.__cause__ if isinstance(error, ClosureInputError) else error
