from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psync.errors import ConfigurationError, GradientError
from psync.specs import ShardSpec
from psync.step_updates import Part, StepUpdate, averages_of
from psync.store import Key, ShardStore
from psync.update_rules import SGD
from psync.updates import ShardSet
from tests.sync_tools import GROUP, config

TASK = "/job:ps/task:0"


def make_store(**dtypes: str) -> ShardStore:
    """A store with variables 0, 1, … of two elements each."""
    store = ShardStore(TASK)
    for number, (name, dtype) in enumerate(dtypes.items()):
        store.create(ShardSpec(name, number, 0, 0, (2,), dtype, 0))
    store.define_optimizer(GROUP, SGD(1.0).to_config())
    return store


def part(store: ShardStore, **gradients: float) -> Part:
    """Of a push that carries these variables: their numbers with a "v" before them."""
    keys: tuple[Key, ...] = tuple((int(name[1:]), 0) for name in gradients)
    known = ShardSet(keys).look_up(store)
    return Part(known, [np.full(2, value, np.float32) for value in gradients.values()])


def update_of(
    store: ShardStore, parts: Sequence[Part], weights: Sequence[float], **more: object
) -> StepUpdate:
    group = config(2, **more)
    update = StepUpdate(store, GROUP, group, 0, averages_of(store, group, TASK))
    update.gather(parts, weights)
    update.begin()
    return update


def values(store: ShardStore) -> list[float]:
    return [float(np.asarray(store.read(key)[0]).view(np.float32)[0]) for key in store.keys()]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_is_computed_at_once_and_shard_by_shard(*, at_once: bool) -> None:
    for other in ({"v0": 3.0, "v1": 1.0}, {"v1": 1.0, "v0": 3.0}, {"v0": 3.0}):
        store = make_store(a="float32", b="float32", c="float32")
        parts = [part(store, v0=1.0, v1=2.0), part(store, **other)]
        update = update_of(store, parts, [3.0, 1.0], decay=0.5, averages=((0, 2),))
        assert set(update.touched) == {(0, 0), (1, 0), (2, 0)}
        if at_once:
            update.at_once()
        else:
            for position in range(len(update.costs)):
                for _ in update.work(position):
                    pass
        assert values(store) == [-1.5, -1.75 if "v1" in other else -2.0, -0.75]


def test_a_step_without_a_part_here_still_moves_averages() -> None:
    store = make_store(a="float32", b="float32")
    update = update_of(store, [], [], decay=0.5, averages=((0, 1),))
    assert update.costs == [8]
    update.at_once()
    assert store.version((0, 0)) == 0
    assert store.version((1, 0)) == 1


def test_the_cost_counts_what_every_push_brings() -> None:
    store = make_store(a="float32", b="float32")
    alike = update_of(store, [part(store, v0=1.0)] * 3, [1.0] * 3)
    assert list(alike.costs) == [24]
    mixed = update_of(store, [part(store, v0=1.0), part(store, v1=1.0, v0=1.0)], [1.0] * 2)
    assert list(mixed.costs) == [16, 8]


def test_an_average_has_the_shape_and_dtype_of_its_variable_and_its_place() -> None:
    store = make_store(a="float32", b="float64", c="int32", d="int32")
    assert averages_of(store, config(1), TASK) == []
    assert averages_of(store, config(1, averages=((8, 9),)), TASK) == []  # on other ps tasks
    with pytest.raises(ConfigurationError, match=r"expected shape \(2,\) float32.* got .*float64"):
        averages_of(store, config(1, averages=((0, 1),)), TASK)
    with pytest.raises(ConfigurationError, match="must be on the same ps tasks"):
        averages_of(store, config(1, averages=((0, 9),)), TASK)
    with pytest.raises(GradientError, match="int32"):
        averages_of(store, config(1, averages=((2, 3),)), TASK)
