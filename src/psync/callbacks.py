"""Callbacks of ``Trainer.fit``: hooks between epochs and batches, and the built-in ones.

Callbacks run in the program, not on workers, so batches are reported when they are complete.
Each method may be a coroutine function or a plain function.

Source: ``keras.callbacks`` of Keras 3, for names, arguments and the times of calls.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from psync.api.pulls import pull
from psync.errors import ConfigurationError, check_fits
from psync.schedules import Schedule
from psync.specs import as_number, checked_integer, checked_kind
from psync.training.checkpoint import CheckpointManager

if TYPE_CHECKING:
    from psync.training.trainer import Trainer

Logs = Mapping[str, float]


class Callback:
    """Base of all callbacks; ``trainer`` is set from ``on_train_begin`` on."""

    trainer: Trainer

    @property
    def wants_batches(self) -> bool:
        """Whether batches are reported. Default: whether its class has ``on_train_batch_end``."""
        return type(self).on_train_batch_end is not Callback.on_train_batch_end

    def on_train_begin(self) -> Any:
        """Run before the first epoch, after saved state has been restored."""

    def on_epoch_begin(self, epoch: int) -> Any:
        """Run before an epoch; epochs are numbered from 0."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> Any:
        """Run after each closure of an epoch, that is, every ``steps_per_execution`` batches.

        Calls come in the order of batches. Workers send back metrics of batches only if some
        callback ``wants_batches``. A closure whose worker is lost is reported once, and a closure
        that met the end of its data is not reported. When this method raises or sets
        ``trainer.stop_training = True``, closures that have not ended are cancelled.

        Args:
            batch: Number of the last batch, from 0 in each epoch. Steps that are trained again
                after a rollback have numbers from ``steps_per_epoch`` on.
            logs: Means over these batches: "loss", and the metrics by name.
        """

    def on_epoch_end(self, epoch: int, logs: Logs) -> Any:
        """Run after an epoch and its validation.

        Args:
            epoch: Number of the epoch, from 0.
            logs: "loss" and the metrics by name; values of the validation have the prefix
                ``"val_"``.
        """

    def on_train_end(self, logs: Logs) -> Any:
        """Run after the last epoch, including when an error or a cancellation ended training.

        A callback that changes variables here sets ``trainer.unsaved = True``. ``fit`` then repeats
        its last save, unless training or a callback has failed.
        """


class _Monitor:
    """Says whether a value is better than the best one before.

    Args:
        monitor: Name of a value in the logs.
        mode: "min", "max", or "auto": "max" for accuracies and areas, else "min".
        min_delta: By how much it must be better.
        baseline: What it must be better than at first.
    """

    def __init__(
        self, monitor: str, mode: str, min_delta: float = 0.0, baseline: float | None = None
    ) -> None:
        checked_kind("callback: expected the name of a value as monitor", monitor, str)
        check_fits(mode in ("auto", "min", "max"), "callback: expected mode auto, min or max", mode)
        grows = mode == "max" or (
            mode == "auto" and any(word in monitor for word in ("acc", "auc", "fmeasure"))
        )
        self.monitor = monitor
        self._sign = -1.0 if grows else 1.0
        self._min_delta = abs(as_number("callback: min_delta", min_delta))
        self.best = self._sign * math.inf
        if baseline is not None:
            self.best = as_number("callback: baseline", baseline)

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether there is a value: no validation, no value of it."""
        return not (trainer.validation_skipped and self.monitor.startswith("val_"))

    def improved(self, logs: Logs) -> bool:
        """Look at the logs of an epoch.

        Raises:
            ConfigurationError: The value is not among them.
        """
        value = logs.get(self.monitor)
        if value is None:
            raise ConfigurationError(
                f"callback: no {self.monitor!r} to monitor, expected one of {', '.join(logs)}",
                hint="validation values start with val_ and need validation_data",
            )
        if self._sign * (self.best - value) > self._min_delta:
            self.best = value
            return True
        return False


class TerminateOnNaN(Callback):
    """Ends training immediately when the loss of a batch is not finite.

    The updates of that batch have already been applied. To refuse them, give the optimizer
    ``forbid_nonfinite=True``. ``trainer.history.stop_reason`` names the loss.

    Example:
        history = await trainer.fit(data, epochs=3, callbacks=[psync.callbacks.TerminateOnNaN()])

    Source: ``keras.callbacks.TerminateOnNaN``.
    """

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(loss):
            self.trainer.request_stop(f"loss is {loss} in batch {batch}")


class EarlyStopping(Callback):
    """Ends training when a value no longer improves.

    Args:
        monitor: Name of the value.
        min_delta: Least change that counts as an improvement.
        patience: Number of epochs without improvement after which training ends; 0 means 1.
        mode: "min", "max", or "auto": "max" for accuracies and areas.
        baseline: Value that must be improved on.
        restore_best_weights: Whether the variables return to their values after the best epoch,
            including in the last checkpoint of ``fit``. These values are kept in the program's
            memory; slots of optimizers are not restored.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        self._arguments = (monitor, mode, min_delta, baseline)
        self._patience = checked_integer("early stopping: expected patience from 0", patience, 0)
        self._restore = restore_best_weights
        self.on_train_begin()

    def on_train_begin(self) -> None:
        """Reset the state of an earlier ``fit``."""
        self._monitor = _Monitor(*self._arguments)
        self._waited = 0
        self._values: Any = None
        self.best_epoch = 0
        self.stopped_epoch: int | None = None

    async def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Check whether the value has improved."""
        if not self._monitor.is_due(self.trainer):
            return
        if self._monitor.improved(logs):
            self.best_epoch, self._waited = epoch, 0
            if self._restore:
                self._values = await pull(list(self.trainer.flat_variables), copy=True)
            return
        self._waited += 1
        if self._waited >= self._patience:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    async def on_train_end(self, logs: Logs) -> None:
        """Restore the best values, if requested."""
        if self._values is not None:
            for variable, value in zip(self.trainer.flat_variables, self._values, strict=True):
                await variable.assign(value)
            self.trainer.unsaved = True


class LearningRateScheduler(Callback):
    """Sets the learning rate before each epoch.

    For a rate that changes with each step, give the optimizer a schedule instead; the ps tasks
    evaluate it.

    Args:
        schedule: (epoch, current rate) → rate. The first current rate is the optimizer's argument,
            or the rate in the checkpoint from which ``fit`` resumes.
    """

    def __init__(self, schedule: Callable[[int, float], float]) -> None:
        expected = "learning rate scheduler: expected a function (epoch, rate)"
        hint = "for a constant rate set the optimizer's learning_rate"
        check_fits(callable(schedule), expected, schedule, hint)
        self._schedule = schedule
        self._rate: float | None = None

    async def on_epoch_begin(self, epoch: int) -> None:
        """Compute the rate and set it on the ps tasks."""
        optimizer = self.trainer.optimizer
        if self._rate is None:
            present = optimizer.learning_rate
            if isinstance(present, Schedule):
                raise ConfigurationError(
                    f"learning rate scheduler: {optimizer.get_name()} already has a schedule",
                    hint="use a number as the optimizer's learning_rate, or leave this callback "
                    "out",
                )
            self._rate = float(present)
        self._rate = float(self._schedule(epoch, self._rate))
        await optimizer.set_learning_rate(self._rate)


class CSVLogger(Callback):
    """Writes a line of values for each epoch.

    Args:
        path: Path of the file. Missing folders are created.
        separator: Character between values.
        append: Whether to append to an existing file, as after a resume.
    """

    def __init__(
        self, path: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        is_one = isinstance(separator, str) and len(separator) == 1
        check_fits(is_one, "csv logger: expected one character as separator", separator)
        self._path = Path(path)
        self._separator = separator
        self._append = append
        self._names: list[str] = []
        self._file: TextIO | None = None

    def on_train_begin(self) -> None:
        """Open the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._names = []
        if self._append and self._path.exists() and self._path.stat().st_size:
            with open(self._path, newline="", encoding="utf-8") as file:
                self._names = next(csv.reader(file, delimiter=self._separator))[1:]
        self._file = open(self._path, "a" if self._append else "w", newline="", encoding="utf-8")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write a line; the names precede the first one."""
        assert self._file is not None, "training has begun"
        writer = csv.writer(self._file, delimiter=self._separator)
        if not self._names:
            self._names = list(logs)
            if self.trainer.validation_skipped:
                self._names += [f"val_{name}" for name in logs]
            writer.writerow(["epoch", *self._names])
        writer.writerow([epoch, *(logs.get(name, "") for name in self._names)])
        self._file.flush()

    def on_train_end(self, logs: Logs) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


# Event files as TensorBoard reads them: scalars in a TFRecord file, a sequence of records: length
# (uint64), masked CRC-32C of it, bytes, masked CRC-32C of them, all little-endian. The bytes are a
# protobuf message ``Event``, of which only what a scalar needs is written here: the encoding takes
# less than a dependency would.
#
# Source: tensorflow/core/lib/io/record_writer.cc; tensorflow/core/util/event.proto, summary.proto.

_VERSION = b"brain.Event:2"
_MASK = 0xA282EAD8
_CASTAGNOLI = 0x82F63B78  # reflected

_numbers = itertools.count()  # of the files of this process


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


class EventFile:
    """A new event file for scalars.

    Args:
        directory: Directory of the file, created if missing.

    Attributes:
        flush: Makes the added values visible to readers.
        close: Writes the remaining values and closes the file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}"
        self.path = folder / f"{name}.{os.getpid()}.{next(_numbers)}"
        self._file = open(self.path, "xb")
        self.flush, self.close = self._file.flush, self._file.close
        self._write(_event(time.time()) + _bytes_field(3, _VERSION))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a value.

        Args:
            tag: Name of the value; the part before a slash groups charts.
            value: Any float, including NaN.
            step: Number of at least 0.
        """
        with np.errstate(over="ignore"):  # a value beyond the range of float32 is infinite
            number = struct.pack("<f", np.float32(value))
        point = _bytes_field(1, tag.encode()) + b"\x15" + number
        summary = _bytes_field(1, point)
        self._write(_event(time.time()) + b"\x10" + _varint(step) + _bytes_field(5, summary))

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(
            length + struct.pack("<I", masked_crc(length)) + data
            + struct.pack("<I", masked_crc(data))
        )  # fmt: skip


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of data, masked as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# Protobuf.


def _event(wall_time: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time)


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class TensorBoard(Callback):
    """Writes values for TensorBoard, which can read them during training.

    Epochs are the charts ``epoch_loss`` and so on, each with "train" and "validation". Batches, if
    written, are ``batch_loss`` and so on, by the number of the batch since training began.

    Args:
        log_dir: Directory of the event files. Each ``fit`` begins a new file.
        update_freq: "epoch": epochs only; "batch": also every report of batches; a number n: also
            each n-th report. See ``Callback.on_train_batch_end``.

    Raises:
        ConfigurationError: ``update_freq`` is invalid.

    Example:
        await trainer.fit(..., callbacks=[psync.callbacks.TensorBoard("logs/run-1")])
        # tensorboard --logdir logs

    Source: ``keras.callbacks.TensorBoard``, where "train" and "validation" are folders.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] = "logs", update_freq: int | str = "epoch"
    ) -> None:
        self._log_dir = os.fspath(log_dir)
        self._every = {"epoch": 0, "batch": 1}.get(str(update_freq), -1)  # 0: never
        if self._every < 0:
            expected = 'tensorboard: expected update_freq "epoch", "batch" or a number above 0'
            self._every = checked_integer(expected, update_freq, 1)
        self._file: EventFile | None = None

    @property
    def wants_batches(self) -> bool:
        """Whether batches are written."""
        return self._every > 0

    def on_train_begin(self) -> None:
        """Begin an event file."""
        self._file = EventFile(self._log_dir)
        self._told = self._before = 0  # times that it was told of batches; batches of past epochs
        self._newest = -1

    def on_epoch_begin(self, epoch: int) -> None:
        """Add the batches of the previous epoch to the count."""
        self._before += self._newest + 1
        self._newest = -1

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write the values of each n-th report."""
        self._told += 1
        self._newest = batch
        if self._told % self._every == 0:
            self._write(self._before + batch, {f"batch_{name}": v for name, v in logs.items()})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the values of the epoch."""
        values = {}
        for name, value in logs.items():
            where = "validation" if name.startswith("val_") else "train"
            values[f"epoch_{name.removeprefix('val_')}/{where}"] = value
        self._write(epoch, values)

    def _write(self, step: int, values: Logs) -> None:
        assert self._file is not None, "training has begun"
        for tag, value in values.items():
            self._file.add_scalar(tag, value, step)
        self._file.flush()

    def on_train_end(self, logs: Logs) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ModelCheckpoint(Callback):
    """Saves the trained objects after epochs, separately from the ``Trainer``'s own checkpoints.

    Args:
        directory: Directory of its checkpoints.
        monitor: Name of the value that decides with ``save_best_only``.
        save_best_only: Whether to save only epochs that are better than all earlier ones.
        mode: "min", "max", or "auto": "max" for accuracies and areas.
        every_n_epochs: Number of epochs between saves.
        max_to_keep: Number of newest checkpoints to keep; None: no limit.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        every_n_epochs: int = 1,
        max_to_keep: int | None = 5,
    ) -> None:
        expected = "model checkpoint: expected every_n_epochs above 0"
        self._every = checked_integer(expected, every_n_epochs, 1)
        if max_to_keep is not None:
            checked_integer("model checkpoint: expected max_to_keep above 0", max_to_keep, 1)
        self._directory = Path(directory)
        self._monitor = _Monitor(monitor, mode) if save_best_only else None
        self._max_to_keep = max_to_keep
        self.manager: CheckpointManager | None = None

    def on_train_begin(self) -> None:
        """Create the manager of its checkpoints."""
        self.manager = CheckpointManager(
            self.trainer.checkpoint, self._directory, self._max_to_keep
        )

    async def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save, if a save is due and the value has improved."""
        assert self.manager is not None, "training has begun"
        if (epoch + 1) % self._every:
            return
        monitor = self._monitor
        if monitor is None or (monitor.is_due(self.trainer) and monitor.improved(logs)):
            await self.trainer.save(self.manager)
