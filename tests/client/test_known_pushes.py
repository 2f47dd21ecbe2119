"""What a client knows of pushes elsewhere: those that it was told of, and its own."""

from __future__ import annotations

import itertools

import pytest

from psync.client.known_pushes import KnownPushes
from psync.client.plans import Plan, make_plan
from psync.specs import STEP_BITS, ShardSpec, VariableSpec
from psync.wire.messages import Pushed

EPOCH = 1 << STEP_BITS


def plan_on(*ps: int) -> Plan:
    """The plan of one variable on each of these."""
    variables = []
    for number in ps:
        shard = ShardSpec(f"v{number}", number, 0, 0, (2,), "float32", number)
        variables.append(VariableSpec(shard.variable, number, (2,), "float32", True, (shard,), ""))
    return make_plan(variables, itertools.count(1))


def accepted(step: int, elsewhere: int = 0) -> Pushed:
    return Pushed("accepted", step, elsewhere=elsewhere)


def test_a_push_to_all_ps_tasks_is_elsewhere_on_none() -> None:
    known, plan = KnownPushes(), plan_on(0, 1)
    assert known.before(plan, 2) == {}
    known.learn(plan, {}, [accepted(1), accepted(1)])
    assert (known.number, known.elsewhere) == (1, {})


def test_a_push_is_elsewhere_for_the_others_once_its_home_has_counted_it() -> None:
    known, plan = KnownPushes(), plan_on(2, 1)
    before = known.before(plan, 4)
    known.learn(plan, before, [Pushed("duplicate", 0), accepted(1, 5)])
    assert known.elsewhere == {2: 5}  # ps 1 is its home
    known.learn(plan, before, [accepted(9), Pushed("duplicate", 0)])
    assert (known.number, known.elsewhere) == (9, {2: 5, 0: 1, 3: 1})


def test_a_push_that_a_ps_was_told_of_meanwhile_is_not_added_to_that() -> None:
    known, first, second = KnownPushes(), plan_on(0), plan_on(1)
    before = known.before(first, 2)
    known.learn(second, known.before(second, 2), [accepted(2, 1)])  # told: that one is the first
    known.learn(first, before, [accepted(1)])
    assert known.elsewhere == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("knew", "epoch", "knows"), [(7, EPOCH, EPOCH + 1), (EPOCH + 7, 0, EPOCH + 7)]
)
def test_a_number_of_another_epoch_is_not_counted_on(knew: int, epoch: int, knows: int) -> None:
    known, plan = KnownPushes(), plan_on(0)
    known.elsewhere[1] = knew
    known.learn(plan, known.before(plan, 2), [accepted(epoch + 3)])
    assert known.elsewhere == {1: knows}
