"""Layer-wise update rules (Lamb), which scale an update by norms over the whole variable.

A variable may lie on several ps tasks, so its norms are found in two passes: ``measure`` gives
the sums of squares of each piece and changes nothing, ``trust_ratio`` makes one number of the
sums of all pieces, and ``apply`` takes that. ``apply`` without it takes its arrays for the whole.
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
"""What is measured: param, grad, slots."""

Sums = tuple[float, float]
"""Of squares, of a parameter and of its update."""


@dataclass(slots=True, eq=False)
class Measurement:
    """Measures the update of one variable, or of one shard, part after part.

    Args:
        rule: Whose update it is.
        decay: Of the weights, before it.
        t: Its number, from 1.
        scratch: Work space.
    """

    rule: LayerwiseRule
    decay: float
    t: int
    scratch: Scratch
    _sums: list[Sums] = field(default_factory=list)

    def add(self, param: np.ndarray, grad: np.ndarray, slots: Arrays) -> None:
        """Measure a part; all but the last one are multiples of ``PIECE`` long."""
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
    """Base of rules whose learning rate is multiplied by a trust ratio of each variable."""

    takes_norms = True

    @abstractmethod
    def direction(
        self, grad: np.ndarray, slots: Arrays, out_slots: Arrays, t: int, out: np.ndarray,
        temp: np.ndarray,
    ) -> None:  # fmt: skip
        """Compute the update number ``t`` that is to be scaled, and the slots.

        Args:
            grad: As ``prepared`` returns it.
            slots: One array per name of ``own_slots()``.
            out_slots: Where their new values go.
            t: From 1.
            out: Where the update goes.
            temp: Scratch memory.
        """

    def check_rows(self, what: str) -> None:
        """Raise: a norm is of all rows."""
        raise self._needs_all_rows(what, "scales updates by a norm over the whole variable")

    def measurement(self, step: int, scratch: Scratch) -> Measurement:
        """Return what measures an update without making it; ``step`` and scratch as for ``apply``.

        While it is used, the scratch memory may be used by others in between.
        """
        decay = self.learning_rate(step) * (self.options.weight_decay or 0.0)
        return Measurement(self, decay, self.iteration(step) + 1, scratch)

    def measure(self, parts: Iterable[Measured], step: int, scratch: Scratch) -> Sums:
        """Return the sums of squares of the decayed parameter and of its update, in float64.

        Args:
            parts: Each as for ``apply``; nothing of them is changed. The next one is asked for
                when the one before is done.
            step: As for ``apply``.
            scratch: As for ``apply``.
        """
        measurement = self.measurement(step, scratch)
        for param, grad, slots in parts:
            measurement.add(param, grad, slots)
        return measurement.sums()

    @staticmethod
    def trust_ratio(sums: Iterable[Sums]) -> float:
        """Return the norm of a variable through that of its update; 1 if one of them is 0.

        Args:
            sums: What ``measure`` gave for each piece of the variable.

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
        """As ``UpdateRule.apply_all``; without a ratio each part is taken for a whole variable."""
        for part in parts:
            param, grad, slots, *_ = part
            of_part = ratio
            if of_part is None:
                of_part = self.trust_ratio([self.measure([(param, grad, slots)], step, scratch)])
            super().apply_all((part,), step, scratch, of_part)


class Lamb(LayerwiseRule, MomentRule):
    """Adam whose update of each variable is as long as the variable, times the learning rate.

    Moments ``m`` and ``v`` as Adam's; ``u = m_hat / (sqrt(v_hat) + epsilon)`` with
    ``m_hat = m / (1 - beta_1 ** t)`` and ``v_hat = v / (1 - beta_2 ** t)``; then
    ``w -= lr * |w| / |u| * u``, where a ratio of which one norm is 0 counts as 1.

    Args and Raises: As for ``MomentRule``.

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
