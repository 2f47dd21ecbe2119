"""What is done to a run by a script, instead of the killer: a fault that chance rarely brings.

Layer: L5. Imports: lost_messages, testing_notes, testing.chaos.journal, testing.chaos.killer,
testing.chaos.victims.

    scene  what happens                                           without which the oracle finds it
    torn   the chief dies when a ps has written its file of a     commit_marker
           checkpoint, and goes on from the newest that there is
    late   updates whose connections were lost arrive after the   timeline
           ps tasks have gone back to a checkpoint

Every step waits for what the one before has led to, as journal and notes say it. So nothing depends
on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psync.lost_messages import LATE
from psync.testing.chaos.journal import read_journal
from psync.testing.chaos.killer import LOOK_EVERY_S, Kill
from psync.testing.chaos.victims import victims_of
from psync.testing_notes import notes_in

PATIENCE_S = 60.0
GO = "late"
"""Name of the file at which late requests are served."""

LATE_UPDATES = 24
"""So many, of closures of which most are done and none is final everywhere; one would do."""


class NotPlayed(Exception):
    """A scene did not come to its end."""


@dataclass
class Stage:
    """A run, as a scene sees it.

    Attributes:
        launcher: Process id of ``psync run``.
        directory: Of the run.
        kills: What was done.
    """

    launcher: int
    directory: Path
    kills: list[Kill] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until something is so.

        Raises:
            NotPlayed: It is not, for a long time.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > deadline:
                raise NotPlayed(f"waited {PATIENCE_S:g} s until {what}")
            await asyncio.sleep(LOOK_EVERY_S)

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of the journal of a kind."""
        return [line for line in read_journal(self.directory) if line["kind"] == kind]

    def late(self, task: str, what: str) -> int:
        """Return how many late updates were "lost" at first, or "served" at last, by a task."""
        notes = notes_in(self.directory / "notes").get(task, Counter())
        return sum(notes.get(f"{what} {kind} {LATE}", 0) for kind in ("Push", "Assign"))

    def send(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to a task.

        Raises:
            NotPlayed: It is not there.
        """
        job, _, index = name.partition("-")
        victim = victims_of(self.launcher).get((job, int(index)))
        if victim is None or not victim.send(signum):
            raise NotPlayed(f"{name} is not there")
        if signum != signal.SIGCONT:
            at_s = round(time.monotonic() - self._began, 3)
            self.kills.append(Kill(at_s, name, signum.name, 0))


@dataclass(frozen=True)
class Scene:
    """A scene, and the run that it needs.

    Attributes:
        play: Does it; returns what it has seen.
        settings: Of the program.
        failpoints: Of all tasks.
        losses: Of requests, without "until" and "seed".
    """

    play: Callable[[Stage], Awaitable[str]]
    settings: Mapping[str, Any]
    failpoints: str = ""
    losses: Mapping[str, Any] | None = None


async def _torn(stage: Stage) -> str:
    await stage.until("the chief was started again", lambda: len(stage.said("life")) > 1)
    restored = stage.said("life")[1]["restored"]
    return f"the chief died while it saved, and went on from {Path(str(restored)).name}"


async def _late(stage: Stage) -> str:
    """The one worker keeps closures from being final everywhere, the other one's updates are late.

    Both stand still while the late ones arrive: else closures would become final, and be refused
    for that reason.
    """
    await stage.until("a second batch runs", lambda: len(stage.said("scheduled")) > 1)
    stage.send("worker-0", signal.SIGSTOP)
    try:
        enough = stage.late("ps-0", "lost") + LATE_UPDATES
        await stage.until("enough updates are late", lambda: stage.late("ps-0", "lost") >= enough)
        stage.send("worker-1", signal.SIGSTOP)
        stage.send("ps-1", signal.SIGKILL)
        await stage.until("ps tasks have gone back", lambda: stage.said("rollback"))
        await asyncio.to_thread((stage.directory / GO).touch)
        await stage.until(
            "the late updates have come",
            lambda: stage.late("ps-0", "served") == stage.late("ps-0", "lost"),
        )
    finally:
        for worker in ("worker-0", "worker-1"):
            stage.send(worker, signal.SIGCONT)
    undone = sum(len(line["closures"]) for line in stage.said("rollback"))
    late = stage.late("ps-0", "served")
    return f"{undone} closures were undone, and then {late} late updates came to ps 0"


SCENES: Mapping[str, Scene] = {
    "torn": Scene(
        _torn,
        {"num_ps": 2, "num_workers": 2, "checkpoint_every": 1},
        failpoints="checkpoint.file.written=kill@5",  # the first file of the third checkpoint
    ),
    "late": Scene(
        _late,
        {"num_ps": 2, "num_workers": 2, "checkpoint_every": 1 << 20},
        losses={"Push": {"late": 0.3}, "Assign": {"late": 0.3}},
    ),
}
"""By name."""
