"""Configuration of a synchronous group, as its ps tasks get it."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from psync.errors import ConfigurationError, check_fits
from psync.numerics.rules import flag
from psync.numerics.sums import Reduction, growing_decay
from psync.specs import as_number, checked_integer

REDUCTIONS = ("mean", "sum")
SPARSE_DIVISORS = ("per_index", "total")

MAX_TOKENS = 1 << 20
"""Most tokens that are put at once, so the highest R and N: they take memory on ps 0."""


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One group: R gradients a step, N replicas, and the rule that applies their mean.

    Raises:
        ConfigurationError: Something is of another type, or the numbers contradict each other.
    """

    name: str
    optimizer: dict[str, Any]  # ``UpdateRule.to_config()`` of the wrapped optimizer
    replicas_to_aggregate: int  # R
    total_num_replicas: int  # N
    min_replicas: int = 1  # with fewer living ones no step is closed
    patience_s: float = 30.0  # how long fewer are waited for
    strict: bool = False  # tokens are bound to replicas
    deterministic: bool = False  # sums in the order of the replicas; implies ``strict``
    tensorflow_compat: bool = False  # R initial tokens; old ones stay; the token is the local step
    reduction: Reduction = "mean"
    sparse_divisor: str = "per_index"  # or "total": of the mean of rows
    global_step: tuple[int, int, int]  # (ps, variable id, shard index)
    decay: float = 0.0  # of moving averages
    num_updates: bool = False  # the decay begins low and follows the step
    averages: tuple[tuple[int, int], ...] = ()  # (variable id, its shadow's id)

    def __post_init__(self) -> None:
        for each in ("replicas_to_aggregate", "total_num_replicas", "min_replicas"):
            self._set(each, whole_number(self.name, each, getattr(self, each)))
        for each in ("patience_s", "decay"):
            self._set(each, float(as_number(f"{self.name}: {each}", getattr(self, each))))
        for each in ("strict", "deterministic", "tensorflow_compat", "num_updates"):
            flag(self.name, each, getattr(self, each))
        self._set("strict", self.strict or self.deterministic)
        self._check_values()

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)

    def _check_values(self) -> None:
        needed, total = self.replicas_to_aggregate, self.total_num_replicas
        both, least = "replicas_to_aggregate and total_num_replicas of at", self.min_replicas
        got_both = f"{needed} and {total}"
        for is_wrong, expected, got in (
            (needed < 1 or total < 1, f"{both} least 1", got_both),
            (self.tokens_per_step > MAX_TOKENS, f"{both} most {MAX_TOKENS}", got_both),
            (not 1 <= least <= total, f"min_replicas from 1 to total_num_replicas ({total})",
             least),
            (self.patience_s <= 0, "patience_s above 0 s and finite", f"{self.patience_s:g}"),
            (self.reduction not in REDUCTIONS, 'reduction "mean" or "sum"', repr(self.reduction)),
            (self.sparse_divisor not in SPARSE_DIVISORS, 'sparse_divisor "per_index" or "total"',
             repr(self.sparse_divisor)),
            (not 0 <= self.decay < 1, "decay in [0, 1)", f"{self.decay:g}"),
        ):  # fmt: skip
            if is_wrong:
                raise ConfigurationError(f"{self.name}: expected {expected}, got {got}")
        if self.deterministic and needed != total:
            raise ConfigurationError(
                f"{self.name}: deterministic=True needs every replica in every step, got "
                f"replicas_to_aggregate={needed} of total_num_replicas={total}",
                hint="set both to the same value, without backup workers",
            )
        if self.tensorflow_compat and self.strict:
            raise ConfigurationError(
                f"{self.name}: tensorflow_compat=True uses unbound tokens, as TensorFlow does",
                hint="leave out strict and deterministic, or tensorflow_compat",
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that each step brings."""
        return max(self.replicas_to_aggregate, self.total_num_replicas)

    @property
    def allowance(self) -> int:
        """How often a replica contributes to a step where tokens are bound: ⌈R/N⌉."""
        return math.ceil(self.replicas_to_aggregate / self.total_num_replicas)

    @property
    def fewest_initial_tokens(self) -> int:
        """Without them the first step would never be complete: R - N, or 0."""
        return max(0, self.replicas_to_aggregate - self.total_num_replicas)

    def initial_tokens(self, count: int) -> int:
        """Return how many tokens ``count`` asks for; -1 is the default.

        The default is what the first step needs. In ``tensorflow_compat`` it is R: with
        them the gradients of each replica's second step are stale.

        Raises:
            ConfigurationError: Too few, too many, or no number of tokens.
        """
        if count == -1:
            compat = self.tensorflow_compat
            return self.replicas_to_aggregate if compat else self.fewest_initial_tokens
        if count < self.fewest_initial_tokens:
            raise ConfigurationError(
                f"{self.name}: too few tokens to finish the first step: got {count}, needed "
                f"{self.fewest_initial_tokens} (replicas_to_aggregate - total_num_replicas)",
                hint="-1 puts as many tokens as needed",
            )
        expected = f"{self.name}: expected at most {MAX_TOKENS} initial tokens"
        check_fits(count <= MAX_TOKENS, expected, count, "-1 puts as many tokens as needed")
        return count

    def decay_at(self, step: int) -> float:
        """Return the decay of moving averages after the update that raised the step to ``step``."""
        return growing_decay(self.decay, step) if self.num_updates else self.decay

    def to_config(self) -> dict[str, Any]:
        """Return it as plain data that msgpack takes."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_config(cls, config: object) -> SyncConfig:
        """Return what ``to_config`` of a peer described.

        Raises:
            ConfigurationError: It is none.
        """
        if not isinstance(config, dict) or config.keys() != {*cls.__struct_fields__}:
            raise ConfigurationError("a synchronous optimizer's configuration lacks fields")
        try:
            return msgspec.convert(config, cls)
        except msgspec.ValidationError as exc:
            if isinstance(exc.__cause__, ConfigurationError):  # it names the optimizer
                raise exc.__cause__ from None
            said, _, path = str(exc).replace("`", "").replace("$.", "").partition(" - at ")
            what = f"a synchronous optimizer's configuration: {path}"
            raise ConfigurationError(f"{what}: {said.lower()}") from exc


def whole_number(name: str, argument: str, value: object) -> int:
    """Return a whole number. Raises ConfigurationError if it is none."""
    return checked_integer(f"{name}: expected a whole number as {argument}", value, -(1 << 63))
