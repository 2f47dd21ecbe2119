"""fit of served Keras models: callbacks, data that end, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from memory_cluster import coordinating
from psync.errors import ConfigurationError, UsageError

keras: Any = pytest.importorskip("keras")

from keras_nets import Rows, batches, net, points, served_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


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
    assert seen[0] == ("begin", {"epochs": 9, "steps": 4, "verbose": 0})
    assert [each[1] for each in seen[1:]] == [names, names, both]
    assert [each[3] for each in seen[1:] if each[0] != "tested"] == [4, 8]
    assert seen[-1][2] == pytest.approx(float((kernel**2).sum()), rel=1e-5)
    assert history.epoch == [0, 1]
    assert history.history["learning_rate"] == pytest.approx([0.005, 0.0025])


async def test_weights_that_a_callback_sets_hold_for_all_and_for_the_next_run(
    tmp_path: Path,
) -> None:
    rates = iter([0.0, 0.1, 0.1])
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: next(rates)),
        keras.callbacks.EarlyStopping("loss", patience=2, mode="max", restore_best_weights=True),
    ]
    async with training(2, 1) as (strategy, _):
        model = served_of(
            strategy, lambda: net(keras.optimizers.SGD(1.0)), checkpoint_directory=tmp_path
        )
        before = await model.get_weights()
        history = await model.fit(lambda: [points(1)] * 3, 9, 3, None, callbacks, verbose=False)
        after = await model.get_weights()
    async with training(2, 1) as (strategy, _):
        model = served_of(
            strategy, lambda: net(keras.optimizers.SGD(1.0)), checkpoint_directory=tmp_path
        )
        await model.fit(lambda: [points(1)] * 3, 3, 3, verbose=False)  # nothing is left to do
        resumed = await model.get_weights()
    losses = history.history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    for ours, theirs, next_ones in zip(after, before, resumed, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, next_ones)


@pytest.mark.parametrize("per_execution", [1, 4])
async def test_every_batch_of_uneven_epochs_is_trained(
    per_execution: int, caplog: pytest.LogCaptureFixture
) -> None:
    def uneven(context: psync.InputContext) -> Any:
        return [points(seed, 8) for seed in range(9 if context.input_pipeline_id else 2)]

    async with training(num_workers=2) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(
            uneven, epochs=3, steps_per_epoch=11, steps_per_execution=per_execution, verbose=False
        )
        assert history.epoch == [0, 1, 2]
        assert history.history["rows"] == [11 * 8] * 3
    assert "training ends" not in caplog.text


async def test_fit_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    for epochs in (2, 3):
        async with training(2, 1) as (strategy, _):
            model = served_of(strategy, name="net", checkpoint_directory=tmp_path)
            history = await model.fit(batches, epochs, 4, verbose=False)
            iterations = await model.optimizer.iterations.read()
        assert iterations == 4 * epochs
    assert history.epoch == [2]


async def test_a_resumed_fit_goes_on_with_the_learning_rate_that_callbacks_had_set(
    tmp_path: Path,
) -> None:
    rates = [0.01, 0.002, 0.01]  # the third is what the model is built with
    seen = []
    for epochs in (2, 3):
        async with training(1, 1) as (strategy, _):
            model = served_of(strategy, checkpoint_directory=tmp_path)
            callbacks = [
                keras.callbacks.LambdaCallback(
                    on_train_begin=lambda logs, model=model: seen.append(
                        float(model._chief_model().optimizer.learning_rate)
                    )
                ),
                keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
            ]
            await model.fit(batches, epochs, 2, None, callbacks, verbose=False)
            assert model.optimizer.learning_rate == pytest.approx(rates[epochs - 1])
    assert seen == pytest.approx([0.01, 0.002])


@pytest.mark.parametrize("labels", ["numbers", "column", "one-hot"])
async def test_class_weights_are_those_of_keras(labels: str) -> None:
    def y_of(y: Any) -> Any:
        return {"numbers": y, "column": y[:, None], "one-hot": np.eye(2)[y]}[labels]

    def build() -> Any:
        model = net()
        kind = "categorical" if labels == "one-hot" else "sparse_categorical"
        loss = getattr(keras.losses, kind.title().replace("_", "") + "Crossentropy")
        model.compile(
            keras.optimizers.SGD(0.1), loss(from_logits=True), weighted_metrics=["accuracy"]
        )
        return model

    def data() -> Any:
        return [(x, y_of(y)) for x, y in map(points, range(4))]

    weights = {1: 5.0}
    alone = build()
    arrays = [np.concatenate(each) for each in zip(*data(), strict=True)]
    of_keras = alone.fit(*arrays, 32, 1, shuffle=False, class_weight=weights, verbose=0)
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(data, 1, 4, class_weight=weights, verbose=False)
    assert history.history["loss"] == pytest.approx(of_keras.history["loss"], rel=1e-5)
    assert history.history["accuracy"] == of_keras.history["accuracy"]


async def test_arguments_of_keras_that_it_does_not_have_are_refused_with_what_there_is() -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy)
        others: Any
        for others, hint in (
            ({"sample_weight": np.ones(3)}, r"yield batches \(x, y, sample_weight\)"),
            ({"validation_split": 0.1}, r"validation_data=\(x, y\)"),
            ({"batch_size": 3}, "from_arrays"),
            ({"epoch": 3}, "docstring of PSModel.fit"),
        ):
            message = f"fit: argument {next(iter(others))} is not .*\nhint: .*{hint}"
            with pytest.raises(ConfigurationError, match=message):
                await model.fit(batches, 1, 1, **others)
        with pytest.raises(ConfigurationError, match=r"class_weight to be a dict, .* got list"):
            await model.fit(batches, 1, 1, class_weight=[1.0, 2.0])  # type: ignore[arg-type]


async def test_a_model_that_the_program_has_changed_meanwhile_is_refused() -> None:
    def build() -> Any:
        model = net()
        model.layers[0].trainable = False
        model.compile("sgd", model.loss)
        return model

    class Thaws(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = True

    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, build)
        with pytest.raises(ConfigurationError, match="has other trainable layers than before"):
            await model.fit(batches, 2, 1, None, [Thaws()], verbose=False)
        with pytest.raises(ConfigurationError, match="has other trainable layers than before"):
            await model.fit(batches, 1, 1, verbose=False)
        of_keras = await model.pull()
        of_keras.layers[0].trainable = False
        await model.fit(batches, 1, 1, verbose=False)
        of_keras.compile("sgd", "mse")
        with pytest.raises(ConfigurationError, match=r"compiled again.*\nhint: .*another PSModel"):
            await model.fit(batches, 1, 1, verbose=False)


@pytest.mark.parametrize(
    ("compiled", "given", "batches_told"),
    [(3, None, [2, 5]), (1, None, [0, 1, 2, 3, 4, 5]), (3, 2, [1, 3, 5]), (3, 1, [*range(6)])],
)
async def test_steps_per_execution_is_what_the_model_was_compiled_with_unless_fit_says_another(
    compiled: int, given: int | None, batches_told: list[int]
) -> None:
    told: list[int] = []

    class Notes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told.append(batch)

    def build() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, steps_per_execution=compiled)
        return model

    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, build)
        await model.fit(
            batches, 1, 6, callbacks=[Notes()], steps_per_execution=given, verbose=False
        )
    assert told == batches_told


async def test_metrics_of_an_epoch_count_each_of_its_steps_once_though_a_rollback_undid_some(
    tmp_path: Path,
) -> None:
    class Lose(keras.callbacks.Callback):  # type: ignore[misc]
        lost = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    class Kill(psync.callbacks.Callback):
        async def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if (lose.epoch, batch, lose.lost) == (1, 5, False):
                lose.lost = True
                await cluster.stop("ps-0")
                await cluster.start("ps-0")

    async with coordinating(1, 1) as (cluster, coordinator):
        model = served_of(
            coordinator.strategy, lambda: net(metrics=[Rows()]), checkpoint_directory=tmp_path
        )
        lose = Lose()
        history = await model.fit(batches, 3, 8, None, [lose, Kill()], verbose=False)
        assert await model.optimizer.iterations.read() == 3 * 8
        assert len((await anext(coordinator.events())).closures) >= 6
    assert history.history["rows"] == [8 * 32] * 3


@pytest.mark.parametrize("class_weight", [None, {0: 2.0}])
async def test_batches_with_hidden_values_are_refused(class_weight: Any) -> None:
    def hiding() -> Any:
        x, y = points(1)
        yield (x, np.ma.masked_equal(y, 1)) if class_weight else (np.ma.masked_less(x, 0), y)

    async with training(1, 1) as (strategy, _):
        model = served_of(strategy)
        with pytest.raises(ConfigurationError, match="a batch: expected arrays, got a masked arr"):
            await model.fit(hiding, 1, 1, class_weight=class_weight, verbose=False)
        weights = await model.get_weights()
        with pytest.raises(UsageError, match="set_weights: expected arrays, got a masked array"):
            await model.set_weights([np.ma.masked_less(weights[0], 0), *weights[1:]])
