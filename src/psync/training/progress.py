"""Progress output of ``fit``, ``save`` and ``restore``: a bar on a terminal, plain lines elsewhere.

``Progress`` is for epochs of steps, ``showing_bytes`` for what is counted in bytes.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from psync.errors import ConfigurationError
from psync.status.units import bytes_text


class Progress:
    """What is told of the epochs; this one shows nothing."""

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """An epoch begins; epochs count from 0."""

    def at(self, steps: int) -> None:
        """So many steps of it are done."""

    def end(self, seconds: float, logs: Mapping[str, float]) -> None:
        """It is done."""

    def close(self) -> None:
        """Nothing follows."""


class Lines(Progress):
    """Prints a line for each epoch."""

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """Keep what stands at the beginning of the line."""
        self._head, self._steps = f"epoch {epoch + 1}/{epochs}", steps

    def end(self, seconds: float, logs: Mapping[str, float]) -> None:
        """Print the line."""
        print(f"{self._head}: {text_of(seconds, self._steps, logs)}", flush=True)


class Bar(Progress):
    """A bar for the running epoch, and a line for each that is done."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._rich: Any = RichProgress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), transient=True,
        )  # fmt: skip
        self._rich.start()

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """Show a new bar."""
        self._head, self._steps = f"epoch {epoch + 1}/{epochs}", steps
        self._task = self._rich.add_task(self._head, total=steps)

    def at(self, steps: int) -> None:
        """Move it."""
        self._rich.update(self._task, completed=steps)

    def end(self, seconds: float, logs: Mapping[str, float]) -> None:
        """Replace it by a line."""
        self._rich.remove_task(self._task)
        self._rich.console.print(
            f"{self._head}: {text_of(seconds, self._steps, logs)}", highlight=False
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._rich.stop()


def text_of(seconds: float, steps: int, logs: Mapping[str, float]) -> str:
    """Return what is said of an epoch that is done."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
    return f"{steps} steps in {seconds:.1f} s  {values}"


def progress_of(verbose: bool | str) -> Progress:
    """Return what shows the epochs.

    Args:
        verbose: False: nothing; "lines"; "bar"; True or "auto": a bar if stdout is a terminal.

    Raises:
        ConfigurationError: It is none of these.
    """
    kind = kind_of(verbose)
    return Progress() if kind is None else Bar() if kind == "bar" else Lines()


def kind_of(verbose: bool | str) -> str | None:
    """Return "bar", "lines", or None for no output; else as ``progress_of``."""
    if verbose not in (False, True, "auto", "lines", "bar"):
        raise ConfigurationError(
            f'verbose: expected "auto", "bar", "lines", True or False, got {verbose!r}'
        )
    if not verbose:
        return None
    return "bar" if verbose == "bar" or (verbose != "lines" and sys.stdout.isatty()) else "lines"


LINE_EVERY_S = 10.0
"""Work that takes so long gets a line more."""


@contextlib.contextmanager
def showing_bytes(verbose: bool | str, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how much of some work is done; when it is, say so in a line.

    Args:
        verbose: As for ``progress_of``.
        what: "saving run/checkpoints".
        total: Bytes.

    Returns:
        A context manager of what is to be called with the bytes that are done so far.
    """
    kind, began = kind_of(verbose), time.perf_counter()
    if kind is None:
        yield lambda done: None
        return
    if kind == "bar":
        with _bytes_bar(what, total) as at:
            yield at
    else:
        yield _bytes_lines(what, total)
    seconds = time.perf_counter() - began
    print(f"{what}: {bytes_text(total)} in {seconds:.1f} s", flush=True)


@contextlib.contextmanager
def _bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with RichProgress(*columns, transient=True) as rich:
        task = rich.add_task(what, total=total)
        yield lambda done: rich.update(task, completed=done)


def _bytes_lines(what: str, total: int) -> Callable[[int], None]:
    due = time.perf_counter() + LINE_EVERY_S

    def at(done: int) -> None:
        nonlocal due
        if (now := time.perf_counter()) >= due:
            due = now + LINE_EVERY_S
            print(f"{what}: {bytes_text(done)} of {bytes_text(total)}", flush=True)

    return at


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, whatever happens to them meanwhile."""
    nbytes = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                nbytes += file.stat().st_size
    return nbytes
