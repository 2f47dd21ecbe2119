"""Learning rates: the formulas, what travels, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

import own_rules
from psync import schedules
from psync.errors import ConfigurationError
from psync.schedules import (
    Constant,
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    PiecewiseConstantDecay,
    PolynomialDecay,
    Schedule,
    Warmup,
    as_schedule,
    from_config,
)
from psync.specs import shortened

ONE_OF_EACH = [
    Constant(0.1),
    CosineDecay(0.1, 100, alpha=0.01),
    CosineDecay(0.0, 100, warmup_target=0.5, warmup_steps=10),
    CosineDecayRestarts(0.1, 10, 1.5, 0.5, alpha=0.1),
    CosineDecayRestarts(0.1, 10, t_mul=1),
    ExponentialDecay(0.1, 10, 0.5, staircase=True),
    InverseTimeDecay(0.1, 10, 0.5),
    PiecewiseConstantDecay((10, 20), (1.0, 0.5, 0.1)),
    PolynomialDecay(0.1, 10, cycle=True, power=2.0),
    Warmup(ExponentialDecay(0.1, 10, 0.5), 5),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JUNK = SCALARS | st.lists(SCALARS, max_size=4)
of_each = pytest.mark.parametrize("schedule", ONE_OF_EACH, ids=lambda s: type(s).__name__)


class TestFormulas:
    """Values worked out by hand from the formulas in Keras' documentation."""

    def test_value(self) -> None:
        for schedule, step, rate in [
            (Constant(0.25), 7, 0.25),
            (ExponentialDecay(1.0, 10, 0.5), 0, 1.0),
            (ExponentialDecay(1.0, 10, 0.5), 5, math.sqrt(0.5)),
            (ExponentialDecay(1.0, 10, 0.5), 20, 0.25),
            (ExponentialDecay(1.0, 10, 0.5, staircase=True), 19, 0.5),
            (ExponentialDecay(1.0, 10, 0), 5, 0.0),
            (InverseTimeDecay(1.0, 2, 0.5), 4, 0.5),
            (InverseTimeDecay(1.0, 2, 0.5, staircase=True), 5, 0.5),
            (PolynomialDecay(1.0, 10, 0.0), 5, 0.5),
            (PolynomialDecay(1.0, 10, 0.2, power=2.0), 5, 0.4),
            (PolynomialDecay(1.0, 10), 11, 0.0001),
            (PolynomialDecay(1.0, 10, 0.0, cycle=True), 0, 1.0),
            (PolynomialDecay(1.0, 10, 0.0, cycle=True), 10, 0.0),
            (PolynomialDecay(1.0, 10, 0.0, cycle=True), 15, 0.25),
            (CosineDecay(1.0, 10), 0, 1.0),
            (CosineDecay(1.0, 10), 5, 0.5),
            (CosineDecay(1.0, 10, alpha=0.1), 10, 0.1),
            (CosineDecay(1.0, 10, alpha=0.1), 99, 0.1),
            (CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4), 1, 0.25),
            (CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4), 4, 1.0),
            (CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4), 9, 0.5),
            (CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4), 50, 0.0),
            (CosineDecayRestarts(1.0, 10), 0, 1.0),
            (CosineDecayRestarts(1.0, 10), 5, 0.5),
            (CosineDecayRestarts(1.0, 10, m_mul=0.5), 10, 0.5),
            (CosineDecayRestarts(1.0, 10, m_mul=0.5), 20, 0.25),
            # A period begins here, though the logarithm is rounded to less than its number.
            (CosineDecayRestarts(1.0, 10, t_mul=3.0, m_mul=0.5), 10, 0.5),
            (CosineDecayRestarts(1.0, 10, m_mul=0.5), 30, 0.25),
            (CosineDecayRestarts(1.0, 10, 1.0, 0.5), 25, 0.125),
            (CosineDecayRestarts(1.0, 10, alpha=0.2), 20, 0.6),
            (PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1]), 10, 1.0),
            (PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1]), 11, 0.5),
            (PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1]), 20, 0.5),
            (PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1]), 21, 0.1),
            (Warmup(1.0, 4), 0, 0.0),
            (Warmup(1.0, 4, 0.2), 2, 0.6),
            (Warmup(PolynomialDecay(1.0, 10, 0.0), 4), 9, 0.5),
            (Warmup(1.0, 0), 0, 1.0),
        ]:
            for found in (schedule(step), schedule.rate(step)):
                assert found == pytest.approx(rate, rel=1e-15, abs=1e-17)

    @given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 50))
    def test_warmup_before_cosine_equals_the_warmup_inside_cosine(
        self, step: int, decay_steps: int, warmup_steps: int
    ) -> None:
        inside = CosineDecay(0.1, decay_steps, 0.2, warmup_target=0.7, warmup_steps=warmup_steps)
        before = Warmup(CosineDecay(0.7, decay_steps, 0.2), warmup_steps, 0.1)
        assert inside(step) == pytest.approx(before(step))

    @given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 12))
    def test_every_period_begins_at_its_full_height(
        self, first: int, ratio: int, period: int
    ) -> None:
        """However the logarithm that finds it is rounded."""
        begins = sum(first * ratio**i for i in range(period))
        schedule = CosineDecayRestarts(1.0, first, ratio, 0.5)
        assert schedule(begins) == pytest.approx(0.5**period)

    @of_each
    @given(step=st.integers(0, 2**63))
    def test_any_step_gives_a_finite_float_from_0(self, schedule: Schedule, step: int) -> None:
        for rate in (schedule(step), schedule(step % 300)):
            assert type(rate) is float
            assert math.inf > rate >= 0

    def test_growth_without_bound_is_infinity_not_an_error(self) -> None:
        assert ExponentialDecay(1.0, 1, 10.0)(10**6) == math.inf


class TestConfig:
    @of_each
    def test_survives_the_wire(self, schedule: Schedule) -> None:
        config = msgpack.decode(msgpack.encode(schedule.to_config()))
        assert from_config(config) == schedule

    def test_holds_kind_and_arguments_by_name(self) -> None:
        assert Warmup(PiecewiseConstantDecay([1], [0.1, 0.2]), 5).to_config() == {
            "kind": "Warmup",
            "schedule": {"kind": "PiecewiseConstantDecay", "boundaries": [1], "values": [0.1, 0.2]},
            "warmup_steps": 5,
            "initial_learning_rate": 0.0,
        }

    def test_refuses(self) -> None:
        for config, message in [
            (None, "expected the config of a schedule, got None"),
            ({}, "expected the config of a schedule, got {}"),
            ({"kind": 3}, "expected the config of a schedule"),
            ({"kind": "Lambda"}, "unknown schedule 'Lambda'\nhint: use one of Constant, CosineDec"),
            ({"kind": "Constant"}, r"Constant: expected the arguments \['value'\], got \[\]"),
            ({"kind": "Constant", "value": 1, 7: 1}, r"got \['7', 'value'\]"),
            ({"kind": "Constant", "value": "x" * 300}, "expected a number, got 'x{199}…"),
            ({"kind": "Constant", "value": True}, "Constant: value: expected a number, got True"),
            ({"kind": "Constant", "value": math.nan}, "expected a finite number, got nan"),
            ({"kind": "Constant", "value": 10**400}, "expected a finite number, got 1000"),
            (
                {"kind": "Warmup", "schedule": 1, "warmup_steps": 1, "initial_learning_rate": 0},
                "expected the config of a schedule, got 1",
            ),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                from_config(config)

    def test_refuses_endless_nesting(self) -> None:
        config: object = Constant(1).to_config()
        for _ in range(2000):
            config = {**Warmup(1, 1).to_config(), "schedule": config}
        with pytest.raises(ConfigurationError, match="nested more than 8 deep"):
            from_config(config)

    @given(
        schedule=st.sampled_from(ONE_OF_EACH),
        changes=st.lists(st.tuples(st.integers(0, 6), JUNK), max_size=3),
    )
    def test_garbled_config_is_a_configuration_error_or_a_schedule(
        self, schedule: Schedule, changes: list[tuple[int, object]]
    ) -> None:
        config = schedule.to_config()
        names = sorted(config)
        for which, value in changes:
            config[names[which % len(names)]] = value
        try:
            garbled = from_config(config)
        except ConfigurationError:
            return
        assert isinstance(garbled(3), float)


class TestArguments:
    def test_refused(self) -> None:
        for make, message in [
            (lambda: ExponentialDecay(0.1, 0, 0.5), "ExponentialDecay: expected decay_steps > 0, "),
            (lambda: ExponentialDecay(0.1, 1, -1), "expected decay_rate >= 0, got -1"),
            (lambda: ExponentialDecay(0.1, 1, 1, 1), "expected staircase to be True or False, got"),
            (lambda: PolynomialDecay(0.1, 1, power=-1), "PolynomialDecay: expected power >= 0"),
            (lambda: CosineDecayRestarts(0.1, 0), "expected first_decay_steps > 0, got 0"),
            (lambda: CosineDecayRestarts(0.1, 1, 0.5), "expected t_mul >= 1, got 0.5"),
            (lambda: CosineDecayRestarts(0.1, 1, 1, -1), "expected m_mul >= 0, got -1"),
            (lambda: CosineDecay(0.1, 1, warmup_steps=-1), "expected warmup_steps >= 0, got -1"),
            (lambda: PiecewiseConstantDecay(3, [1]), "a list of numbers as boundaries, got 3"),
            (lambda: PiecewiseConstantDecay([1], [1]), "got 1 boundaries and 1 values"),
            (lambda: PiecewiseConstantDecay([], [1]), "got 0 boundaries and 1 values"),
            (lambda: PiecewiseConstantDecay([2, 2], [1, 2, 3]), r"increasing order, got \[2, 2\]"),
            # A rate below 0 would climb, and let weights grow that are to decay.
            (lambda: Constant(-0.1), "Constant: expected value >= 0, got -0.1"),
            (lambda: as_schedule(-1), "learning rate: expected a number from 0, got -1"),
            (lambda: ExponentialDecay(-0.1, 10, 0.5), "initial_learning_rate >= 0, got -0.1"),
            (lambda: InverseTimeDecay(-0.1, 10, 0.5), "initial_learning_rate >= 0, got -0.1"),
            (lambda: PolynomialDecay(-0.1, 10), "initial_learning_rate >= 0, got -0.1"),
            (lambda: PolynomialDecay(0.1, 10, -0.1), "end_learning_rate >= 0, got -0.1"),
            (lambda: CosineDecay(-0.1, 10), "initial_learning_rate >= 0, got -0.1"),
            (lambda: CosineDecay(0.1, 10, -0.5), "alpha >= 0, got -0.5"),
            (lambda: CosineDecay(0.1, 10, warmup_target=-1), "warmup_target >= 0, got -1"),
            (lambda: CosineDecayRestarts(-0.1, 10), "initial_learning_rate >= 0, got -0.1"),
            (lambda: CosineDecayRestarts(0.1, 10, m_mul=2, alpha=1.5), "alpha <= 1, got 1.5"),
            (lambda: PiecewiseConstantDecay([1], [0.1, -0.2]), "expected values >= 0, got -0.2"),
            (lambda: Warmup(0.1, 10, -0.1), "initial_learning_rate >= 0, got -0.1"),
            (lambda: Warmup(-0.1, 10), "learning rate: expected a number from 0, got -0.1"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                make()

    def test_number_is_a_constant_schedule(self) -> None:
        for number in [1, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 2)]:
            schedule = as_schedule(number)
            assert schedule == Constant(float(number))
            assert type(schedule.to_config()["value"]) in (int, float)

    def test_function_is_refused_with_the_names_of_what_exists(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            as_schedule(lambda step: 0.1)
        text = str(caught.value)
        assert "got the callable <function" in text
        assert "a ps evaluates the learning rate and runs no user code" in text
        assert "PiecewiseConstantDecay, PolynomialDecay, Warmup" in text


@pytest.fixture
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


@pytest.mark.usefixtures("registry")
def test_a_schedule_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'Constant' of .*the name is"):
        schedules.register(type("Constant", (schedules.Constant,), {}))
    with pytest.raises(ConfigurationError, match=r"'Halving' of .* by own_rules"):
        schedules.register(type("Halving", (schedules.Constant,), {}))
    with pytest.raises(ConfigurationError, match="expected a subclass of"):
        schedules.register(int)  # type: ignore[type-var]


def test_without_plugins_nothing_is_registered() -> None:
    assert schedules.registered() == []
    assert schedules.registered_in(schedules.Warmup(0.5, 3)) == []


def test_what_is_no_finite_number_is_refused() -> None:
    for value in [True, "1", None, math.nan, math.inf, 10**400, Fraction(10**400)]:
        with pytest.raises(ConfigurationError, match=r"^learning rate: expected a "):
            as_schedule(value)


def test_long_values_are_shortened_in_messages() -> None:
    assert shortened("x" * 198) == repr("x" * 198)
    assert shortened("x" * 300) == "'" + "x" * 199 + "…"
