"""PSPytree: trees of jax arrays out, gradients and new state in; keys of steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, inside_a_step, strategy_of, training
from psync.client.context import ClosureContext, inside
from psync.errors import ConfigurationError, PartitionError, UsageError, ValueMismatchError

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from psync.integrations.jax import PSPytree, step_key  # noqa: E402  # needs jax

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.zeros(2, np.float32)}
STATS = {"bn": {"mean": np.zeros(4, np.float32), "count": np.array(0)}}


def served_of(
    strategy: psync.ParameterServerStrategy, params: Any = PARAMS, **options: Any
) -> PSPytree[Any]:
    optimizer = options.pop("optimizer", None) or psync.optimizers.SGD(1.0)
    with strategy.scope():
        return PSPytree(params, optimizer, **options)


def ones_like(tree: Any) -> Any:
    return jax.tree.map(jnp.ones_like, tree)


# --- values ------------------------------------------------------------------------------------


async def test_a_pull_gives_the_same_tree_of_jax_arrays() -> None:
    params = {"layers": [(jnp.ones((3, 2)), None), (jnp.zeros(2, jnp.bfloat16), 3)]}
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        served = served_of(strategy, params, name="net")
        names = ["net/layers/0/0", "net/layers/1/0", "net/layers/1/1"]
        assert [served.variable(name[4:]).name for name in names] == names
        assert not served.variable("layers/1/1").trainable

        async def step() -> Any:
            pulled = await served.pull()
            leaves = jax.tree.leaves(pulled)
            kinds = [(str(x.dtype), x.shape) for x in leaves if isinstance(x, jax.Array)]
            return str(jax.tree.structure(pulled)), kinds, [np.asarray(x) for x in leaves]

        structure, kinds, values = await in_step(coordinator, step)
        assert structure == str(jax.tree.structure(params))
        assert kinds == [("float32", (3, 2)), ("bfloat16", (2,)), ("int32", ())]
        for value, first in zip(values, jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(value, first)


async def test_arrays_of_a_pull_stay_what_they_are() -> None:
    """Their memory is that into which values were read; it is nobody else's from then on."""
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy)
        first = await served.pull()
        for _ in range(3):
            await served.push(ones_like(first))
        assert (await served.pull())["b"].tolist() == [-3, -3]
        np.testing.assert_array_equal(first["w"], PARAMS["w"])
        assert first["b"].tolist() == [0, 0]


async def test_on_a_cpu_values_are_read_into_the_memory_of_the_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from psync.integrations import jax as module

    read: set[int] = set()

    def recorded(*args: Any) -> Any:
        array = module_aligned(*args)
        read.add(array.ctypes.data)
        return array

    module_aligned = module.aligned
    monkeypatch.setattr(module, "aligned", recorded)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        served = served_of(strategy, state=STATS, trainable=lambda name: name == "w")
        pulled = await served.pull()
        assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pulled)} == read


async def test_pulled_arrays_may_be_donated_frozen_ones_too() -> None:
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy, trainable=lambda name: name == "b")
        donating = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
        for _ in range(2):
            params = await served.pull()
            donating(params)
            assert params["w"].is_deleted()
        np.testing.assert_array_equal((await served.pull())["w"], PARAMS["w"])


async def test_values_go_to_a_device_or_sharding() -> None:
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy)
        (device,) = jax.devices("cpu")
        for where in (device, jax.sharding.SingleDeviceSharding(device)):
            assert (await served.pull(device=where))["w"].devices() == {device}


# --- gradients ---------------------------------------------------------------------------------


async def test_a_step_of_jitted_gradients() -> None:
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda p, x: (x @ p["w"] + p["b"]).sum() * p["n"], allow_int=True)
    )
    async with training(2, 1) as (strategy, coordinator):
        served = served_of(strategy, {**PARAMS, "n": np.array(2)}, name="net")

        def step() -> Any:
            loss, grads = value_and_grad(psync.wait(served.pull()), jnp.ones((1, 3)))
            return loss.item(), psync.wait(served.push(grads)).outcome

        assert await in_step(coordinator, step) == (30.0, psync.Outcome.ACCEPTED)
        values = await served.state_dict()
        np.testing.assert_array_equal(values["w"], PARAMS["w"] - 2)
        assert values["b"].tolist() == [-2, -2]
        assert values["n"] == 2


async def test_what_is_no_gradient_is_refused() -> None:
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy, name="net")
        message = "PSPytree 'net': gradients: expected the same tree as params of PSPytree"
        with pytest.raises(ValueMismatchError, match=f"{message} 'net'; missing: 'b'"):
            await served.push({"w": jnp.ones((3, 2))})
        with pytest.raises(ValueMismatchError, match="PSPytree 'net': no gradient to push"):
            await served.push({"w": None, "b": None})
        with pytest.raises(
            ValueMismatchError, match=r'gradient for "net/b": expected shape \(2,\)'
        ):
            await served.push({"w": None, "b": jnp.ones(3)})
        gone = jnp.ones(2)
        gone.delete()
        with pytest.raises(ValueMismatchError, match='gradient "b" was deleted'):
            await served.push({"w": None, "b": gone})
        with pytest.raises(UsageError, match="got a state, but was created without one"):
            await served.push(PARAMS, state=STATS)


# --- state -------------------------------------------------------------------------------------


async def push_state(served: PSPytree[Any], mean: float, count: int) -> Any:
    params, stats = await served.pull()
    new = {"bn": {"mean": stats["bn"]["mean"] * 0 + mean, "count": stats["bn"]["count"] + count}}
    await served.push(ones_like(params), state=new)
    return stats


async def test_state_has_to_be_pulled_and_pushed() -> None:
    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy, state=STATS)

        async def forgets() -> None:
            params, _ = await served.pull()
            await served.push(ones_like(params))

        async def pushes() -> None:
            await served.push(PARAMS, state=STATS)

        async def another() -> None:
            params, stats = await served.pull()
            await served.push(params, state=stats["bn"])

        with pytest.raises(UsageError, match="expected the new state beside the gradients"):
            await in_step(coordinator, forgets)
        with pytest.raises(UsageError, match="state pushed in a step that has not pulled"):
            await in_step(coordinator, pushes)
        with pytest.raises(ValueMismatchError, match="state: expected the same tree as state of"):
            await in_step(coordinator, another)


# --- checkpoints and declarations --------------------------------------------------------------


async def test_checkpoints_have_the_names_of_the_tree(tmp_path: Path) -> None:
    async with training(2, 1) as (strategy, _):
        served = served_of(
            strategy, {"dense": PARAMS}, state=STATS, optimizer=psync.optimizers.Adam(0.1)
        )
        checkpoint = psync.Checkpoint(model=served, optimizer=served.optimizer)
        await push_state(served, 2.0, 1)
        path = await checkpoint.save(tmp_path)
        saved = await served.state_dict()
        await push_state(served, 3.0, 1)
        await checkpoint.restore(path)
        params, stats = await served.pull()
        np.testing.assert_array_equal(params["dense"]["w"], saved["dense/w"])
        np.testing.assert_array_equal(stats["bn"]["mean"], saved["state/bn/mean"])
        read = await checkpoint.read(path)
        assert read["model"].keys() == {
            "dense/w", "dense/b", "state/bn/mean", "state/bn/count"
        }  # fmt: skip


async def test_numbers_of_64_bits_are_refused_where_jax_has_none() -> None:
    async with training(1, 1) as (strategy, _):
        with jax.enable_x64(True):
            served = served_of(strategy, {"w": jnp.ones(2)}, name="net")
        assert served.variable("w").dtype == np.float64
        with pytest.raises(ConfigurationError, match='"net/w" is float64, but jax has no 64-bit'):
            await served.pull()


def test_without_jax_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "psync.integrations.jax")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigurationError, match=r"needs the package jax.*\n.*psync\[jax\]"):
        import psync.integrations.jax  # noqa: F401


def test_arrays_of_jax_are_values_of_variables_and_keys_are_not() -> None:
    with strategy_of().scope():
        half = psync.Variable(jnp.ones(3, jnp.bfloat16))
        assert (half.dtype.name, half.shape) == ("bfloat16", (3,))
        with pytest.raises(PartitionError, match=r"not an array: .* Use jax.random.key_data"):
            psync.Variable(jax.random.key(0))


# --- keys --------------------------------------------------------------------------------------


def key_of(closure_id: int, worker: int = 0, seed: Any = 0) -> list[int]:
    with inside(ClosureContext(worker_index=worker, closure_id=closure_id)):
        assert (step_key(seed) == step_key(seed)).all()
        data: list[int] = jax.random.key_data(step_key(seed)).tolist()
        return data


def test_each_closure_has_a_key_whoever_runs_it() -> None:
    assert key_of(7, worker=0) == key_of(7, worker=3)
    assert key_of(7, seed=1) == key_of(7, seed=jax.random.key(1)) != key_of(7, seed=2)
    assert key_of(7, seed=jax.numpy.int32(1)) == key_of(7, seed=jax.random.PRNGKey(1))
    ids = [0, 1, 2, 1 << 32, (1 << 32) + 1, 1 << 40]
    assert len({tuple(key_of(each)) for each in ids}) == len(ids)


def test_outside_of_a_step_there_is_no_key() -> None:
    with pytest.raises(UsageError, match=r"step_key outside of a step\nhint: jax\.random\.key"):
        step_key(0)
    with inside_a_step():
        assert jnp.issubdtype(step_key(0).dtype, jax.dtypes.prng_key)
