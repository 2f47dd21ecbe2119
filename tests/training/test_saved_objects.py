"""Under which names a checkpoint holds what it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync.errors import CheckpointError, ConfigurationError
from psync.training.saved_objects import Contents


class Layer(psync.Module):
    def __init__(self) -> None:
        self.w = psync.Variable(np.zeros((5, 2), np.float32), name="w")
        self.size = (5, 2)
        self.activation = np.tanh


class Net(psync.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.same = self.layers[0]
        self.by_name = {"first": self.layers[0].w}


def test_names_are_paths_and_each_array_has_one() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        net = Net()
    contents = Contents()
    contents.add("net", net)
    assert list(contents.arrays) == ["net/by_name/first", "net/layers/1/w"]
    array = contents.arrays["net/layers/1/w"]
    assert (array.shape, array.dtype) == ((5, 2), "float32")
    assert [(part.offset, part.shape) for part in array.parts] == [(0, (3, 2)), (3, (2, 2))]


def test_an_object_with_a_state_is_asked_for_it() -> None:
    state = psync.SavedState(epoch=3)
    contents = Contents()
    contents.add("progress", {"one": state, "two": state})
    assert contents.states == {"progress/one": state}
    state.restore_checkpoint_state({"epoch": 4, "best": 0.5})
    assert state.checkpoint_state() == {"epoch": 4, "best": 0.5}


@pytest.mark.parametrize("value", [np.float32(1), {1: 2}, (1, 2), [{"a": (1,)}]])
def test_a_state_that_would_not_come_back_is_refused(value: Any) -> None:
    contents = Contents()
    contents.add("state", psync.SavedState(x=value))
    with pytest.raises(CheckpointError, match="'state'"):
        contents.present_states()


def test_a_metric_is_held_as_its_aggregate() -> None:
    with strategy_of().scope():
        metric = psync.metrics.AUC(10)
    contents = Contents()
    contents.add("auc", metric)
    array = contents.arrays["auc/sums"]
    assert array.shape == (4, 10)
    assert len(array.parts) == 1


def test_a_saved_value_cannot_take_the_name_of_a_method() -> None:
    message = (
        "expected names of values, got 'checkpoint_state', which is an attribute of SavedState"
    )
    with pytest.raises(ConfigurationError, match=message):
        psync.SavedState(checkpoint_state=1)
    progress = psync.SavedState(epoch=1)
    with pytest.raises(ConfigurationError, match=message):
        progress.checkpoint_state = 5
    progress.step = 3
    assert progress.checkpoint_state() == {"epoch": 1, "step": 3}
