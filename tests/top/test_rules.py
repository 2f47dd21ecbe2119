"""Update rules of users: what they compute, and what is refused when they are registered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import own_rules
from psync import optimizers, rules, schedules
from psync.errors import ConfigurationError
from psync.numerics.memory import Scratch
from psync.numerics.rules import RULES, SGD, RuleOptions, RuleRaised, UpdateRule, registered
from rule_table import run, start


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


FLOAT32 = np.dtype(np.float32)


class Plain(rules.UpdateRule):
    """Gradient descent, without a slot."""

    name = "tests.plain"

    def update(self, value: Any, slots: Any, gradient: Any, step: rules.Step) -> Any:
        return value - step.learning_rate * gradient


def test_computes_what_the_same_rule_of_psync_does() -> None:
    for dtype in ["float16", "float32", "float64"]:
        for options in [
            RuleOptions(),
            RuleOptions(weight_decay=0.3),
            RuleOptions(clipvalue=0.2, weight_decay=0.1),
        ]:
            for in_place in [True, False]:
                rate = schedules.ExponentialDecay(0.1, 3, 0.9)
                own: UpdateRule = own_rules.Momentum(rate, momentum=0.8).with_options(options)
                theirs = SGD(rate, 0.8, nesterov=True).with_options(options)
                found, expected = (
                    run(rule, np.dtype(dtype), chunk=300, in_place=in_place)
                    for rule in (own, theirs)
                )
                np.testing.assert_allclose(
                    found[0], expected[0], rtol=1e-3 if dtype == "float16" else 1e-6
                )
                np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-5)


def test_one_without_slots_returns_the_value_alone() -> None:
    rules.register(Plain)
    found, _ = run(Plain(0.1), FLOAT32, chunk=300)
    expected, _ = run(SGD(0.1), FLOAT32, chunk=300)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_step_has_a_number_from_one_and_the_rate_of_the_pushes_so_far() -> None:
    seen = []

    @rules.register
    class Seeing(rules.UpdateRule):
        name = "tests.seeing"

        def update(self, value: Any, slots: Any, gradient: Any, step: rules.Step) -> Any:
            seen.append((step.number, step.learning_rate))
            return value

    seen.clear()
    rule = Seeing(schedules.PiecewiseConstantDecay([1], [0.5, 0.25]))
    run(rule, FLOAT32, chunk=1000)
    assert seen[:4] == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_results_that_are_the_arguments_themselves_are_copied_in_time() -> None:
    @rules.register
    class Before(rules.UpdateRule):
        name = "tests.before"
        slots = ("before", "gradient")

        def update(self, value: Any, slots: Any, gradient: Any, step: rules.Step) -> Any:
            return value - gradient, {"before": value, "gradient": gradient}

    param, slots = start(Before(), 10, FLOAT32)
    was, gradient = param.copy(), np.ones(10, np.float32)
    Before().apply([(param, gradient, slots, param, slots)], 0, Scratch())
    assert np.array_equal(param, was - 1)
    assert np.array_equal(slots[0], was)
    assert np.array_equal(slots[1], gradient)


def test_arguments_have_their_range() -> None:
    with pytest.raises(ConfigurationError, match=r"tests.momentum: expected momentum between 0"):
        own_rules.Momentum(momentum=1.5)
    with pytest.raises(ConfigurationError, match=r"tests.momentum: most: expected a number"):
        own_rules.Momentum(most="much")  # type: ignore[arg-type]


def test_a_default_rate_and_initial_values_of_slots() -> None:
    @rules.register
    class Filled(rules.UpdateRule):
        name = "tests.filled"
        slots = ("sums",)
        learning_rate: float = 0.25
        initial_sums_value: float = 0.1

        def update(self, value: Any, slots: Any, gradient: Any, step: rules.Step) -> Any:
            return value - step.learning_rate * gradient, dict(slots)

    assert Filled().learning_rate(0) == 0.25
    assert Filled(0.5).learning_rate(0) == 0.5
    assert Filled().initial_slot("sums") == 0.1
    assert Filled(initial_sums_value=2).initial_slot("sums") == 2


def test_it_may_have_an_initialization_of_its_own() -> None:
    @rules.register
    class Initialized(rules.UpdateRule):
        name = "tests.initialized"
        factor: float = 0.5

        def __post_init__(self) -> None:
            self.twice = 2 * self.factor

        def update(self, value: Any, slots: Any, gradient: Any, step: rules.Step) -> Any:
            return value - step.learning_rate * self.twice * gradient

    found, _ = run(Initialized(0.1), FLOAT32, chunk=300)
    expected, _ = run(SGD(0.1), FLOAT32, chunk=300)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_it_raises_is_the_cause_and_nothing_is_written() -> None:
    rule = own_rules.Momentum(0.1)
    param, slots = start(rule, 10, FLOAT32)
    was = param.copy()
    with pytest.raises(RuleRaised) as caught:
        rule.apply([(param, np.full(10, 1e9, np.float32), slots, param, slots)], 0, Scratch())
    assert str(caught.value.__cause__) == "a gradient above 100"
    assert np.array_equal(param, was)
    assert not slots[0].any()


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, ValueError, MemoryError])
def test_whatever_it_raises_is_its_error_but_out_of_memory(error: type[BaseException]) -> None:
    """A ps that let it through would answer nobody."""
    rule = Plain()
    rule.update = lambda *_: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
    with pytest.raises(MemoryError if error is MemoryError else RuleRaised) as caught:
        run(rule, FLOAT32, chunk=1000)
    assert error in (type(caught.value), type(caught.value.__cause__))


# What is refused.


def of(**attributes: Any) -> type[rules.UpdateRule]:
    return type("Given", (Plain,), {"name": "tests.given", **attributes})


def returning(make: Any, **attributes: Any) -> type[rules.UpdateRule]:
    return of(update=lambda self, *arguments: make(*arguments), **attributes)


counter = itertools.count()


def raising(*_: Any) -> Any:
    raise KeyError("nothing")


def test_refuses() -> None:
    for rule, message in [
        (SGD, "expected a subclass of psync.rules.UpdateRule, got <class 'psync"),
        (of(name=""), "expected a text of 1 to 100 characters as its name, got ''\nhint: name ="),
        (of(name=3), "as its name, got 3"),
        (of(name="sgd"), "'sgd' of .*the name is already used by psync.numerics"),
        (of(name="tests.momentum"), "the name is already used by own_rules"),
        (of(version="2"), "expected an integer as version, got '2'"),
        (of(slots=["m"]), r"expected a tuple of different names as slots, .* got \['m'\]"),
        (of(slots=("m", "m")), "different names"),
        (of(slots=("gradient_accumulator",)), "none of them 'gradient_accumulator'"),
        (type("Given", (rules.UpdateRule,), {"name": "g"}), r"expected a method update\(value,"),
        (returning(raising), "update raised KeyError in a probe, with float32 between -2 and 2"),
        (returning(lambda *_: None), r"expected the value to be of shape .*, got \(\) object"),
        (returning(lambda v, *_: v[1:]), r"expected the value to be of shape \(97,\) float32, got"),
        (returning(lambda v, *_: v * 1j), "got .*complex64"),
        (returning(lambda v, *_: v, slots=("m",)), r"to return \(value, \{'m'\}\), got an array"),
        (returning(lambda v, *_: (v, {}), slots=("m",)), r"to return \(value, \{'m'\}\)"),
        (returning(lambda v, s, g, _: v.__iadd__(g)), "read-only"),
        (
            returning(lambda v, *_: v + next(counter)),
            "update returned a different result when called",
        ),
        (
            returning(lambda v, s, g, _: v - g / np.linalg.norm(g)),
            "depending on the other elements",
        ),
    ]:
        before = registered()
        with pytest.raises(ConfigurationError, match=message):
            rules.register(rule)
        assert registered() == before


def test_the_same_class_again_replaces_itself() -> None:
    rules.register(own_rules.Momentum)
    assert RULES["tests.momentum"] is own_rules.Momentum


def test_an_optimizer_needs_one_that_is_registered_and_bears_a_probe_of_its_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown optimizer 'tests.plain'") as caught:
        optimizers.Optimizer(Plain(0.1))
    assert "--plugin MODULE" in str(caught.value.hint)
    with pytest.raises(ConfigurationError, match=r"tests.momentum: update raised ValueError"):
        optimizers.Optimizer(own_rules.Momentum(0.1, most=0.01))
    optimizer = optimizers.Optimizer(own_rules.Momentum(0.1), weight_decay=0.1)
    assert optimizer.get_name() == "Momentum"
    assert optimizer.get_slot_names() == ["momentum"]


def test_an_optimizer_refuses_a_schedule_that_is_not_registered() -> None:
    class Other(own_rules.Halving):
        pass

    with pytest.raises(ConfigurationError, match="unknown schedule 'Other'"):
        optimizers.SGD(Other(0.1))
