"""Scripted faults for a chaos run, which chance rarely brings.

    scene  what happens                                           without which the oracle finds it
    torn   the chief dies when a ps has written its file of a     commit_marker
           checkpoint, and goes on from the newest that there is
    late   updates whose connections were lost arrive after the   timeline
           ps tasks have gone back to a checkpoint
    former updates whose connections were lost arrive when there  fencing
           is another chief, which goes on from a checkpoint
    cut    ps tasks go back to checkpoints of moments when        one_cut
           closures ran, and when not all heard of it at once
    alone  nothing comes to the backups any more, and a ps dies   replica_ack

Every step waits for what the one before has led to, as journal and notes say it. So nothing depends
on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psync.testing.chaos.evidence import PushMarks, read_journal, victims_of
from psync.testing.chaos.killer import LOOK_EVERY_S, Kill
from psync.testing.sabotage import notes_in
from psync.testing.sabotage.message_loss import LATE

PATIENCE_S = 60.0
BATCH_S = 6.0
TRIES = 8
GO = "late"
"""Name of the file at which late requests are served."""

LOSE = "lose"
"""Name of the file while which requests are lost, where the scene says so."""

LATE_UPDATES = 24
"""So many, of closures of which most are done and none is final everywhere; one would do."""


class NotPlayed(Exception):
    """A scene did not come to its end."""


CUTS = 3

ENDED = 8
"""By so much a worker's mark grows in a closure, and some more."""

NUM_WORKERS = 3

LOST_ENTRIES = 20
"""So many messages to backups are lost: time enough for many updates."""


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
        if not await self.within(PATIENCE_S, holds):
            raise NotPlayed(f"waited {PATIENCE_S:g} s until {what}")

    async def within(self, seconds: float, holds: Callable[[], object]) -> bool:
        """Return whether something is so, once it is, or after that time."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of the journal of a kind."""
        return [line for line in read_journal(self.directory) if line["kind"] == kind]

    def saved(self, how: str) -> int:
        """Return how many checkpoints were saved while closures ran, or while none did."""
        return sum(line["how"] == how for line in self.said("saved"))

    def late(self, task: str, what: str) -> int:
        """Return how many late updates were "lost" at first, or "served" at last, by a task."""
        return sum(self.noted(task, f"{what} {kind} {LATE}") for kind in ("Update",))

    def noted(self, task: str, line: str) -> int:
        """Return how often a task has noted something."""
        return notes_in(self.directory / "notes").get(task, Counter())[line]

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
        losses: Of requests, but for files and seed.
        loses_always: Whether that is so from the beginning, or only while ``LOSE`` is there.
    """

    play: Callable[[Stage], Awaitable[str]]
    settings: Mapping[str, Any]
    failpoints: str = ""
    losses: Mapping[str, Any] | None = None
    loses_always: bool = True

    def losses_in(self, directory: Path) -> Mapping[str, Any] | None:
        """Return what is lost, with the names of files in the directory of a run."""
        if self.losses is None:
            return None
        only = {} if self.loses_always else {"while": str(directory / LOSE)}
        return {**self.losses, **only, "until": str(directory / GO)}


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
    try:
        await _hold_back(stage)
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


async def _hold_back(stage: Stage) -> None:
    """Stop one worker in a batch that is large enough for the other one to have late updates."""
    for _ in range(TRIES):
        enough = stage.late("ps-0", "lost") + LATE_UPDATES
        stage.send("worker-0", signal.SIGSTOP)
        if await stage.within(BATCH_S, lambda: stage.late("ps-0", "lost") >= enough):  # noqa: B023
            return
        stage.send("worker-0", signal.SIGCONT)  # at the end of a batch; another one follows
    raise NotPlayed(f"no batch had {LATE_UPDATES} late updates of one worker")


async def _former(stage: Stage) -> str:
    """The next life of the program does again what the late updates are part of."""
    await stage.until("a second batch runs", lambda: len(stage.said("scheduled")) > 1)
    enough = stage.late("ps-0", "lost") + LATE_UPDATES
    await stage.until("enough updates are late", lambda: stage.late("ps-0", "lost") >= enough)
    stage.send("chief-0", signal.SIGKILL)
    await stage.until("the chief was started again", lambda: len(stage.said("life")) > 1)
    late = stage.late("ps-0", "lost")
    await asyncio.to_thread((stage.directory / GO).touch)
    await stage.until("the late updates have come", lambda: stage.late("ps-0", "served") >= late)
    return f"the chief was started again, and then {late} late updates came to ps 0"


async def _cut(stage: Stage) -> str:
    """A closure that had a part in a cut, and has ended since, is undone."""
    with contextlib.closing(PushMarks(stage.directory / "marks")) as marks:
        for number in range(1, CUTS + 1):
            await stage.until("closures were saved", lambda: stage.saved("hot") >= number)  # noqa: B023
            before = marks.snapshot(NUM_WORKERS)

            def all_went_on(before: Mapping[int, tuple[int, int]] = before) -> bool:
                now = marks.snapshot(NUM_WORKERS)
                return all(now[worker][1] - count >= ENDED for worker, (_, count) in before.items())

            await stage.until("those closures have ended", all_went_on)
            stage.send("ps-1", signal.SIGKILL)
            await stage.until("ps tasks go back", lambda: len(stage.said("rollback")) >= number)  # noqa: B023
    undone = sum(len(line["closures"]) for line in stage.said("rollback"))
    return f"ps tasks went back {CUTS} times, and {undone} closures were undone"


async def _alone(stage: Stage) -> str:
    """Whoever waits for a backup stands still; whoever does not answers what nobody else has."""
    await stage.until("a batch is done", lambda: stage.said("done"))
    lose = stage.directory / LOSE
    await asyncio.to_thread(lose.touch)
    await stage.until(
        "nothing comes to the backup of ps 0",
        lambda: stage.noted("ps-1", "lost LogEntries request") >= LOST_ENTRIES,
    )
    stage.send("ps-0", signal.SIGKILL)
    await asyncio.to_thread(lose.unlink)
    await stage.until("a backup serves", lambda: stage.said("failover") + stage.said("rollback"))
    if not stage.said("failover"):
        raise NotPlayed("there was no backup that could take over")
    return "ps 0 died when its backup did not hear of it any more, and that took over"


SCENES: Mapping[str, Scene] = {
    "torn": Scene(
        _torn,
        {"num_ps": 2, "num_workers": 2, "checkpoint_every": 1},
        failpoints="checkpoint.file.written=kill@5",  # the first file of the third checkpoint
    ),
    "late": Scene(
        _late,
        {"num_ps": 2, "num_workers": 2, "checkpoint_every": 1 << 20},
        losses={"Update": {"late": 0.3}},
    ),
    "former": Scene(
        _former,
        {"num_ps": 2, "num_workers": 2, "checkpoint_every": 1 << 20},
        losses={"Update": {"late": 0.3}},
    ),
    "cut": Scene(
        _cut,
        {"num_ps": 2, "num_workers": NUM_WORKERS, "checkpoint_every": 1, "batch": 100},
        losses={"Freeze": {"slow": 1.0}},
    ),
    "alone": Scene(
        _alone,
        {"num_ps": 2, "num_workers": NUM_WORKERS, "recovery": "backup"},
        losses={"LogEntries": {"request": 1.0}},
        loses_always=False,
    ),
}
"""By name."""
