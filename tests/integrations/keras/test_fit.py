"""fit, evaluate and predict of served Keras models: the numbers of a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import shared, training

keras: Any = pytest.importorskip("keras")

from psync.integrations.keras import ServedModel  # noqa: E402  # needs keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def points(seed: int, size: int = 32) -> Any:
    """A batch of two classes, in the present floats of Keras."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 4)) * 3 + 1
    return x.astype(keras.config.floatx()), (x.sum(1) > 4).astype(np.int32)


def net(optimizer: Any = None, *, norm: bool = False, metrics: Any = ("accuracy",)) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh")]
    if norm:
        layers.append(keras.layers.BatchNormalization(momentum=0.9))
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def served_of(strategy: Any, build: Callable[[], Any] = net, **options: Any) -> ServedModel:
    with strategy.scope():
        return ServedModel(build, **options)


def batches(context: psync.InputContext) -> Any:
    seed = context.input_pipeline_id
    while True:
        yield points(seed)
        seed += context.num_input_pipelines


# --- a single process's numbers -------------------------------------------------------------------


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
        keras_model = await model.pull()
        as_in_training = keras.ops.convert_to_numpy(keras_model(x, training=True)).argmax(1)
    assert evaluated > 0.9
    assert evaluated > (as_in_training == y).mean() - 0.02


# --- metrics --------------------------------------------------------------------------------------


async def test_metrics_of_workers_are_those_of_all_batches() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [
            "accuracy", keras.metrics.AUC(name="area"), keras.metrics.Precision(name="precision"),
            keras.metrics.F1Score(threshold=0.5, average="micro", name="f1"),
        ]  # fmt: skip
        weighted = [keras.metrics.MeanSquaredError(name="error")]
        rate = keras.optimizers.SGD(0.0)
        model.compile(rate, "binary_crossentropy", metrics=metrics, weighted_metrics=weighted)
        return model

    def batch_of(seed: int) -> Any:
        x, y = points(seed, 20 + seed)
        return x, y[:, None].astype("float32"), np.linspace(0, 1, len(x), dtype="float32")

    def two_parts(context: psync.InputContext) -> Any:
        return map(batch_of, range(context.input_pipeline_id, 6, 2))

    parts = [batch_of(seed) for seed in range(6)]
    x, y, weight = (np.concatenate(each) for each in zip(*parts, strict=True))
    alone = build()
    expected = alone.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    del expected["loss"]  # Keras's mean over batches depends on how they are cut
    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(two_parts, 1, 6, verbose=False)
        evaluated = await model.evaluate((x, y, weight), batch_size=9)
        of_training = {name: values[-1] for name, values in history.history.items()}
        for found in (of_training, evaluated):
            assert found.pop("loss") > 0
            assert found == pytest.approx(expected, rel=1e-5)


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # of a package without types
    """No sum over batches."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs) + 5.0))

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.value)


class Rows(keras.metrics.Metric):  # type: ignore[misc]
    """The number of examples."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.count.assign(self.count + keras.ops.shape(outputs)[0])

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.count)


async def test_metrics_of_the_user_are_merged_if_they_add_up() -> None:
    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(batches, 1, 5, verbose=False)
        assert history.history["rows"] == [5 * 32]
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Largest()]))
        with pytest.raises(psync.errors.ConfigurationError, match="largest: their variables are"):
            await model.fit(batches, 1, 1, verbose=False)


# --- callbacks ------------------------------------------------------------------------------------


async def test_callbacks_of_keras_run_in_the_program_with_logs_as_keras_has_them() -> None:
    seen: list[Any] = []

    class Notes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(("begin", self.params))

        def on_test_end(self, logs: Any = None) -> None:
            seen.append(("tested", sorted(logs)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            layer = self.model.layers[0]
            norm = float(keras.ops.convert_to_numpy(keras.ops.sum(layer.kernel**2)))
            seen.append((epoch, sorted(logs), norm, int(self.model.optimizer.iterations)))
            self.model.stop_training = epoch == 1

    async with training(1, 2) as (strategy, _):
        model = served_of(strategy)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        history = await model.fit(
            batches, 9, 4, points(99), [Notes(), schedule], verbose=False, validation_freq=2
        )
        kernel = (await model.get_weights())[0]
        assert model.optimizer.learning_rate == pytest.approx(0.01 / 4)
    names = ["accuracy", "loss"]
    both = [*names, "val_accuracy", "val_loss"]
    assert seen[0] == ("begin", {"epochs": 9, "steps": 4})
    assert [each[1] for each in seen[1:]] == [names, names, both]
    assert [each[3] for each in seen[1:] if each[0] != "tested"] == [4, 8]
    assert seen[-1][2] == pytest.approx(float((kernel**2).sum()), rel=1e-5)
    assert history.epoch == [0, 1]
    assert history.history["learning_rate"] == pytest.approx([0.005, 0.0025])


async def test_weights_that_a_callback_sets_hold_for_all() -> None:
    rates = iter([0.0, 0.1, 0.1])
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: next(rates)),
        keras.callbacks.EarlyStopping("loss", patience=2, mode="max", restore_best_weights=True),
    ]
    async with training(2, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(keras.optimizers.SGD(1.0)))
        before = await model.get_weights()
        history = await model.fit(lambda: [points(1)] * 3, 9, 3, None, callbacks, verbose=False)
        after = await model.get_weights()
    losses = history.history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    for ours, theirs in zip(after, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


async def test_callbacks_that_need_batches_or_slots_are_refused(tmp_path: Path) -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy)
        for callback, text in (
            (keras.callbacks.TerminateOnNaN(), "TerminateOnNaN has on_batch_end, and batches are"),
            (keras.callbacks.BackupAndRestore(tmp_path / "b"), "without what the optimizer keeps"),
        ):
            with pytest.raises(psync.errors.ConfigurationError, match=text):
                await model.fit(batches, 1, 1, callbacks=[callback], verbose=False)
        saves = keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.weights.h5", "loss", save_weights_only=True
        )
        await model.fit(batches, 1, 1, callbacks=[saves], verbose=False)
        saved = net()
        saved.load_weights(tmp_path / "1.weights.h5")
        for ours, theirs in zip(await model.get_weights(), saved.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


# --- weights and outputs --------------------------------------------------------------------------


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


async def test_models_of_several_inputs_and_outputs() -> None:
    def build() -> Any:
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        both = keras.layers.Concatenate()([a, b])
        outputs = {
            "sum": keras.layers.Dense(1, name="sum")(both),
            "class": keras.layers.Dense(2, name="class", activation="softmax")(both),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        losses = {"sum": "mse", "class": "sparse_categorical_crossentropy"}
        model.compile("adam", losses, metrics={"class": "accuracy"})
        return model

    def pairs() -> Any:
        x, y = points(1)
        yield {"a": x, "b": x}, {"sum": x.sum(1), "class": y}

    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(pairs, 1, 1, verbose=False)
        names = {"loss", "sum_loss", "class_loss", "class_accuracy"}
        assert set(history.history) == names
        x, _ = points(1, 9)
        outputs = await model.predict({"a": x, "b": x}, batch_size=4)
        assert {name: each.shape for name, each in outputs.items()} == {
            "sum": (9, 1), "class": (9, 2),
        }  # fmt: skip


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


async def test_workers_draw_masks_of_their_own() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(3)
        seed = keras.random.SeedGenerator(7)

        class Noise(keras.layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.seed = seed
                self.bias = self.add_weight(shape=(1,), initializer="zeros", name="bias")

            def call(self, x: Any, training: bool = False) -> Any:
                noise = keras.random.normal(keras.ops.shape(x), seed=self.seed)
                return keras.ops.where(training, noise, x) + self.bias

        model = keras.Sequential([keras.Input((1,)), Noise()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    zero = np.zeros((4, 1), np.float32)

    def one_batch() -> Any:
        yield zero, zero

    losses = []
    for workers in (1, 2):
        async with training(1, workers) as (strategy, _):
            model = served_of(strategy, build, synchronous=synchronous_of(workers))
            history = await model.fit(one_batch, 1, workers, verbose=False)
            losses.append(history.history["loss"][0])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def synchronous_of(workers: int) -> Callable[[Any], Any]:
    return lambda rule: psync.SyncReplicasOptimizer(rule, workers)


async def test_mixed_precision_is_that_of_the_program(floats: Callable[..., None]) -> None:
    floats("float32", "mixed_bfloat16")
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(norm=True))
        history = await model.fit(batches, 2, 30, verbose=False)
        assert history.history["loss"][1] < history.history["loss"][0]
        assert {weight.dtype.name for weight in await model.get_weights()} == {"float32"}
        outputs = await model.predict(points(1)[0])
        assert outputs.dtype.name == "bfloat16" or keras.config.backend() == "torch"


# --- data, resuming, and processes ----------------------------------------------------------------


async def test_training_ends_with_the_epoch_in_which_the_data_of_a_worker_end() -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(lambda: [points(1)] * 3, 9, 5, verbose=False)
        assert history.epoch == [0]
        assert history.history["rows"] == [3 * 32]
        with pytest.raises(psync.errors.ConfigurationError, match="at least one batch, got none"):
            await model.fit(lambda: [], 1, 5, verbose=False)


def test_it_trains_without_async() -> None:
    with psync.blocking.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with psync.blocking.ClusterCoordinator(strategy):
            model = served_of(strategy)
            history = psync.wait(model.fit(batches, 2, 3, verbose=False))
            assert history.epoch == [0, 1]
            assert psync.wait(model.evaluate(points(1))).keys() == {"accuracy", "loss"}


async def test_fit_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    for epochs in (2, 3):
        async with training(2, 1) as (strategy, _):
            model = served_of(strategy, name="net", checkpoint_directory=tmp_path)
            history = await model.fit(batches, epochs, 4, verbose=False)
            iterations = await model.optimizer.iterations.read()
        assert iterations == 4 * epochs
    assert history.epoch == [2]


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_workers_in_processes_of_their_own() -> None:
    async with psync.LocalCluster(1, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            model = served_of(strategy, lambda: net(norm=True), name="net")
            await model.fit(batches, 2, 60, verbose=False)
            assert (await model.evaluate(points(10**6, 200)))["accuracy"] > 0.9
