"""Which optimizers a process has, and which of them its program pushes through."""

from __future__ import annotations

import gc
import pickle

import pytest

import psync
from psync import optimizers, schedules
from psync.api.optimizers.registry import OptimizerRegistry, optimizers_here


@pytest.fixture
def registry() -> OptimizerRegistry:
    return OptimizerRegistry()


def test_optimizers_are_numbered_as_they_are_made(registry: OptimizerRegistry) -> None:
    one, two = optimizers.SGD(0.5), optimizers.Adam(0.5)
    registry.add_new(one)
    registry.add_new(two)
    assert [(o.origin, o.number) for o in (one, two)] == [
        (registry.process, 1),
        (registry.process, 2),
    ]
    assert registry.known.get((registry.process, 2)) is two
    assert registry.known.get(("another process", 2)) is None


def test_an_optimizer_that_nobody_refers_to_is_forgotten(registry: OptimizerRegistry) -> None:
    sgd = optimizers.SGD(0.5)
    registry.add_new(sgd)
    del sgd
    gc.collect()
    assert registry.known.get((registry.process, 1)) is None


def test_every_optimizer_that_is_made_is_known_here() -> None:
    sgd = optimizers.SGD(0.5)
    assert sgd.origin == optimizers_here().process
    assert optimizers_here().known[sgd.origin, sgd.number] is sgd
    assert pickle.loads(pickle.dumps(sgd)) is sgd


def test_the_program_pushes_through_its_own_and_through_none_that_is_wrapped(
    registry: OptimizerRegistry,
) -> None:
    wrapped, plain, others = optimizers.SGD(0.5), optimizers.Adam(0.5, name="a"), optimizers.SGD(1)
    synchronous = psync.SyncReplicasOptimizer(wrapped, 2)
    for optimizer in (synchronous, wrapped, plain):
        registry.add_new(optimizer)
    others.origin, others.number = "another process", 1
    registry.known["another process", 1] = others
    assert [(new.number, new.name) for new in registry.of_the_program()] == [
        (1, "sync_replicas"),
        (3, "a"),
    ]
    assert registry.of_the_program()[1].config == plain.get_config()


def test_a_learning_rate_that_an_earlier_program_has_set_is_noted(
    registry: OptimizerRegistry,
) -> None:
    sgd = optimizers.SGD(0.5)
    registry.add_new(sgd)
    registry.note_learning_rate(1, schedules.Constant(0.25).to_config())
    registry.note_learning_rate(2, schedules.Constant(0.125).to_config())  # which nobody has
    assert sgd.learning_rate == 0.25


def test_a_synchronous_optimizer_is_noticed(registry: OptimizerRegistry) -> None:
    sgd = optimizers.SGD(0.5)
    registry.add_new(sgd)
    assert not registry.any_synchronous()
    synchronous = psync.SyncReplicasOptimizer(sgd, 2)
    registry.add_new(synchronous)
    assert registry.any_synchronous()
