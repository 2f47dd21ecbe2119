"""Clocks are aligned by what messages say: nothing arrives before it has left."""

from __future__ import annotations

import math
import random

import pytest

from psync.net.tracing.clocks import MAX_SLACK_S, Bound, align


def exchanges(ahead: list[float], pairs: list[tuple[int, int]], seed: int = 1) -> list[Bound]:
    """What 50 requests of each pair say, of clocks that are so far ahead."""
    draw = random.Random(seed)
    bounds: list[Bound] = []
    for client, server in pairs * 50:
        sent = draw.uniform(0, 5)
        came = sent + draw.expovariate(1000)
        answered = came + draw.expovariate(500)
        got = answered + draw.expovariate(1000)
        bounds.append((client, server, came + ahead[server] - sent - ahead[client]))
        bounds.append((server, client, got + ahead[client] - answered - ahead[server]))
    return bounds


def test_clocks_are_found_within_what_is_said() -> None:
    ahead = [0.0, 1000.0, -3.5, 0.002]
    bounds = exchanges(ahead, [(0, 1), (0, 2), (0, 3), (3, 1), (3, 2)])
    found = align(4, bounds)
    for task in range(4):
        assert abs(found.ahead[task] - ahead[task]) <= found.within[task] < 1e-3
    for one, other, seconds in bounds:  # so no message arrives before it has left
        assert found.ahead[other] - found.ahead[one] <= seconds + 1e-12
    assert found.slack == 0


def test_a_clock_is_found_through_others() -> None:
    found = align(3, exchanges([0.0, 7.0, -9.0], [(0, 1), (1, 2)]))
    assert found.ahead == pytest.approx([0, 7, -9], abs=1e-3)


def test_of_what_has_said_nothing_nothing_is_known() -> None:
    found = align(3, exchanges([0.0, 5.0, 0.0], [(0, 1)]))
    assert found.ahead[2] == 0
    assert math.isinf(found.within[2])


def test_with_bounds_of_one_side_only_a_clock_is_at_its_bound() -> None:
    assert align(2, [(0, 1, 3.0)]).ahead[1] == 3
    assert align(2, [(1, 0, 3.0)]).ahead[1] == -3


def test_clocks_that_drift_are_aligned_all_the_same() -> None:
    found = align(2, [(0, 1, 5.0), (1, 0, -5.0002)])  # at most 5 s ahead, and at least 5.0002
    assert found.ahead[1] == pytest.approx(5.0001, abs=1e-4)
    assert 1e-4 <= found.slack <= 3e-4


def test_what_is_no_clock_is_left_alone() -> None:
    found = align(2, [(0, 1, -10 * MAX_SLACK_S), (1, 0, -10 * MAX_SLACK_S)])
    assert (found.ahead[1], found.slack) == (0, math.inf)
