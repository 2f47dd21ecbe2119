"""Named places where a test can make a task die, fail or wait.

``PSYNC_FAILPOINTS="ps.push.applied=kill@3, worker.push.sent=error"`` kills the process
when the place is reached for the third time, and raises at the other one the first time.
Without that variable a failpoint costs one dictionary look-up.

What else a test may do to a task comes along: safeguards that are switched off, and notes of
what was done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from psync.errors import ConfigurationError, PsyncError
from psync.net.testing_notes import Notes
from psync.net.testing_switches import switched_off

NAMES = frozenset(
    {
        "worker.closure.start",  # arguments are there, the step has not begun
        "worker.closure.end",  # the step has returned, its result is not sent
        "worker.push.begun",  # nothing is sent
        "worker.push.between_ps",  # one ps task has answered, nothing is sent to the next
        "worker.push.staged",  # every ps has its part, ps 0 has not been told
        "worker.push.answered",  # all ps tasks have answered, the step does not know yet
        "ps.push.received",  # complete, nothing is applied
        "ps.push.applied",  # applied and recorded, not answered
        "ps.assign.applied",  # likewise
        "ps.backup.sending",  # entries are about to be sent to a backup, and nothing is applied
        "ps.backup.taken",  # a backup has them, nothing is applied here
        "ps.create.done",  # shards exist, not answered
        "ps.step.measured",  # norms of a synchronous step are measured here, ps 0 does not know
        "ps.step.applied",  # a synchronous step is applied here, ps 0 does not know
        "ps0.step.decided",  # a synchronous step is to be closed, no other ps knows
        "ps0.step.measured",  # ps 0 knows norms of a synchronous step, no ps applies it yet
        "ps0.step.applied",  # on every ps, the global step is not raised
        "coordinator.dispatch",  # closures are about to be sent
        "coordinator.result",  # results came in, nothing is settled
        "checkpoint.ps.write",  # a ps is about to write its file of a checkpoint
        "checkpoint.file.written",  # a ps's file of a checkpoint, which does not say so yet
        "checkpoint.before_commit",  # a checkpoint's files are written, COMMIT is not
        "checkpoint.before_rename",  # it is complete but for its name
    }
)
"""Every failpoint there is."""


class FailpointError(PsyncError):
    """Raised by a failpoint with the action ``error``."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoints:
    """Which failpoints of one task are armed.

    Args:
        text: As in the variable ``PSYNC_FAILPOINTS``.
        without: Safeguards that are switched off: see ``testing_switches``.
        notes: Told of each failpoint that acts.

    Raises:
        ConfigurationError: If the text names an unknown place or action.
    """

    def __init__(
        self, text: str = "", *, without: frozenset[str] = frozenset(), notes: Notes | None = None
    ) -> None:
        self.without = without
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
            self.arm(name, _kill if action == "kill" else _raiser(name), int(count or 1))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Failpoints:
        """Return those that ``PSYNC_FAILPOINTS`` arms."""
        return cls(
            environ.get("PSYNC_FAILPOINTS", ""),
            without=switched_off(environ),
            notes=Notes.from_environment(environ),
        )

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

    def armed(self, name: str) -> bool:
        """Return whether ``name`` may still act: tests whose order of things matters ask."""
        return name in self._armed

    def of_backup(self) -> Failpoints:
        """Return those of a backup in the same process: who arms a place means the one that serves.

        It may be promoted; nothing is armed there then, either.
        """
        return Failpoints(without=self.without)

    def hit(self, name: str) -> None:
        """The place ``name`` is reached."""
        armed = self._armed.get(name)
        if armed is None:
            return
        self.hits[name] += 1
        if self.hits[name] == armed[1]:
            self.notes.add("failpoint", name)
            armed[0]()


def _raiser(name: str) -> Callable[[], None]:
    def fail() -> None:
        raise FailpointError(f"failpoint {name}")

    return fail
