"""Scaling: how many workers a cluster shall have, by what there is to do.

A launcher imports it, so it needs no numpy.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from psync.errors import check_fits


@dataclass(frozen=True, slots=True)
class Load:
    """What a coordinator has to do at one moment."""

    queued: int = 0  # closures that no worker holds, and that wait for no input
    in_flight: int = 0  # closures that workers hold
    mean_s: float | None = None  # seconds that one takes; None: none has ended yet


class AdaptiveRule:
    """How many workers a cluster shall have, asked again and again.

    Args:
        minimum: Of workers, at least 1.
        maximum: Of workers.
        target_s: In how many seconds what there is to do should be done.
        wait_count: So many looks in a row have to ask for fewer workers before any leaves.

    Raises:
        ConfigurationError: One of them is out of range.
    """

    def __init__(
        self, minimum: int, maximum: int, target_s: float = 5.0, wait_count: int = 3
    ) -> None:
        for name, value in (("minimum", minimum), ("wait_count", wait_count)):
            fits = type(value) is int and value >= 1
            check_fits(fits, f"{name}: expected a whole number above 0", value)
        fits = type(maximum) is int and maximum >= minimum
        check_fits(fits, f"maximum: expected a whole number, {minimum} or above", maximum)
        fits = 0 < target_s < math.inf
        check_fits(fits, "target_duration: expected seconds above 0", target_s)
        self._minimum, self._maximum, self._target_s = minimum, maximum, target_s
        self._fewer: deque[int] = deque(maxlen=wait_count)  # the last looks, if they ask for fewer

    def wanted(self, load: Load) -> int:
        """Return how many workers a load asks for, within the bounds."""
        number = load.queued + load.in_flight
        if load.mean_s is not None:
            number = min(number, math.ceil(number * load.mean_s / self._target_s))
        return min(max(number, self._minimum), self._maximum)

    def decide(self, load: Load, workers: int) -> int:
        """Return how many workers there shall be, where there are ``workers`` now."""
        wanted = self.wanted(load)
        if wanted >= workers:
            self._fewer.clear()
            return wanted
        self._fewer.append(wanted)
        if len(self._fewer) < (self._fewer.maxlen or 0):
            return workers
        target = max(self._fewer)
        self._fewer.clear()
        return target


def changes(
    present: Collection[int], taken: Collection[int], number: int
) -> tuple[list[int], list[int]]:
    """Return which workers have to come and which to leave, by index, for ``number`` of them.

    Those come that have the lowest indices which are free; those leave that have the highest.

    Args:
        present: Workers that there are.
        taken: Further indices that are not free yet: of workers that are about to leave.
        number: At least 1.

    Raises:
        ConfigurationError: It is no such number.
    """
    fits = type(number) is int and number >= 1
    check_fits(fits, "workers: expected a whole number above 0", number)
    free = (index for index in itertools.count() if index not in present and index not in taken)
    come = list(itertools.islice(free, max(number - len(present), 0)))
    leave = sorted(present, reverse=True)[: max(len(present) - number, 0)]
    return come, leave
