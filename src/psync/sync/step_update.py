"""One decided step on one ps: validation and effects, shard by shard.

For synchronous steps what ``ps.updates`` is for pushes. It decides nothing about time: ``ps_sync``
says when to begin and work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.numerics.rules import Sums, slot_dtype
from psync.ps.plans import Body, ShardSet
from psync.specs import dtype_of
from psync.store.rows import RowMean, RowValues
from psync.store.step_norms import UPDATES, ShardSums, StepNorms
from psync.store.store import Key, Plan, ShardStore, Work, ones
from psync.store.sync_config import SyncConfig

GLOBAL_STEP_DTYPE = "int64"

Gradient = np.ndarray | RowValues


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


class Part(NamedTuple):
    """What a push brings to the shards of one ps."""

    known: ShardSet
    gradients: Sequence[Gradient]  # views of the memory in which they came
    body: Body  # that memory
    nbytes: int
    rows: Sequence[int] | None = None  # as in Update


@dataclass(frozen=True, slots=True)
class Average:
    """A shard and its moving average, which is another shard of the same ps."""

    shadow: Key
    value: Key
    nbytes: int


@dataclass(slots=True, eq=False)
class StepUpdate:
    """The mean of a step's pushes, for each shard over those that carry it; then the averages."""

    store: ShardStore
    group: int
    config: SyncConfig
    step: int  # that is closed
    averages: Sequence[Average]
    norms: StepNorms
    global_step: Key | None = None  # if it is here: it is raised with the step
    optimizer_step: int = 0  # with which schedules are evaluated
    keys: Sequence[Key] = ()
    costs: Sequence[int] = ()  # bytes that the update of each shard touches, then each average's
    touched: Sequence[Key] = ()  # all shards that must be idle
    alone: Sequence[str] = ()  # what this ps must measure by itself before it begins to work
    _gradients: Sequence[Sequence[Gradient]] = ()  # of each shard, in the order of the sum; or
    # those of each push, which then carries the same shards as the others
    _pushes: Sequence[Sequence[np.ndarray]] = ()
    _weights: Sequence[Sequence[float]] = ()  # of each shard
    _plan: Plan | None = None  # of ``keys``, where it is known
    _decay: float = 0.0
    _one: np.ndarray | None = None  # by which the global step is raised

    def __post_init__(self) -> None:
        self._decay = self.config.decay_at(self.step + 1)

    def gather(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        """Take the parts of the step's pushes, in the order in which they are summed.

        Raises:
            ValueMismatchError: The global step is no integer.
            UnknownVariableError: The global step is not here.
            RemoteProtocolError: Some factors of a shard are known, and others are not.
            RuleError: A schedule of a user's raised.
        """
        first = parts[0].known.keys if parts else ()
        if parts and all([part.known.keys == first and part.rows is None for part in parts]):
            self._gather_alike(parts, weights)
        else:
            self._gather_mixed(parts, weights)
        if not self.norms.known_for(self.keys):
            raise RemoteProtocolError(
                f"{self.store.task}: step {self.step} of {self.config.name} changes shards whose "
                "norms were not measured"
            )
        self.optimizer_step = max(self.store.push_count(self.group).known, self.step)
        self.store.check_rate(self.group, self.optimizer_step)
        self.alone = self.norms.passes_alone(self.keys)
        self.touched = self.keys
        if self.averages:
            self.costs = [*self.costs, *(average.nbytes for average in self.averages)]
            pairs = ((average.shadow, average.value) for average in self.averages)
            self.touched = [*self.keys, *(key for pair in pairs for key in pair)]
        if self.global_step is not None:
            one = ones(self.store.spec(self.global_step).shape, GLOBAL_STEP_DTYPE)
            self._one = self.store.check_assign(self.global_step, "add", one)
            self.costs = [*self.costs, 0]
            self.touched = [*self.touched, self.global_step]

    def _gather_alike(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        known = parts[0].known
        self.keys = known.keys
        self.costs = [length * len(parts) for length in known.costs]
        self._plan = known.plan
        self._pushes = [part.gradients for part in parts]  # type: ignore[misc]
        self._weights = [weights] * len(self.keys)

    def _gather_mixed(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        carried: dict[Key, tuple[list[Gradient], list[float]]] = {}
        for part, weight in zip(parts, weights, strict=True):
            for key, gradient in zip(part.known.keys, part.gradients, strict=True):
                gradients, its_weights = carried.setdefault(key, ([], []))
                gradients.append(gradient)
                its_weights.append(weight)
        self.keys = list(carried)
        self._gradients = [gradients for gradients, _ in carried.values()]
        self._weights = [its_weights for _, its_weights in carried.values()]
        self.costs = [
            sum(self._cost(key, gradient) for gradient in gradients)
            for key, gradients in zip(self.keys, self._gradients, strict=True)
        ]

    def _cost(self, key: Key, gradient: Gradient) -> int:
        if isinstance(gradient, RowValues):
            return self.store.rows_cost(key, gradient.rows)
        return gradient.nbytes

    def begin(self) -> None:
        """Draw the step with which the optimizer applies it."""
        if self.keys:
            self.optimizer_step = self.store.begin_step(self.group, self.step)

    def measure(self, what: str, position: int, into: list[Sums]) -> Work:
        """Begin to measure one shard, which changes nothing.

        Args:
            what: The pass. Those before it are concluded.
            position: Of the shard; one after the other, in order.
            into: Gets its sums of squares at the end.
        """
        key, weights = self.keys[position], self._weights[position]
        gradients, rows = self._wholes_or_rows(position)
        if rows and what != UPDATES:
            return self.store.square_row_mean(key, self._row_mean(rows, position), into)
        mean = self.store.mean_of(gradients, weights, self.config.reduction, self._scale(key))
        if what == UPDATES:
            return self.store.measure(self.group, key, mean, self.optimizer_step, into)
        return self.store.square_mean(key, mean, into)

    def measure_at_once(self, what: str) -> list[ShardSums]:
        """Do a whole pass; for small shards, none of which is busy."""
        sums: list[Sums] = []
        for position in range(len(self.keys)):
            for _ in self.measure(what, position, sums):
                pass
        return self.sums_by_shard(sums)

    def sums_by_shard(self, sums: Sequence[Sums]) -> list[ShardSums]:
        """Return what a pass over all shards has measured, with their names."""
        return [(*key, *pair) for key, pair in zip(self.keys, sums, strict=True)]

    def at_once(self) -> None:
        """Do all the work; for small shards. Raises BusyError, with nothing done: one is busy."""
        self.store.check_idle(self.touched)
        for what in self.alone:
            self.norms.conclude(what, self.measure_at_once(what))
        first = 0
        if self._pushes and self.norms.scales is None and self.norms.ratios is None:
            first = len(self.keys)
            self.store.apply_mean_at_once(
                self.group, self._plan or self.keys, self._pushes, self._weights[0],
                self.optimizer_step, self.config.reduction,
            )  # fmt: skip
        for position in range(first, len(self.costs)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard; then on one average; at last on the global step."""
        if position < len(self.keys):
            return self._mean(position)
        position -= len(self.keys)
        if position == len(self.averages):
            assert self.global_step is not None, "it is among what is touched"
            assert self._one is not None, "it was checked"
            return self.store.assign_checked(self.global_step, "add", self._one)
        average = self.averages[position]
        return self.store.average(average.shadow, average.value, self._decay)

    def _mean(self, position: int) -> Work:
        key, weights = self.keys[position], self._weights[position]
        gradients, rows = self._wholes_or_rows(position)
        if rows:
            given = self._row_mean(rows, position)
            return self.store.apply_row_mean(self.group, key, given, self.optimizer_step)
        mean = self.store.mean_of(gradients, weights, self.config.reduction, self._scale(key))
        ratios = self.norms.ratios
        ratio = None if ratios is None else ratios[key[0]]
        return self.store.apply_checked(self.group, key, mean, self.optimizer_step, ratio)

    def _wholes_or_rows(self, position: int) -> tuple[Sequence[np.ndarray], Sequence[RowValues]]:
        """Return the gradients of a shard: rows, or if not all are rows, whole ones."""
        gradients: Sequence[Gradient]
        if self._pushes:
            gradients = [push[position] for push in self._pushes]
        else:
            gradients = self._gradients[position]
        rows = [gradient for gradient in gradients if isinstance(gradient, RowValues)]
        if len(rows) == len(gradients):
            return (), rows
        wholes = [
            cast(np.ndarray, RowsAsWhole(gradient)) if isinstance(gradient, RowValues) else gradient
            for gradient in gradients
        ]
        return wholes, ()

    def _scale(self, key: Key) -> float:
        scales = self.norms.scales
        return 1.0 if scales is None else scales[key[0]]

    def _row_mean(self, rows: Sequence[RowValues], position: int) -> RowMean:
        per_index = self.config.sparse_divisor == "per_index"
        scale = self._scale(self.keys[position])
        return RowMean(rows, self._weights[position], self.config.reduction, per_index, scale)


def averages_of(store: ShardStore, config: SyncConfig, task: str) -> list[Average]:
    """Return the moving averages of a group that are kept on the ps ``task``.

    Raises:
        ConfigurationError: One is not beside its variable, or of another shape or dtype.
        ValueMismatchError: One has a dtype of which there is no mean.
    """
    if not config.averages:
        return []
    here: dict[int, set[int]] = {}
    for variable, index in store.keys():
        here.setdefault(variable, set()).add(index)
    averages = []
    for variable, shadow in config.averages:
        if here.get(variable, set()) != here.get(shadow, set()):
            raise ConfigurationError(
                f"{config.name} on {task}: variable {variable} has the shards "
                f"{sorted(here.get(variable, ()))} here, its moving average {shadow} has "
                f"{sorted(here.get(shadow, ()))}",
                hint="a variable and its moving average must be on the same ps tasks",
            )
        for index in sorted(here.get(variable, ())):
            spec, other = store.spec((variable, index)), store.spec((shadow, index))
            if (spec.shape, spec.dtype) != (other.shape, other.dtype):
                raise ConfigurationError(
                    f"{config.name}: {other} on {task}: expected shape {spec.shape} {spec.dtype}, "
                    f"as {spec} has, whose moving average it is, got {other.shape} {other.dtype}"
                )
            slot_dtype(dtype_of(spec.dtype))
            averages.append(Average(other.key, spec.key, spec.nbytes))
    return averages
