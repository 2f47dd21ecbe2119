"""Extended: reductions to a destination, and updates, in a step and on the coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, in_update_context
from psync import Mirrored, PerReplica, get_replica_context
from psync.client.context import ClosureContext, inside
from psync.errors import ReplicaValueError, UsageError
from psync.replicas.context import OneReplica, cross_replica

SUM, MEAN = psync.ReduceOp.SUM, psync.ReduceOp.MEAN
DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"
THREE = PerReplica([np.ones(2), np.full(2, 2.0), np.full(2, 6.0)])


def strategy() -> psync.ParameterServerStrategy:
    addresses = {"chief": ["a:1"], "ps": ["a:2", "a:3"], "worker": ["a:4"]}
    return psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(psync.ClusterSpec(addresses), task_type="chief", task_id=0)
    )


def variables(count: int = 1) -> tuple[psync.ParameterServerStrategy, list[Any]]:
    made = strategy()
    with made.scope():
        return made, [psync.Variable(np.zeros(2), name=f"v{n}") for n in range(count)]


def step() -> Any:
    return inside(ClosureContext(worker_index=0, closure_id=7))


# --- reductions ----------------------------------------------------------------------------------


def test_values_of_replicas_become_one_that_knows_where_it_belongs() -> None:
    made, (v,) = variables()
    total = at_once(made.extended.reduce_to("sum", THREE, v))
    assert type(total) is Mirrored
    assert (np.asarray(total).tolist(), total.destination) == ([9.0, 9.0], v)
    mean = at_once(made.extended.reduce_to(MEAN, {"g": THREE}, destinations=DEVICE))
    assert (mean["g"].value.tolist(), mean["g"].destination) == ([3.0, 3.0], DEVICE)


def test_ordinary_values_are_what_all_replicas_have() -> None:
    made, (v,) = variables()
    value = np.ones(2)
    with cross_replica(made, num_replicas=3):
        assert at_once(made.extended.reduce_to(SUM, 0, v)) == 0
        assert at_once(made.extended.reduce_to(MEAN, value, v)) is value
        with pytest.raises(ReplicaValueError, match="SUM over 3 replicas of a value that is not"):
            at_once(made.extended.reduce_to(SUM, value, v))


def test_a_batch_keeps_its_order() -> None:
    made, (v, w) = variables(2)
    results = at_once(made.extended.batch_reduce_to(SUM, [(THREE, w), (0, v), (THREE, v)]))
    assert [getattr(result, "destination", None) for result in results] == [w, None, v]
    with pytest.raises(ReplicaValueError, match="batch_reduce_to: expected pairs"):
        at_once(made.extended.batch_reduce_to(SUM, [THREE]))


@pytest.mark.parametrize(
    ("destinations", "said"),
    [(None, "is missing"), ("", "is missing"), ([1], "got a list"), ((1, 2), "got a tuple")],
)
def test_a_destination_is_one_thing(destinations: Any, said: str) -> None:
    extended = strategy().extended
    with pytest.raises(ReplicaValueError, match=f"reduce_to: .*{said}"):
        at_once(extended.reduce_to(SUM, THREE, destinations))
    with pytest.raises(ReplicaValueError, match=f"broadcast_to: .*{said}"):
        at_once(extended.broadcast_to(THREE, destinations))


def test_what_is_broadcast_is_what_all_replicas_have() -> None:
    made, (v,) = variables()
    value = at_once(made.extended.broadcast_to([1.0, 2.0], v))
    assert (type(value), value.value.tolist(), value.destination) == (Mirrored, [1.0, 2.0], v)
    again = at_once(made.extended.broadcast_to(value, DEVICE))
    assert (again.value is value.value, again.destination) == (True, DEVICE)
    assert at_once(made.extended.broadcast_to(3.5, v)) == 3.5
    with pytest.raises(ReplicaValueError, match="expected one value, got those of 3 replicas"):
        at_once(made.extended.broadcast_to(THREE, v))


def test_in_a_replica_the_values_of_others_are_not_known() -> None:
    made, (v,) = variables()
    with step():
        for call in (
            made.extended.reduce_to(SUM, THREE, v),
            made.extended.batch_reduce_to(SUM, []),
            made.extended.broadcast_to(1, v),
            made.reduce(SUM, THREE),
            made.gather(THREE, 0),
        ):
            with pytest.raises(RuntimeError, match=r"in replica context[^\n]*\nhint: .*merge_call"):
                at_once(call)


# --- updates -------------------------------------------------------------------------------------


def test_an_update_runs_in_its_context_with_arguments_unwrapped() -> None:
    made, (v,) = variables()
    seen: list[Any] = []

    async def fn(variable: Any, gradient: Any, *, rate: float) -> str:
        seen.append((variable, gradient, rate, in_update_context(), get_replica_context()))
        return "updated"

    with pytest.raises(ReplicaValueError, match=r"values of 3 replicas.*\nhint: .*reduce_to"):
        at_once(made.extended.update(v, print, args=(THREE,)))
    with pytest.raises(ReplicaValueError, match="update: expected a variable, got ndarray"):
        at_once(made.extended.update(np.ones(2), print))
    args, kwargs = (Mirrored([1.0], v),), {"rate": PerReplica([0.5])}
    assert at_once(made.extended.update(v, fn, args, kwargs)) == "updated"
    assert seen == [(v, 1.0, 0.5, True, None)]
    assert not in_update_context()
    assert at_once(made.extended.update(v, lambda var: [1, 2], group=False)) == [(1,), (2,)]


def test_what_an_optimizer_keeps_once_is_updated_where_all_agree() -> None:
    made, (v, w) = variables(2)
    device = made.extended.non_slot_devices([w, v])
    assert device == v.device == made.extended.non_slot_devices(iter([v, w]))
    assert at_once(made.extended.update_non_slot(device, lambda n: n + 1, args=(1,))) == 2
    assert at_once(made.extended.update_non_slot(device, in_update_context, group=False)) == (True,)
    with pytest.raises(ReplicaValueError, match="update_non_slot: a destination is missing"):
        at_once(made.extended.update_non_slot(None, print))
    with pytest.raises(ReplicaValueError, match="non_slot_devices: expected at least one variable"):
        made.extended.non_slot_devices([])
    with pytest.raises(ReplicaValueError, match="non_slot_devices: expected a variable, got str"):
        made.extended.non_slot_devices([v, "w"])


@pytest.mark.parametrize("name", ["worker_devices", "parameter_devices"])
def test_devices_are_known_to_the_program_alone(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} of <the strategy of a step"), step():
        getattr(psync.get_strategy().extended, name)


def test_a_value_is_its_own_container_in_a_step() -> None:
    stand_in = OneReplica("one").extended
    value = np.ones(2)
    assert stand_in.value_container(value) is value
    assert stand_in.experimental_local_results(THREE) == THREE.values
    assert repr(stand_in) == "<Extended of <one>>"
