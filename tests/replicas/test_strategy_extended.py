"""strategy.extended on the coordinator: devices, roles, placement, steps over an iterator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once
from psync import PerReplica, StrategyExtended, in_cross_replica_context
from psync.client.context import ClosureContext, inside
from psync.errors import EndOfData, UsageError
from psync.replicas.context import MultiStepContext

CLUSTER = {"chief": ["a:1"], "ps": ["a:2", "a:3"], "worker": ["a:4", "a:5"]}


def strategy(
    job: str | None = "chief", index: int | None = 0, cluster: Any = None, shards: int = 1
) -> psync.ParameterServerStrategy:
    resolver = psync.SimpleClusterResolver(
        psync.ClusterSpec(cluster or CLUSTER), task_type=job, task_id=index
    )
    return psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(shards))


def test_devices_have_their_long_names() -> None:
    extended = strategy().extended
    assert type(extended) is StrategyExtended
    assert extended.worker_devices == (
        "/job:worker/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:1/device:CPU:0",
    )
    assert extended.parameter_devices == (
        "/job:ps/replica:0/task:0/device:CPU:0",
        "/job:ps/replica:0/task:1/device:CPU:0",
    )
    assert extended.should_save_summary is extended.experimental_should_init is True
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_between_graph is True


def test_without_a_chief_worker_0_saves() -> None:
    cluster = {job: CLUSTER[job] for job in ("ps", "worker")}
    saves = [strategy("worker", n, cluster).extended.should_checkpoint for n in (0, 1)]
    assert saves == [True, False]


def test_variables_go_beside_a_variable_or_on_a_device() -> None:
    made = strategy()
    with made.scope():
        psync.Variable(0.0)
        w = psync.Variable(0.0)
        with made.extended.colocate_vars_with(w):
            slot = psync.Variable(0.0)
        with made.extended.colocate_vars_with(made.extended.non_slot_devices([w])):
            count = psync.Variable(0)
    assert w.device == slot.device == count.device == made.extended.parameter_devices[1]


def test_a_shard_belongs_to_its_variable() -> None:
    made = strategy(shards=2)
    with made.scope():
        w = psync.Variable(np.zeros((4, 2)), name="w")
        b = psync.Variable(0.0, name="b")
    assert made.extended.value_container(w.variables[1]) is w
    assert made.extended.value_container(b) is b
    assert made.extended.value_container(3) == 3


def test_arrays_become_a_dataset() -> None:
    dataset = strategy().extended.experimental_make_numpy_dataset([[1, 2], [3, 4]])
    assert [row.tolist() for row in dataset] == [[1, 2], [3, 4]]


# --- steps over an iterator ----------------------------------------------------------------------


def test_steps_run_over_elements_and_leave_the_last_outputs() -> None:
    made = strategy()

    async def fn(context: MultiStepContext, inputs: int) -> None:
        assert in_cross_replica_context()
        both = PerReplica([inputs, inputs + 1])
        context.set_last_step_output("loss", both, "sum")
        context.set_last_step_output("each", both)
        context.set_non_tensor_output("names", PerReplica([f"a{inputs}", f"b{inputs}"]))
        context.set_non_tensor_output("step", inputs)

    iterator = iter([1, 2, 3])
    context = at_once(
        made.extended.experimental_run_steps_on_iterator(fn, iterator, 2, {"early": 1.0, "loss": 0})
    )
    assert context.last_step_outputs["loss"] == 5
    assert context.last_step_outputs["each"].values == (2, 3)
    assert context.last_step_outputs["early"] == 1.0
    assert context.non_tensor_outputs == {"names": ("a2", "b2"), "step": 2}
    assert next(iterator) == 3
    assert repr(context) == "<MultiStepContext: early, loss, each, names, step>"


def test_an_asynchronous_iterator_will_do() -> None:
    async def batches() -> AsyncIterator[int]:
        yield 7

    seen: list[int] = []
    extended = strategy().extended
    iterator = batches()
    at_once(extended.experimental_run_steps_on_iterator(lambda _, n: seen.append(n), iterator))
    assert seen == [7]
    with pytest.raises(EndOfData, match="ended after 0 of 2 elements"):
        at_once(extended.experimental_run_steps_on_iterator(lambda *_: None, iterator, 2))


@pytest.mark.parametrize(
    ("elements", "iterations", "error", "said"),
    [
        (lambda: iter([1, 2]), 3, EndOfData, "the iterator ended after 2 of 3 elements"),
        (lambda: [1], 1, UsageError, r"expected an iterator, got list\nhint: iter"),
        *(
            (lambda: iter([1]), iterations, UsageError, "expected at least 1 iteration")
            for iterations in (0, -1, 1.5, True)
        ),
    ],
)
def test_steps_need_an_iterator_that_lasts_and_their_number(
    elements: Any, iterations: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        at_once(
            strategy().extended.experimental_run_steps_on_iterator(
                lambda *_: None, elements(), iterations
            )
        )


def test_outputs_are_set_where_the_context_is_and_not_in_a_replica() -> None:
    context = MultiStepContext(strategy())
    assert repr(context) == "<MultiStepContext: nothing>"
    with inside(ClosureContext(worker_index=0, closure_id=1)):
        with pytest.raises(UsageError, match='set_last_step_output of "loss" in a replica'):
            context.set_last_step_output("loss", 1)
        with pytest.raises(UsageError, match='set_non_tensor_output of "n" in a replica'):
            context.set_non_tensor_output("n", 1)
