"""Writing the arrays of a checkpoint: each ps its own, in parallel, and the program the rest.

ps tasks write their whole snapshots of a cut. The program writes computed arrays, whose inputs it
reads from the same cut. A ps that does not see the program's directory sends its arrays, and the
program writes the same file. Each finds that out when it is to write: the program has put a file
with a random text beside. It is asked at each save, for directories are mounted and ps tasks start
on other machines at any time; and with the order itself, so it costs no message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from psync.checkpoints.files import DataFile, Writer
from psync.checkpoints.manifest import Layout, Planned
from psync.chief.consistent_cut import Cut, WrittenSnapshot
from psync.errors import CheckpointError
from psync.numerics.blocks import BLOCK_ELEMENTS
from psync.specs import dtype_of
from psync.training.saved_objects import Contents, Part

T = TypeVar("T")

FILE_BYTES = 2 << 30
"""A file of the program's that has as much is followed by another."""


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


async def write_by_reading(contents: Contents, writer: Writer) -> None:
    """Read one shard after the other and write it: of several instants, if training goes on.

    Raises:
        CheckpointError: The disk is full, or fails.
        ParameterServerLost: A ps is gone.

    Cancellation: Files are half written.
    """
    await _write_parts(writer, contents.parts)


async def _write_snapshot(cut: Cut, ps: int, layout: Layout, writer: Writer) -> None:
    """Have all arrays of a ps written, and note what is where."""
    name = f"ps-{ps:05d}-of-{len(cut.snapshots):05d}"
    path = writer.temporary.absolute() / f"{name}.safetensors"
    made = None
    if writer.nonce:
        made = await cut.write(ps, str(path), writer.nonce, layout.arrays[ps])
    if made is None:
        made = await _write_streamed(cut, ps, layout, path)

    def note() -> None:
        writer.add_file(path.name, made.size, layout.slices(ps, path.name, made.places))
        state = cut.snapshots[ps].to_bytes()
        writer.add_snapshot(ps, f"{name}.json", state, path.name, layout.places(ps, made.places))

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
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
