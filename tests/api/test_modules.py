from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

import psync
from local_training import declared, in_step, strategy_of, training
from psync.errors import UsageError


class Dense(psync.Module):
    def __init__(self, rows: int = 100, columns: int = 10) -> None:  # as in TensorFlow's guide
        self.w = psync.Variable(np.zeros((rows, columns), np.float32), name="w")


class Layer(psync.Module):
    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)


def scalars(count: int) -> list[psync.Variable]:
    return [psync.Variable(0.0) for _ in range(count)]


def test_the_shards_of_a_variable_are_counted_one_by_one() -> None:
    with strategy_of(2, psync.FixedShardsPartitioner(2)).scope():
        dense = Dense()
    assert len(dense.variables) == 2
    assert all(isinstance(variable, psync.Variable) for variable in dense.variables)
    assert [variable.shape for variable in dense.variables] == [(50, 10), (50, 10)]
    assert dense.variables == tuple(dense.w.variables)


def test_attributes_come_in_the_order_of_their_names_and_modules_last() -> None:
    with strategy_of().scope():
        a, b, c, d, e = scalars(5)
    inner = Layer(z=a, b=b)
    outer = Layer(x=c, m=inner, d=d, y=Layer(a=e))
    assert outer.variables == (d, c, b, a, e)
    assert outer.submodules == (inner, outer.y)


def test_lists_tuples_and_dicts_are_looked_into_at_any_depth() -> None:
    pair = namedtuple("pair", "right left")
    with strategy_of().scope():
        a, b, c, d, e, f, g = scalars(7)
    layer = Layer(
        many=[a, (b, {"z": c, "a": [d]})],
        pairs=pair(e, "no variable"),
        table=OrderedDict([(2, f), ("1", g)]),  # cannot be sorted: as it was made
        text="w",
        array=np.zeros(3),
        nothing=None,
    )
    assert layer.variables == (a, b, d, c, e, f, g)


def test_what_is_held_twice_is_there_once_and_cycles_end() -> None:
    v, w = declared(2, psync.FixedShardsPartitioner(2), v=np.zeros(4), w=0.0)
    parent, child = Layer(w=w, also=[w], v=v), Layer(w=w, shards=v.variables)
    parent.child, child.parent = child, parent
    loop: list[Any] = [w]
    loop.append(loop)
    parent.loop = loop
    assert parent.variables == (w, *v.variables)
    assert parent.submodules == (child,)
    assert child.submodules == (parent,)


def test_trainable_are_those_that_were_declared_so() -> None:
    with strategy_of(2, psync.FixedShardsPartitioner(2)).scope():
        w = psync.Variable(np.zeros(4))
        frozen = psync.Variable(np.zeros(4), trainable=False)
    assert Layer(w=w, frozen=frozen).trainable_variables == tuple(w.variables)


def test_what_is_set_later_counts() -> None:
    with strategy_of().scope():
        layer = Layer()
        assert layer.variables == ()
        layer.w = psync.Variable(0.0)
    assert layer.variables == (layer.w,)


@pytest.mark.parametrize(
    ("cls", "name"),
    [("Dense", "dense"), ("MyLayer", "my_layer"), ("MLPBlock", "mlp_block"), ("V2Net", "v2_net")],
)
def test_its_name_is_that_of_its_class_unless_it_has_one(cls: str, name: str) -> None:
    made: Any = type(cls, (psync.Module,), {})
    assert made().name == name
    assert made(name="other").name == "other"


@pytest.mark.parametrize("name", ["", "a b", "1a", 3])
def test_a_name_is_an_identifier(name: Any) -> None:
    with pytest.raises(UsageError, match="name of a module: expected a Python identifier"):
        psync.Module(name)


def test_it_is_pickled_with_what_it_holds() -> None:
    with strategy_of(2, psync.FixedShardsPartitioner(2)).scope():
        dense = Dense()
    again = pickle.loads(pickle.dumps(dense))
    assert again is not dense
    assert again.variables == dense.variables  # handles are one object in a process


async def test_a_step_computes_with_it_and_its_shards_take_gradients() -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        with strategy.scope():
            dense = Dense(4, 2)
        optimizer = psync.optimizers.SGD(1.0)

        async def step() -> list[tuple[int, ...]]:
            values = await psync.pull(dense.variables)
            await optimizer.apply_gradients(
                (np.ones(value.shape, np.float32), v)
                for value, v in zip(values, dense.trainable_variables, strict=True)
            )
            return [value.shape for value in values]

        assert await in_step(coordinator, step) == [(2, 2), (2, 2)]
        assert (await dense.w.read()).tolist() == [[-1, -1]] * 4
