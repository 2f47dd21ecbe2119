"""Whole trainings with jax: the numbers of a single process, Flax and Equinox, lost workers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, shared, training
from memory_cluster import coordinating

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from psync.integrations.jax import PSPytree, step_key  # noqa: E402  # needs jax


def first_params() -> Any:
    rng = np.random.default_rng(0)
    return {
        "in": {"w": rng.normal(size=(4, 8), scale=0.5).astype(np.float32)},
        "norm": {"scale": np.ones(8, np.float32), "shift": np.zeros(8, np.float32)},
        "out": {"w": rng.normal(size=(8, 2), scale=0.5).astype(np.float32), "b": np.zeros(2)},
    }


def first_stats() -> Any:
    return {"mean": np.zeros(8, np.float32), "var": np.ones(8, np.float32), "seen": np.array(0)}


def forward(params: Any, stats: Any, x: Any, train: bool) -> Any:
    """A net with BatchNorm by hand: logits, and what its running statistics become."""
    x = x @ params["in"]["w"]
    mean, var = (x.mean(0), x.var(0)) if train else (stats["mean"], stats["var"])
    if train:
        stats = {
            "mean": 0.9 * stats["mean"] + 0.1 * mean,
            "var": 0.9 * stats["var"] + 0.1 * var,
            "seen": stats["seen"] + 1,
        }
    x = (x - mean) / jnp.sqrt(var + 1e-5) * params["norm"]["scale"] + params["norm"]["shift"]
    return jax.nn.relu(x) @ params["out"]["w"] + params["out"]["b"], stats


def loss_of(params: Any, stats: Any, x: Any, y: Any) -> Any:
    logits, stats = forward(params, stats, x, True)
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, 2)).sum(1).mean(), stats


value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))


def batch_of(seed: int, size: int = 32) -> Any:
    x = np.random.default_rng(seed).normal(size=(size, 4), loc=1, scale=3).astype(np.float32)
    return x, (x.sum(1) > 4).astype(np.int32)


def accuracy_of(params: Any, stats: Any, train: bool) -> float:
    x, y = batch_of(10**6, 2000)
    return float((forward(params, stats, x, train)[0].argmax(1) == y).mean())


async def train(coordinator: Any, served: PSPytree[Any], steps: int) -> None:
    def step(seed: int) -> None:
        params, stats = psync.wait(served.pull())
        (_, stats), grads = value_and_grad(params, stats, *batch_of(seed))
        psync.wait(served.push(grads, state=stats))

    for seed in range(steps):
        coordinator.schedule(step, args=(seed,))
    await coordinator.join()


async def test_one_worker_computes_what_a_single_process_does_state_too() -> None:
    params, stats = first_params(), first_stats()
    for seed in range(20):
        (_, stats), grads = value_and_grad(params, stats, *batch_of(seed))
        params = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        with strategy.scope():
            served = PSPytree(first_params(), psync.optimizers.SGD(0.1), state=first_stats())
        await train(coordinator, served, 20)
        served_params, served_stats = await served.pull()
    assert served_stats["seen"] == 20
    for ours, alone in ((served_params, params), (served_stats, stats)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, alone
        )


@pytest.mark.virtual_time
async def test_a_closure_that_runs_again_elsewhere_has_the_same_key() -> None:
    shared.update(keys=[], begun=asyncio.Event())

    async def step() -> int:
        from local_training import shared

        key = jax.random.key_data(step_key(3)).tolist()
        shared["keys"].append(key)
        if len(shared["keys"]) == 1:
            shared["begun"].set()
            await asyncio.Event().wait()  # until its worker is lost
        return psync.get_worker_index()

    async with coordinating(num_workers=2) as (cluster, coordinator):
        value = coordinator.schedule(step)
        await shared["begun"].wait()
        await cluster.stop("worker-0")
        assert await value == 1
        await in_step(coordinator, step)
    first, again, another = shared["keys"]
    assert first == again != another


async def trained_once(params: Any, state: Any, loss: Any) -> Any:
    """Serve a tree for one step on a worker; return names, and the values before and after."""
    async with training(1, 1) as (strategy, coordinator):
        with strategy.scope():
            served = PSPytree(params, psync.optimizers.SGD(0.1), state=state)
        before = await served.state_dict()

        def step() -> None:
            values, state = psync.wait(served.pull())
            (_, state), grads = jax.value_and_grad(loss, has_aux=True)(values, state)
            psync.wait(served.push(grads, state=state))

        await in_step(coordinator, step)
        return before, await served.state_dict()


async def test_models_of_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    x = np.ones((8, 4), np.float32) * np.arange(8)[:, None]
    model = nnx.Sequential(
        nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)
    )
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params: Any, stats: Any) -> Any:
        net = nnx.merge(graph, params, stats, copy=True)
        made = (net(x, rngs=nnx.Rngs(dropout=step_key(0))) ** 3).sum()
        return made, nnx.state(net, nnx.BatchStat)

    before, after = await trained_once(params, stats, loss)
    names = ["layers/0/kernel", "layers/1/scale", "state/layers/1/mean"]
    assert set(names) <= before.keys()
    assert all((before[name] != after[name]).any() for name in names)


async def test_models_of_flax_linen() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    x = np.ones((8, 4), np.float32) * np.arange(8)[:, None]
    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=False)])
    variables = model.init(jax.random.key(0), x)

    def loss(params: Any, stats: Any) -> Any:
        made, new = model.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return (made**3).sum(), new["batch_stats"]

    before, after = await trained_once(variables["params"], variables["batch_stats"], loss)
    names = ["layers_0/kernel", "layers_1/scale", "state/layers_1/mean"]
    assert set(names) <= before.keys()
    assert all((before[name] != after[name]).any() for name in names)


async def test_models_of_equinox() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    x = np.ones((8, 4), np.float32) * np.arange(8)[:, None]

    class Net(eqx.Module):
        linear: Any
        norm: Any

        def __init__(self, key: Any) -> None:
            self.linear = eqx.nn.Linear(4, 3, key=key)
            self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(self.linear(x), state)

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, state: Any) -> Any:
        net = eqx.combine(params, static)
        made, state = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return (made**3).sum(), state

    before, after = await trained_once(params, state, loss)
    assert before.keys() >= {"linear/weight", "linear/bias", "norm/weight", "norm/bias"}
    assert (before["linear/weight"] != after["linear/weight"]).any()
    assert any((before[name] != after[name]).any() for name in before if name[:6] == "state/")


@pytest.mark.processes
async def test_workers_in_processes_of_their_own() -> None:
    async with psync.LocalCluster(1, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                served = PSPytree(
                    first_params(), psync.optimizers.Adam(0.02), name="net", state=first_stats()
                )
            await train(coordinator, served, 100)
            assert accuracy_of(*await served.pull(), False) > 0.9
