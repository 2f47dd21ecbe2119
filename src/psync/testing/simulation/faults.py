"""The faults of a plan, drawn: which kinds there are in this run, when, to whom, for how long."""

from __future__ import annotations

import dataclasses
import errno
import random
from collections.abc import Sequence

from psync.testing.simulation.plan import Fault, Trigger

MESSAGES = (
    "Push", "Assign", "Pull", "Contribute", "StagePush", "CloseStep", "AskStep",
    "LogEntries", "BackUp", "BeginBackup", "FillBackup", "Promote", "Freeze", "Gate",
    "WriteFrozen", "PrepareSnapshot", "FillSnapshot", "RestoreSnapshot", "AttachPs", "AdoptShards",
    "Fence", "AttachWorker", "RunClosures", "ClosureResults", "AwaitWaiters", "ReportSchedule",
    "FinalBelow",
    "CreateShards", "GrantCoordinator", "AskServed", "LockShards", "EndSession",
)  # fmt: skip
"""Requests that faults may wait for, or lose."""

RECOVERY = (
    "AttachPs", "CreateShards", "AttachWorker", "BeginBackup", "FillBackup", "BackUp", "LogEntries",
    "Promote", "Fence", "PrepareSnapshot", "FillSnapshot", "RestoreSnapshot", "AskServed",
    "AdoptShards", "GrantCoordinator", "EndFormer", "EndSession", "AskStep",
)  # fmt: skip
"""Those of a task that comes, or goes on for another one."""

MOMENTS = (
    "save", "saved", "join", "join", "trained", "start", "kill", "RollbackEvent", "FailoverEvent",
)  # fmt: skip
"""Points to which the world, or the program, comes."""

KINDS = {
    "kill": 3.0, "kill_many": 2.0, "host_dies": 1.0, "power": 0.3, "stop": 1.5, "drag": 0.7,
    "cut": 1.0, "cut_bytes": 1.0, "stall": 1.0, "clog": 1.0, "partition": 1.0, "one_way": 0.7,
    "lose_request": 1.5, "lose_reply": 1.5, "lose_in_flight": 1.5, "slow": 1.0,
    "vanish": 0.5, "close": 0.5, "disk": 1.5, "leave": 1.0, "add_worker": 0.5, "remove_worker": 0.5,
    "last_words": 1.5,
}  # fmt: skip
"""The kinds of faults, with the weights that are drawn on top of those of a run."""

FILES = ("create", "write", "sync", "sync_directory", "make_directory", "rename", "unlink")
"""What is done to files; the disk may fail then."""

DEATHS = ("kill", "kill", "kill_many", "host_dies", "stop", "cut")
"""What comes soon after something else."""

CUT_OFF = ("partition", "one_way", "stall", "clog", "stop", "drag")
"""After these somebody goes on who does not know what has happened since."""

THEMES = {
    "steps": (
        "place ps0.step.decided", "place ps0.step.decided", "place ps0.step.measured",
        "place ps.step.measured", "place ps.step.applied", "place ps0.step.applied",
        "message CloseStep", "message MeasureStep", "message Contribute",
    ),
    "pushes": (
        "place worker.push.begun", "place worker.push.between_ps", "place worker.push.between_ps",
        "place worker.push.staged", "place worker.push.answered", "place ps.push.received",
        "place ps.push.applied", "place ps.assign.applied", "message Push", "message StagePush",
    ),
    "copies": (
        "place ps.backup.sending", "place ps.backup.taken", "message BeginBackup",
        "message FillBackup", "message BackUp", "message LogEntries", "message LogEntries",
        "message Promote", "moment FailoverEvent",
    ),
    "saves": (
        "place checkpoint.ps.write", "place checkpoint.file.written",
        "place checkpoint.before_commit", "place checkpoint.before_rename", "moment save",
        "message Gate", "message Freeze", "message WriteFrozen", "file rename",
    ),
    "rollbacks": (
        "moment saved", "moment saved", "moment saved", "moment saved", "message PrepareSnapshot",
        "message FillSnapshot", "message RestoreSnapshot", "moment RollbackEvent",
    ),
    "late words": (),
}  # fmt: skip
"""Where faults come together: what some runs have most of theirs at.

Runs with "late words" have nothing else: of a worker's push a word arrives after the rollback that
has undone it; or a ps dies before its backup has what it was told last; or some updates are slow.
"""

COMES_BACK = {
    "replica": (
        "message Promote", "message Promote", "message Promote", "moment FailoverEvent",
        "message BeginBackup", "message FillBackup", "message LogEntries", "message AskServed",
    ),
    "checkpoint": (
        "message PrepareSnapshot", "message PrepareSnapshot", "message FillSnapshot",
        "message RestoreSnapshot", "message RestoreSnapshot", "moment RollbackEvent",
    ),
    "none": ("message AttachPs", "message CreateShards", "message AttachWorker"),
}  # fmt: skip
"""By how a ps comes back: to what that comes, and at which others are hit."""

PLACES = (
    "worker.closure.start", "worker.closure.end", "worker.push.begun", "worker.push.between_ps",
    "worker.push.staged", "worker.push.answered", "ps.push.received", "ps.push.applied",
    "ps.assign.applied", "ps.backup.sending", "ps.backup.taken", "ps.create.done",
    "ps.step.measured", "ps.step.applied", "ps0.step.decided", "ps0.step.measured",
    "ps0.step.applied", "coordinator.dispatch", "coordinator.result", "checkpoint.ps.write",
    "checkpoint.file.written", "checkpoint.before_commit", "checkpoint.before_rename",
)  # fmt: skip


class FaultDraw:
    """Draws the faults of one plan.

    Args:
        rng: Of the plan.
        num_ps: How many ps tasks there are.
        num_workers: How many workers.
        recovery: Of the plan.
        train_s: Seconds within which faults happen.
        has_steps: Whether there are synchronous steps.
        has_saves: Whether the program saves.
    """

    def __init__(
        self,
        rng: random.Random,
        num_ps: int,
        num_workers: int,
        recovery: str,
        train_s: float,
        has_steps: bool,
        has_saves: bool,
    ) -> None:
        self.rng = rng
        self._train_s = train_s
        self._num_workers = num_workers
        self._ps = [f"ps-{index}" for index in range(num_ps)]
        self._workers = [f"worker-{index}" for index in range(num_workers)]
        of_ps = self._ps * rng.choice((1, 2, 5))
        if recovery == "none" and rng.random() < 0.8:
            of_ps = []  # one that dies takes everything with it
        self._pool = [*of_ps, *self._workers, *rng.choice(([], ["chief-0"], ["chief-0"] * 2))]
        self._triggers = [rng.random() ** 2 for _ in range(7)]
        self._bursts = rng.choice((0.0, 0.3, 0.7))
        self._recovery = recovery
        self._themes: list[str] = []
        if rng.random() < 0.5:
            themes = ["pushes", *["steps"] * 2 * has_steps]
            themes += ["copies"] * (recovery == "replica")
            themes += ["saves", "rollbacks"] * has_saves
            aims = {"checkpoint": 3 * (has_saves and num_ps > 1), "replica": 1}
            themes += ["late words"] * aims.get(recovery, 0)
            self._themes = rng.choices(themes, k=rng.choice((1, 1, 2)))

    def draw(self) -> tuple[Fault, ...]:
        """Return the faults, in the order of their times."""
        rng = self.rng
        if "late words" in self._themes[:1]:
            return self._late_words()
        kinds = [kind for kind in KINDS if rng.random() < 0.4]  # some do not exist in this run
        if not kinds or rng.random() < 0.1:
            return ()
        kinds += rng.choice(([], ["kill"], ["kill", "host_dies"]))
        weights = [KINDS[kind] * rng.random() ** 3 for kind in kinds]
        faults: list[Fault] = []
        for kind in rng.choices(kinds, weights, k=rng.randrange(1, 1 + rng.choice((2, 3, 5, 9)))):
            points = THEMES[rng.choice(self._themes)] if self._is_of_theme() else ()
            faults.append(self._aimed(points) if points else self._fault(kind))
            if kind in ("kill", "kill_many", "host_dies") and rng.random() < self._bursts:
                faults.append(self._aimed(COMES_BACK[self._recovery]))
            if rng.random() < self._bursts or (kind == "stop" and rng.random() < 0.5):
                faults.append(self._next(faults[-1]))
        return tuple(sorted(faults, key=lambda fault: fault.when.at_s))

    def _late_words(self) -> tuple[Fault, ...]:
        rng = self.rng
        if self._recovery == "checkpoint" and rng.random() < 0.5:
            counts = [self._count(40) for _ in range(8)]
            names = [rng.choice(("Push", "Assign")) for _ in counts]
            whens = [Trigger(0.0, "message", *each) for each in zip(names, counts, strict=True)]
            return tuple(Fault("slow", when) for when in whens)
        when = Trigger(0.0, "moment", "saved", self._count(3))
        targets = rng.choice(self._workers), rng.choice(self._ps)
        if self._recovery == "replica":
            when = Trigger(0.0, "message", rng.choice(MESSAGES[:6]), self._count(8))
            targets = targets[1], targets[1]
        seconds, amount = self._seconds("last_words"), self._amount("last_words")
        return (Fault("last_words", when, targets, seconds, amount),)

    def _fault(self, kind: str) -> Fault:
        targets = self._targets(kind)
        when = self._message() if kind.startswith("lose") or kind == "slow" else self._trigger()
        if kind == "disk":
            when = self._file()
        if when.kind and self.rng.random() < 0.4:
            if kind in ("kill", "host_dies", "stop", "cut", "cut_bytes", "disk"):
                targets = ()  # whoever reaches it
        if when.kind in ("turn", "life") and targets and self.rng.random() < 0.7:
            when = dataclasses.replace(when, at=targets[0])
        return Fault(kind, when, targets, self._seconds(kind), self._amount(kind))

    def _is_of_theme(self) -> bool:
        return bool(self._themes) and self.rng.random() < 0.7

    def _aimed(self, points: Sequence[str]) -> Fault:
        """Draw a death at one of some points, or a moment later."""
        rng = self.rng
        kind = rng.choice((*DEATHS, "cut", "cut_bytes"))
        point, _, name = rng.choice(points).partition(" ")
        delay_s = rng.choice((0.0, 0.0, round(10 ** rng.uniform(-4, -0.5), 5)))
        is_rare = point in ("moment", "file") or name.startswith("checkpoint") or name in RECOVERY
        when = Trigger(0.0, point, name, self._count(3 if is_rare else 8), "", delay_s)
        targets = self._targets(kind)
        if name == "saved" and set(self._ps) & set(self._pool):
            kind, targets = rng.choice(("kill", "host_dies", "last_words")), (rng.choice(self._ps),)
            if kind == "last_words":
                targets = rng.choice(self._workers), *targets
        elif rng.random() < 0.5 and kind != "kill_many":
            targets = ()  # whoever reaches it
        return Fault(kind, when, targets, self._seconds(kind), self._amount(kind))

    def _next(self, first: Fault) -> Fault:
        """Draw what happens soon after a fault, while others still deal with it."""
        rng = self.rng
        kind = rng.choice(DEATHS)
        delay_s = round(10 ** rng.uniform(-4, 0.7), 5)
        targets, when = self._targets(kind), first.when
        if first.kind in CUT_OFF and first.targets and rng.random() < 0.7:
            kind = rng.choice(("cut", "cut", "kill")) if first.kind == "stop" else "kill"
            delay_s = min(delay_s, round(first.seconds * rng.random(), 5))
            allowed = [name for name in first.targets if name in self._pool or kind == "cut"]
            if allowed:
                when = dataclasses.replace(when, delay_s=when.delay_s + delay_s)
                return Fault(
                    kind, when, (rng.choice(allowed),), self._seconds(kind), self._amount(kind)
                )
        deadly = first.kind in ("kill", "kill_many", "host_dies", "power")
        match rng.choice(
            ("delay", "moment", "life", "message") if deadly else ("delay", "message")
        ):
            case "delay":
                when = dataclasses.replace(when, delay_s=when.delay_s + delay_s)
            case "moment":
                name = rng.choice(MOMENTS[5:])
                when = Trigger(when.at_s, "moment", name, delay_s=delay_s)
                if name == "start" and rng.random() < 0.5:
                    targets = ()
            case "life":
                name = (first.targets or targets)[0]
                when = Trigger(max(when.at_s, 1e-4), "life", "", self._count(800), name)
                targets = (name,) if rng.random() < 0.7 else targets
            case "message":
                when = Trigger(when.at_s, "message", rng.choice(RECOVERY), self._count(4))
                if rng.random() < 0.5 and kind != "kill_many":
                    targets = ()
        return Fault(kind, when, targets, self._seconds(kind), self._amount(kind))

    def _count(self, most: int) -> int:
        return int(most ** self.rng.random())

    def _trigger(self) -> Trigger:
        rng = self.rng
        at_s = round(self._train_s * rng.random() ** rng.choice((1, 1, 3)), 4)
        kinds = ("", "turn", "life", "message", "place", "moment", "file")
        match rng.choices(kinds, self._triggers)[0]:
            case "turn":
                return Trigger(at_s * rng.choice((0, 0, 1)), "turn", count=self._count(4_000))
            case "life":
                return Trigger(0.0, "life", count=self._count(2_000))
            case "message":
                return self._message()
            case "file":
                return self._file()
            case "place":
                at_s *= rng.choice((0, 0, 1))
                return Trigger(at_s, "place", rng.choice(PLACES), self._count(15))
            case "moment":
                name = rng.choice(MOMENTS[:7])
                return Trigger(
                    0.0, "moment", name, self._count(3), delay_s=round(10 ** rng.uniform(-4, 0), 5)
                )
        return Trigger(at_s)

    def _message(self) -> Trigger:
        """Draw a message: by its name, or the how manieth of a process."""
        rng = self.rng
        at_s = round(self._train_s * rng.choice((0, 0, 0, rng.random())), 4)
        if rng.random() < 0.5:
            at = rng.choice((*self._ps, *self._workers, "chief-0"))
            return Trigger(at_s, "message", "", self._count(60), at)
        names = rng.choice((MESSAGES, MESSAGES[:4]))
        return Trigger(at_s, "message", rng.choice(names), self._count(8))

    def _file(self) -> Trigger:
        rng = self.rng
        name = rng.choice(("", "", *FILES))
        return Trigger(0.0, "file", name, self._count(20 if name else 60))

    def _targets(self, kind: str) -> tuple[str, ...]:
        rng = self.rng
        names = sorted(set(self._pool))
        if kind in ("partition", "one_way"):
            names = sorted({*self._ps, *self._workers, "chief-0"})
            if self._recovery == "replica" and rng.random() < 0.4:
                names = self._ps
            return tuple(rng.sample(names, 2))
        if kind == "last_words":  # whose, and who dies; who trains says most
            says = rng.choice((*self._workers, *self._workers, rng.choice(self._ps), "chief-0"))
            return says, rng.choice((says, rng.choice(self._pool)))
        if kind in ("leave", "remove_worker"):
            return (rng.choice(self._workers),)
        if kind == "vanish":
            names = [name for name in names if name != "chief-0"]
            return (rng.choice(names or self._workers),)
        if kind == "kill_many":
            return tuple(rng.sample(names, min(rng.choice((2, 2, 3)), len(names))))
        if kind in ("cut", "cut_bytes", "stall", "clog"):
            names.append("chief-0")
            return (rng.choice(names),)
        return () if kind in ("power", "add_worker", "close") else (rng.choice(self._pool),)

    def _seconds(self, kind: str) -> float:
        rng = self.rng
        longest = rng.choice((0.0, 0.05, 0.4, 3.0, 20.0, 90.0))
        if kind in ("stop", "drag"):
            longest = rng.choice((0.1, 2.0, 8.0, 40.0, 200.0))
        elif kind in ("stall", "clog", "partition", "one_way", "last_words"):
            longest = rng.choice((0.1, 2.0, 20.0, 90.0))
        return round(longest * rng.random(), 4)

    def _amount(self, kind: str) -> float:
        rng = self.rng
        if kind == "drag":
            return round(10 ** rng.uniform(-5, -1.3), 6)
        if kind == "last_words":
            return round(10 ** rng.uniform(-3, 0), 5)
        if kind == "disk":
            return float(rng.choice((errno.ENOSPC, errno.EIO)))
        if kind == "add_worker":
            return self._num_workers + rng.choice((0, 0, 1))
        return float(rng.choice((1, 10, 100, 1000, 10_000)))
