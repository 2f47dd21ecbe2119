"""Progress output: a bar on a terminal, one line that changes in a notebook, plain lines elsewhere.

``Progress`` is for epochs of steps, ``showing`` for what is counted in bytes or in pieces. Bars are
rich's, but for notebooks, where rich needs ipywidgets: there a line is displayed by IPython, which
replaces it in its place.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def end(self, seconds: float, logs: Mapping[str, float], again: int = 0) -> None:
        """It is done; so many steps of it were trained again after a rollback."""

    def close(self) -> None:
        """Nothing follows."""


class Lines(Progress):
    """Prints a line for each epoch."""

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """Keep what stands at the beginning of the line."""
        self._head, self._steps = f"epoch {epoch + 1}/{epochs}", steps

    def end(self, seconds: float, logs: Mapping[str, float], again: int = 0) -> None:
        """Print the line."""
        print(f"{self._head}: {text_of(seconds, self._steps, logs, again)}", flush=True)


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

    def end(self, seconds: float, logs: Mapping[str, float], again: int = 0) -> None:
        """Replace it by a line."""
        self._rich.remove_task(self._task)
        self._rich.console.print(
            f"{self._head}: {text_of(seconds, self._steps, logs, again)}", highlight=False
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._rich.stop()


class CellLines(Progress):
    """A line for each epoch in one output of a notebook's cell, below them one that changes."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._cell = _Cell()

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """Show a new line."""
        self._head, self._steps = f"epoch {epoch + 1}/{epochs}", steps
        self.at(0)

    def at(self, steps: int) -> None:
        """Change it."""
        self._cell.show(self._done, f"{self._head}: {steps}/{self._steps}", steps / self._steps)

    def end(self, seconds: float, logs: Mapping[str, float], again: int = 0) -> None:
        """Replace it by what came of the epoch."""
        self._done.append(f"{self._head}: {text_of(seconds, self._steps, logs, again)}")
        self._cell.show(self._done)

    def close(self) -> None:
        """Leave the lines of epochs that are done."""
        self._cell.show(self._done)


class _Cell:
    """Lines in a notebook, shown in one place."""

    def __init__(self) -> None:
        self._shown: Any = None  # None until there are any
        self._newest: tuple[object, ...] | None = None

    def show(self, lines: Sequence[str], now: str = "", share: float = 0.0) -> None:
        """Show lines, and below them one that has done its share, from 0 to 1; "": none."""
        if self._newest == (newest := (len(lines), now)):
            return
        self._newest = newest
        parts = [f"<div>{html.escape(line)}</div>" for line in lines]
        if now:
            bar = f'<progress max="1" value="{min(1.0, share):.3f}"></progress>'
            parts.append(f"<div>{bar} {html.escape(now)}</div>")
        plain = "\n".join([*lines, now] if now else lines)
        mark = {"text/html": "".join(parts), "text/plain": plain}
        if self._shown is None:
            display = importlib.import_module("IPython.display").display
            self._shown = display(mark, raw=True, display_id=True)
        else:
            self._shown.update(mark, raw=True)


def text_of(seconds: float, steps: int, logs: Mapping[str, float], again: int) -> str:
    """Return what is said of an epoch that is done."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
    undone = f" ({again} undone by a rollback and trained again)" if again else ""
    return f"{steps} steps{undone} in {seconds:.1f} s  {values}"


def progress_of(verbose: bool | str) -> Progress:
    """Return what shows the epochs.

    Args:
        verbose: False: nothing; "lines"; "bar"; True or "auto": a bar if stdout is a terminal or a
            notebook.

    Raises:
        ConfigurationError: It is none of these.
    """
    return {None: Progress, "bar": Bar, "cell": CellLines, "lines": Lines}[kind_of(verbose)]()


def kind_of(verbose: bool | str) -> str | None:
    """Return "bar", "cell", "lines", or None for no output; else as ``progress_of``."""
    if verbose not in (False, True, "auto", "lines", "bar"):
        raise ConfigurationError(
            f'verbose: expected "auto", "bar", "lines", True or False, got {verbose!r}'
        )
    if not verbose:
        return None
    if verbose == "lines":
        return "lines"
    if type(sys.stdout).__module__.startswith("ipykernel"):
        return "cell"
    return "bar" if verbose == "bar" or sys.stdout.isatty() else "lines"


LINE_EVERY_S = 10.0
"""Work that takes so long gets a line more."""


@contextlib.contextmanager
def showing(
    verbose: bool | str, what: str, total: int, unit: str = ""
) -> Iterator[Callable[[int], None]]:
    """Show how much of some work is done; when it is, say so in a line.

    Args:
        verbose: As for ``progress_of``.
        what: "saving run/checkpoints".
        total: How much it is.
        unit: Of that: "shards"; "": bytes.

    Returns:
        A context manager of what is to be called with how much is done so far.
    """

    kind, began = kind_of(verbose), time.perf_counter()
    if kind is None:
        yield lambda done: None
        return
    whole = f"{total:,} {unit}" if unit else bytes_text(total)

    def text(done: int) -> str:
        return f"{what}: {f'{done:,}' if unit else bytes_text(done)} of {whole}"

    cell = _Cell()
    if kind == "bar":
        with _bar(what, total, unit) as at:
            yield at
    elif kind == "cell":
        yield lambda done: cell.show((), text(done), done / max(total, 1))
    else:
        yield _lines(text)
    ended = f"{what}: {whole} in {time.perf_counter() - began:.1f} s"
    if kind == "cell":
        cell.show((ended,))
    else:
        print(ended, flush=True)


@contextlib.contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    counts = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        *((MofNCompleteColumn(),) if unit else counts), TimeRemainingColumn(),
    )  # fmt: skip
    with RichProgress(*columns, transient=True) as rich:
        task = rich.add_task(what, total=total)
        yield lambda done: rich.update(task, completed=done)


def _lines(text: Callable[[int], str]) -> Callable[[int], None]:
    due = time.perf_counter() + LINE_EVERY_S

    def at(done: int) -> None:
        nonlocal due
        if (now := time.perf_counter()) >= due:
            due = now + LINE_EVERY_S
            print(text(done), flush=True)

    return at


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, whatever happens to them meanwhile."""
    nbytes = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                nbytes += file.stat().st_size
    return nbytes
