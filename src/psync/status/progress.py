"""Progress output: a bar on a terminal, one line that changes in a notebook, plain lines elsewhere.

``Progress`` is for epochs of steps, ``showing`` for what is counted in bytes or in pieces. Bars are
rich's, but for notebooks, where rich needs ipywidgets: there a line is displayed by IPython, which
replaces it in its place.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import math
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from psync.errors import check_fits
from psync.status.units import bytes_text

LINE_EVERY_S = 10.0
"""Work that takes so long gets a line more."""


class Progress:
    """How far work is, one piece of it after the other.

    Args:
        kind: As of ``kind_of``.
        unit: What is counted; "": bytes.
        line_every_s: Where there are only lines, how often one says how far it is.
    """

    def __init__(
        self, kind: str | None, unit: str = "steps", line_every_s: float = math.inf
    ) -> None:
        self._kind, self._unit, self._line_every_s = kind, unit, line_every_s
        self._bar: Any = None
        self._ended: list[str] = []  # lines that a notebook shows above
        self._shown: Any = None  # in a notebook; None until there is something

    def begin(self, what: str, total: int) -> None:
        """A piece of work begins."""
        self._what, self._total, self._due = what, total, math.inf
        self._whole = f"{self._count(total)} {self._unit}".rstrip()
        self._began = time.perf_counter()
        if self._kind == "bar":
            self._bar = _bar(self._unit)
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()
        self.at(0)
        self._due = self._began + self._line_every_s

    def _count(self, done: int) -> str:
        return f"{done:,}" if self._unit else bytes_text(done)

    def at(self, done: int) -> None:
        """So much of it is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._kind == "cell" or (
            self._kind == "lines" and (now := time.perf_counter()) >= self._due
        ):
            text = f"{self._what}: {self._count(done)} of {self._whole}"
            if self._kind == "cell":
                self._show(text, done / max(self._total, 1))
            else:
                self._due = now + self._line_every_s
                print(text, flush=True)

    def end(self, note: str = "", values: Mapping[str, float] = types.MappingProxyType({})) -> None:
        """It is done; a line says so, with a note and with what came of it."""
        seconds = time.perf_counter() - self._began
        came = "".join(f"  {name} {value:.4g}" for name, value in values.items())
        line = f"{self._what}: {self._whole}{note} in {seconds:.1f} s{came}"
        self._ended.append(line)
        self.close()
        if self._kind in ("bar", "lines"):
            print(line, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was, and the lines of what is done."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._kind == "cell":
            self._show()

    def _show(self, now: str = "", share: float = 0.0) -> None:
        """Show lines in a notebook, and below them one that has done its share, from 0 to 1."""
        parts = [f"<div>{html.escape(line)}</div>" for line in self._ended]
        if now:
            bar = f'<progress max="1" value="{min(1.0, share):.3f}"></progress>'
            parts.append(f"<div>{bar} {html.escape(now)}</div>")
        plain = "\n".join([*self._ended, now] if now else self._ended)
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
    is_known = verbose in (False, True, "auto", "lines", "bar")
    check_fits(is_known, 'verbose: expected "auto", "bar", "lines", True or False', verbose)
    if not verbose:
        return None
    if verbose == "lines":
        return "lines"
    if type(sys.stdout).__module__.startswith("ipykernel"):
        return "cell"
    return "bar" if verbose == "bar" or sys.stdout.isatty() else "lines"


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
    show = Progress(kind_of(verbose), unit, LINE_EVERY_S)
    show.begin(what, total)
    try:
        yield show.at
        show.end()
    finally:
        show.close()


def _bar(unit: str) -> Any:
    """Return rich's bar of something that is counted; "": in bytes."""
    from rich import get_console, progress

    counts: tuple[Any, ...] = (
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
    )
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
        *((progress.MofNCompleteColumn(),) if unit else counts), progress.TimeRemainingColumn(),
        transient=True, disable=not get_console().is_terminal,
    )  # fmt: skip


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, whatever happens to them meanwhile."""
    nbytes = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                nbytes += file.stat().st_size
    return nbytes
