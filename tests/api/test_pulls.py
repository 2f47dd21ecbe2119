"""Pulls: one call for many variables, in the nesting of the caller."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import psync
from local_training import at_once, declared, training, training_of
from psync.errors import ValueMismatchError


class Layer(NamedTuple):
    weights: Any
    bias: Any


halves = psync.FixedShardsPartitioner(2)


async def test_variables_become_arrays_in_the_nesting_of_the_caller() -> None:
    async with training_of(2, 1, halves, w=np.arange(4), b=5) as (_, w, b):
        alone = await psync.pull(w)
        value = await psync.pull({"layers": [Layer(w, b), (b, None)], "rate": 0.5, "empty": ()})
    assert isinstance(alone, np.ndarray)
    assert alone.tolist() == [0, 1, 2, 3]
    assert type(value["layers"][0]) is Layer
    assert value["layers"][0].weights.tolist() == [0, 1, 2, 3]
    assert value["layers"][0].bias == 5
    assert type(value["layers"][1]) is tuple
    assert value["layers"][1] == (5, None)
    assert value["rate"] == 0.5
    assert value["empty"] == ()


def test_without_variables_the_tree_itself_comes_back_even_without_a_cluster() -> None:
    tree = {"a": [1, (2, "b")]}
    assert at_once(psync.pull(tree)) is tree


async def test_a_variable_that_stands_twice_is_pulled_once() -> None:
    async with training_of(v=[1, 2]) as (coordinator, v):
        first, second = await psync.pull((v, v))
        assert first is second
        mine = np.zeros(2, np.int64)
        first, second = await psync.pull([v, v], out=[mine, mine])
        assert first is second is mine
        assert mine.tolist() == [1, 2]
        before = (await coordinator.ps_statistics())[0]["pulls"]
        await psync.pull([v] * 100)
        assert (await coordinator.ps_statistics())[0]["pulls"] == before + 1


async def test_a_pull_is_one_request_to_each_ps() -> None:
    async with training(num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            variables = [psync.Variable(index) for index in range(20)]
        assert await psync.pull(variables) == list(range(20))
        assert [counters["pulls"] for counters in await coordinator.ps_statistics()] == [1, 1]


async def test_a_shard_and_its_whole_are_pulled_together() -> None:
    async with training_of(2, 1, halves, v=np.arange(4)) as (_, v):
        for tree in ([v, *v.variables], [*v.variables], [v.variables[1]], [v]):
            wanted = {4: [0, 1, 2, 3], 2: [0, 1]}
            for handle, value in zip(tree, await psync.pull(tree), strict=True):
                expected = [2, 3] if handle.name.endswith("part_1") else wanted[len(value)]
                assert value.tolist() == expected


# --- out= --------------------------------------------------------------------------------------


async def test_arrays_of_the_caller_are_filled_and_returned() -> None:
    async with training_of(2, 1, halves, w=np.arange(4.0), b=np.float32(7)) as (_, w, b):
        out = {"w": np.empty(4), "rest": [np.empty((), np.float32)]}
        pulled = await psync.pull({"w": w, "rest": (b,)}, out=out)
        assert pulled["w"] is out["w"]
        assert pulled["rest"][0] is out["rest"][0]
        assert out["w"].tolist() == [0, 1, 2, 3]
        assert out["rest"][0] == 7


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ({"w": np.zeros(2)}, "out: expected a dict with the same keys as the variables"),
        ([np.zeros(2)], "out: expected a dict with the same keys as the variables"),
        (
            {"w": np.zeros(2), "rest": []},
            "out: expected 1 items in a list or tuple, one for each variable",
        ),
        ({"w": np.zeros(2), "rest": 5}, "out: expected 1 items in a list or tuple"),
        ({"w": np.zeros(3), "rest": [np.zeros(2)]}, 'out for "w": expected a writable C-contig'),
    ],
)
def test_another_nesting_in_out_is_an_error(out: Any, text: str) -> None:
    w, b = declared(w=np.zeros(2), b=np.zeros(2))
    with pytest.raises(ValueMismatchError, match=re.escape(text)):
        at_once(psync.pull({"w": w, "rest": [b]}, out=out))


def test_an_array_in_out_that_stands_for_two_variables_is_an_error() -> None:
    w, b = declared(w=np.zeros(2), b=np.zeros(2))
    room = np.zeros(2)
    with pytest.raises(ValueMismatchError, match='out has one array for variables "w" and "b"'):
        at_once(psync.pull([w, b], out=[room, room]))


def test_a_variable_that_stands_twice_has_one_array_in_out() -> None:
    v = declared(v=np.ones(2))
    with pytest.raises(ValueMismatchError, match='out has two arrays for variable "v"'):
        at_once(psync.pull([v, v], out=[np.zeros(2), np.zeros(2)]))


# --- where it cannot work ----------------------------------------------------------------------
