"""fit of served Keras models: callbacks, data that end, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from psync.errors import ConfigurationError

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


async def test_hooks_of_batches_see_the_epoch_so_far() -> None:
    seen: list[Any] = []

    class Notes(keras.callbacks.Callback):  # type: ignore[misc]  # of a package without types
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((batch, logs["rows"], int(self.model.optimizer.iterations) > batch))
            self.model.stop_training = len(seen) == 8

    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(
            batches, 9, 6, None, [Notes()], steps_per_execution=2, verbose=False
        )
    assert seen[:6] == [1, (1, 64, True), 3, (3, 128, True), 5, (5, 192, True)]
    assert seen[6:] == [1, (1, 64, True)]
    assert history.epoch == [0, 1]
    assert history.history["rows"][0] == 192


async def test_nan_ends_training() -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(keras.optimizers.SGD(1e38)))
        callback = keras.callbacks.TerminateOnNaN()
        history = await model.fit(batches, 9, 20, None, [callback], verbose=False)
    assert history.epoch == [0]


async def test_model_checkpoints_are_of_the_present_values(tmp_path: Path) -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy)
        callback = keras.callbacks.BackupAndRestore(tmp_path / "b")
        with pytest.raises(ConfigurationError, match="without what the optimizer keeps"):
            await model.fit(batches, 1, 1, callbacks=[callback], verbose=False)
        saves = keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.weights.h5", "loss", save_weights_only=True
        )
        await model.fit(batches, 1, 1, callbacks=[saves], verbose=False)
        saved = net()
        saved.load_weights(tmp_path / "1.weights.h5")
        for ours, theirs in zip(await model.get_weights(), saved.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


async def test_training_ends_with_the_epoch_in_which_the_data_of_a_worker_end() -> None:
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(lambda: [points(1)] * 3, 9, 5, verbose=False)
        assert history.epoch == [0]
        assert history.history["rows"] == [3 * 32]
        with pytest.raises(psync.errors.ConfigurationError, match="at least one batch, got none"):
            await model.fit(lambda: [], 1, 5, verbose=False)


async def test_fit_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    for epochs in (2, 3):
        async with training(2, 1) as (strategy, _):
            model = served_of(strategy, name="net", checkpoint_directory=tmp_path)
            history = await model.fit(batches, epochs, 4, verbose=False)
            iterations = await model.optimizer.iterations.read()
        assert iterations == 4 * epochs
    assert history.epoch == [2]


def test_it_trains_without_async() -> None:
    with psync.blocking.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with psync.blocking.ClusterCoordinator(strategy):
            model = served_of(strategy)
            history = psync.wait(model.fit(batches, 2, 3, verbose=False))
            assert history.epoch == [0, 1]
            assert psync.wait(model.evaluate(points(1))).keys() == {"accuracy", "loss"}
