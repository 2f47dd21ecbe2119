"""How far the clocks of tasks are apart, from the requests that they have sent each other.

Nothing comes before it was sent: a request that a sent at s and b had at r says that b's clock is
at most r - s ahead of a's, and its answer says the same the other way round. Every request between
any two tasks is such a *bound*, and so is each reading that the coordinator has asked for. What
satisfies all of them is convex, so the middle between the most and the least that a clock can be
ahead is a solution, too, in which no message arrives before it has left. (The shortest paths of
difference constraints: Cormen et al., "Introduction to Algorithms", 24.4.)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_SLACK_S = 1e-6
"""Clocks that drift break bounds by so little, or twice it, or four times …"""

MAX_SLACK_S = 10.0

Bound = tuple[int, int, float]
"""(a, b, seconds): the clock of b is at most so much ahead of that of a."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How far clocks are ahead of the first one.

    Attributes:
        ahead: Seconds, for each task; 0 where nothing is known.
        within: Half of the seconds between the most and the least that it can be; inf: unknown.
        slack: Seconds by which bounds contradict each other: clocks drift in a long trace.
    """

    ahead: Sequence[float]
    within: Sequence[float]
    slack: float


def align(count: int, bounds: Iterable[Bound]) -> Alignment:
    """Return how far clocks are ahead of that of task 0.

    Args:
        count: Number of tasks.
        bounds: In any order; of several between two tasks the tightest counts.
    """
    tightest: dict[tuple[int, int], float] = {}
    for one, other, seconds in bounds:
        if seconds < tightest.get((one, other), math.inf):
            tightest[one, other] = seconds
    slack = 0.0
    while True:
        forth: dict[int, list[tuple[int, float]]] = defaultdict(list)
        back: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (one, other), seconds in tightest.items():
            forth[one].append((other, seconds + slack))
            back[other].append((one, seconds + slack))
        most, least = _distances(count, forth), _distances(count, back)
        if (most is not None and least is not None) or slack > MAX_SLACK_S:
            break
        slack = max(MIN_SLACK_S, 2 * slack)
    if most is None or least is None:  # these are no clocks
        return Alignment([0.0] * count, [math.inf] * count, math.inf)
    ahead = [_middle(high, -low) for high, low in zip(most, least, strict=True)]
    within = [(high + low) / 2 for high, low in zip(most, least, strict=True)]
    return Alignment(ahead, within, slack)


def _middle(most: float, least: float) -> float:
    if math.isinf(most) and math.isinf(least):
        return 0.0
    if math.isinf(most) or math.isinf(least):
        return least if math.isinf(most) else most
    return (most + least) / 2


def _distances(count: int, edges: dict[int, list[tuple[int, float]]]) -> list[float] | None:
    """Return the shortest paths from 0 (Bellman and Ford); None: there is a negative circle."""
    distances = [math.inf] * count
    distances[0] = 0.0
    changed, is_waiting, rounds = deque([0]), [False] * count, [0] * count
    while changed:
        one = changed.popleft()
        is_waiting[one] = False
        for other, seconds in edges.get(one, ()):
            if distances[one] + seconds < distances[other]:
                distances[other] = distances[one] + seconds
                if not is_waiting[other]:
                    rounds[other] += 1
                    if rounds[other] > count:
                        return None
                    is_waiting[other] = True
                    changed.append(other)
    return distances
