"""Layer-wise update rules (Lamb), which scale an update by norms over the whole variable.

A variable may be spread over several ps tasks, so its norms take two passes. ``measure`` returns
the sums of squares of each piece and changes nothing. ``trust_ratio`` combines the sums of all
pieces into one number, and ``apply`` takes that number. Without it, ``apply`` treats its arrays as
the whole variable.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from psync.numerics.moment_rules import MomentRule
from psync.numerics.update_rule import Arrays, Coefficients, Part, Scratch, UpdateRule, slot_dtype

PIECE = 1 << 13
"""Elements whose squares numpy adds up. Pieces are cut from the beginning of an array, and their
sums are added without rounding (``math.fsum``), so neither chunks nor the blocks of a shard, which
are multiples of it, show in a norm."""

Measured = tuple[np.ndarray, np.ndarray, Arrays]
"""Arrays to measure: param, grad, slots."""

Sums = tuple[float, float]
"""Sums of squares of a parameter and of its update."""


@dataclass(slots=True, eq=False)
class Measurement:
    """The norms of the update of one variable or shard, measured part by part.

    Args:
        rule: Rule of the update.
        decay: Weight decay before the update.
        t: Number of the update, from 1.
        scratch: Work space.
    """

    rule: LayerwiseRule
    decay: float
    t: int
    scratch: Scratch
    _sums: list[Sums] = field(default_factory=list)

    def add(self, param: np.ndarray, grad: np.ndarray, slots: Arrays) -> None:
        """Measure a part; the length of all parts except the last is a multiple of ``PIECE``."""
        with np.errstate(all="ignore"):
            for start in range(0, param.size, PIECE):
                piece = slice(start, start + PIECE)
                self._sums.append(
                    self._measure(param[piece], grad[piece], [slot[piece] for slot in slots])
                )

    def sums(self) -> Sums:
        """Return the sums over all parts."""
        return _added(p for p, _ in self._sums), _added(u for _, u in self._sums)

    def _measure(self, param: np.ndarray, grad: np.ndarray, slots: Arrays) -> Sums:
        work = slot_dtype(param.dtype)
        arrays = self.scratch.arrays(work, 5 + len(slots), param.size)
        single, prepared, update, temp, wide, *moved = arrays
        if work != np.float64:
            (wide,) = self.scratch.arrays(np.dtype(np.float64), 1, param.size)
        np.multiply(param, -self.decay, out=single, dtype=work)
        np.add(param, single, out=single, dtype=work)
        rule = self.rule
        rule.direction(rule.prepared(grad, work, prepared), slots, moved, self.t, update, temp)
        return _squares(single, wide), _squares(update, wide)


class LayerwiseRule(UpdateRule):
    """Base of rules that multiply the learning rate by a trust ratio of each variable."""

    takes_norms = True

    @abstractmethod
    def direction(
        self, grad: np.ndarray, slots: Arrays, out_slots: Arrays, t: int, out: np.ndarray,
        temp: np.ndarray,
    ) -> None:  # fmt: skip
        """Compute the unscaled update number ``t`` and the slots.

        Args:
            grad: Gradient as returned by ``prepared``.
            slots: Arrays, one per name of ``own_slots()``.
            out_slots: Arrays for the new slots.
            t: Number of the update, from 1.
            out: Array for the update.
            temp: Scratch memory.
        """

    def check_rows(self, what: str) -> None:
        """Raise, because a norm needs all rows."""
        raise self._needs_all_rows(what, "scales updates by a norm over the whole variable")

    def measurement(self, step: int, scratch: Scratch) -> Measurement:
        """Return an object that measures an update without applying it; see ``apply``.

        Others may use the scratch memory between its calls.
        """
        decay = self.learning_rate(step) * (self.options.weight_decay or 0.0)
        return Measurement(self, decay, self.iteration(step) + 1, scratch)

    def measure(self, parts: Iterable[Measured], step: int, scratch: Scratch) -> Sums:
        """Return the sums of squares of the decayed parameter and of its update, in float64.

        Args:
            parts: Parts as for ``apply``, which are not changed. Each one is requested when the
                previous one is done.
            step: See ``apply``.
            scratch: See ``apply``.
        """
        measurement = self.measurement(step, scratch)
        for param, grad, slots in parts:
            measurement.add(param, grad, slots)
        return measurement.sums()

    @staticmethod
    def trust_ratio(sums: Iterable[Sums]) -> float:
        """Return the norm of a variable divided by that of its update; 1 if one of them is 0.

        Args:
            sums: Results of ``measure`` for all pieces of the variable.

        Source: You et al., 2019, with the identity as phi; ``keras.optimizers.Lamb``.
        """
        pieces = list(sums)
        of_param, of_update = (_added(piece[i] for piece in pieces) for i in (0, 1))
        if not (of_param > 0 and of_update > 0):
            return 1.0
        return math.sqrt(of_param) / math.sqrt(of_update)

    def apply_all(
        self, parts: Iterable[Part], step: int, scratch: Scratch, ratio: float | None = None
    ) -> None:
        """Call ``apply`` for many parts; without a ratio, each part is a whole variable."""
        for part in parts:
            param, grad, slots, *_ = part
            of_part = ratio
            if of_part is None:
                of_part = self.trust_ratio([self.measure([(param, grad, slots)], step, scratch)])
            super().apply_all((part,), step, scratch, of_part)


class Lamb(LayerwiseRule, MomentRule):
    """Adam with updates scaled to the norm of each variable, times the learning rate.

    Moments ``m`` and ``v`` are Adam's. ``u = m_hat / (sqrt(v_hat) + epsilon)`` with
    ``m_hat = m / (1 - beta_1 ** t)`` and ``v_hat = v / (1 - beta_2 ** t)``; then
    ``w -= lr * |w| / |u| * u``, where the ratio is 1 if one of the norms is 0.

    Args and Raises: See ``MomentRule``.

    Source: You et al., 2019; ``keras.optimizers.Lamb``.
    """

    name = "lamb"

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        return rate, t

    def direction(
        self, grad: np.ndarray, slots: Arrays, out_slots: Arrays, t: int, out: np.ndarray,
        temp: np.ndarray,
    ) -> None:  # fmt: skip
        """Compute Adam's update with both moments corrected."""
        m, v = self._move_moments(grad, slots, out_slots, temp)
        np.divide(v, 1 - self.beta_2**t, out=temp)
        np.sqrt(temp, out=temp)
        np.add(temp, self.epsilon, out=temp)
        np.divide(m, 1 - self.beta_1**t, out=out)
        np.divide(out, temp, out=out)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        rate, t = coefficients
        update, temp = scratch[:2]
        self.direction(grad, slots, out_slots, int(t), update, temp)
        np.multiply(update, rate, out=update)
        np.subtract(param, update, out=out_param)


def _squares(array: np.ndarray, wide: np.ndarray) -> float:
    np.copyto(wide, array)
    np.multiply(wide, wide, out=wide)
    return float(np.add.reduce(wide))


def _added(sums: Iterable[float]) -> float:
    """Return the sum of squares as if it were rounded once."""
    try:
        return math.fsum(sums)
    except OverflowError:  # finite ones beyond the range
        return math.inf
