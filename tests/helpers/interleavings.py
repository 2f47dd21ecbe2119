"""Two workers, two ps tasks and their synchronous steps, one event at a time.

Real are ``StepCloser``, ``PsSync``, ``Staging`` and the rule; workers, the coordinator and
connections are played. A ``State`` is plain data. A ``World`` is made from it, plays one event and
is a ``State`` again. ``explore`` visits all states.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from msgspec import msgpack

from psync.client.counters import PulledSteps
from psync.net.connection import AsIfFrom, OwnRequest
from psync.net.platform import Parts
from psync.ps.executor import Executor
from psync.ps.plans import ShardSet
from psync.store.commit_log import CommitLog
from psync.store.ledger import Ledger
from psync.sync import step, step_closer
from psync.sync.ps_sync import CLOSER, PsSync
from psync.sync.step import NOWHERE
from psync.sync.step_closer import StepCloser, _Here
from psync.wire import messages as m
from psync.wire.closure_numbers import PART_BITS
from psync.wire.codec import decode, encode
from sync_tools import GROUP, config

BOTH = (0, 1)


class Push(NamedTuple):
    task: str
    incarnation: int
    number: int
    closure: int
    local: int
    places: tuple[int, ...]  # ps tasks that have a part

    @property
    def key(self) -> Any:
        return GROUP, (self.task, self.incarnation), self.number


class Worker(NamedTuple):
    incarnation: int = 1
    pushes: int = 0
    alone: int = -1  # the step until which nothing was on ps 1, as far as it knows
    push: Push | None = None  # whose answers it waits for
    sent: tuple[int, int] = (0, 0)  # how often, to each ps
    heard: tuple[str, str] = ("", "")  # the answer of each ps
    token: int = 0  # that it has got with that of ps 0


class Ps(NamedTuple):
    parts: tuple[Push, ...] = ()
    step: int | None = None  # None: no step was closed
    fenced: tuple[tuple[str, int], ...] = ()
    waiting: tuple[tuple[Push, int], ...] = ()  # requests: a push, and which time it was sent
    applied: tuple[tuple[int, frozenset[Push]], ...] = ()  # steps
    elsewhere: int = NOWHERE  # see ``KnownGroup``


class State(NamedTuple):
    queue: tuple[int, ...]  # closures that do not run
    faults: tuple[tuple[str, int], ...]  # how many may still happen
    workers: tuple[Worker, ...] = (Worker(), Worker())
    ended: frozenset[tuple[int, str]] = frozenset()  # closures, and what they were told
    wire: frozenset[tuple[Any, ...]] = frozenset()  # from workers, in any order
    down: tuple[Any, ...] = ()  # from ps 0 to ps 1, in order
    up: tuple[Any, ...] = ()
    ps: tuple[Ps, Ps] = (Ps(), Ps())
    asks: bool = False  # ps 0 has said FollowParts on this connection
    told: bool | None = None  # and ps 1 has heard it; None: on no connection
    here: tuple[Any, ...] = ()  # what ps 0 knows of parts
    rule: bytes = b""
    closing: tuple[Any, ...] = ()  # the step that is outgoing
    is_settled: bool = True
    reported: Any = None


class Violation(BaseException):  # no error handling of the product is to see it
    pass


class Part:
    """The part of a push on one ps."""

    nbytes = 1
    body = ()

    def __init__(self, push: Push, ps: int) -> None:
        self.push, self.key, self.local_step = push, push.key, push.local
        self.known = SETS[ps == 0 and 1 in push.places]


class Asked(OwnRequest[Any]):
    """The request of a push, sent for the ``attempt``-th time."""

    __slots__ = ("attempt", "push")


class Far(AsIfFrom):
    """The connection of ps 0, as ps 1 sees it."""

    up: Any = None

    def notify(self, message: m.Held) -> None:
        if not self.is_closed:
            self.up.append(("held", tuple(message.parts)))


class Loop:
    """In place of the event loop: it turns once at the end of an event."""

    create_task = None  # nothing takes long
    call_later = staticmethod(lambda *_: None)  # what people are shown is no state
    time = staticmethod(float)

    def __init__(self) -> None:
        self.soon: deque[Any] = deque()

    def call_soon(self, *call: Any) -> None:
        self.soon.append(call)

    def drain(self) -> None:
        while self.soon:
            call, *args = self.soon.popleft()
            call(*args)


class KnownGroup(step.KnownGroup):
    """It applies nothing, and notes which parts it should."""

    takes_norms = spread = False
    norms = broken = None
    number, touched, answered = GROUP, (), -1
    rule: Any = SimpleNamespace(may_raise=False)

    def __init__(self, cluster: Cluster, state: Ps) -> None:
        self.config, self.raw, self.elsewhere = cluster.config, cluster.raw, state.elsewhere
        self.applied = [*state.applied]

    def keys(self, _: Any) -> tuple[()]:
        return ()

    def step_of(self, message: m.CloseStep, parts: Any) -> Any:
        pushes = frozenset(part.push for part, _ in parts)
        apply = partial(self.applied.append, (message.step, pushes))
        return SimpleNamespace(
            layout=step.NO_LAYOUT, number=message.step, alone=(), known=self, whole=apply
        )


class Others:
    """In place of ``AllPs``: what ps 0 says to ps 1 waits in ``World.down``."""

    addresses, own = BOTH, AsIfFrom((CLOSER, 0))
    world: Any

    def __init__(self, closer: Any) -> None:
        self.closer, self.heard = closer, closer.heard
        self.following: dict[int, Any] = {}

    def follow(self, _: Any) -> None:
        if not self.world.asks:
            self.world.asks = True
            self.world.down.append(("follow",))

    def tell(self, message: m.CloseStep, parts: Any, then: Any) -> None:
        self.world.then = then
        is_alone = message.step < self.closer.groups[GROUP].elsewhere
        if not is_alone:
            pushes = [(*push, on) for push, on in zip(message.pushes, parts, strict=True)]
            self.world.down.append(("close", message.step, _hashable(pushes)))
        self.closer.execute(OwnRequest(self.own, message, (), _nothing))
        if is_alone:
            LOOP.call_soon(then, [], None)


class World:
    """A state in which one event is played. Only the ps tasks are made that take part in it."""

    def __init__(self, cluster: Cluster, state: State) -> None:
        self.cluster, self.state = cluster, state
        self.queue, self.workers, self.faults = (
            [*state.queue],
            [*state.workers],
            {**dict(state.faults)},
        )
        self.ended, self.wire = {*state.ended}, {*state.wire}
        self.down, self.up, self.asks = [*state.down], [*state.up], state.asks
        self.reported, self.is_cut, self.then = state.reported, False, NONE
        self.made: dict[int, Any] = {}

    def ps(self, number: int) -> Any:
        """Return a ps."""
        if number not in self.made:
            self.made[number] = self._ps(number, self.state.ps[number])
            if number == 0:
                self._recall(self.made[0], self.state.here)
            elif self.state.told is not None:
                self.far = self._far(is_closed=not self.state.told)
                self.made[1]._followers.append(self.far)
        return self.made[number]

    def _far(self, *, is_closed: bool = False) -> Far:
        far = Far((CLOSER, 1), {}, NONE, is_closed=is_closed)
        far.up = self.up
        return far

    def _ps(self, number: int, state: Ps, *, is_hosted: bool = False) -> Any:
        task, ledger = f"/job:ps/task:{number}", Ledger()
        for fence in state.fenced:
            ledger.fence(*fence)
        executor = Executor(task, STORE, WORK, CommitLog(task, 0))
        given: Any = task, STORE, ledger, WORK, NONE, LOCKS, executor, NONE, PLATFORM, True
        sync: Any = PsSync(*given) if number else StepCloser(*given, ATTACH, CLOCKS, 0, is_hosted)
        sync.groups[GROUP] = KnownGroup(self.cluster, state)
        if state.step is not None:
            sync.staging.close(GROUP, state.step - 1)
            sync.staging.applied(GROUP, state.step - 1)
        for push in state.parts:
            sync.staging.stage(Part(push, number))
        for push, attempt in state.waiting:
            sync.wait(self._ask(number, push, attempt), Part(push, number))
        return sync

    def _recall(self, closer: Any, here: tuple[Any, ...]) -> None:
        """Let ps 0 know what it knew, and of parts this."""
        closer.all_ps.world = self
        if not self.state.rule:
            closer.steps.define(GROUP, self.cluster.config, 0)
            return
        rule, counted = msgpack.decode(self.state.rule)
        for group, closure, ordinal, digest in counted:
            closer.ledger.count((closure, ordinal << PART_BITS), (group, digest))
        closer.steps.restore(rule, {GROUP: self.cluster.config})
        for key, local, held, push, attempt in here:
            closer._here[key] = known = _Here(local, set(held))
            if push is not None:
                waiting = [each for each in closer._waiting.get(key, ()) if each.attempt == attempt]
                request = waiting[0] if waiting else self._ask(0, push, attempt)
                request.over, request.on_given_up = not waiting, request.on_given_up or _nothing
                known.waits = request, Part(push, 0)
        for close in closer.steps.closing():
            closer.groups[GROUP].answered = (closer.staging.step(GROUP) or 0) - 1
            if not closer.pauses:
                closer.carried.add(GROUP)
            self.then = partial(closer._ended, close)

    def _ask(self, ps: int, push: Push, attempt: int) -> Asked:
        message = m.Update(push.number, push.number, push.closure, 0, 0, local_step=push.local)
        then = partial(self._answered, ps, push, attempt)
        asked = Asked(AsIfFrom(push.key[1], {}, NONE), message, (), then)
        asked.attempt, asked.push, asked.token = attempt, push, SETS[0]
        return asked

    def frozen(self) -> State:
        """Return the state after the event."""
        report = self.cluster.report(self.queue, self.workers)
        if not self.cluster.late and report != self.reported:
            self.reports(report)
        LOOP.drain()
        state = self.state
        here, rule, closing, is_settled = state.here, state.rule, state.closing, state.is_settled
        told = state.told and not self.is_cut
        if 1 in self.made:
            open_ones = [not each.is_closed for each in self.made[1]._followers]
            told = any(open_ones) if open_ones else None
        if 0 in self.made:
            steps = self.made[0].steps
            made = steps.snapshot()
            for _, group in made["groups"]:  # counters would only make states differ
                group |= {"outcomes": {}, "staleness": {}, "num_steps": 0, "num_partial": 0}
                group["tokens"] |= {"published": 0, "taken": 0, "void": 0}
            rule = msgpack.encode([made, sorted(steps.ledger.counted())])
            is_settled = steps.is_settled
            closing = tuple((each.step, _hashable(_placed(each))) for each in steps.closing())
            here = tuple(
                (key, each.local_step, tuple(each.held), *_waiting(each.waits))
                for key, each in sorted(self.made[0]._here.items())
            )
        return State(
            tuple(self.queue), tuple(self.faults.items()), tuple(self.workers),
            frozenset(self.ended), frozenset(self.wire), tuple(self.down), tuple(self.up),
            (self.frozen_ps(0), self.frozen_ps(1)), self.asks, told, here, rule, closing,
            is_settled, self.reported,
        )  # fmt: skip

    def frozen_ps(self, number: int) -> Ps:
        """Return the state of a ps."""
        sync = self.made.get(number)
        if sync is None:
            return self.state.ps[number]
        return Ps(
            tuple(sorted(part.push for part in sync.staging.held())),
            sync.staging.step(GROUP),
            tuple((task, each.incarnation) for task, each in sorted(sync.ledger._senders.items())),
            tuple((each.push, each.attempt) for known in sync._waiting.values() for each in known),
            tuple(sync.groups[GROUP].applied),
            sync.groups[GROUP].elsewhere,
        )

    # Events.

    def begins(self, index: int) -> None:
        worker, closure, pulled = self.workers[index], self.queue.pop(0), PulledSteps()
        places = (0,) if closure < self.cluster.narrow else BOTH
        for ps in places:
            at = self.state.ps[ps].step
            pulled.note([[] if at is None else [(GROUP, at)]])
        number, local = worker.pushes + 1, cast(int, pulled.lowest(GROUP, worker.alone))
        self.cluster.check_pull(self.state, places, local)
        task = f"/job:worker/task:{index}"
        push = Push(task, worker.incarnation, number, closure, local, places)
        self.workers[index] = worker._replace(pushes=number, push=push)
        self.wire |= {("part", ps, push, 0) for ps in places}

    def arrives(self, message: tuple[Any, ...]) -> None:
        self.wire.discard(message)
        kind, ps, push, attempt = message
        sync = self.ps(ps)
        if kind == "part":
            request = self._ask(ps, push, attempt)
            try:
                sync.ledger.check_incarnation(*push.key[1])
                sync.staging.reserve(push.key, push.local, 1, self.cluster.config)
                sync.took(request, Part(push, ps))
            except Exception as exc:
                request.fail(exc)
            return
        for each in [*sync._waiting.get(push.key, ())]:  # caller, connection or worker is gone
            if each.attempt == attempt:
                each.give_up()
        if kind == "fence":
            below = push.task, push.incarnation + 1
            sync.ledger.fence(*below)
            sync.fence(*below)

    def ps_1_hears(self) -> None:
        kind, *what = self.down.pop(0)
        sync, message, far = self.ps(1), m.FollowParts(), self._far()
        if kind == "close":
            here = [push[:4] for push in what[1] if 1 in push[4]]
            message, far = m.CloseStep(GROUP, None, what[0], here), self.far
        request = OwnRequest(far, _sent(message), (), partial(self._has_closed, what))
        sync.handlers()[type(message)].run(request)

    def _has_closed(self, what: list[Any], outcome: Any) -> None:
        if isinstance(outcome, BaseException):
            raise Violation(str(outcome))
        self.up.append(("done", what[0]))

    def ps_0_hears(self) -> None:
        kind, what = self.up.pop(0)
        closer = self.ps(0)
        if kind == "held":
            peer = AsIfFrom(("/job:ps/task:1", 1), {}, NONE)
            closer.all_ps.heard(OwnRequest(peer, _sent(m.Held(1, [*what])), (), _raise))
        elif self.state.closing and self.state.closing[0][0] == what:
            self.then([], None)

    def reports(self, report: Any) -> None:
        closer = self.ps(0)
        self.reported = alive, queued, in_flight = report
        flying = [(closure, "") for closure in in_flight]
        closer._set_members(m.ReportSchedule(0, [*alive], [], queued, flying))

    def joins(self) -> None:
        self.ps(0)._close_all(m.FinishSteps())

    # Faults.

    def dies(self, index: int) -> None:
        self.faults["deaths"] -= 1
        worker = self.workers[index]
        self.queue.insert(0, worker.push.closure)
        self.wire |= {("fence", ps, worker.push, worker.sent[ps]) for ps in BOTH}
        self.workers[index] = Worker(worker.incarnation + 1)

    def is_lost(self, message: tuple[Any, ...]) -> None:
        self.wire.discard(message)

    def is_cancelled(self, index: int, unsent: int) -> None:
        """Its caller is cancelled; or a ps refuses its part, of which the other hears as much."""
        self.faults["cancels"] -= 1
        worker = self.workers[index]
        self.wire.discard(("part", unsent, worker.push, worker.sent[unsent]))
        self._ends(index, "cancelled")

    def hangs_up(self, index: int, ps: int) -> None:
        """The connection of a worker to a ps is lost, perhaps with an answer."""
        self.faults["losses"] -= 1
        self.wire.add(("gone", ps, self.workers[index].push, self.workers[index].sent[ps]))
        self._repeats(index, ps)

    def _repeats(self, index: int, ps: int) -> None:
        worker = self.workers[index]
        push, sent = worker.push, worker.sent
        if (
            push is not None
            and ps in push.places
            and not worker.heard[ps]
            and ("part", ps, push, sent[ps]) not in self.wire
        ):
            sent = (sent[0] + (ps == 0), sent[1] + (ps == 1))
            self.workers[index] = worker._replace(sent=sent)
            self.wire.add(("part", ps, push, sent[ps]))

    def hang_up(self) -> None:
        """The connection between the ps tasks is lost: ps 0 asks again what was not answered."""
        self.faults["losses"] -= 1
        self._reconnect()

    def _reconnect(self) -> None:
        self.up, self.is_cut = [], True
        self.down = [("follow",)] * self.asks + [("close", *each) for each in self.state.closing]
        if self.state.closing and self.state.ps[0].elsewhere > self.state.closing[0][0]:
            raise Violation("a step that ps 0 applies alone is under way")

    def fails_over(self, ps: int) -> None:
        """Its backup serves, which has all that was judged; who waits sends its part again."""
        self.faults["failovers"] -= 1
        asking = {each.push for each in self.workers}
        self.wire = {
            each
            for each in self.wire
            if each[1] != ps or each[0] == "fence" or (each[0] == "part" and each[2] in asking)
        }
        self._reconnect()
        state = self.state.ps[ps]._replace(waiting=())
        self.made[ps] = made = self._ps(ps, state, is_hosted=True)
        if ps == 0:
            self.down, self.asks = [], False
            self._recall(made, ())
            made.serve()
        for index in BOTH:
            self._repeats(index, ps)

    # What workers hear.

    def _answered(self, ps: int, push: Push, attempt: int, outcome: Any) -> None:
        for index, worker in enumerate(self.workers):
            if worker.push == push and worker.sent[ps] == attempt:
                if isinstance(outcome, BaseException):
                    raise Violation(f"{push} is refused: {outcome!r}")
                self._hears(index, ps, outcome[0])

    def _hears(self, index: int, ps: int, message: Any) -> None:
        worker, states, said = self.workers[index], [*map(self.frozen_ps, BOTH)], "done"
        if ps == 0:
            said = message.outcome if message.count else f"{message.outcome} early"
            worker = worker._replace(token=message.token)
            if message.alone:
                worker = worker._replace(alone=message.token)
        heard = tuple(said if at == ps else worker.heard[at] for at in BOTH)
        self.workers[index] = worker._replace(heard=heard)
        places = worker.push.places
        if heard[0] and (heard[0] != "accepted" or all(heard[at] for at in places)):
            counts = [any(worker.push in made for _, made in states[at].applied) for at in places]
            if heard[0] == "accepted" and not all(counts):
                raise Violation(f"{worker.push} is told accepted, and is in the values: {counts}")
            told = states if states[0].elsewhere < worker.token else states[:1]
            if worker.token > min(each.step or 0 for each in told):
                raise Violation(f"{worker.push} gets token {worker.token} too early")
            self._ends(index, heard[0].split()[0])

    def _ends(self, index: int, outcome: str) -> None:
        worker = self.workers[index]
        self.wire |= {
            ("gone", ps, worker.push, worker.sent[ps])
            for ps in worker.push.places
            if not worker.heard[ps]
        }
        self.ended.add((worker.push.closure, outcome))
        self.workers[index] = Worker(worker.incarnation, worker.pushes, worker.alone)


class Cluster:
    """What may happen, and what must hold.

    Args:
        needed: Pushes that a step needs.
        closures: That are scheduled.
        narrow: So many of them, the first, push to what lies on ps 0 alone.
        late: Whether the coordinator's reports may come late.
        faults: How many of each kind may happen.
    """

    def __init__(
        self, needed: int, closures: int, *, narrow: int = 0, late: bool = False, **faults: int
    ) -> None:
        self.config, self.narrow, self.late = config(needed, 2), narrow, late
        self.raw = self.config.to_config()
        kinds = ("deaths", "cancels", "losses", "failovers")
        self.start = State(
            (*range(closures),), tuple((kind, faults.get(kind, 0)) for kind in kinds)
        )

    def report(self, queue: Sequence[int], workers: Sequence[Worker]) -> tuple[Any, ...]:
        """Return what the coordinator says of its workers and closures."""
        alive = tuple(
            (f"/job:worker/task:{at}", each.incarnation) for at, each in enumerate(workers)
        )
        return alive, bool(queue), tuple(sorted(each.push.closure for each in workers if each.push))

    def events(self, state: State) -> Iterator[tuple[Any, ...]]:
        """Yield what may happen without a fault: a method of ``World``, and what it is given."""
        free = [index for index in BOTH if state.workers[index].push is None]
        if state.queue and free:
            yield World.begins, free[0]
        for message in sorted(state.wire, key=repr):
            if message[0] != "gone" or ("part", *message[1:]) not in state.wire:
                yield World.arrives, message
        if state.down:
            yield (World.ps_1_hears,)
        if state.up:
            yield (World.ps_0_hears,)
        if (report := self.report(state.queue, state.workers)) != state.reported:
            yield World.reports, report
        if not state.queue and len(free) == 2 and not state.is_settled and not state.closing:
            yield (World.joins,)

    def faults(self, state: State) -> Iterator[tuple[Any, ...]]:
        """Yield what may go wrong."""
        may = {kind for kind, left in state.faults if left}
        pushing = {each.push for each in state.workers}
        for message in sorted(state.wire, key=repr):
            if message[0] == "part" and message[2] not in pushing:  # its sender is gone
                yield World.is_lost, message
        for index, worker in enumerate(state.workers):
            if worker.push is None:
                continue
            coming = [ps for ps in BOTH if ("part", ps, worker.push, worker.sent[ps]) in state.wire]
            if "deaths" in may:
                yield World.dies, index
            if "cancels" in may:
                yield from ((World.is_cancelled, index, unsent) for unsent in (*coming, -1))
            if "losses" in may:
                asked = [
                    ps for ps in worker.push.places if ps not in coming and not worker.heard[ps]
                ]
                yield from ((World.hangs_up, index, ps) for ps in asked)
        if "losses" in may and state.asks:
            yield (World.hang_up,)
        if "failovers" in may:
            yield from ((World.fails_over, ps) for ps in BOTH)

    def check(self, state: State) -> None:
        """A push counts whole, and each closure at most once."""
        zero, one = self._shared(state)
        if any(zero[at] != one[at] for at in zero.keys() & one.keys()):
            raise Violation(f"other pushes are in the values of ps 0, {zero}, than of ps 1, {one}")
        closures = [push.closure for _, pushes in state.ps[0].applied for push in pushes]
        if len(closures) != len({*closures}):
            raise Violation(f"a closure counts twice: {state.ps[0].applied}")

    def check_pull(self, state: State, places: Sequence[int], local: int) -> None:
        """Values of a step have all pushes of the steps before."""
        zero, one = self._shared(state)
        if 1 in places and any(at < local and zero[at] for at in zero.keys() - one.keys()):
            raise Violation(f"values of step {local} are {one} on ps 1, and {zero} is applied")

    def _shared(self, state: State) -> list[dict[int, frozenset[Push]]]:
        """Return of each ps, by step, the pushes with a part on ps 1 that it has applied."""
        return [
            {at: frozenset(each for each in made if 1 in each.places) for at, made in ps.applied}
            for ps in state.ps
        ]

    def check_end(self, state: State) -> None:
        """Nothing is under way: nobody waits, nothing is left, what was told is true."""
        if left := {*self.start.queue} - {closure for closure, _ in state.ended}:
            raise Violation(f"closures {sorted(left)} never end")
        applied = {push.closure for _, pushes in state.ps[0].applied for push in pushes}
        told = {closure for closure, outcome in state.ended if outcome in ("accepted", "duplicate")}
        if not told <= applied:
            raise Violation(f"{sorted(told)} were told that they count, and {sorted(applied)} do")
        zero, one = self._shared(state)
        lacks = any(zero[at] for at in zero.keys() - one.keys())
        if lacks or any(len(ps.applied) != len(dict(ps.applied)) for ps in state.ps):
            raise Violation(f"a step is not applied everywhere, or twice: {state.ps}")
        steps = [-1 if ps.step is None else ps.step for ps in state.ps]
        for ps, at in zip(state.ps, steps, strict=True):
            if ps.waiting or any(push.local < at for push in ps.parts):
                raise Violation(f"at step {at} a ps keeps parts or requests: {ps}")
        if any(local < steps[0] for _, local, *_ in state.here):
            raise Violation(f"ps 0, at step {steps[0]}, remembers {state.here}")


class Explored(NamedTuple):
    states: int
    ends: int  # states in which nothing happens any more
    violation: str = ""
    history: tuple[str, ...] = ()  # that leads to it, one of the shortest


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Let there be no loop, and no connections to other ps tasks."""
    running = asyncio._get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_closer, "AllPs", Others)
        asyncio._set_running_loop(LOOP)
        try:
            yield
        finally:
            LOOP.soon.clear()
            asyncio._set_running_loop(running)


def explore(cluster: Cluster) -> Explored:
    """Visit all states, breadth first, until one is wrong."""
    came: dict[State, Any] = {cluster.start: None}
    todo, ends = deque([cluster.start]), 0
    event: tuple[Any, ...] = ()
    with played():
        try:
            while todo:
                state, event = todo.popleft(), ()
                cluster.check(state)
                usual = [*cluster.events(state)]
                for event in (*usual, *cluster.faults(state)):
                    world = World(cluster, state)
                    event[0](world, *event[1:])
                    following = world.frozen()
                    if following not in came:
                        came[following] = state, event
                        todo.append(following)
                if not usual:
                    ends, event = ends + 1, ()
                    cluster.check_end(state)
        except Violation as exc:
            events = [event] if event else []
            while came[state] is not None:
                state, event = came[state]
                events.append(event)
            told = [" ".join([each[0].__name__, *map(str, each[1:])]) for each in events[::-1]]
            return Explored(len(came), ends, str(exc), tuple(told))
    return Explored(len(came), ends)


# What stands for the surroundings of a ps.


def _nothing(*_: Any) -> None:
    pass


def _raise(error: Any) -> None:
    raise error


def _sent(message: Any) -> Any:
    return decode(encode(message))


def _hashable(pushes: Any) -> tuple[Any, ...]:
    return tuple((*each[:4], tuple(each[4])) for each in pushes)


def _placed(close: Any) -> list[tuple[Any, ...]]:
    return [(*push, on) for push, on in zip(close.pushes, close.places, strict=True)]


def _waiting(waits: Any) -> tuple[Any, int]:
    return (None, 0) if waits is None else (waits[0].push, waits[0].attempt)


LOOP: Any = Loop()
NONE: Any = None
PLATFORM: Any = SimpleNamespace(limits=SimpleNamespace(staging_bytes=1 << 40), parts=Parts())
WORK: Any = SimpleNamespace(is_torn=False, give_up=_raise)
STORE: Any = SimpleNamespace(failures={})  # nothing is applied
CLOCKS: Any = SimpleNamespace(heeds_groups=False)
LOCKS: Any = SimpleNamespace(num_exclusive=0, begin=_nothing, end=_nothing)
ATTACH: Any = SimpleNamespace(coordinator=1, ps_addresses=BOTH)
SETS = [
    ShardSet(m.DefinePlan(0, [], GROUP, variable_set=b"w", others=others)) for others in ([], [1])
]
