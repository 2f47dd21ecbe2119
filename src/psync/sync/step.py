"""One decided step on one ps: the mean of its pushes, shard by shard; then averages, at last the
global step.

For synchronous steps what ``ps.updates`` is for pushes. It decides nothing about time: ``ps_sync``
says when to begin and work. What a group settles for all its steps is ``KnownGroup``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from psync.errors import ConfigurationError, PsyncError, RemoteProtocolError
from psync.numerics.rules import Sums, clips_norms, slot_dtype
from psync.numerics.sums import MeanGradient
from psync.ps.plans import ShardSet
from psync.specs import dtype_of
from psync.store.rows import RowMean, RowValues
from psync.store.step_norms import UPDATES, ShardSums, StepNorms
from psync.store.store import Gradients, Key, Means, Plan, ShardStore, Work, ones
from psync.store.sync_config import SyncConfig
from psync.sync.staging import Gradient, Part
from psync.wire.messages import CloseStep, DefinePlan

GLOBAL_STEP_DTYPE = "int64"

NOWHERE = 1 << 62
"""A step that is never reached."""

NOTHING = ShardSet(DefinePlan(-1, []))


class RowsAsWhole:
    """The gradient of some rows as one of the whole shard, zero in the others; made when it is cut.

    Args:
        gradient: The rows.
    """

    __slots__ = ("_gradient",)

    def __init__(self, gradient: RowValues) -> None:
        self._gradient = gradient

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return elements ``part.start`` to ``part.stop``."""
        rows, values = self._gradient
        size = values.shape[1]
        first, end = part.start // size, -(-part.stop // size)
        begin, stop = rows.searchsorted((first, end)).tolist()
        made = np.zeros((end - first, size), values.dtype)
        made[rows[begin:stop] - first] = values[begin:stop]
        return made.reshape(-1)[part.start - first * size : part.stop - first * size]


class Average(NamedTuple):
    """A shard and its moving average, which is another shard of the same ps."""

    shadow: Key
    value: Key
    nbytes: int


class Layout(NamedTuple):
    """What a step changes that has so many pushes to the same shards."""

    shards: Sequence[Key]
    pushes: int
    costs: Sequence[int]  # bytes that the update of each touches, then each average's, then 0
    nbytes: int
    touched: Sequence[Key]  # all shards that must be idle


NO_LAYOUT = Layout((), -1, (), 0, ())


@dataclass(eq=False)
class KnownGroup:
    """One group, as a ps knows it.

    Args:
        store: Has its shards, and knows its optimizer.
        number: Of the group.
        raw: The configuration as it came.
        config: The same.
        global_step: If that is here.
        elsewhere: On ps 0, the first step of which other ps tasks are told: before it, ps 0 is
            *alone*. ``NOWHERE``: nothing of the group is there so far. On another one 0.
        broken: A step could not be applied here: neither can others.
        touched: By its last step, which is perhaps being applied.
        spread: On ps 0, whether a variable of a push lies on several ps tasks.
        answered: Likewise, the last step of whose pushes those on every ps are answered.
        one: By which the global step is raised.
    """

    store: ShardStore
    number: int
    raw: dict[str, Any]
    config: SyncConfig
    global_step: Key | None
    elsewhere: int
    broken: PsyncError | None = None
    touched: Sequence[Key] = ()
    spread: bool = False
    answered: int = -1
    one: np.ndarray | None = None
    _layout: Layout = NO_LAYOUT  # of the last step whose pushes were alike

    def __post_init__(self) -> None:
        self.rule = self.store.rule(self.number)
        self.norms = StepNorms(self.rule)  # of steps that need none
        self.takes_norms = clips_norms(self.rule.options) or self.rule.takes_norms

    @functools.cached_property
    def averages(self) -> list[Average]:
        """Its moving averages that are kept here.

        Raises:
            ConfigurationError: One is not beside its variable, or of another shape or dtype.
            ValueMismatchError: One has a dtype of which there is no mean.
        """
        store, config, averages = self.store, self.config, list[Average]()
        here: dict[int, set[int]] = {}
        for variable, index in store.keys() if config.averages else ():
            here.setdefault(variable, set()).add(index)
        for variable, shadow in config.averages:
            of_variable, of_shadow = here.get(variable, set()), here.get(shadow, set())
            if of_variable != of_shadow:
                raise ConfigurationError(
                    f"{config.name} on {store.task}: variable {variable} has the shards "
                    f"{sorted(of_variable)} here, its moving average {shadow} has "
                    f"{sorted(of_shadow)}",
                    hint="a variable and its moving average must be on the same ps tasks",
                )
            for index in sorted(of_variable):
                spec, other = store.spec((variable, index)), store.spec((shadow, index))
                if (spec.shape, spec.dtype) != (other.shape, other.dtype):
                    raise ConfigurationError(
                        f"{config.name}: {other} on {store.task}: expected shape {spec.shape} "
                        f"{spec.dtype}, as {spec} has, whose moving average it is, got "
                        f"{other.shape} {other.dtype}"
                    )
                slot_dtype(dtype_of(spec.dtype))
                averages.append(Average(other.key, spec.key, spec.nbytes))
        return averages

    def keys(self, shards: Sequence[Key]) -> Sequence[Key]:
        """Return what a step touches that changes these shards."""
        pairs = [key for shadow, value, _ in self.averages for key in (shadow, value)]
        raised = () if self.global_step is None else (self.global_step,)
        return [*dict.fromkeys((*shards, *pairs)), *raised]

    def layout(self, shards: Sequence[Key], pushes: int, costs: Sequence[int]) -> Layout:
        """Return what a step changes.

        Args:
            shards: That have a mean.
            pushes: How many; or -1: not all have the same shards.
            costs: Bytes that the update of each touches.

        Raises:
            ValueMismatchError: The global step is no integer.
            UnknownVariableError: The global step is not here.
            ConfigurationError: Moving averages are not beside their variables.
        """
        if self.global_step is not None and self.one is None:
            one = ones(self.store.spec(self.global_step).shape, GLOBAL_STEP_DTYPE)
            self.one = self.store.check_assign(self.global_step, "add", one)
        costs = [*costs, *(average.nbytes for average in self.averages)]
        if self.global_step is not None:
            costs.append(0)
        return Layout(shards, pushes, costs, sum(costs), self.keys(shards))

    def step_of(self, message: CloseStep, parts: Sequence[tuple[Part, float]]) -> Step:
        """Say what a step changes here; nothing has changed yet if this raises.

        Args:
            message: The step.
            parts: Of its pushes, with their weights, in the order in which they are summed.

        Raises:
            RemoteProtocolError: Some factors of a shard are known, and others are not.
            RuleError: A schedule of a user's raised.
            PsyncError: As ``layout``.
        """
        step = Step(self, self.store, message.step, self.norms)
        first: ShardSet | None = None
        for part, weight in parts:
            known = part.known
            if not known.keys:  # all of it belongs to others
                continue
            first = first or known
            if part.rows is not None or known.keys != first.keys:
                layout = step.gather_mixed(parts)
                break
            step.weights.append(weight)
            step.pushes.append(part.gradients)  # type: ignore[arg-type]
        else:
            layout, count, known = self._layout, len(step.pushes), first or NOTHING
            step.plan = None if first is None else first.plan
            if layout.pushes != count or layout.shards != known.keys:
                costs = [length * count for length in known.costs]
                layout = self._layout = self.layout(known.keys, count, costs)
        step.layout = layout
        if self.takes_norms or message.scales is not None or message.ratios is not None:
            step.take_norms(message)
        optimizer = self.store.optimizers[self.number]
        if self.takes_norms or optimizer.own_schedules:
            step.optimizer_step = max(optimizer.count.known, message.step)
            if optimizer.own_schedules:
                self.store.check_rate(self.number, step.optimizer_step)
        return step


class Step(msgspec.Struct, eq=False):
    """The mean of a step's pushes, for each shard over those that carry it; then the averages."""

    known: KnownGroup
    store: ShardStore
    number: int  # of the step that is closed
    norms: StepNorms
    optimizer_step: int = 0  # with which schedules are evaluated
    plan: Plan | None = None  # of the shards, where all pushes have the same
    pushes: list[Gradients] = msgspec.field(default_factory=list)
    weights: list[float] = msgspec.field(default_factory=list)
    alone: Sequence[str] = ()  # what this ps must measure by itself before it begins
    layout: Layout = NO_LAYOUT
    # Of each shard, in the order of the sum, where pushes have different ones.
    _gradients: Sequence[Sequence[Gradient]] = ()
    _shard_weights: Sequence[Sequence[float]] = ()

    def gather_mixed(self, parts: Sequence[tuple[Part, float]]) -> Layout:
        """Take parts of pushes that have rows, or different shards."""
        carried: dict[Key, tuple[list[Gradient], list[float]]] = {}
        for part, weight in parts:
            for key, gradient in zip(part.known.keys, part.gradients, strict=True):
                gradients, weights = carried.setdefault(key, ([], []))
                gradients.append(gradient)
                weights.append(weight)
        self.pushes = []
        self._gradients = [gradients for gradients, _ in carried.values()]
        self._shard_weights = [weights for _, weights in carried.values()]
        costs = [
            sum(
                self.store.rows_cost(key, gradient.rows)
                if isinstance(gradient, RowValues)
                else gradient.nbytes
                for gradient in gradients
            )
            for key, (gradients, _) in carried.items()
        ]
        return self.known.layout([*carried], -1, costs)

    def take_norms(self, message: CloseStep) -> None:
        """Take the factors that were measured, and see which are still to be."""
        scales, ratios = message.scales, message.ratios
        self.norms = StepNorms(
            self.known.rule,
            None if scales is None else dict(scales),
            None if ratios is None else dict(ratios),
        )
        if not self.norms.known_for(self.layout.shards):
            raise RemoteProtocolError(
                f"{self.store.task}: step {self.number} of {self.known.config.name} changes "
                "shards whose norms were not measured"
            )
        self.alone = self.norms.passes_alone(self.layout.shards)

    def measure(self, what: str, position: int, into: list[Sums]) -> Work:
        """Begin to measure one shard, which changes nothing.

        Args:
            what: The pass. Those before it are concluded.
            position: Of the shard; one after the other, in order.
            into: Gets its sums of squares at the end.
        """
        key, mean = self.layout.shards[position], self._mean(position)
        if isinstance(mean, RowMean):
            return self.store.square_row_mean(key, mean, into)
        if what == UPDATES:
            return self.store.measure(self.known.number, key, mean, self.optimizer_step, into)
        return self.store.square_mean(key, mean, into)

    def sums_by_shard(self, sums: Sequence[Sums]) -> list[ShardSums]:
        """Return what a pass over all shards has measured, with their names."""
        return [(*key, *pair) for key, pair in zip(self.layout.shards, sums, strict=True)]

    def whole(self) -> None:
        """Do all the work; for small shards. Raises BusyError, with nothing done: one is busy."""
        self.store.check_idle(self.layout.touched)
        first, known = 0, self.known
        for what in self.alone:
            sums: list[Sums] = []
            for position in range(len(self.layout.shards)):
                for _ in self.measure(what, position, sums):
                    pass
            self.norms.conclude(what, self.sums_by_shard(sums))
        if self.plan is not None and self.norms.scales is None and self.norms.ratios is None:
            first = len(self.layout.shards)
            means = Means(self.pushes, self.weights, known.config.reduction)
            self.store.apply_at_once(known.number, self.plan, means, self.optimizer_step)
        for position in range(first, len(self.layout.costs)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard; then on one average; at last on the global step."""
        if position < len(self.layout.shards):
            key, mean = self.layout.shards[position], self._mean(position)
            number, ratios = self.known.number, self.norms.ratios
            if isinstance(mean, RowMean):
                return self.store.apply_row_mean(number, key, mean, self.optimizer_step)
            ratio = None if ratios is None else ratios[key[0]]
            return self.store.apply_checked(number, key, mean, self.optimizer_step, ratio)
        position -= len(self.layout.shards)
        averages = self.known.averages
        if position == len(averages):
            raised, one = self.known.global_step, self.known.one
            assert raised is not None, "it is one of the costs"
            assert one is not None, "it was checked"
            return self.store.assign_checked(raised, "add", one)
        shadow, value, _ = averages[position]
        return self.store.average(shadow, value, self.known.config.decay_at(self.number + 1))

    def _mean(self, position: int) -> MeanGradient | RowMean:
        """Return the mean of a shard's gradients: of rows, or if not all are rows, whole ones."""
        config, scales = self.known.config, self.norms.scales
        scale = 1.0 if scales is None else scales[self.layout.shards[position][0]]
        if self.plan is not None:
            wholes = [push[position] for push in self.pushes]
            return self.store.mean_of(wholes, self.weights, config.reduction, scale)
        gradients, weights = self._gradients[position], self._shard_weights[position]
        rows = [gradient for gradient in gradients if isinstance(gradient, RowValues)]
        if len(rows) == len(gradients):
            per_index = config.sparse_divisor == "per_index"
            return RowMean(rows, weights, config.reduction, per_index, scale)
        wholes = [
            cast(np.ndarray, RowsAsWhole(gradient)) if isinstance(gradient, RowValues) else gradient
            for gradient in gradients
        ]
        return self.store.mean_of(wholes, weights, config.reduction, scale)
