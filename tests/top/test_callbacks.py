"""Callbacks by themselves: their arguments, and what counts as better."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from local_training import at_once
from psync import callbacks
from psync.errors import ConfigurationError


class FakeTrainer:
    """What a callback that monitors needs."""

    stop_training = False
    validation_skipped = False
    flat_variables = ()


@pytest.mark.parametrize(
    ("monitor", "mode", "values", "better"),
    [
        ("val_loss", "auto", [1.0, 0.5, 0.6, 0.4], [True, True, False, True]),
        ("val_accuracy", "auto", [0.5, 0.6, 0.6, 0.7], [True, True, False, True]),
        ("auc", "auto", [0.5, 0.4], [True, False]),
        ("score", "max", [1.0, 2.0], [True, True]),
        ("loss", "auto", [float("nan"), 1.0], [False, True]),
    ],
)
def test_what_is_better_follows_from_the_name(
    monitor: str, mode: str, values: list[float], better: list[bool]
) -> None:
    watched = callbacks._Monitor(monitor, mode)
    assert [watched.improved({monitor: value}) for value in values] == better


def test_a_baseline_and_a_delta_have_to_be_passed() -> None:
    watched = callbacks._Monitor("loss", "min", min_delta=0.1, baseline=1.0)
    assert [watched.improved({"loss": value}) for value in (1.0, 0.95, 0.8, 0.75)] == [
        False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("patience", "stopped"), [(0, 1), (1, 1), (2, 5), (3, 6)])
def test_patience_counts_epochs_without(patience: int, stopped: int) -> None:
    stop = callbacks.EarlyStopping("loss", patience=patience)
    stop.trainer = FakeTrainer()  # type: ignore[assignment]
    stop.on_train_begin()
    for epoch, loss in enumerate([1.0, 2.0, 0.5, 0.4, 1.0, 1.0, 1.0]):
        at_once(stop.on_epoch_end(epoch, {"loss": loss}))
        assert stop.trainer.stop_training == (epoch >= stopped)
        if stop.trainer.stop_training:
            break
    assert (stop.best_epoch, stop.stopped_epoch) == (0 if stopped == 1 else 3, stopped)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: callbacks.EarlyStopping(patience=-1), "expected patience from 0, got -1"),
        (lambda: callbacks.EarlyStopping(mode="up"), "expected mode auto, min or max, got 'up'"),
        (lambda: callbacks.ModelCheckpoint("d", every_n_epochs=0), "every_n_epochs above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_without_a_writer_for_tensorboard_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("tensorboardX", "torch.utils.tensorboard", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        callbacks.TensorBoard()


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    board = callbacks.TensorBoard(tmp_path)
    board.on_train_begin()
    board.on_epoch_end(0, {"loss": 1.0, "val_loss": 2.0})
    board.on_train_end({})
    (events,) = tmp_path.glob("events*")
    assert b"epoch_loss/validation" in events.read_bytes()


def test_a_callback_that_does_nothing_may_be_told_everything() -> None:
    callback = callbacks.Callback()
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {})
    callback.on_train_end({})
