"""A synchronous step that ps 0 has decided: what it changes on one ps, and how, shard by shard.

Layer: L3. Imports: errors, specs, store, sums, sync_config, update_rules, updates.

For synchronous steps what ``updates`` is for pushes. It decides nothing about time: ``ps_sync``
says when to begin and work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from psync.errors import ConfigurationError
from psync.specs import dtype_of
from psync.store import Key, ShardStore, Work
from psync.sums import Reduction, check_weight
from psync.sync_config import SyncConfig
from psync.update_rules import slot_dtype
from psync.updates import ShardSet


@dataclass(frozen=True, slots=True)
class Part:
    """What a push brings to the shards of one ps."""

    known: ShardSet
    gradients: Sequence[np.ndarray]  # views of the buffer in which they came


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
    optimizer_step: int = 0  # with which schedules are evaluated
    keys: Sequence[Key] = ()
    costs: Sequence[int] = ()  # bytes that the update of each shard touches, then each average's
    touched: Sequence[Key] = ()  # all shards that must be idle
    _gradients: Sequence[Sequence[np.ndarray]] = ()  # of each shard, in the order of the sum
    _weights: Sequence[Sequence[float]] = ()  # of each shard
    _decay: float = 0.0
    _pushes: Sequence[Sequence[np.ndarray]] = field(default=())  # if all carry the same shards

    def __post_init__(self) -> None:
        self._decay = self.config.decay_at(self.step + 1)

    def gather(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        """Take the parts of the step's pushes, in the order in which they are summed.

        Raises:
            GradientError: A weight is none.
        """
        for weight in weights:
            check_weight(weight)
        if parts and all(part.known.keys == parts[0].known.keys for part in parts):
            self._gather_alike(parts, weights)
        else:
            self._gather_mixed(parts, weights)
        self.touched = self.keys
        if self.averages:
            self.costs = [*self.costs, *(average.nbytes for average in self.averages)]
            pairs = ((average.shadow, average.value) for average in self.averages)
            self.touched = [*self.keys, *(key for pair in pairs for key in pair)]

    def _gather_alike(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        known = parts[0].known
        self.keys = known.keys
        self.costs = [length * len(parts) for length in known.lengths]
        self._pushes = [part.gradients for part in parts]
        self._gradients = list(zip(*self._pushes, strict=True))
        self._weights = [weights] * len(self.keys)

    def _gather_mixed(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        carried: dict[Key, tuple[list[np.ndarray], list[float]]] = {}
        for part, weight in zip(parts, weights, strict=True):
            for key, gradient in zip(part.known.keys, part.gradients, strict=True):
                gradients, its_weights = carried.setdefault(key, ([], []))
                gradients.append(gradient)
                its_weights.append(weight)
        self.keys = list(carried)
        self._gradients = [gradients for gradients, _ in carried.values()]
        self._weights = [its_weights for _, its_weights in carried.values()]
        self.costs = [sum(array.nbytes for array in arrays) for arrays in self._gradients]

    def begin(self) -> None:
        """Draw the step with which the optimizer applies it."""
        if self.keys:
            self.optimizer_step = self.store.begin_push(self.group, self.step)

    def at_once(self) -> None:
        """Do all the work; for small shards, none of which is busy."""
        first = 0
        if self._pushes:
            first = len(self.keys)
            self.store.apply_mean_at_once(
                self.group, self.keys, self._pushes, self._weights[0], self.optimizer_step,
                self._reduction,
            )  # fmt: skip
        for position in range(first, len(self.costs)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard, or on one average: these come after all that they follow."""
        if position < len(self.keys):
            return self.store.apply_mean(
                self.group, self.keys[position], self._gradients[position],
                self._weights[position], self.optimizer_step, reduction=self._reduction,
            )  # fmt: skip
        average = self.averages[position - len(self.keys)]
        return self.store.average(average.shadow, average.value, self._decay)

    @property
    def _reduction(self) -> Reduction:
        return cast(Reduction, self.config.reduction)


def averages_of(store: ShardStore, config: SyncConfig, task: str) -> list[Average]:
    """Return the moving averages of a group that are kept on the ps ``task``.

    Raises:
        ConfigurationError: One is not beside its variable, or of another shape or dtype.
        GradientError: One has a dtype of which there is no mean.
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
