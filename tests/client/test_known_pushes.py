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


@pytest.mark.parametrize(
    ("knew", "epoch", "knows"), [(7, EPOCH, EPOCH + 1), (EPOCH + 7, 0, EPOCH + 7)]
)
def test_a_number_of_another_epoch_is_not_counted_on(knew: int, epoch: int, knows: int) -> None:
    known, plan = KnownPushes(), plan_on(0)
    known.elsewhere[1] = knew
    known.learn(plan, known.before(plan, 2), [accepted(epoch + 3)])
    assert known.elsewhere == {1: knows}
