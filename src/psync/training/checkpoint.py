"""Checkpoint: saves and restores variables, optimizers and other objects by name.

    checkpoint = psync.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    manager = psync.CheckpointManager(checkpoint, "run/checkpoints", max_to_keep=3)
    await manager.restore_or_initialize()
    for progress.epoch in range(progress.epoch, 10):
        ...
        await coordinator.join()
        await manager.save()

A checkpoint shows one instant of all ps tasks. It is taken while training continues, so it may be
saved at any time. All ps tasks write their whole snapshots of that cut in parallel; the program
writes computed arrays, whose inputs it reads from the same cut. A ps that does not see the
program's directory sends its arrays, and the program writes the same file. Each ps finds that out
when it is told to write, by a file with a random text that the program has put there. So it costs
no message, and is right also after a directory was mounted or a ps has moved.

Source: ``tf.train.Checkpoint`` and ``tf.train.CheckpointManager``. There, a sharded variable must
be restored into the saved number of shards; here, any number works, including for its slots. There,
variables are read one after the other while others may change.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from psync.api.cluster_coordinator import coordinator_of
from psync.api.reads import runtime_of
from psync.api.scopes import running_scopes, runtime_here
from psync.checkpoints.files import (
    STREAM_VARIABLE,
    DataFile,
    Reader,
    Writer,
    checkpoints_in,
    disk_errors,
    remove,
)
from psync.checkpoints.manifest import Layout, Planned, changed_rate, step_of
from psync.checkpoints.ownership import Owner, own
from psync.chief.consistent_cut import Cut, WrittenSnapshot
from psync.client.context import forbid_in_step
from psync.coordinator import Coordinator
from psync.errors import (
    CheckpointError,
    ConfigurationError,
    CutLost,
    FencedError,
    RemoteError,
    TransportError,
)
from psync.net.platform import Parts, flag, random_hex
from psync.numerics.memory import BLOCK_ELEMENTS
from psync.specs import checked_integer, dtype_of
from psync.status.html_tables import table
from psync.status.progress import kind_of, showing, size_of
from psync.store.snapshot_state import SnapshotState
from psync.training.saved_objects import Contents, Part, numbers_of, with_names_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "ckpt"

OWNER = "OWNER"
"""The file in a directory of checkpoints that names the process which saves there."""

LOOK_EVERY_S = 0.1
"""How often progress is looked at."""

FILE_BYTES = 2 << 30
"""A file of the program's that has as much is followed by another."""

TRIES = 5
"""A save is begun anew when the cut is lost, since a ps was cut off, or lost and recovered."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        path: Path of the checkpoint.
        number: Number of its save.
        missing: Names that the checkpoint did not have; their objects are unchanged.
        extra: Names in the checkpoint without an object here.
    """

    path: Path
    number: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]


class Saved(NamedTuple):
    """A saved checkpoint."""

    path: Path
    coordinator: Coordinator | None  # whose ps tasks wrote it; None: it has nothing of theirs
    snapshots: Sequence[SnapshotState]  # what these held


class Checkpoint:
    """Objects that are saved and restored together, each under the name given here.

    Args:
        objects: Variables, modules, optimizers (their slots and steps, and a learning rate that was
            set later), metrics, moving averages, visits of data shards, ``SavedState`` and all
            objects with ``checkpoint_state``; dicts and lists of them.

    Raises:
        UsageError: No object is given, an object cannot be saved, a name begins with "~", or the
            call is inside a step.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"
    __psync_capture_hint__ = "call it in the program, outside of steps"

    def __init__(self, **objects: Any) -> None:
        forbid_in_step("making a checkpoint")
        if not objects:
            raise ConfigurationError(
                "checkpoint: expected objects to save", hint="Checkpoint(model=model)"
            )
        for name in objects:
            if name.startswith("~"):
                raise ConfigurationError(
                    f"checkpoint: {name!r} cannot be a name: '~' is reserved for state that is not "
                    "saved by name"
                )
        self._objects = objects
        self._contents(slots=False)  # what cannot be saved is refused here

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    def _repr_html_(self) -> str:
        contents = self._contents(slots=False)
        rows: list[tuple[object, ...]] = [
            (name, "variable", each.shape, each.dtype, sum(part.nbytes for part in each.parts))
            for name, each in contents.arrays.items()
        ]
        others: dict[str, object] = {**contents.optimizers, **contents.states}
        rows += [(name, type(thing).__name__, "", "", "") for name, thing in others.items()]
        slots = ", with the slots of its optimizers" if contents.optimizers else ""
        title = f"Checkpoint of {', '.join(self._objects)}{slots}"
        return table(title, ("name", "what", "shape", "dtype", "bytes"), rows)

    async def save(
        self,
        directory: str | os.PathLike[str],
        *,
        number: int | None = None,
        verbose: bool | str = False,
    ) -> Path:
        """Write a checkpoint and return its path; it is either complete or absent.

        A checkpoint shows one instant: each acknowledged update is included completely, and every
        other update completely or not at all. Updates wait for this instant, not for the disk.
        Objects without arrays are asked for their states at this instant.

        A training session without a ``ClusterCoordinator`` instead reads one shard after the other,
        so concurrent pushes may be in some shards and not in others.

        Args:
            directory: Directory of all checkpoints, created if missing. ps tasks that see it under
                the same path write there themselves.
            number: Number of this checkpoint, from 0. Default: the highest there plus one.
            verbose: Whether to show progress: False, "lines", "bar"; "auto" or True: a bar on a
                terminal, otherwise lines.

        Raises:
            CheckpointError: The disk is full or fails, or ``directory`` is not a directory: the
                message names path, number and step. Or there is already a checkpoint of that
                number; or a ps was cut off or died, or serves another coordinator. Earlier
                checkpoints are intact.
            ConfigurationError: The number is invalid, or another program saves there.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Nothing remains of the checkpoint, unless it was already complete.
        """
        path, *_ = await self._saved(Path(directory), number, verbose)
        return path

    async def _saved(
        self, directory: Path, number: int | None, verbose: bool | str = False
    ) -> Saved:
        """As ``save``; also say whose ps tasks wrote the checkpoint."""
        forbid_in_step("saving a checkpoint")
        if number is not None:
            hint = "save(int(await global_step.read()))"
            expected = "checkpoint: expected a whole number from 0"
            number = checked_integer(expected, number, 0, 10**18 - 1, hint=hint)
        kind_of(verbose)  # is it one?
        contents = self._contents()
        coordinator = await coordinator_for(contents)
        if coordinator is None:
            path = await self._save_by_reading(contents, directory, number, verbose)
            return Saved(path, None, ())
        for tries_left in reversed(range(TRIES)):
            try:
                return await self._save_cut(coordinator, contents, directory, number, verbose)
            except (CutLost, FencedError, RemoteError, TransportError) as exc:
                recovering = coordinator.recovery.is_rolling_back
                if tries_left and (isinstance(exc, CutLost) or recovering):
                    logger.warning("saving a checkpoint starts again: %s", exc.message)
                    continue  # a ps was cut off, or was lost and has been recovered
                raise CheckpointError(
                    f"checkpoint in {directory}: it was not saved: {exc}",
                    hint="earlier checkpoints are intact",
                ) from exc
        raise AssertionError("unreachable")

    async def _save_cut(
        self, coordinator: Coordinator, contents: Contents, directory: Path, number: int | None,
        verbose: bool | str,
    ) -> Saved:  # fmt: skip
        """Take a cut and write it."""
        states: dict[str, Any] = {}
        errors: list[Exception] = []

        def ask() -> None:
            try:
                states.update(contents.present_states())
            except Exception as exc:
                errors.append(exc)

        async with coordinator.cuts.take(ask) as cut:
            for error in errors:
                raise error
            for name, optimizer in contents.optimizers.items():
                step = step_of(cut.snapshots, optimizer.number)
                states[f"{name}/step"] = optimizer._rule.iteration(step)
                states[f"{name}/learning_rate"] = changed_rate(cut.snapshots, optimizer.number)
            path = await _written(
                directory, number, contents, states, coordinator.parts,
                lambda writer: write_cut(cut, contents, writer), verbose,
                sum(item.nbytes for state in cut.snapshots for item in state.items),
                nonce="" if flag(os.environ, STREAM_VARIABLE) else random_hex(16),
            )  # fmt: skip
            try:
                cut.check_present()  # what was undone, and told so, must not be gone back to
            except CutLost:
                await in_thread(remove, path)
                raise
        return Saved(path, coordinator, cut.snapshots)

    async def _save_by_reading(
        self, contents: Contents, directory: Path, number: int | None, verbose: bool | str
    ) -> Path:
        states = contents.present_states()
        for path, optimizer in contents.optimizers.items():
            states[f"{path}/step"] = int(await optimizer.iterations.read())
        return await _written(
            directory, number, contents, states, Parts(),
            lambda writer: _write_parts(writer, contents.parts), verbose,
            sum(part.nbytes for part in contents.parts),
        )  # fmt: skip

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        partial: bool = False,
        verbose: bool | str = False,
    ) -> Restored:
        """Restore all objects from a checkpoint, saved with any number of ps tasks and shards.

        A ``SyncReplicasOptimizer`` that has made steps in this program continues to count from
        these, with its bias corrections and schedules. Restore it before its first push.

        Args:
            path: Path of the checkpoint, as returned by ``save``.
            partial: Whether objects that the checkpoint does not have stay unchanged. Additional
                entries of the checkpoint are always ignored and named in the result.
            verbose: See ``save``.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CheckpointCorrupt: The checkpoint is damaged. Nothing was restored.
            CheckpointMismatch: Entries are missing or have another shape or dtype (the message
                names all of them), or a state does not belong to its object. Nothing was restored.
            CheckpointError: The checkpoint cannot be read; the message names the path.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Some variables are restored, others are not.
        """
        forbid_in_step("restoring a checkpoint")
        reader = await asyncio.to_thread(Reader, Path(path))
        contents = self._contents()
        manifest = await asyncio.to_thread(with_names_of, contents, reader)
        hint = "restore(path, partial=True) leaves what is missing as it is"
        difference = contents.compared(manifest, reader.path, hint, partial=partial)
        named = [(part, manifest.tensors.get(part.tensor)) for part in contents.parts]
        found = [(part, tensor) for part, tensor in named if tensor is not None]
        steps, rates = numbers_of(contents.optimizers, manifest.states, reader.path)
        total, done = sum(part.nbytes for part, _ in found), 0

        async def assign(done: int) -> None:
            for part, tensor in found:
                stop = part.offset + part.rows
                await part.write(await asyncio.to_thread(reader.read, tensor, part.offset, stop))
                show((done := done + part.nbytes) // 2)
            for optimizer, step in steps.items():
                await optimizer.iterations.assign(step)
            for optimizer, rate in rates.items():
                await optimizer.set_learning_rate(rate)

        with showing(verbose, f"restoring {reader.path}", total) as show:
            for part, tensor in found:
                await asyncio.to_thread(reader.check, tensor)  # all, before any is replaced
                show((done := done + part.nbytes) // 2)
            contents.restore_states(manifest.states, reader.path)  # may refuse: before the others
            await self._as_first_state(functools.partial(assign, done))
        logger.info("restored %s", reader.path)
        return Restored(reader.path, manifest.number, difference.missing, difference.extra)

    async def _as_first_state(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Restore; again if a ps is lost meanwhile, and nothing has been computed before."""
        handle = next(iter(self._contents(slots=False).handles.values()), None)
        coordinator = None if handle is None else coordinator_of(handle.origin)
        if coordinator is None:
            await restore()
        else:
            await coordinator.recovery.restored(restore)

    async def read(self, path: str | os.PathLike[str], *, slots: bool = False) -> dict[str, Any]:
        """Return the values of a checkpoint, without restoring them and without a cluster.

        Args:
            path: Path of the checkpoint, as returned by ``save``.
            slots: Whether to read the slots of optimizers as well.

        Returns:
            The saved values, nested as the objects of this ``Checkpoint``. A variable is one whole
            numpy array. Dicts, lists and tuples are unchanged. A module is a dict of its
            attributes, and a ``SavedState`` a dict of its values. A metric is its value. Moving
            averages have the names of their variables. An optimizer is {"step": …}, with ``slots``
            also {slot: {name of the variable: array}}.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CheckpointCorrupt: The checkpoint is damaged.
            CheckpointMismatch: Entries are missing or have another shape or dtype: the message
                names all of them.

        Cancellation: Safe.

        Example:
            values = await checkpoint.read(psync.latest_checkpoint("run/checkpoints"))
            logits = x @ values["model"]["w"]
        """
        contents = self._contents(slots=False)
        reader = await asyncio.to_thread(Reader, Path(path))
        reader.manifest = await asyncio.to_thread(with_names_of, contents, reader)
        manifest = reader.manifest
        hint = "declare what the program declares that has saved it, and give it the same names"
        contents.compared(manifest, reader.path, hint)
        prefixes = tuple(f"{path}/" for path in contents.optimizers) if slots else ()
        arrays = {
            name: await asyncio.to_thread(reader.read, tensor, 0, tensor.rows)
            for name, tensor in manifest.tensors.items()
            if name in contents.arrays or name.startswith(prefixes)
        }
        return {
            name: contents.add(name, thing)(arrays, manifest.states)
            for name, thing in self._objects.items()
        }

    def _contents(self, *, slots: bool = True) -> Contents:
        contents = Contents(slots)
        for name, thing in self._objects.items():
            contents.add(name, thing)
        return contents


async def _shown(work: Awaitable[None], verbose: bool | str, writer: Writer, total: int) -> None:
    """Await the writing of a checkpoint, and show how far it is: as its files grow."""

    async def look() -> None:
        while True:
            show(min(total, await asyncio.to_thread(size_of, writer.temporary)))
            await asyncio.sleep(LOOK_EVERY_S)

    with showing(verbose, f"saving {writer.directory}", total) as show:
        looking = asyncio.create_task(look())
        try:
            await work
        finally:
            looking.cancel()
            await asyncio.wait((looking,))


async def coordinator_for(contents: Contents) -> Coordinator | None:
    """Return whose ps tasks hold what is saved; None: there is a training session instead.

    Raises:
        UsageError: There is neither, or variables are of several strategies.
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    if contents.handles:
        runtime = await runtime_of("saving a checkpoint", *contents.handles.values())
        return coordinator_of(runtime.origin)
    running = running_scopes()
    if len(running) != 1:
        return None
    runtime_here("saving a checkpoint", running[0])
    return coordinator_of(running[0]._origin)


async def _written(
    directory: Path,
    number: int | None,
    contents: Contents,
    states: dict[str, Any],
    parts: Parts,
    write: Callable[[Writer], Awaitable[None]],
    verbose: bool | str,
    total: int,
    nonce: str = "",
) -> Path:
    """Write a checkpoint, or leave nothing of it.

    Raises:
        CheckpointError: The disk is full, or fails: says of which checkpoint and step.
    """
    begun: list[Writer] = []  # so that who is cancelled while it is made abandons it, too
    shapes = {name: (array.shape, array.dtype) for name, array in contents.arrays.items()}
    owner = await in_thread(own_directory, directory)
    try:
        with disk_errors(str(directory)):
            if number is None:
                number = max((n for n, _ in checkpoints_in(directory, PREFIX)), default=0) + 1
            name = f"{PREFIX}-{number:08d}"
            make = parts.of(Writer)
            await in_thread(
                lambda: begun.append(make(directory, name, number, shapes, states, nonce))
            )
            writer = begun[0]
            await (_shown(write(writer), verbose, writer, total) if verbose else write(writer))
            return await in_thread(writer.commit)
    except BaseException as exc:
        for writer in begun:
            await in_thread(writer.abandon)
        if type(exc) is not CheckpointError:
            raise
        steps = [states[f"{path}/step"] for path in contents.optimizers]
        what = "a checkpoint" if number is None else f"checkpoint {number}"
        what += f" of step {max(steps)}" if steps else ""
        raise CheckpointError(f"saving {what}: {exc.message}", hint=exc.hint) from (
            exc.__cause__ or exc
        )
    finally:
        del owner  # it must not last as long as a traceback


def own_directory(directory: Path) -> Owner | None:
    """Become the one process that saves into a directory, which is made if it is not there.

    Returns:
        None: It cannot be written; saving says why.

    Raises:
        ConfigurationError: Another process saves there.
    """
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        return own(
            directory / OWNER,
            f"saves its checkpoints into {directory}",
            "give each program a directory of its own; to read while another one saves: "
            "psync.latest_checkpoint(directory) and Checkpoint.restore(path)",
        )
    return None


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Work on files in a thread; a cancelled caller still waits until it has ended.

    So a checkpoint is not removed, nor its files closed, while it is being completed.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # which nobody wants to hear any more
    raise cancelled


async def write_cut(cut: Cut, contents: Contents, writer: Writer) -> None:
    """Write what ps tasks held at a cut.

    Args:
        cut: Held meanwhile.
        contents: What is wanted by name.
        writer: Of the checkpoint.

    Raises:
        CheckpointError: The disk is full, or fails.
        CutLost, ParameterServerLost, RemoteError, TransportError: A ps did not write, or answer.

    Cancellation: Files are half written.
    """
    parts = contents.parts
    layout = Layout(cut.snapshots, [part for part in parts if part.compute is None])
    own = await _own(cut, parts, layout)  # first: a ps lets go of what it has written
    theirs = [_write_snapshot(cut, ps, layout, writer) for ps in range(len(cut.snapshots))]
    await _together([*theirs, _write_parts(writer, own)])


async def _write_snapshot(cut: Cut, ps: int, layout: Layout, writer: Writer) -> None:
    """Have all arrays of a ps written, and note what is where."""
    name = f"ps-{ps:05d}-of-{len(cut.snapshots):05d}"
    path = writer.temporary.absolute() / f"{name}.safetensors"
    made = None
    if writer.nonce:
        made = await cut.write(ps, str(path), writer.nonce, layout.arrays[ps])
    size, places = made or await _write_streamed(cut, ps, layout, path)

    def note() -> None:
        writer.add_file(path.name, size, layout.slices(ps, path.name, places))
        state = cut.snapshots[ps].to_bytes()
        writer.add_snapshot(ps, f"{name}.json", state, path.name, layout.places(ps, places))

    await in_thread(note)


async def _write_streamed(cut: Cut, ps: int, layout: Layout, path: Path) -> WrittenSnapshot:
    """Write what a ps sends."""
    planned = []
    for number, label in layout.arrays[ps]:
        item = cut.snapshots[ps].items[number]
        planned.append(Planned(label, item.shape, item.dtype, 0, label=label))
    opened: list[DataFile] = []  # so that who is cancelled while it is opened closes it, too
    try:
        await in_thread(lambda: opened.append(DataFile(path, planned)))
        data_file = opened[0]
        for number, _ in layout.arrays[ps]:
            async for piece in cut.pieces(ps, number):
                await in_thread(data_file.extend, piece)
            data_file.end_slice()
        size = await in_thread(data_file.close)
    finally:
        for data_file in opened:
            data_file.abandon()
    places = [(piece.start, piece.nbytes, piece.crc32) for _, piece in data_file.slices]
    return WrittenSnapshot(size, places)


async def _own(cut: Cut, parts: Sequence[Part], layout: Layout) -> list[Part]:
    """Return what no ps writes: what is computed, such as the sum of copies, and new slots.

    Raises:
        CheckpointError: No ps holds a variable.
    """
    own = []
    for part in parts:
        found = layout.find(part)
        if found is None and not part.slot:
            raise CheckpointError(
                f"checkpoint: no ps holds {part.tensor!r}",
                hint="it was declared while the checkpoint was saved: save again",
            )
        if found is None:
            own.append(dataclasses.replace(part, read=functools.partial(_value, _constant(part))))
        elif part.compute is not None:
            value = await part.compute(await cut.read(*found))
            own.append(dataclasses.replace(part, read=functools.partial(_value, value)))
    return own


async def _value(value: Any) -> Any:
    return value


async def _write_parts(writer: Writer, parts: Sequence[Part]) -> None:
    for number, batch in enumerate(_batches(parts)):
        name = f"data-{number:05d}.safetensors"
        data_file = await in_thread(writer.data_file, name, batch)
        for part in batch:
            await in_thread(data_file.write, await part.read())


def _batches(parts: Sequence[Part]) -> list[list[Part]]:
    """Return what goes into which file."""
    batches: list[list[Part]] = []
    nbytes = FILE_BYTES
    for part in parts:
        if nbytes >= FILE_BYTES:
            batches.append([])
            nbytes = 0
        batches[-1].append(part)
        nbytes += part.nbytes
    return batches


def _constant(part: Part) -> Iterator[np.ndarray]:
    """Yield, in pieces, a slot that no ps holds yet: as it is before the first push."""
    dtype = dtype_of(part.dtype)
    left = part.nbytes // dtype.itemsize
    elements = np.full(min(left, BLOCK_ELEMENTS), part.fill, dtype)
    while left > 0:
        yield elements[:left]
        left -= elements.size


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; when one fails the others are cancelled, and have ended when it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
