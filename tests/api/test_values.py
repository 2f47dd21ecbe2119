"""Values of variables: pulled together, read and assigned as one, kept in a scope."""

from __future__ import annotations

import asyncio
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import psync
from local_training import at_once, declared, in_step, strategy_of, training, training_of
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


def test_an_array_in_out_stands_for_one_variable_and_a_variable_has_one_array() -> None:
    w, b = declared(w=np.zeros(2), b=np.zeros(2))
    room = np.zeros(2)
    with pytest.raises(ValueMismatchError, match='out has one array for variables "w" and "b"'):
        at_once(psync.pull([w, b], out=[room, room]))
    with pytest.raises(ValueMismatchError, match='out has two arrays for variable "w"'):
        at_once(psync.pull([w, w], out=[room, np.zeros(2)]))


# --- where it cannot work ----------------------------------------------------------------------


# --- as one ------------------------------------------------------------------------------------


async def test_an_atomic_assign_sets_all_shards_and_returns_the_variable() -> None:
    async with training_of(2, 1, halves, v=np.zeros(4, np.float32), scalar=0.0) as (
        _,
        v,
        scalar,
    ):
        assert await v.assign([1, 2, 3, 4], atomic=True) is v
        assert (await v.read(consistent=True)).tolist() == [1, 2, 3, 4]
        await scalar.assign(5, atomic=True)
        assert await scalar.read(consistent=True) == 5
        # A read has the names of TensorFlow, too.
        assert (await v.value()).tolist() == (await v.read_value()).tolist() == [1, 2, 3, 4]


async def test_steps_assign_and_read_as_one() -> None:
    async with training_of(2, 2, halves, v=np.zeros(4, np.float32)) as (coordinator, v):

        async def step(number: int) -> list[float]:
            await v.assign(np.full(4, number, np.float32), atomic=True)
            (value,) = await psync.pull([v], consistent=True)
            return value.tolist()

        values = [coordinator.schedule(step, args=(number,)) for number in range(20)]
        for value in await coordinator.fetch(values):
            assert len(set(value)) == 1


async def test_a_consistent_pull_fills_what_it_is_given() -> None:
    async with training_of(2, 1, halves, v=[1.0, 2.0], w=[3.0, 4.0]) as (_, v, w):
        out = {"v": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
        assert await psync.pull({"v": v, "w": w}, out=out, consistent=True) is not None
        assert out["v"].tolist() == [1, 2]
        assert out["w"].tolist() == [3, 4]
        mine = await v.read(copy=True, consistent=True)
        mine[:] = 0
        assert (await v.read()).tolist() == [1, 2]


def test_what_the_dtype_cannot_hold_is_refused() -> None:
    with strategy_of().scope():
        small = psync.Variable([100], dtype="int8", name="small")
        half = psync.Variable([60000.0], dtype="float16", name="half")
    for variable, operand in ((small, np.array([300])), (half, np.array([1e300]))):
        rows = [0], operand
        for refused in (
            variable.assign(operand), variable.assign(operand, atomic=True),
            variable.assign_add(operand), variable.assign_sub(operand),
            variable.scatter_update(rows), variable.scatter_add(rows),
            variable.scatter_sub(rows), variable.scatter_mul(rows),
            variable.scatter_min(rows), variable.scatter_max(rows),
        ):  # fmt: skip
            with pytest.raises(ValueMismatchError, match=r"got (300|1e\+300)"):
                at_once(refused)


async def test_overflow_of_a_result_is_numpys() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            small = psync.Variable([100], dtype="int8", name="small")
            half = psync.Variable([60000.0], dtype="float16", name="half")
        await small.assign_add([100])
        await half.assign_add([60000])
        assert (await psync.pull([small, half])) == [[-56], [np.inf]]


async def test_many_at_once_all_end() -> None:
    async with training_of(2, 1, halves, v=np.zeros(4, np.float32)) as (_, v):
        calls: list[Any] = [v.assign(np.full(4, 100.0 * n), atomic=True) for n in range(10)]
        calls += [v.assign_add(np.ones(4)) for _ in range(10)]
        calls += [v.read(consistent=True) for _ in range(10)]
        await asyncio.gather(*calls)
        value = await v.read(consistent=True)
        # What is only added may come before an atomic assign on one ps and after it on another;
        # and whose assign is the last nobody has promised.
        assert len(set((value // 100).tolist())) == 1
        assert (value % 100).max() <= 10
        await v.assign(np.zeros(4), atomic=True)
        assert (await v.read()).tolist() == [0] * 4


# --- kept --------------------------------------------------------------------------------------


async def test_rows_are_not_kept_and_consistent_reads_neither() -> None:
    async with training_of(v=[1.0, 2.0]) as (_, v):
        with psync.cache_variable_reads():
            await v.read()
            await v.assign([5.0, 6.0])
            assert await v[1] == 6
            assert await v.sparse_read([0]) == [5]
            assert (await v.read(consistent=True)).tolist() == [5, 6]
            assert (await v.read()).tolist() == [1, 2]


async def test_what_is_kept_is_copied_for_those_who_change_it() -> None:
    async with training_of(v=[1.0, 2.0]) as (_, v):
        with psync.cache_variable_reads():
            mine = await v.read(copy=True)
            mine[:] = 0
            out = np.zeros(2, np.float32)
            assert (await v.read(out=out)) is out
            assert out.tolist() == [1, 2]
            kept = await v.read()
            assert kept.tolist() == [1, 2]
            with pytest.raises(ValueError, match="read-only"):
                kept[0] = 7


async def test_of_two_reads_at_once_one_is_kept() -> None:
    async with training_of(v=1.0) as (_, v):
        with psync.cache_variable_reads():
            first, second = await asyncio.gather(v.read(), v.read())
            third = await v.read()
        assert first is second or second is third
        assert first == second == third == 1


async def test_nested_scopes_are_an_error_and_change_nothing() -> None:
    async with training_of(v=1.0) as (_, v):
        with psync.cache_variable_reads():
            await v.read()
            with pytest.raises(ValueError, match="cannot be nested"):
                with psync.cache_variable_reads():
                    pass
            await v.assign(2.0)
            assert await v.read() == 1  # the outer one is still open
        assert await v.read() == 2
        with psync.cache_variable_reads():
            assert await v.read() == 2


def test_a_scope_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), psync.cache_variable_reads():
        raise ZeroDivisionError
    with psync.cache_variable_reads():
        pass


async def test_other_tasks_have_scopes_of_their_own() -> None:
    async with training_of(v=1.0) as (_, v):
        opened, assigned = asyncio.Event(), asyncio.Event()

        async def reader() -> tuple[float, float]:
            with psync.cache_variable_reads():
                first = float(await v.read())
                opened.set()
                await assigned.wait()
                return first, float(await v.read())

        reading = asyncio.create_task(reader())
        await opened.wait()
        await v.assign(2.0)
        with psync.cache_variable_reads():
            assert await v.read() == 2
        assigned.set()
        assert await reading == (1, 1)


async def test_a_step_has_its_own_scope_and_not_that_in_which_it_was_scheduled() -> None:
    async with training_of(v=1.0) as (coordinator, v):

        async def step() -> Any:
            await v.assign(2.0)
            seen = [float(await v.read())]
            with psync.cache_variable_reads():
                seen.append(float(await v.read()))
                await v.assign(3.0)
                seen.append(float(await v.read()))
            return [*seen, float(await v.read())]

        with psync.cache_variable_reads():
            await v.read()
            assert await in_step(coordinator, step) == [2, 2, 2, 3]
            assert await v.read() == 1


async def test_a_plain_step_keeps_reads_too() -> None:
    async with training_of(v=1.0) as (coordinator, v):

        def step() -> Any:
            with psync.cache_variable_reads():
                first = float(psync.wait(v.read()))
                psync.wait(v.assign(2.0))
                return first, float(psync.wait(v.read()))

        assert await in_step(coordinator, step) == (1, 1)
