"""The runtime of variables and optimizers: the worker's in a step, else the coordinator's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psync.client.accumulator_client import AccumulatorClient
from psync.client.compression import ErrorFeedback
from psync.client.context import ClosureContext, here
from psync.client.plans import Plan
from psync.client.prefetch import PulledAhead, Wanted
from psync.client.ps_client import PsClient
from psync.client.pulled_steps import PulledSteps
from psync.client.sync_client import SyncClient
from psync.specs import STEP_BITS, count_of
from psync.store.push_counts import HOME
from psync.wire.messages import Pushed


class KnownPushes:
    """What one client knows of the number of an optimizer's pushes, on one timeline.

    Attributes:
        number: The highest number that a ps has named, marked.
        elsewhere: By ps, the pushes without a part there, marked.
    """

    __slots__ = ("elsewhere", "number")

    def __init__(self) -> None:
        self.number = 0
        self.elsewhere: dict[int, int] = {}

    def before(self, plan: Plan, num_ps: int) -> dict[int, int]:
        """Return what is known, before a push, of the ps tasks that get no part of it."""
        if len(plan.ps) == num_ps:
            return {}
        apart = (ps for ps in range(num_ps) if ps not in plan.ps)
        return {ps: self.elsewhere.get(ps, 0) for ps in apart}

    def learn(self, plan: Plan, before: Mapping[int, int], answers: Sequence[Pushed]) -> None:
        """Take in the answers to a push; ``before`` is what ``before`` returned."""
        for request, answer in zip(plan.requests, answers, strict=True):
            self.number = max(self.number, answer.step)
            if count_of(answer.elsewhere):
                self._raise(request.ps, answer.elsewhere)
            if before and request.place == HOME and answer.outcome == "accepted":
                epoch = answer.step >> STEP_BITS
                for ps, known in before.items():
                    if known >> STEP_BITS <= epoch:
                        self._raise(ps, max(known, epoch << STEP_BITS) + 1)

    def _raise(self, ps: int, elsewhere: int) -> None:
        self.elsewhere[ps] = max(elsewhere, self.elsewhere.get(ps, 0))


@dataclass(eq=False)
class Runtime:
    """One task's way to the ps tasks."""

    ps: PsClient
    origin: str  # token of the strategy whose variables it serves
    program: str = ""  # token of the process whose optimizers it serves
    ensure_created: Callable[[], Awaitable[None]] | None = None
    """Creates what has been declared meanwhile; None: there is nothing to create."""
    find_iterator: Callable[[str], Iterator[Any] | None] | None = None
    """Returns a worker's per-worker iterator by its uid; None on the coordinator."""
    in_session: bool = field(default=False, kw_only=True)
    """Whether the program itself trains, outside of closures: a worker in a training session."""
    _pushes: dict[int, KnownPushes] = field(default_factory=dict, init=False)
    _timeline: int = field(default=0, init=False)  # that they are of
    rounds: dict[int, int] = field(default_factory=dict, init=False)
    """Done through each optimizer that has a staleness bound."""
    _pulled: PulledSteps = field(default_factory=PulledSteps, init=False)
    """By code outside of closures."""
    _ordinals: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def pushes(self, optimizer: int) -> KnownPushes:
        """Return what is known of an optimizer's pushes; none that ps tasks have undone."""
        timeline = self.ps.outgoing.timeline
        if self._timeline != timeline:
            self._timeline = timeline
            self._pushes = {}
        known = self._pushes.get(optimizer)
        if known is None:
            known = self._pushes[optimizer] = KnownPushes()
        return known

    @functools.cached_property
    def sync(self) -> SyncClient:
        """The way to the synchronous groups."""
        return self.ps.parts.of(SyncClient)(self.ps)

    @functools.cached_property
    def ahead(self) -> PulledAhead:
        """Values that came with the answer to a push."""
        return PulledAhead(self.ps.links, self.ps.now)

    @functools.cached_property
    def feedback(self) -> ErrorFeedback:
        """What compressed pushes have left."""
        return ErrorFeedback(self.ps)

    @functools.cached_property
    def accumulators(self) -> AccumulatorClient:
        """The way to the accumulators."""
        return AccumulatorClient(self.ps)

    @property
    def pulled(self) -> PulledSteps:
        """What the pulls of the step that runs here, or of the program, have seen."""
        closure = here.get()
        return closure.pulled if type(closure) is ClosureContext else self._pulled

    def take_ahead(self, plan: Plan) -> list[np.ndarray] | None:
        """Return values that came with an answer, if they are what a pull would bring now."""
        closure = here.get()
        arrival = closure.arrival if type(closure) is ClosureContext else 0
        wanted = self.ahead.take(plan, arrival)
        return None if wanted is None else self.note_values(wanted)

    def note_values(self, wanted: Wanted) -> list[np.ndarray] | None:
        """Return values that came with an answer, as pulled now; None: they did not come."""
        if wanted.arrays is not None:
            for steps in wanted.steps:
                self.pulled.note(steps)
        return wanted.arrays

    def begin_update(self, operation: str) -> tuple[int, int]:
        """Return the identity of a new push or assign: (number of the closure or -1, ordinal).

        Raises:
            UsageError, ClosureCancelled: As ``ClosureContext.check_open``.
        """
        closure = here.get()
        if type(closure) is ClosureContext:
            closure.check_open(operation)
            return closure.number_on_ps, next(closure.ordinals)
        return -1, next(self._ordinals)


def current_runtime() -> Runtime | None:
    """Return the runtime of the step that runs here, or None outside a step."""
    closure = here.get()
    if type(closure) is ClosureContext and isinstance(closure.runtime, Runtime):
        return closure.runtime
    return None
