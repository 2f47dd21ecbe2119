"""Saving and restoring what is trained.

Layer: L4. Imports: errors, checkpoint_files, checkpoint_manifest, checkpoint_objects,
checkpoint_values, context.

    checkpoint = psync.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    manager = psync.CheckpointManager(checkpoint, "run/checkpoints", max_to_keep=3)
    await manager.restore_or_initialize()
    for progress.epoch in range(progress.epoch, 10):
        ...
        await coordinator.join()
        await manager.save()

The program reads every shard, one after the other, and writes it; no more than one shard is in its
memory. Save after ``join``: what is pushed while a checkpoint is written may be in some of its
shards and not in others.

Source: ``tf.train.Checkpoint`` and ``tf.train.CheckpointManager``. There a sharded variable must be
restored into as many shards as were saved; here into any number, its slots too.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from psync.checkpoint_files import (
    DataFile,
    Planned,
    Reader,
    Writer,
    checkpoints_in,
    mark_last,
    remove,
    unmark_last,
)
from psync.checkpoint_manifest import check_state
from psync.checkpoint_objects import Array, Contents, Part
from psync.checkpoint_values import nested, read_arrays
from psync.context import forbid_in_dataset, forbid_in_step
from psync.errors import CheckpointMismatch, ConfigurationError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "ckpt"
FILE_BYTES = 2 << 30
"""A data file that has as much is followed by another."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        path: Of the checkpoint.
        number: Of its save.
        missing: Names that the checkpoint did not have; they were left as they are.
        extra: Names in the checkpoint that nothing here stands for.
    """

    path: Path
    number: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]


class Checkpoint:
    """Objects that are saved and restored together, each under the name that it is given here.

    Args:
        objects: Variables, modules, optimizers (their slots and steps, not a learning rate that was
            set later), metrics, moving averages, visits of data shards, ``SavedState`` and
            everything with ``checkpoint_state``; dicts and lists of them.

    Raises:
        UsageError: Nothing is given, or something that cannot be saved; or inside a step.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"

    def __init__(self, **objects: Any) -> None:
        forbid_in_step("making a checkpoint")
        forbid_in_dataset("making a checkpoint")
        if not objects:
            raise ConfigurationError(
                "checkpoint: expected objects to save", hint="Checkpoint(model=model)"
            )
        self._objects = objects
        self._contents(slots=False)  # what cannot be saved is refused here

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    async def save(self, directory: str | os.PathLike[str], *, number: int | None = None) -> Path:
        """Write a checkpoint and return its path; it is complete or absent.

        Args:
            directory: Of all checkpoints; made if it is not there.
            number: Of this one, from 0. Default: one more than the highest there.

        Raises:
            CheckpointError: The disk is full, or fails; or there is one of that number. What was
                saved before is whole.
            ConfigurationError: The number is none.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is gone.

        Cancellation: Nothing is left of the checkpoint, unless it was complete by then.
        """
        forbid_in_step("saving a checkpoint")
        path = Path(directory)
        number = None if number is None else _checked_number(number)
        contents = self._contents()
        states = {name: thing.checkpoint_state() for name, thing in contents.states.items()}
        for name, state in states.items():
            check_state(name, state)
        for name, optimizer in contents.optimizers.items():
            states[name] = int(await optimizer.iterations.read())
        if number is None:
            number = max((n for n, _ in checkpoints_in(path, PREFIX)), default=0) + 1
        writer = await asyncio.to_thread(Writer, path, f"{PREFIX}-{number:08d}")
        try:
            await _write(writer, list(contents.arrays.values()))
            shapes = {array.name: (array.shape, array.dtype) for array in contents.arrays.values()}
            return await _in_thread(writer.commit, number, shapes, states)
        except BaseException:
            await _in_thread(writer.abandon)
            raise

    async def restore(self, path: str | os.PathLike[str], *, partial: bool = False) -> Restored:
        """Take everything from a checkpoint, whatever number of ps tasks and shards it was of.

        Args:
            path: Of the checkpoint, as ``save`` returned it.
            partial: Whether what the checkpoint does not have is left as it is. What it has and
                nobody asks for is passed over in any case, and named in the result.

        Raises:
            CheckpointNotFound: There is none.
            CheckpointCorrupt: It is damaged.
            CheckpointMismatch: Something is missing, or of another shape or dtype: all are named.
                Nothing was restored.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is gone.

        Cancellation: Some variables are restored, others are not.
        """
        forbid_in_step("restoring a checkpoint")
        reader = await asyncio.to_thread(Reader, Path(path))
        contents = self._contents()
        manifest = reader.manifest
        difference = contents.compared(
            manifest,
            reader.path,
            "restore(path, partial=True) leaves what is missing as it is",
            partial=partial,
        )
        for name, array in contents.arrays.items():
            tensor = manifest.tensors.get(name)
            for part in array.parts if tensor is not None else ():
                assert tensor is not None
                stop = part.offset + (part.shape[0] if part.shape else 1)
                value = await asyncio.to_thread(reader.read, tensor, part.offset, stop)
                await part.write(value)
        for name, optimizer in contents.optimizers.items():
            if name in manifest.states:
                await optimizer.iterations.assign(_as_step(manifest.states[name], name, reader))
        for name, thing in contents.states.items():
            if name in manifest.states:
                thing.restore_checkpoint_state(manifest.states[name])
        logger.info("restored %s", reader.path)
        return Restored(reader.path, manifest.number, difference.missing, difference.extra)

    async def read(self, path: str | os.PathLike[str], *, slots: bool = False) -> dict[str, Any]:
        """Return the values of a checkpoint; nothing is restored, and no cluster is needed.

        Args:
            path: Of the checkpoint, as ``save`` returned it.
            slots: Whether those of optimizers are read, too.

        Returns:
            What was saved, nested as the objects of this ``Checkpoint``. A numpy array for each
            variable, whole; dicts, lists and tuples as they are; a dict of its attributes for a
            module, and of its values for ``SavedState``; the value of a metric; the averages by
            the names of their variables; of an optimizer {"step": …}, with ``slots`` also
            {slot: {name of the variable: array}}.

        Raises:
            CheckpointNotFound: There is none.
            CheckpointCorrupt: It is damaged.
            CheckpointMismatch: Something is missing, or of another shape or dtype: all are named.

        Cancellation: Safe.

        Example:
            values = await checkpoint.read(psync.latest_checkpoint("run/checkpoints"))
            logits = x @ values["model"]["w"]
        """
        contents = self._contents(slots=False)
        reader = await asyncio.to_thread(Reader, Path(path))
        arrays = await read_arrays(reader, contents, slots=slots)
        states = reader.manifest.states
        return {
            name: nested(thing, contents, arrays, states) for name, thing in self._objects.items()
        }

    def _contents(self, *, slots: bool = True) -> Contents:
        contents = Contents(slots)
        for name, thing in self._objects.items():
            contents.add(name, thing)
        return contents


class CheckpointManager:
    """The checkpoints of one program in one directory: numbers, and which are kept.

    Args:
        checkpoint: What is saved.
        directory: Where; made when the first one is saved. One program at a time may use it.
        max_to_keep: The newest so many are kept; None: all.
        keep_every_n_steps: Those whose number is a multiple of this are kept for ever.

    Raises:
        ConfigurationError: An argument is no such number.

    Source: ``tf.train.CheckpointManager``.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every_n_steps: int | None = None,
    ) -> None:
        for name, value in (
            ("max_to_keep", max_to_keep), ("keep_every_n_steps", keep_every_n_steps),
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(
                    f"checkpoint manager: expected {name} above 0, or None, got {value!r}"
                )
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigurationError(
                f"checkpoint manager: expected a Checkpoint, got {type(checkpoint).__name__}",
                hint="CheckpointManager(psync.Checkpoint(model=model), directory)",
            )
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every_n_steps

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._checkpoint!r} in {str(self._directory)!r}>"

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._directory

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, the oldest first."""
        return [path for _, path in checkpoints_in(self._directory, PREFIX)]

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return latest_checkpoint(self._directory)

    async def save(self, checkpoint_number: int | None = None, *, last: bool = False) -> Path:
        """Save, then remove those that need not be kept; else as ``Checkpoint.save``.

        Args:
            checkpoint_number: From 0, such as the global step. Default: one more than the highest.
            last: Whether no other one follows; see ``finish``.
        """
        path = await self._checkpoint.save(self._directory, number=checkpoint_number)
        found = checkpoints_in(self._directory, PREFIX)
        if self._max_to_keep is not None:
            for number, old in found[: -self._max_to_keep]:
                if old != path and (self._keep_every is None or number % self._keep_every):
                    await asyncio.to_thread(remove, old)
        if last:
            await self.finish()
        return path

    async def finish(self) -> Path | None:
        """Say that no other checkpoint follows: a ``SidecarEvaluator`` then stops after the newest.

        ``restore_or_initialize`` takes it back: the program goes on.

        Returns:
            The path of the newest checkpoint, or None: there is none, and nothing was said.

        Raises:
            CheckpointError: The disk fails, or is full.

        Cancellation: It may have been said.
        """
        newest = self.latest_checkpoint
        if newest is not None:
            await asyncio.to_thread(mark_last, newest)
        return newest

    async def restore_or_initialize(self) -> Path | None:
        """Restore the newest checkpoint; without one, everything stays as it was declared.

        Returns:
            Its path, or None.

        Raises:
            CheckpointError, UsageError, ParameterServerLost: As ``Checkpoint.restore``.

        Cancellation: As ``Checkpoint.restore``.
        """
        latest = self.latest_checkpoint
        if latest is not None:
            await self._checkpoint.restore(latest)
            await asyncio.to_thread(unmark_last, latest)
        return latest


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a directory, or None.

    Source: ``tf.train.latest_checkpoint``.
    """
    found = checkpoints_in(Path(directory), PREFIX)
    return found[-1][1] if found else None


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Work on files in a thread; who is cancelled still waits until it has ended.

    So nobody removes a checkpoint, or closes its files, while somebody else completes it.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


async def _write(writer: Writer, arrays: Sequence[Array]) -> None:
    """Write all arrays, shard by shard."""
    for number, batch in enumerate(_batches(arrays)):
        planned = [
            Planned(array.name, part.shape, array.dtype, part.offset) for array, part in batch
        ]
        data_file: DataFile = await _in_thread(
            writer.data_file, f"data-{number:05d}.safetensors", planned
        )
        for _, part in batch:
            value = await part.read()
            await _in_thread(data_file.write, value)


def _batches(arrays: Sequence[Array]) -> list[list[tuple[Array, Part]]]:
    """Return which parts go into which file."""
    batches: list[list[tuple[Array, Part]]] = []
    nbytes = FILE_BYTES
    for array in arrays:
        for part in array.parts:
            if nbytes >= FILE_BYTES:
                batches.append([])
                nbytes = 0
            batches[-1].append((array, part))
            nbytes += Planned(array.name, part.shape, array.dtype, part.offset).nbytes
    return batches


def _checked_number(number: Any) -> int:
    """Return the number of a checkpoint, or raise ConfigurationError: it is none."""
    try:
        checked = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        checked = -1
    if not 0 <= checked < 10**18:
        raise ConfigurationError(
            f"checkpoint: expected a whole number from 0, got {number!r}",
            hint="save(int(await global_step.read()))",
        )
    return checked


def _as_step(value: Any, name: str, reader: Reader) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointMismatch(f"{reader.path}: expected a step as {name!r}, got {value!r}")
    return value
