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
    """What is told of the epochs.

    Args:
        kind: As of ``kind_of``.
    """

    def __init__(self, kind: str | None) -> None:
        self._kind = kind
        self._done: list[str] = []
        self._cell = _Cell()
        self._bar: Any = None
        if kind == "bar":
            self._bar = _bar("steps")
            self._bar.start()

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """An epoch begins; epochs count from 0."""
        self._head, self._steps = f"epoch {epoch + 1}/{epochs}", steps
        if self._bar is not None:
            self._task = self._bar.add_task(self._head, total=steps)
        self.at(0)

    def at(self, steps: int) -> None:
        """So many steps of it are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=steps)
        elif self._kind == "cell":
            self._cell.show(self._done, f"{self._head}: {steps}/{self._steps}", steps / self._steps)

    def end(self, seconds: float, logs: Mapping[str, float], again: int = 0) -> None:
        """It is done; so many steps of it were trained again after a rollback."""
        values = "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
        undone = f" ({again} undone by a rollback and trained again)" if again else ""
        line = f"{self._head}: {self._steps} steps{undone} in {seconds:.1f} s  {values}"
        if self._bar is not None:
            self._bar.remove_task(self._task)
            self._bar.console.print(line, highlight=False)
        elif self._kind == "cell":
            self._done.append(line)
            self._cell.show(self._done)
        elif self._kind is not None:
            print(line, flush=True)

    def close(self) -> None:
        """Nothing follows: leave the terminal as it was, and the lines of epochs that are done."""
        if self._bar is not None:
            self._bar.stop()
        elif self._kind == "cell":
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


def kind_of(verbose: bool | str) -> str | None:
    """Return "bar", "cell", "lines", or None for no output.

    Args:
        verbose: False: nothing; "lines"; "bar"; True or "auto": a bar if stdout is a terminal or a
            notebook.

    Raises:
        ConfigurationError: It is none of these.
    """
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
        verbose: As for ``kind_of``.
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
        with _bar(unit) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
    elif kind == "cell":
        yield lambda done: cell.show((), text(done), done / max(total, 1))
    else:
        yield _lines(text)
    ended = f"{what}: {whole} in {time.perf_counter() - began:.1f} s"
    if kind == "cell":
        cell.show((ended,))
    else:
        print(ended, flush=True)


def _bar(unit: str) -> Any:
    """Return rich's bar of something that is counted; "": in bytes."""
    from rich import progress

    counts: tuple[Any, ...] = (
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
    )
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
        *((progress.MofNCompleteColumn(),) if unit else counts), progress.TimeRemainingColumn(),
        transient=True,
    )  # fmt: skip


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
