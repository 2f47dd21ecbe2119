"""Which gradients count, and who gets them when."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from accumulator_tools import accumulator, apply_grad, array, cancel, refusal, take_grad
from psync.accumulators import (
    Applied,
    ConditionalAccumulator,
    Take,
    other_parameters,
    rule_of,
)
from psync.errors import ConfigurationError, RemoteProtocolError, ValueMismatchError
from psync.numerics.sums import at_once
from psync.specs import Outcome
from psync.wire.codec import replace
from psync.wire.messages import DefineAccumulator

ACCEPTED, STALE = Outcome.ACCEPTED, Outcome.STALE


class Unconvertible:
    """Refuses to become an array, as tensors of torch that record their gradient do."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise RuntimeError("detach it first")

    def __repr__(self) -> str:
        return "Unconvertible()"


class TestSteps:
    def test_the_step_can_go_back_with_a_warning(self) -> None:
        held = accumulator((1,))
        held.set_global_step(7)
        assert held.set_global_step(7) is None
        warning = held.set_global_step(np.int64(3))
        assert warning == 'accumulator "w/part_0": the step went back from 7 to 3'
        assert apply_grad(held, array(1), 3).outcome is ACCEPTED

    def test_a_step_is_an_integer(self) -> None:
        for step in [1.0, "1", None, True, [1]]:
            message = refusal(accumulator().set_global_step, step, error=ConfigurationError)
            assert message == f"expected an integer as step, got {step!r}"


WRONG = np.ones(5, np.int8)
"""Of another dtype and shape than what is accumulated below."""


class TestOrderOfChecks:
    """Argument types, then staleness, then shape, then values."""

    @pytest.fixture
    def held(self) -> ConditionalAccumulator:
        held = accumulator(forbid_nonfinite=True)
        held.set_global_step(3)
        apply_grad(held, array(1, 1), 3)
        return held

    @pytest.mark.parametrize(
        ("gradient", "step", "weight", "said"),
        [
            *(
                (WRONG, step, -1.0, f"expected an integer scalar as local_step, got {step!r}")
                for step in (1.0, "1", None, False, [3], np.array([3]))
            ),
            (WRONG, 0, 0.0, "expected a weight from 1e-30 to 1e+30, got 0.0"),
            (np.ones(2), 0, 1.0, "expected a gradient of float32, got float64"),
            (np.ones(2, np.float16), 0, 1.0, "expected a gradient of float32, got float16"),
            ([True, False], 0, 1.0, "expected a gradient of float32, got bool"),
            ([None, None], 0, 1.0, "expected a gradient of float32, got object"),
            (["1", "2"], 0, 1.0, "expected a gradient of float32, got <U1"),
            ([[1.0], [1.0, 2.0]], 0, 1.0, "expected an array as gradient, got [[1.0], [1.0, 2.0]]"),
            (Unconvertible(), 0, 1.0, "expected an array as gradient, got Unconvertible()"),
            (array(1, 2, math.nan), 3, 1.0, "shape mismatch: expected (2,), got (3,)"),
            (array(math.nan, 1), 3, 1.0, "expected finite values, got 1 of 2 that are not"),
            (array(-math.inf, math.nan), 3, 1.0, "expected finite values, got 2 of 2 that are not"),
        ],
        ids=str,
    )
    def test_what_is_refused_changes_nothing(
        self, held: ConditionalAccumulator, gradient: Any, step: Any, weight: float, said: str
    ) -> None:
        take = take_grad(held, 2)
        assert refusal(apply_grad, held, gradient, step, weight) == said
        assert (held.step, held.num_accumulated(), [*held.waiting]) == (3, 1, [take])
        apply_grad(held, array(3, 3), 3)
        assert take.result.tolist() == [2, 2]

    @pytest.mark.parametrize("step", [3, np.int32(3), np.array(3)], ids=repr)
    def test_an_integer_of_any_kind_is_a_local_step(
        self, held: ConditionalAccumulator, step: object
    ) -> None:
        assert apply_grad(held, array(1, 1), step).outcome is ACCEPTED

    def test_a_stale_malformed_gradient_is_no_error(self, held: ConditionalAccumulator) -> None:
        assert apply_grad(held, array(1, 2, math.nan), 2) == Applied(STALE, 1, 3)


@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        (
            "dtype", ["int32", "complex64", np.bool_, "nonsense", object],
            "expected one of float16, bfloat16, float32, float64 as dtype, got {!r}",
        ),
        (
            "reduction_type", ["mean", "Sum", "MAX", "", None, ["MEAN"]],
            "expected reduction_type 'MEAN' or 'SUM', got {!r}",
        ),
        ("shape", [-1, 2.0, "2", True], "expected dimensions of 0 or more, or None, got {!r}"),
        ("max_staleness", [-1, 0.5, None], "expected max_staleness of 0 or more, got {!r}"),
    ],
)  # fmt: skip
def test_options_have_their_ranges(option: str, values: list[Any], said: str) -> None:
    for value in values:
        given = {option: (2, value) if option == "shape" else value}
        assert refusal(accumulator, **given, error=ConfigurationError) == said.format(value)


class TestTakes:
    def test_a_take_is_of_a_positive_number(self) -> None:
        for number in [0, -1, 1.0, None, True, "2", [1], np.array([1])]:
            held = accumulator()
            apply_grad(held, array(1, 1))
            message = refusal(take_grad, held, number, error=ConfigurationError)
            assert message == f"expected a number of gradients above 0, got {number!r}"
            assert (held.num_accumulated(), held.step) == (1, 0)


class TestCancellation:
    def test_a_cancelled_take_consumes_nothing(self) -> None:
        held = accumulator((1,))
        apply_grad(held, array(1))
        take = take_grad(held, 2)
        assert cancel(held, take) is None
        assert (held.num_accumulated(), held.step) == (1, 0)
        assert apply_grad(held, array(3)) == Applied(ACCEPTED, 2, 0)
        assert take_grad(held, 1).result.tolist() == [2]
        assert take.result is None


class TestMemory:
    def test_a_sum_that_memory_does_not_suffice_for_changes_nothing(self) -> None:
        held = accumulator(None)
        too_large = np.broadcast_to(np.float32(1), (1 << 60,))
        with pytest.raises(MemoryError):
            apply_grad(held, too_large)
        assert held.num_accumulated() == 0
        assert apply_grad(held, array(1)).outcome is ACCEPTED


class TestPieces:
    """What is decided, and what is done to arrays then, in the same order."""

    def test_decisions_go_on_before_anything_is_added(self) -> None:
        held = accumulator((1,))
        first, second = held.enter(2), held.enter(1)
        applied = [held.offer(array(value), 1, 1.0) for value in (1, 3, 7)]
        assert applied == [
            Applied(ACCEPTED, 1, 0), Applied(ACCEPTED, 0, 1, first), Applied(ACCEPTED, 0, 2, second)
        ]  # fmt: skip
        assert (first.result, first.count, first.step) == (None, 2, 1)
        for each in applied:
            at_once(each.work())
        assert (first.result, second.result) == (2, 7)

    def test_a_gradient_has_to_fit_those_that_are_to_be_added(self) -> None:
        held = accumulator(None)
        held.offer(array(1, 2), 0, 1.0)
        assert refusal(held.offer, array(1), 0, 1.0) == "shape mismatch: expected (2,), got (1,)"
        held.enter(1)
        held.complete()
        assert held.offer(array(1), 1, 1.0).outcome is ACCEPTED

    def test_a_take_may_be_completed_before_its_gradients_are_added(self) -> None:
        held = accumulator((1,))
        work = held.offer(array(1), 0, 1.0).work()
        take = held.enter(1)
        assert held.complete() is take
        assert not held.waiting
        assert (held.num_accumulated(), held.step) == (0, 1)
        at_once(work)
        at_once(take.making())
        assert take.result.tolist() == [1]

    def test_who_knows_how_many_values_are_not_finite_may_say_so(self) -> None:
        held = accumulator((2,), forbid_nonfinite=True)
        message = refusal(held.offer, array(1, 1), 0, 1.0, 2)
        assert message == "expected finite values, got 2 of 2 that are not"
        assert held.nbytes == 0
        assert held.offer(array(1, 1), 0, 1.0, 0).outcome is ACCEPTED
        assert accumulator((2,)).offer(array(1, 1), 0, 1.0, 2).outcome is ACCEPTED

    def test_it_knows_how_much_it_holds(self) -> None:
        held = accumulator((2,), "float16")
        assert held.nbytes == 0
        apply_grad(held, np.ones(2, np.float16))
        assert held.nbytes == 8  # summed in float32


class AgainstAModel(RuleBasedStateMachine):
    """Applies, takes and cancellations in any order: the answers are those of a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.held = accumulator((1,), "float64", max_staleness=1)
        self.step = 0
        self.gradients: list[tuple[int, Fraction]] = []
        self.waiting: list[Take] = []
        self.ended: dict[Take, object] = {}

    def serve(self) -> Take | None:
        """Only the head, and only if enough gradients are there."""
        if not self.waiting or len(self.gradients) < self.waiting[0].num_required:
            return None
        take = self.waiting.pop(0)
        weights = sum(weight for _, weight in self.gradients)
        mean = sum(value * weight for value, weight in self.gradients) / weights
        self.ended[take] = [float(mean)]
        self.step += 1
        self.gradients = []
        return take

    @rule(value=st.integers(-9, 9), ahead=st.integers(-3, 2), weight=st.sampled_from([1, 2, 0.5]))
    def apply(self, value: int, ahead: int, weight: float) -> None:
        applied = apply_grad(self.held, np.array([value], float), self.step + ahead, weight)
        if ahead < -1:
            assert applied == Applied(STALE, len(self.gradients), self.step)
            return
        self.gradients.append((value, Fraction(weight)))
        completed = self.serve()
        assert applied == Applied(ACCEPTED, len(self.gradients), self.step, completed)

    @rule(value=st.sampled_from([np.ones(2), np.ones(1, np.float32), "text"]))
    def apply_nonsense(self, value: object) -> None:
        with pytest.raises(ValueMismatchError):
            apply_grad(self.held, value, self.step)

    @rule(number=st.integers(1, 4))
    def take(self, number: int) -> None:
        take = take_grad(self.held, number)
        self.waiting.append(take)
        assert self.serve() is (None if take.result is None else take)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.waiting:
            return
        take = data.draw(st.sampled_from(self.waiting))
        cancelled = cancel(self.held, take)
        self.waiting.remove(take)
        self.ended[take] = None
        assert cancelled is self.serve()

    @rule(step=st.integers(0, 5))
    def set_step(self, step: int) -> None:
        assert (self.held.set_global_step(step) is None) == (step >= self.step)
        self.step = step

    @invariant()
    def all_agree(self) -> None:
        assert (self.held.step, self.held.num_accumulated()) == (self.step, len(self.gradients))
        assert [*self.held.waiting] == self.waiting
        for take, result in self.ended.items():
            assert (None if take.result is None else take.result.tolist()) == result


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


DEFINED = (
    DefineAccumulator("a", "dense", "float32", [2, None], "MEAN", "", False, 0),
    DefineAccumulator("b", "dense", "float64", None, "SUM", "", True, 3),
    DefineAccumulator("c", "sparse", "float32", [None, 4], "MEAN", "total", False, 0),
)


@pytest.mark.parametrize("definition", DEFINED)
def test_what_is_said_of_an_accumulator_makes_one_like_it(definition: DefineAccumulator) -> None:
    assert rule_of(definition).definition == definition


def test_a_kind_of_accumulator_that_is_none_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match='"a": expected kind "dense" or "sparse", got'):
        rule_of(replace(DEFINED[0], kind="dens"))


def test_of_two_accumulators_of_one_name_the_parameters_that_differ_are_named() -> None:
    other = replace(DEFINED[0], dtype="float64", reduction="SUM")
    error = other_parameters(DEFINED[0], other)
    assert error.message == (
        "accumulator \"a\": other parameters than at first: expected dtype='float32', "
        "reduction='MEAN', got dtype='float64', reduction='SUM'"
    )
