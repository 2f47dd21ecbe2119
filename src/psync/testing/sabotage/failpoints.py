"""Named places where a test can make a task die, fail or wait.

``PSYNC_FAILPOINTS="ps.push.applied=kill@3, worker.push.sent=error"`` kills the process
when the place is reached for the third time, and raises at the other one the first time. Where
each place is: see ``places``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from psync.errors import ConfigurationError, PsyncError
from psync.testing.sabotage.notes import Notes
from psync.testing.sabotage.places import NAMES


class FailpointError(PsyncError):
    """Raised by a failpoint with the action ``error``."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoints:
    """Which failpoints of one task are armed.

    Args:
        text: As in the variable ``PSYNC_FAILPOINTS``.
        notes: Told of each failpoint that acts.

    Raises:
        ConfigurationError: If the text names an unknown place or action.
    """

    def __init__(self, text: str = "", *, notes: Notes | None = None) -> None:
        self.notes = Notes() if notes is None else notes
        self._armed: dict[str, tuple[Callable[[], None], int]] = {}
        self.hits: dict[str, int] = {}  # how often each armed place was reached
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, action = item.partition("=")
            action, at, count = action.partition("@")
            if action not in ("kill", "error") or (at and not (count.isdecimal() and int(count))):
                raise ConfigurationError(
                    f"PSYNC_FAILPOINTS: {item!r}: expected NAME=kill or NAME=error, "
                    "optionally with @COUNT from 1"
                )
            if action == "kill":
                self.arm(name, _kill, int(count or 1))
            else:
                self.fail(name, int(count or 1))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Failpoints:
        """Return those that ``PSYNC_FAILPOINTS`` arms."""
        return cls(environ.get("PSYNC_FAILPOINTS", ""), notes=Notes.from_environment(environ))

    def arm(self, name: str, action: Callable[[], None], count: int = 1) -> None:
        """Run ``action`` when ``name`` is reached for the ``count``-th time.

        Raises:
            ConfigurationError: If there is no such failpoint.
        """
        if name not in NAMES:
            raise ConfigurationError(
                f"unknown failpoint {name!r}", hint=f"known: {', '.join(sorted(NAMES))}"
            )
        self._armed[name] = (action, count)
        self.hits[name] = 0

    def fail(self, name: str, count: int = 1) -> None:
        """Raise FailpointError when ``name`` is reached for the ``count``-th time."""

        def fails() -> None:
            raise FailpointError(f"failpoint {name}")

        self.arm(name, fails, count)

    def armed(self, name: str) -> bool:
        """Return whether ``name`` may still act: tests whose order of things matters ask."""
        return name in self._armed

    def of_backup(self) -> Failpoints:
        """Return those of a backup in the same process: who arms a place means the one that serves.

        It may be promoted; nothing is armed there then, either.
        """
        return Failpoints()

    def hit(self, name: str) -> None:
        """The place ``name`` is reached."""
        armed = self._armed.get(name)
        if armed is None:
            return
        self.hits[name] += 1
        if self.hits[name] == armed[1]:
            self.notes.add("failpoint", name)
            armed[0]()
