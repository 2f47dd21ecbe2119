"""Served Keras models: the numbers of a single process, weights in and outputs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from local_training import shared, training

keras: Any = pytest.importorskip("keras")

from keras_nets import batches, net, points, served_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
async def test_two_synchronous_workers_have_the_loss_curve_of_a_single_process(
    name: str, dtype: str, floats: Callable[[str], None]
) -> None:
    floats(dtype)
    steps, make = 100, OPTIMIZERS[name]

    def build() -> Any:
        return net(make())

    alone = build()
    data = (points(step) for step in range(steps))
    of_keras = alone.fit(data, epochs=steps, steps_per_epoch=1, shuffle=False, verbose=0)

    shared["epochs"] = [0, 0]

    def halves(context: psync.InputContext) -> Any:
        import local_training

        worker = context.input_pipeline_id
        step = local_training.shared["epochs"][worker]
        local_training.shared["epochs"][worker] += 1
        x, y = points(step)
        yield x[worker::2], y[worker::2]

    async with training(2, 2) as (strategy, _):
        model = served_of(
            strategy,
            build,
            synchronous=lambda rule: psync.SyncReplicasOptimizer(rule, 2, deterministic=True),
        )
        history = await model.fit(halves, steps, 2, verbose=False)
        weights = await model.get_weights()
    tolerance = {"float32": 1e-4, "float64": 1e-5}[dtype]
    np.testing.assert_allclose(history.history["loss"], of_keras.history["loss"], rtol=tolerance)
    for ours, theirs in zip(weights, alone.get_weights(), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=20 * tolerance, atol=tolerance)


async def test_one_worker_has_the_moving_statistics_of_a_single_process(
    floats: Callable[[str], None],
) -> None:
    floats("float64")

    def build() -> Any:
        return net(norm=True)

    alone = build()
    data = (points(step) for step in range(20))
    of_keras = alone.fit(data, epochs=2, steps_per_epoch=10, shuffle=False, verbose=0)

    shared["epochs"] = 0

    def ten_batches() -> Any:
        import local_training

        first = 10 * local_training.shared["epochs"]
        local_training.shared["epochs"] += 1
        yield from (points(first + step) for step in range(10))

    async with training(2, 1) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(ten_batches, 2, 10, steps_per_execution=4, verbose=False)
        weights = await model.get_weights()
        x, y = points(1000, 100)
        evaluated = await model.evaluate((x, y), batch_size=7)
    assert history.epoch == [0, 1]
    for name, values in of_keras.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-6)
    for ours, theirs in zip(weights, alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)
    expected = alone.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    assert evaluated == pytest.approx(expected, rel=1e-6)


async def test_moving_statistics_of_workers_are_merged() -> None:
    async with training(2, 2) as (strategy, _):
        model = served_of(strategy, lambda: net(norm=True))
        await model.fit(batches, 1, 120, verbose=False)
        x, y = points(10**6, 400)
        evaluated = (await model.evaluate((x, y)))["accuracy"]
        dense, norm = (await model.pull()).layers[:2]
    assert evaluated > 0.9
    seen = keras.ops.convert_to_numpy(dense(x))  # by the layer; its statistics began as 0 and 1
    mean, variance = map(keras.ops.convert_to_numpy, (norm.moving_mean, norm.moving_variance))
    assert np.abs(mean - seen.mean(0)).max() < 0.2
    assert np.abs(variance - seen.var(0)).max() < 0.2 < 1 - seen.var(0).min()


async def test_weights_go_in_and_out_and_outputs_are_those_of_the_model() -> None:
    x, _ = points(5, 50)
    async with training(2, 2, psync.FixedShardsPartitioner(2)) as (strategy, _):
        model = served_of(strategy, name="net")
        assert model.variable("dense/kernel").name == "net/dense/kernel"
        alone = net()
        for ours, theirs in zip(await model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        weights = [weight + 1 for weight in alone.get_weights()]
        await model.set_weights(weights)
        alone.set_weights(weights)
        outputs = await model.predict(x, batch_size=8)
        np.testing.assert_allclose(outputs, alone.predict(x, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy((await model.pull())(x)), outputs, rtol=1e-5
        )
        with pytest.raises(psync.errors.UsageError, match="expected 4 arrays, got 1"):
            await model.set_weights(weights[:1])
        with pytest.raises(psync.errors.UsageError, match=r'"dense_1/bias": expected shape \(2,\)'):
            await model.set_weights([*weights[:3], weights[0]])


async def test_frozen_layers_stay_as_they_are() -> None:
    def build() -> Any:
        model = net(norm=True)
        for layer in model.layers[:2]:
            layer.trainable = False
        model.compile(model.optimizer, model.loss)
        return model

    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, build)
        before = await model.get_weights()
        await model.fit(batches, 1, 3, verbose=False)
        after = await model.get_weights()
    same = [np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
    assert same == [True] * 6 + [False] * 2


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_workers_in_processes_of_their_own() -> None:
    async with psync.LocalCluster(1, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            model = served_of(strategy, lambda: net(norm=True), name="net")
            await model.fit(batches, 2, 60, verbose=False)
            assert (await model.evaluate(points(10**6, 200)))["accuracy"] > 0.9
