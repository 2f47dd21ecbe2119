"""What schedules have in common: numbers, and plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest

from psync.errors import ConfigurationError
from psync.schedules import Schedule
from psync.specs import as_number, shortened


@dataclass(frozen=True)
class Line(Schedule):
    """As somebody would write one."""

    slope: float = field(metadata={">=": 0, ">": -1})
    bends: tuple[float, ...] = ()
    inner: Schedule | None = None
    up: bool = True

    def rate(self, step: float) -> float:
        return self.slope**step


def test_the_configuration_is_plain_data() -> None:
    assert Line(1, (1.0, 2.0), Line(2)).to_config() == {
        "kind": "Line",
        "slope": 1,
        "bends": [1.0, 2.0],
        "inner": {"kind": "Line", "slope": 2, "bends": [], "inner": None, "up": True},
        "up": True,
    }


def test_a_rate_beyond_the_range_is_infinite() -> None:
    assert Line(2.5)(3) == 15.625
    assert Line(10.0)(400) == math.inf


def test_arguments_out_of_range_are_refused() -> None:
    for slope, up, message in [
        (-0.5, True, "Line: expected slope >= 0, got -0.5"),
        (-2, True, "Line: expected slope >= 0, got -2"),
        ("x", True, "Line: slope: expected a number, got 'x'"),
        (1, 1, "Line: expected up to be True or False, got 1"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            Line(slope, up=up)
        assert caught.value.message == message


def test_a_number_becomes_a_plain_one() -> None:
    for value in [1, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 2)]:
        number = as_number("it", value)
        assert number == value
        assert type(number) in (int, float)


def test_what_is_no_finite_number_is_refused() -> None:
    for value in [True, "1", None, math.nan, math.inf, 10**400, Fraction(10**400)]:
        with pytest.raises(ConfigurationError, match=r"^it: expected a "):
            as_number("it", value)


def test_long_values_are_shortened_in_messages() -> None:
    assert shortened("x" * 198) == repr("x" * 198)
    assert shortened("x" * 300) == "'" + "x" * 199 + "…"
