"""Progress output of ``Trainer.fit``: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from psync.errors import ConfigurationError


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
    if verbose not in (False, True, "auto", "lines", "bar"):
        raise ConfigurationError(
            f'verbose: expected "auto", "bar", "lines", True or False, got {verbose!r}'
        )
    if not verbose:
        return Progress()
    if verbose == "bar" or (verbose != "lines" and sys.stdout.isatty()):
        return Bar()
    return Lines()
