"""What synchronous steps with norms of the mean should give, computed by one process, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.numerics.memory import Scratch
from psync.numerics.rules import LayerwiseRule, UpdateRule, clipped_by_norm
from psync.numerics.sums import sum_dtype
from psync.specs import VariableSpec


class Training:
    """One process that sums, clips and applies what several replicas bring.

    Args:
        rule: Of the optimizer.
        values: At the beginning.
        variables: Say where they are cut.
    """

    def __init__(
        self, rule: UpdateRule, values: Sequence[np.ndarray], variables: Sequence[VariableSpec]
    ) -> None:
        self.rule = rule
        self.steps = 0
        self._shapes = [variable.shape for variable in variables]
        self._shards = [(i, shard) for i, v in enumerate(variables) for shard in v.shards]
        self.values = [
            values[i][shard.offset : shard.offset + shard.shape[0]].reshape(-1)
            if shard.shape
            else values[i].reshape(-1)
            for i, shard in self._shards
        ]
        self.values = [value.copy() for value in self.values]
        self._slots = [[np.zeros_like(v) for _ in rule.own_slots()] for v in self.values]

    def step(self, gradients: Sequence[Sequence[np.ndarray]]) -> None:
        """Take the gradients of each replica, one for each variable."""
        means = []
        for i, shard in self._shards:
            rows = slice(shard.offset, shard.offset + shard.shape[0]) if shard.shape else ...
            work = sum_dtype(gradients[0][i].dtype)
            total = gradients[0][i][rows].astype(work)
            for of_replica in gradients[1:]:
                total = total + of_replica[i][rows]
            mean = total / work.type(len(gradients))
            means.append(mean.astype(gradients[0][i].dtype).reshape(-1))
        clipped = clipped_by_norm(means, [i for i, _ in self._shards], self.rule.options)
        ratios = self._ratios(clipped)
        for (i, _), value, slots, mean in zip(
            self._shards, self.values, self._slots, clipped, strict=True
        ):
            ratio = ratios.get(i)
            self.rule.apply(value, mean, slots, value, slots, self.steps, Scratch(), ratio)  # type: ignore[arg-type]
        self.steps += 1

    def _ratios(self, gradients: Sequence[Any]) -> dict[int, float]:
        rule = self.rule
        if not isinstance(rule, LayerwiseRule):
            return {}
        sums: dict[int, list[tuple[float, float]]] = {}
        for (i, _), *part in zip(self._shards, self.values, gradients, self._slots, strict=True):
            sums.setdefault(i, []).append(rule.measure([tuple(part)], self.steps, Scratch()))
        return {i: rule.trust_ratio(pieces) for i, pieces in sums.items()}

    def read(self, variable: int) -> np.ndarray:
        parts = [v for (i, _), v in zip(self._shards, self.values, strict=True) if i == variable]
        return np.concatenate(parts).reshape(self._shapes[variable])
