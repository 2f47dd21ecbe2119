"""Trainer: fit and evaluate, its checkpoints, validation data."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import message_counts
import psync
from local_training import at_once, shared, strategy_of, training
from loops import for_each
from memory_cluster import coordinating, event_of, note
from psync.checkpoints.files import is_last
from psync.errors import ClosedError, ConfigurationError, ValueMismatchError
from psync.training.trainer import Counts, batch_size_of, shards_of

pytestmark = pytest.mark.virtual_time

TRUE = np.array([[2.0], [-1.0]], np.float32)
X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
Y = X @ TRUE

ONE_HOT = 2.0 * (np.arange(len(X)) == 5)  # weights, of which one is not 0
OF_ZEROS = {"loss": float(np.mean(Y**2)), "mae": float(np.mean(np.abs(Y)))}  # before training


def batches(context: psync.InputContext) -> Iterator[Any]:
    rng = np.random.default_rng(context.input_pipeline_id)
    while True:
        rows = rng.integers(0, len(X), 8)
        yield X[rows], Y[rows]


def value_and_grad(values: Any, batch: Any) -> Any:
    """Least squares: values are {"w": …}."""
    x, y, *_ = batch
    predictions = x @ values["w"]
    error = predictions - y
    return np.mean(error**2), {"w": 2 * x.T @ error / len(x)}, predictions


def make(
    strategy: Any, optimizer: Any = None, compute: Any = value_and_grad, **options: Any
) -> psync.Trainer:
    with strategy.scope():
        w = psync.Variable(np.zeros((2, 1), np.float32), name="w")
        metric = psync.metrics.MeanAbsoluteError("mae")
    return psync.Trainer(
        strategy, {"w": w}, compute, optimizer or psync.optimizers.SGD(0.1), [metric],
        **options,
    )  # fmt: skip


async def examples(trainer: psync.Trainer) -> int:
    """How many count in the loss of the present epoch."""
    return int((await trainer._counted["loss"].variables[0].read())[1])


async def test_steps_of_one_closure_get_their_values_with_the_push_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message_counts.count_everything(monkeypatch)
    async with training(num_ps=1, num_workers=1) as (strategy, _):
        trainer = make(strategy)
        message_counts.counting.on = True
        await trainer.fit(
            batches, epochs=1, steps_per_epoch=10, steps_per_execution=5, verbose=False
        )
        message_counts.counting.on = False
    # In each of two closures: a pull, five pushes, one for each of two metrics; and the answers.
    # Once: the plans of these, and of a push that brings no values.
    link = message_counts.Link("ps", "worker")
    assert message_counts.counting.links[link].messages == 2 * 2 * (1 + 5 + 2) + 5


async def test_it_trains_and_says_how_each_epoch_went(capsys: Any) -> None:
    async with training(num_workers=2) as (strategy, coordinator):
        trainer = make(strategy)
        history = await trainer.fit(
            batches, epochs=4, steps_per_epoch=20, steps_per_execution=3, verbose="lines",
            validation_data=(X, Y), validation_freq=2,
        )  # fmt: skip
        assert history.epoch == [0, 1, 2, 3]
        assert history.history["loss"][-1] < 1e-3 < history.history["loss"][0]
        assert history.history["mae"][-1] < 0.05
        assert len(history.history["val_loss"]) == 2
        w = await psync.pull(trainer.variables)
        np.testing.assert_allclose(w["w"], TRUE, atol=0.05)
        # Every step is counted once.
        statistics = await coordinator.ps_statistics()
        assert sum(ps["pushes"] for ps in statistics) == 4 * 20
        assert await examples(trainer) == 20 * 8  # of the last epoch
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("epoch 2/4: 20 steps in ")
    assert "val_mae" in lines[1]


class TestEvaluation:
    @pytest.mark.parametrize(
        ("data", "options", "made", "logs"),
        [
            ((X, Y), {"batch_size": 7, "num_shards": 4}, {}, OF_ZEROS),
            ([[(X, Y)]], {}, {}, OF_ZEROS),
            (lambda number, count: [(X[number::count], Y[number::count])], {"num_shards": 3}, {},
             OF_ZEROS),
            ((X, Y, ONE_HOT), {}, {}, {"mae": abs(float(Y[5, 0]))}),
            ((X, Y), {}, {"loss_and_predictions": lambda values, batch: (5.0, 0 * batch[1])},
             OF_ZEROS | {"loss": 5.0}),
        ],
        ids=["arrays", "shards", "made by workers", "weighted", "without gradients"],
    )  # fmt: skip
    async def test_each_example_counts_once(
        self, data: Any, options: dict[str, Any], made: dict[str, Any], logs: dict[str, float]
    ) -> None:
        async with training(num_workers=3) as (strategy, _):
            trainer = make(strategy, **made)
            found = await trainer.evaluate(data, **options)
            assert set(found) == {"loss", "mae"}
            assert found | logs == pytest.approx(found, rel=1e-5)
            assert (await trainer.metrics["mae"].result()) == 0.0  # training counts on its own


class TestEnds:
    async def test_data_that_end_end_training_with_the_epoch(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def three(context: psync.InputContext) -> list[Any]:
            return [(X[:8], Y[:8])] * 3

        async with training() as (strategy, _):
            trainer = make(strategy)
            history = await trainer.fit(
                three, epochs=5, steps_per_epoch=10, steps_per_execution=2, verbose=False
            )
            assert history.epoch == [0]
            assert await examples(trainer) == 3 * 8
        assert "training ends with epoch 1 of 5: the workers' data started and ended" in caplog.text

    @pytest.mark.parametrize("steps", [6, 9, 12])  # of ten batches
    async def test_an_epoch_goes_on_with_the_data_where_the_one_before_has_stopped(
        self, steps: int
    ) -> None:
        def ten(context: psync.InputContext) -> list[Any]:
            return [(np.full((1, 2), number), np.zeros((1, 1))) for number in range(10)]

        def noting(values: Any, batch: Any) -> Any:
            import local_training

            local_training.shared.setdefault("seen", []).append(int(batch[0][0, 0]))
            return 0.0, {"w": np.zeros((2, 1), np.float32)}, batch[1]

        shared.clear()
        async with training(num_workers=1) as (strategy, _):
            trainer = make(strategy, compute=noting)
            history = await trainer.fit(ten, epochs=4, steps_per_epoch=steps, verbose=False)
        trained = 10 if steps > 10 else 4 * steps  # data that are too few for an epoch end it
        assert shared["seen"] == [*range(10), *range(10), *range(10), *range(10)][:trained]
        assert len(history.epoch) == (1 if steps > 10 else 4)

    @pytest.mark.promise("data.all-batches")
    @pytest.mark.virtual_time
    @pytest.mark.parametrize("per_execution", [1, 4])
    @pytest.mark.parametrize("synchronous", [False, True])
    async def test_every_batch_of_uneven_epochs_is_trained(
        self, per_execution: int, synchronous: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One worker has 5 batches, another one 22: each epoch trains all of them once."""
        sizes = (5, 22)
        columns = [[n + 5 * worker for n in range(size)] for worker, size in enumerate(sizes)]

        def uneven(context: psync.InputContext) -> Any:
            for column in columns[context.input_pipeline_id]:
                one = np.zeros((1, 27), np.float32)
                one[0, column] = 1
                yield one, np.zeros((1, 1))

        async def counting(values: Any, batch: Any) -> Any:
            await asyncio.sleep(0.02)
            return 1.0, -batch[0][0], batch[1]

        told: list[int] = []

        class Tells(psync.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any) -> None:
                told.append(batch)

        async with coordinating(num_workers=2) as (_, coordinator):
            strategy = coordinator.strategy
            with strategy.scope():
                trained = psync.Variable(np.zeros(27, np.float32), name="trained")
                mae = psync.metrics.MeanAbsoluteError("mae")
            optimizer: Any = psync.optimizers.SGD(1.0)
            if synchronous:
                optimizer = psync.SyncReplicasOptimizer(optimizer, 2, reduction="sum")
            trainer = psync.Trainer(strategy, trained, counting, optimizer, [mae])
            history = await trainer.fit(
                uneven, epochs=3, steps_per_epoch=27, steps_per_execution=per_execution,
                callbacks=[Tells()], verbose=False,
            )  # fmt: skip
            assert history.epoch == [0, 1, 2]
            assert history.repeated == [0, 0, 0]
            assert await examples(trainer) == 27
            assert (await trained.read()).tolist() == [3] * 27
        last = [batch for at, batch in enumerate(told, 1) if told[at : at + 1] < [batch]]
        assert last == [26] * 3
        assert "training ends" not in caplog.text

    @pytest.mark.virtual_time
    async def test_data_that_end_with_the_first_worker_end_training_there(self) -> None:
        async with coordinating(num_workers=2) as (_, coordinator):
            trainer = make(coordinator.strategy)
            few = coordinator.create_per_worker_dataset(
                lambda context: [(X[:8], Y[:8])] * (3 + 97 * context.input_pipeline_id),
                end="first",
            )
            history = await trainer.fit(
                few, epochs=2, steps_per_epoch=100, steps_per_execution=2, verbose=False
            )
            assert history.epoch == [0]
            assert await examples(trainer) < 100 * 8

    @pytest.mark.virtual_time
    async def test_steps_may_run_again_where_there_are_less_data(self) -> None:
        def data(context: psync.InputContext) -> list[Any]:
            mine = np.full((4, 2), context.input_pipeline_id, np.float32)
            return [(mine, np.ones((4, 1), np.float32))] * (3 - 2 * context.input_pipeline_id)

        async def slow(values: Any, batch: Any) -> Any:
            if batch[0][0, 0] == 0 and np.any(np.isclose(values["w"], -0.2)):
                await note("two were pushed")
                await event_of("never").wait()
            return 1.0, {"w": np.ones((2, 1), np.float32)}, batch[1]

        async with coordinating(num_workers=2) as (cluster, coordinator):
            trainer = make(coordinator.strategy, compute=slow)
            uneven = coordinator.create_per_worker_dataset(data, end="first")
            fit = asyncio.create_task(
                trainer.fit(uneven, steps_per_epoch=3, steps_per_execution=3, verbose=False)
            )
            await event_of("two were pushed").wait()
            await cluster.stop("worker-0")
            history = await fit
            assert history.history["loss"] == [1.0]
            w = await psync.pull(trainer.variables)
            np.testing.assert_allclose(w["w"], [[-0.2], [-0.2]], rtol=1e-6)
            assert await examples(trainer) == 4

    async def test_a_callback_may_end_it(self) -> None:
        class Stop(psync.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any) -> None:
                self.trainer.stop_training = epoch == 1

        async with training() as (strategy, _):
            history = await make(strategy).fit(
                batches, epochs=9, steps_per_epoch=2, callbacks=[Stop()], verbose=False
            )
            assert history.epoch == [0, 1]

    async def test_a_step_may_end_it(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")

        def compute(values: Any, batch: Any) -> Any:
            if len(batch[0]) == 7:
                psync.request_stop("seven rows")
            return value_and_grad(values, batch)

        def data(context: psync.InputContext) -> Iterator[Any]:
            for count in (8, 8, 8, 7, *(8,) * 100):
                yield X[:count], Y[:count]

        async with training(num_workers=1) as (strategy, _):
            trainer = make(strategy, compute=compute)
            history = await trainer.fit(data, epochs=3, steps_per_epoch=50, verbose=False)
            assert (history.epoch, history.stop_reason) == ([0], "seven rows")
            assert 4 * 8 - 1 <= await examples(trainer) < 50 * 8
            assert "fit ends: seven rows" in caplog.text
            # The next one begins with nothing of it.
            history = await trainer.fit(batches, epochs=1, steps_per_epoch=3, verbose=False)
            assert (history.epoch, history.stop_reason) == ([0], None)

    async def test_a_loss_that_is_no_number_ends_it(self) -> None:
        def compute(values: Any, batch: Any) -> Any:
            loss, *others = value_and_grad(values, batch)
            return np.float32("nan") if len(batch[0]) == 7 else loss, *others

        def data(context: psync.InputContext) -> Iterator[Any]:
            for count in (8, 8, 8, 7, *(8,) * 200):
                yield X[:count], Y[:count]

        async with training(num_workers=1) as (strategy, _):
            trainer = make(strategy, compute=compute)
            history = await trainer.fit(
                data, epochs=3, steps_per_epoch=100, verbose=False,
                callbacks=[psync.callbacks.TerminateOnNaN()],
            )  # fmt: skip
        assert (history.epoch, history.stop_reason) == ([0], "loss is nan in batch 3")

    async def test_an_error_of_a_callback_at_the_end_keeps_neither_others_from_ending_nor_the_cause(
        self, tmp_path: Path
    ) -> None:
        class Broken(psync.callbacks.Callback):
            def on_train_end(self, logs: Any) -> None:
                raise RuntimeError("at the end")

        def broken(values: Any, batch: Any) -> Any:
            raise ZeroDivisionError("in the step")

        log = psync.callbacks.CSVLogger(tmp_path / "log.csv")
        async with training() as (strategy, _):
            trainer = make(strategy)
            with pytest.raises(RuntimeError, match="at the end"):
                await trainer.fit(
                    batches, steps_per_epoch=2, callbacks=[Broken(), log], verbose=False
                )
        async with training() as (strategy, _):
            trainer = make(strategy, compute=broken)
            with pytest.raises(ZeroDivisionError, match="in the step") as caught:
                await trainer.fit(
                    batches, steps_per_epoch=2, callbacks=[Broken(), log], verbose=False
                )
        assert "Broken.on_train_end: RuntimeError: at the end" in caught.value.__notes__


class Reading(psync.callbacks.Callback):
    """Reads the trained values while they are there."""

    async def on_train_end(self, logs: Any) -> None:
        self.values = await psync.pull(self.trainer.variables)


class TestWithoutACoordinator:
    async def test_fit_opens_one_and_closes_it(self) -> None:
        async with psync.LocalCluster(2, 1, processes=False) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            trainer, reading = make(strategy), Reading()
            history = await trainer.fit(
                batches, epochs=2, steps_per_epoch=40, callbacks=[reading],
                validation_data=(X, Y), verbose=False,
            )  # fmt: skip
            assert history.epoch == [0, 1]
            assert history.history["val_loss"][-1] < 0.1
            np.testing.assert_allclose(reading.values["w"], TRUE, atol=0.2)
            for late in (
                trainer.fit(batches, steps_per_epoch=1),
                trainer.evaluate((X, Y)),
                psync.pull(trainer.variables),
            ):
                with pytest.raises(ClosedError):
                    await late

    async def test_it_is_closed_when_a_step_or_a_dataset_is_wrong(self) -> None:
        def broken(values: Any, batch: Any) -> Any:
            raise ZeroDivisionError("in the step")

        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            for compute, dataset, error in (
                (broken, batches, ZeroDivisionError),
                (value_and_grad, 5, ConfigurationError),
            ):
                strategy = psync.ParameterServerStrategy(cluster.resolver)
                with pytest.raises(error):
                    await make(strategy, compute=compute).fit(
                        dataset, steps_per_epoch=2, verbose=False
                    )
                assert "not running" in repr(psync.ClusterCoordinator(strategy))

    async def test_it_is_closed_when_it_is_cancelled(self) -> None:
        begun = asyncio.Event()

        class Noting(psync.callbacks.Callback):
            def on_epoch_begin(self, epoch: int) -> None:
                begun.set()

        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            strategy, reading = psync.ParameterServerStrategy(cluster.resolver), Reading()
            fitting = asyncio.create_task(
                make(strategy).fit(
                    batches,
                    steps_per_epoch=10**4,
                    steps_per_execution=100,
                    verbose=False,
                    callbacks=[Noting(), reading],
                )
            )
            await begun.wait()
            fitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fitting
            assert reading.values["w"].shape == (2, 1)  # it was told while they were there
            assert "not running" in repr(psync.ClusterCoordinator(strategy))

    async def test_steps_of_one_that_is_cancelled_take_no_part_in_the_next_one(self) -> None:
        """In a coordinator that ran before, as after an interrupt in a notebook."""
        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy) as coordinator:
                trainer = make(strategy)
                options: dict[str, Any] = {"steps_per_execution": 1, "verbose": False}
                begun = asyncio.Event()

                class Noting(psync.callbacks.Callback):
                    def on_train_batch_end(self, batch: int, logs: Any) -> None:
                        begun.set()

                fitting = asyncio.create_task(
                    trainer.fit(batches, steps_per_epoch=10**4, callbacks=[Noting()], **options)
                )
                await begun.wait()
                fitting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fitting
                await coordinator.join()
                before = await trainer.optimizer.iterations.read()
                await trainer.fit(batches, steps_per_epoch=5, **options)
                assert await trainer.optimizer.iterations.read() - before == 5

    async def test_it_starts_the_coordinator_that_the_program_has_made(self) -> None:
        class Noting(psync.callbacks.Callback):
            def on_train_begin(self) -> None:
                self.seen = repr(coordinator)

        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            strategy, noting = psync.ParameterServerStrategy(cluster.resolver), Noting()
            coordinator = psync.ClusterCoordinator(strategy, closure_timeout=50)
            await make(strategy).fit(batches, steps_per_epoch=1, callbacks=[noting], verbose=False)
            assert noting.seen.endswith(", running>")
            assert repr(coordinator).endswith(", not running>")


class TestMistakes:
    def test_numbers_out_of_range_are_refused(self) -> None:
        trainer = make(strategy_of())
        with pytest.raises(ConfigurationError, match="steps_per_epoch above 0, got 0"):
            at_once(trainer.fit(batches, steps_per_epoch=0))
        with pytest.raises(ConfigurationError, match="batch_size above 0, got 0"):
            at_once(trainer.evaluate((X, Y), batch_size=0))
        with pytest.raises(ConfigurationError, match="initial_epoch from 0, or None, got -1"):
            at_once(trainer.fit(batches, steps_per_epoch=1, initial_epoch=-1))

    @for_each(
        "options, text",
        [
            ({"validation_data": (X, Y[:3])}, "expected the same number of rows in all"),
            ({"validation_data": (X, Y), "validation_batch_size": 0}, "batch_size above 0"),
            ({"callbacks": [print]}, "expected psync.callbacks, got builtin_function_or_method"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_trained(
        self, options: dict[str, Any], text: str
    ) -> None:
        trainer = make(strategy_of())
        with pytest.raises(ConfigurationError, match=text):
            at_once(trainer.fit(batches, steps_per_epoch=1, verbose=False, **options))

    def test_arguments_that_are_none_are_refused(self) -> None:
        strategy = strategy_of()
        with strategy.scope():
            w = psync.Variable(np.zeros(2), name="w")
            twice = [psync.metrics.Mean("m"), psync.metrics.Sum("m")]
        sgd = psync.optimizers.SGD()
        with pytest.raises(ConfigurationError, match="expected an optimizer, got float"):
            psync.Trainer(strategy, w, value_and_grad, 0.1)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="different names"):
            psync.Trainer(strategy, w, value_and_grad, sgd, twice)
        with pytest.raises(ConfigurationError, match="metrics, got str"):
            psync.Trainer(strategy, w, value_and_grad, sgd, ["mae"])  # type: ignore[list-item]
        with pytest.raises(ConfigurationError, match="expected variables to train"):
            psync.Trainer(strategy, [], value_and_grad, sgd)

    @pytest.mark.parametrize(
        ("made", "text", "evaluates"),
        [
            (3.0, r"expected a tuple or list \(loss, gradients\) or .*, got float", True),
            ((1.0, 2.0, 3.0, 4.0), "got 4 values", True),
            (
                (np.ones(8), {"w": np.zeros((2, 1), "f4")}, Y[:8]),
                r"a number, got shape \(8,\)",
                True,
            ),
            ((0.0, {"w": np.zeros((2, 1), "f4")}), "mae need predictions", False),
            ((0.0, [1], Y[:8]), "gradients: expected a dict with the same keys", False),
        ],
    )
    async def test_what_a_step_computes_is_checked(
        self, made: Any, text: str, evaluates: bool
    ) -> None:
        async with training() as (strategy, _):
            trainer = make(strategy, compute=lambda values, batch: made)
            with pytest.raises(ValueMismatchError, match=text):
                await trainer.fit(batches, steps_per_epoch=1, verbose=False)
            if evaluates:
                with pytest.raises(ValueMismatchError, match=text):
                    await trainer.evaluate((X[:8], Y[:8]), num_shards=1)

    async def test_data_without_a_batch_are_no_training(self) -> None:
        async with training() as (strategy, _):
            trainer = make(strategy)
            with pytest.raises(ConfigurationError, match="expected at least one batch, got none"):
                await trainer.fit(lambda: [], steps_per_epoch=3, verbose=False)
            with pytest.raises(ConfigurationError, match="at least one batch"):
                await trainer.evaluate(lambda number, count: [])
            with pytest.raises(ConfigurationError, match="or False, got 'quiet'"):
                await trainer.fit(batches, steps_per_epoch=3, verbose="quiet")


class TestResuming:
    async def test_it_goes_on_where_it_was(self, tmp_path: Path) -> None:
        async with training() as (strategy, _):
            trainer = make(strategy, psync.optimizers.Adam(0.1), checkpoint_directory=tmp_path)
            await trainer.fit(batches, epochs=2, steps_per_epoch=5, verbose=False)
            before = await psync.pull(trainer.variables)
            slots = [await slot.read() for slot in trainer.optimizer.variables()]
        async with training(num_ps=3) as (strategy, _):
            trainer = make(strategy, psync.optimizers.Adam(0.1), checkpoint_directory=tmp_path)
            seen = []

            class Look(psync.callbacks.Callback):
                async def on_train_begin(self) -> None:
                    seen.append(await psync.pull(self.trainer.variables))
                    seen.append([await s.read() for s in self.trainer.optimizer.variables()])

            history = await trainer.fit(
                batches, epochs=4, steps_per_epoch=5, callbacks=[Look()], verbose=False
            )
            np.testing.assert_array_equal(seen[0]["w"], before["w"])
            for restored, saved in zip(seen[1], slots, strict=True):
                np.testing.assert_array_equal(restored, saved)
            assert history.epoch == [0, 1, 2, 3]
            assert len(history.history["loss"]) == 4
            assert await trainer.optimizer.iterations.read() == 20

    async def test_a_learning_rate_that_was_lowered_stays_low(self, tmp_path: Path) -> None:
        seen = []

        def halved(epoch: int, rate: float) -> float:
            seen.append(rate)
            return rate / 2

        for epochs in (2, 4):
            async with training() as (strategy, _):
                trainer = make(strategy, psync.optimizers.SGD(0.5), checkpoint_directory=tmp_path)
                rates = psync.callbacks.LearningRateScheduler(halved)
                await trainer.fit(
                    batches, epochs=epochs, steps_per_epoch=2, callbacks=[rates], verbose=False
                )
        assert seen == [0.5, 0.25, 0.125, 0.0625]

    @pytest.mark.parametrize("saves", ["the trainer", "a callback"])
    async def test_after_a_rollback_an_epoch_has_the_values_of_what_ran_since(
        self, saves: str, tmp_path: Path
    ) -> None:
        async def value_and_grad(values: Any, batch: Any) -> Any:
            import memory_cluster

            loss = 1.0
            if memory_cluster.event_of("second epoch").is_set():
                await memory_cluster.note("under way")
                await memory_cluster.event_of("go on").wait()
                loss = 3.0
            return loss, {"w": np.zeros_like(values["w"])}, np.zeros((8, 1), np.float32)

        class Second(psync.callbacks.Callback):
            def on_epoch_begin(self, epoch: int) -> None:
                if epoch == 1:
                    event_of("second epoch").set()

        async with coordinating(2, 1) as (cluster, coordinator):
            own = tmp_path if saves == "the trainer" else None
            trainer = make(coordinator.strategy, None, value_and_grad, checkpoint_directory=own)
            callbacks: list[Any] = [Second()]
            if own is None:
                callbacks.append(psync.callbacks.ModelCheckpoint(tmp_path))
            training = asyncio.create_task(
                trainer.fit(
                    batches, epochs=2, steps_per_epoch=5, callbacks=callbacks, verbose=False
                )
            )
            await event_of("under way").wait()
            await cluster.stop("ps-1")
            await cluster.start("ps-1")
            await anext(coordinator.events())
            event_of("go on").set()
            history = await training
            assert history.history["loss"] == [1.0, 3.0]
            assert await examples(trainer) == 5 * 8

    async def test_epochs_that_are_done_again_are_in_the_history_once(self, tmp_path: Path) -> None:
        for initial_epoch in (None, 0):
            async with training() as (strategy, _):
                trainer = make(strategy, checkpoint_directory=tmp_path)
                history = await trainer.fit(
                    batches, epochs=2, initial_epoch=initial_epoch, steps_per_epoch=2, verbose=False
                )
            assert history.epoch == [0, 1]
            assert len(history.history["loss"]) == 2

    async def test_what_is_done_is_not_done_again(self, tmp_path: Path) -> None:
        for _ in range(2):
            async with training() as (strategy, coordinator):
                trainer = make(strategy, checkpoint_directory=tmp_path)
                history = await trainer.fit(batches, epochs=1, steps_per_epoch=2, verbose=False)
                assert history.epoch == [0]
                statistics = await coordinator.ps_statistics()
        assert sum(ps["pushes"] for ps in statistics) == 0


class TestCallbacks:
    async def fit(self, *callbacks: Any, epochs: int = 4, **options: Any) -> psync.Trainer:
        async with training() as (strategy, _):
            trainer = make(strategy)
            await trainer.fit(
                batches, epochs=epochs, steps_per_epoch=3, callbacks=callbacks, verbose=False,
                **options,
            )  # fmt: skip
            trainer.values = await psync.pull(trainer.variables)  # type: ignore[attr-defined]
            return trainer

    async def test_a_line_of_values_for_each_epoch(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        await self.fit(psync.callbacks.CSVLogger(path), epochs=2)
        await self.fit(psync.callbacks.CSVLogger(path, append=True), epochs=1)
        rows = list(csv.reader(path.read_text().splitlines()))
        assert rows[0] == ["epoch", "loss", "mae"]
        assert [row[0] for row in rows[1:]] == ["0", "1", "0"]
        assert all(float(value) >= 0 for row in rows[1:] for value in row)

    async def test_learning_rates_hold_on_the_ps(self) -> None:
        trainer = await self.fit(psync.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0))
        np.testing.assert_array_equal(trainer.values["w"], np.zeros((2, 1)))  # type: ignore[attr-defined]
        assert trainer.optimizer.learning_rate == 0.0

    async def test_it_stops_when_nothing_gets_better_and_goes_back_to_the_best(self) -> None:
        rates = psync.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < 2 else 2.0)
        stop = psync.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
        trainer = await self.fit(rates, stop, epochs=20, validation_data=(X, Y))
        assert stop.best_epoch == 1
        assert stop.stopped_epoch == 2
        w = trainer.values["w"]  # type: ignore[attr-defined]
        losses = trainer.history.history["val_loss"]
        assert float(np.mean((X @ w - Y) ** 2)) == pytest.approx(min(losses), rel=1e-4)

    async def test_the_best_values_are_in_the_last_checkpoint(self, tmp_path: Path) -> None:
        rates = psync.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < 2 else 2.0)
        stop = psync.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
        async with training() as (strategy, _):
            trainer = make(strategy, checkpoint_directory=tmp_path)
            await trainer.fit(
                batches, epochs=20, steps_per_epoch=3, callbacks=[rates, stop], verbose=False
            )
            assert stop.stopped_epoch == stop.best_epoch + 2
            values = await psync.pull(trainer.variables)
            assert trainer.manager is not None
            newest = trainer.manager.latest_checkpoint
            assert newest is not None
            saved = await trainer.checkpoint.read(newest)
            np.testing.assert_array_equal(saved["model"]["w"], values["w"])
            assert is_last(newest)

    async def test_what_a_callback_has_half_changed_is_not_saved(self, tmp_path: Path) -> None:
        class Broken(psync.callbacks.Callback):
            async def on_train_end(self, logs: Any) -> None:
                self.trainer.unsaved = True
                await self.trainer.flat_variables[0].assign(np.zeros((2, 1)))
                raise RuntimeError("at the end")

        async with training() as (strategy, _):
            trainer = make(strategy, checkpoint_directory=tmp_path)
            with pytest.raises(RuntimeError, match="at the end"):
                await trainer.fit(batches, steps_per_epoch=3, callbacks=[Broken()], verbose=False)
            assert trainer.manager is not None
            (only,) = trainer.manager.checkpoints
            assert (await trainer.checkpoint.read(only))["model"]["w"].any()

    async def test_what_is_saved_elsewhere_is_still_to_be_saved(self, tmp_path: Path) -> None:
        class Elsewhere(psync.callbacks.Callback):
            async def on_train_end(self, logs: Any) -> None:
                self.trainer.unsaved = True
                await self.trainer.flat_variables[0].assign(np.zeros((2, 1)))
                manager = psync.CheckpointManager(self.trainer.checkpoint, tmp_path / "other")
                await self.trainer.save(manager)

        async with training() as (strategy, _):
            trainer = make(strategy, checkpoint_directory=tmp_path / "own")
            await trainer.fit(batches, steps_per_epoch=3, callbacks=[Elsewhere()], verbose=False)
            assert trainer.manager is not None
            newest = trainer.manager.latest_checkpoint
            assert newest is not None
            assert not (await trainer.checkpoint.read(newest))["model"]["w"].any()

    async def test_a_negative_learning_rate_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="learning rate: expected a number from 0"):
            await self.fit(psync.callbacks.LearningRateScheduler(lambda epoch, rate: -rate))

    async def test_a_value_that_there_is_not_is_named(self) -> None:
        with pytest.raises(
            ConfigurationError, match="no 'val_loss' to monitor, expected one of loss"
        ):
            await self.fit(psync.callbacks.EarlyStopping())

    async def test_epochs_without_validation_are_passed_over(self, tmp_path: Path) -> None:
        rates = psync.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < 4 else 2.0)
        stop = psync.callbacks.EarlyStopping()
        best = psync.callbacks.ModelCheckpoint(tmp_path / "best", save_best_only=True)
        log = psync.callbacks.CSVLogger(tmp_path / "log.csv")
        await self.fit(rates, stop, best, log, epochs=20, validation_data=(X, Y), validation_freq=2)
        assert (stop.best_epoch, stop.stopped_epoch) == (3, 5)
        assert best.manager is not None
        assert len(best.manager.checkpoints) == 2
        rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
        assert [row["val_loss"] != "" for row in rows] == [False, True] * 3

    async def test_the_best_is_saved(self, tmp_path: Path) -> None:
        best = psync.callbacks.ModelCheckpoint(tmp_path / "best", "loss", save_best_only=True)
        all_of_them = psync.callbacks.ModelCheckpoint(tmp_path / "all", every_n_epochs=2)
        rates = psync.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < 2 else 6.0)
        await self.fit(rates, best, all_of_them, epochs=5)
        assert best.manager is not None
        assert len(best.manager.checkpoints) < 5
        assert all_of_them.manager is not None
        assert len(all_of_them.manager.checkpoints) == 2


ROWS = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
LABELS = ROWS.sum(axis=1)


@for_each(
    "data, text",
    [
        (5, "got int"),
        ("text", "got str"),
        ([], "got list"),
        ((ROWS, LABELS[:5]), "validation data: arrays: expected the same number of rows"),
        ((np.float32(1), np.float32(1)), "validation data: arrays: expected arrays of at least"),
        (({"a": ROWS, "b": ROWS[:5]}, LABELS), "expected the same number of rows in all"),
        (
            [ROWS, LABELS],
            r"got a list of arrays, which is not a list of shards\nhint: .*\(x, y\)",
        ),
    ],
)
def test_what_is_no_validation_data_is_refused(data: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        shards_of(data, 3, 8)


def test_coroutines_are_refused() -> None:
    async def shard(number: int, count: int) -> None: ...

    with pytest.raises(ConfigurationError, match="expected a plain function"):
        shards_of(shard, 3, 8)


def test_few_examples_make_few_shards() -> None:
    shards = shards_of((ROWS[:3], LABELS[:3]), 10, 2)
    assert [[len(x) for (x, _) in shard] for shard in shards] == [[1], [1], [1]]
    (shard,) = shards_of((ROWS[:5],), 1, 2)
    assert [len(x) for (x,) in shard] == [2, 2, 1]


def test_dicts_of_arrays_are_cut_together() -> None:
    shards = shards_of(({"a": ROWS[:5], "b": LABELS[:5]}, LABELS[:5]), 2, 2)
    assert [[len(y) for _, y in shard] for shard in shards] == [[2], [2, 1]]
    for shard in shards:
        for x, y in shard:
            np.testing.assert_array_equal(x["b"], y)
            np.testing.assert_allclose(x["a"].sum(axis=1), y)


@for_each(
    "batch, size",
    [
        ((ROWS, LABELS), 60),
        ({"x": ROWS[:3]}, 3),
        ([(ROWS[:4],), LABELS], 4),
        (5.0, 1),
        ((), 0),
        ("text", 1),
    ],
)
def test_a_batch_has_as_many_examples_as_its_first_array_is_long(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


def test_losses_of_larger_batches_weigh_more() -> None:
    with strategy_of().scope():
        loss = psync.metrics.Mean("loss")
    counts = Counts({"loss": loss})
    counts.note((ROWS[:10], LABELS[:10]), 1.0, ())
    counts.note((ROWS[:30], LABELS[:30]), np.float32(2.0), ())
    assert loss.value_of(counts.sums[0]) == 1.75


def test_metrics_need_labels() -> None:
    with strategy_of().scope():
        loss, mae = psync.metrics.Mean("loss"), psync.metrics.MeanAbsoluteError("mae")
    with pytest.raises(ValueMismatchError, match=r"expected \(x, y\) or \(x, y, sample_weight\)"):
        Counts({"loss": loss, "mae": mae}).note(ROWS, 1.0, (LABELS,))
