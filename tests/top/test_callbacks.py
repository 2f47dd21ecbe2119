"""Callbacks by themselves: their arguments, and what counts as better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from event_files import scalars
from local_training import at_once
from psync import callbacks
from psync.errors import ConfigurationError


class FakeTrainer:
    """What a callback that monitors needs."""

    stop_training = False
    validation_skipped = False
    flat_variables = ()


def test_patience_counts_epochs_without() -> None:
    for patience, stopped in [(0, 1), (1, 1), (2, 5), (3, 6)]:
        stop = callbacks.EarlyStopping("loss", patience=patience)
        stop.trainer = FakeTrainer()  # type: ignore[assignment]
        stop.on_train_begin()
        for epoch, loss in enumerate([1.0, 2.0, 0.5, 0.4, 1.0, 1.0, 1.0]):
            at_once(stop.on_epoch_end(epoch, {"loss": loss}))
            assert stop.trainer.stop_training == (epoch >= stopped)
            if stop.trainer.stop_training:
                break
        assert (stop.best_epoch, stop.stopped_epoch) == (0 if stopped == 1 else 3, stopped)


def test_arguments_out_of_range_are_refused() -> None:
    for make, text in [
        (lambda: callbacks.EarlyStopping(patience=-1), "expected patience from 0, got -1"),
        (lambda: callbacks.EarlyStopping(patience="3"), "expected patience from 0, got '3'"),  # type: ignore[arg-type]
        (lambda: callbacks.EarlyStopping(min_delta="1"), "min_delta: expected a number"),  # type: ignore[arg-type]
        (lambda: callbacks.EarlyStopping(baseline=[1]), "baseline: expected a number"),  # type: ignore[arg-type]
        (lambda: callbacks.EarlyStopping(3), "name of a value as monitor, got int"),  # type: ignore[arg-type]
        (lambda: callbacks.ModelCheckpoint("d", max_to_keep=0), "max_to_keep above 0"),
        (lambda: callbacks.LearningRateScheduler(0.1), r"a function \(epoch, rate\), got 0.1"),  # type: ignore[arg-type]
        (lambda: callbacks.CSVLogger("log", "::"), "one character as separator, got '::'"),
        (lambda: callbacks.EarlyStopping(mode="up"), "expected mode auto, min or max, got 'up'"),
        (lambda: callbacks.ModelCheckpoint("d", every_n_epochs=0), "every_n_epochs above 0"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            make()


def written(folder: Path) -> list[tuple[str, float, int]]:
    """The scalars of the only event file in a folder."""
    (path,) = folder.glob("events.out.tfevents.*")
    return scalars(path.read_bytes())


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    board = callbacks.TensorBoard(tmp_path / "logs")
    assert not board.wants_batches
    board.on_train_begin()
    board.on_epoch_end(0, {"loss": 1.0, "val_loss": 2.0})
    assert written(tmp_path / "logs") == [  # while training goes on
        ("epoch_loss/train", 1.0, 0), ("epoch_loss/validation", 2.0, 0),
    ]  # fmt: skip
    board.on_train_end({})
    board.on_train_end({})  # also if it never began


@pytest.mark.parametrize(
    ("update_freq", "steps"),
    [("batch", [1, 3, 5, 7, 11]), (1, [1, 3, 5, 7, 11]), (2, [3, 7]), (3, [5])],
)
def test_tensorboard_counts_batches_through_all_epochs(
    update_freq: int | str, steps: list[int], tmp_path: Path
) -> None:
    board = callbacks.TensorBoard(tmp_path, update_freq)
    assert board.wants_batches
    board.on_train_begin()
    for epoch, batches in enumerate(([1, 3], [1, 3], [3])):  # two in each closure
        board.on_epoch_begin(epoch)
        for batch in batches:
            board.on_train_batch_end(batch, {"loss": 0.5})
    board.on_train_end({})
    assert written(tmp_path) == [("batch_loss", 0.5, step) for step in steps]


def test_another_frequency_for_tensorboard_is_refused() -> None:
    for update_freq in [0, -1, "never", None, [1], True]:
        with pytest.raises(ConfigurationError, match="expected update_freq"):
            callbacks.TensorBoard("logs", update_freq)


def test_each_fit_of_a_csv_logger_has_a_header(tmp_path: Path) -> None:
    logger = callbacks.CSVLogger(tmp_path / "log.csv")
    logger.trainer = FakeTrainer()  # type: ignore[assignment]
    for name in ("loss", "mae"):
        logger.on_train_begin()
        logger.on_epoch_end(0, {name: 0.5})
        logger.on_train_end({})
        assert (tmp_path / "log.csv").read_text().splitlines() == [f"epoch,{name}", "0,0.5"]


def test_a_callback_wants_batches_if_it_has_the_method() -> None:
    class OfBatches(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None: ...

    assert OfBatches().wants_batches
    assert not callbacks.EarlyStopping().wants_batches
