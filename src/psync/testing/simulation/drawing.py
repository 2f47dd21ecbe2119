"""The plan of a seed, drawn: cluster, program and faults."""

from __future__ import annotations

import dataclasses
import errno
import random
from collections.abc import Sequence
from typing import Any

from psync.testing.simulation.plan import (
    Batch,
    Call,
    ClosurePlan,
    Fault,
    GroupPlan,
    Plan,
    Trigger,
)
from psync.testing.simulation.tight import SIZES

MESSAGES = (
    "Update", "Update", "Update", "Read", "Held", "FollowParts", "CloseStep", "KeepPart",
    "LogEntries", "BackUp", "BeginBackup", "FillSnapshot", "Promote", "Freeze", "Gate",
    "WriteFrozen", "PrepareSnapshot", "FillSnapshot", "RestoreSnapshot", "AttachPs", "AdoptShards",
    "Fence", "AttachWorker", "RunClosures", "ClosureResults", "AwaitWaiters", "ReportSchedule",
    "FinalBelow",
    "CreateShards", "GrantCoordinator", "AskServed", "LockShards", "EndSession",
)  # fmt: skip
"""Requests that faults may wait for, or lose."""

RECOVERY = (
    "AttachPs", "CreateShards", "AttachWorker", "BeginBackup", "FillSnapshot", "BackUp",
    "LogEntries", "Promote", "Fence", "PrepareSnapshot", "RestoreSnapshot", "AskServed",
    "AdoptShards", "GrantCoordinator", "AskServed", "EndSession", "FollowParts",
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
        "message CloseStep", "message CloseStep", "message Held", "place ps.part.held",
    ),
    "pushes": (
        "place worker.push.begun", "place worker.push.between_ps", "place worker.push.between_ps",
        "place worker.push.sent", "place worker.push.answered", "place ps.push.received",
        "place ps.push.applied", "place ps.assign.applied", "message Update", "message Held",
        "place ps.part.held",
    ),
    "copies": (
        "place ps.backup.sending", "place ps.backup.taken", "message BeginBackup",
        "message FillSnapshot", "message BackUp", "message LogEntries", "message LogEntries",
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
        "message BeginBackup", "message FillSnapshot", "message LogEntries", "message AskServed",
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
    "worker.push.sent", "ps.part.held", "worker.push.answered", "ps.push.received",
    "ps.push.applied",
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
            whens = [Trigger(0.0, "message", "Update", count) for count in counts]
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


def drawn(seed: int, shape: str = "any") -> Plan:
    """Return the plan of a seed.

    Args:
        seed: Of everything.
        shape: One of ``SHAPES``: what is drawn is of this kind.
    """
    rng = random.Random(f"{seed}:{shape}:plan")
    return _Draw(seed, rng, shape).plan()


def _duration(batches: Sequence[Batch], num_workers: int) -> float:
    """Estimate how long the program trains if nothing happens, in seconds."""
    pauses = sum(
        call.pause_s for batch in batches for each in batch.closures for call in each.calls
    )
    return 0.3 + sum(batch.pause_s + 0.1 for batch in batches) + 1.5 * pauses / num_workers


RULES = ("Momentum", "Adam", "Adagrad", "RMSprop", "AMSGrad", "Nadam", "Lamb")
"""Of groups; all but the last also of table "moved"."""

ASYNCHRONOUS = ("dense", "rows", "added", "both", "moved", "scattered", "held", "counted",
                "averaged", "spread", "metered")  # fmt: skip

BOUNDED = ("dense", "rows", "both", "moved", "spread")
"""Tables whose pushes a bound of staleness holds back."""

WORKS = ("ganged", "visited")

EXACT = ("dense", "rows", "added", "both", "scattered")
"""Tables each of whose calls is one update, and leaves its mark on all shards."""

SHAPES = ("any", "async", "sync", "replica", "sync-replica", "checkpoint", "damaged", "metered",
          "gone", "visited", "uneven", "attach", "begins")  # fmt: skip
"""Kinds of plans. The last seven: the newest checkpoint is damaged before a ps dies, beside what
else happens; metrics alone; a ps goes for good, beside what else happens; data
shards are visited, or data are trained on that are uneven, beside what else happens; chiefs die in
saves, perhaps with a worker or after a fail-over, or while they restore, and the next ones attach;
ps tasks die while the next chief begins, and restores."""

SAVING = (
    "message Gate", "message Gate", "message Freeze", "message Freeze", "message OpenGate",
    "message Update", "message Update", "moment save", "moment kill",
)  # fmt: skip
"""Where chiefs die in plans of that shape."""


class _Draw:
    """Draws one plan."""

    def __init__(self, seed: int, rng: random.Random, shape: str) -> None:
        self.seed = seed
        self.rng = rng
        self.shape = shape
        self.rolls = random.Random(f"{seed}:rolls back")  # apart, so that what else is drawn stays
        self.restores = random.Random(f"{seed}:restores")  # and this
        self.columns: dict[str, int] = {}

    def plan(self) -> Plan:
        rng, shape = self.rng, self.shape
        recovery = {
            "replica": "replica", "sync-replica": "replica", "checkpoint": "checkpoint",
            "attach": ("replica", "checkpoint")[self.seed % 2], "begins": "checkpoint",
            "damaged": "checkpoint",
        }.get(shape) or rng.choice(
            ("replica", "replica", "replica", "checkpoint", "checkpoint", "none"))  # fmt: skip
        several = recovery == "replica" or shape == "attach"
        num_ps = rng.choice((2, 2, 3)) if several else rng.choice((1, 2, 2, 3))
        num_workers = rng.choice((1, 2, 2, 3))
        num_groups = rng.choice((0, 1, 1, 2))
        if shape.startswith("sync"):
            num_groups = rng.choice((1, 1, 2))
        elif shape in ("async", "metered"):
            num_groups = 0
        groups = tuple(self._group(num_workers) for _ in range(num_groups))
        works_uneven = self._uneven()
        if works_uneven:  # a worker without data is no replica that has some
            groups = tuple(
                dataclasses.replace(each, options=each.options | {"min_replicas": 1})
                for each in groups
            )
        kinds = self._kinds(num_groups)
        rolls_back = recovery == "checkpoint" and self.rolls.random() < 0.3
        if rolls_back and "spread" not in kinds and self.rolls.random() < 0.5:
            kinds = ["spread" if kind in ("dense", "added") else kind for kind in kinds]
        self.weighted = {
            f"sync{number}"
            for number, group in enumerate(groups)
            if not group.rows and rng.random() < 0.5  # of rows each is divided by its own weights
        }
        batches = tuple(self._batch(kinds, recovery) for _ in range(rng.choice((1, 1, 2, 3))))
        bound = rng.choice((-1, -1, 0, 1, 3))
        races = bound >= 0 and num_workers > 1 and rng.random() < 0.06
        if races := races and not shape.startswith("sync"):
            self.columns.clear()
            batches = (self._race(),)
        train_s = _duration(batches, num_workers) * rng.choice((0.7, 1.0, 1.5))
        has_saves = any(batch.save for batch in batches)
        faults = FaultDraw(rng, num_ps, num_workers, recovery, train_s, bool(groups), has_saves)
        low = rng.choice((0.0, 0.0002, 0.001))
        padding = rng.choice((0, 0, 0, 0, 9_000))
        latency = (low, low + rng.choice((0.0, 0.001, 0.01, 0.1)))
        tightness = rng.choice((0.0, 0.0, 0.0, 0.1, 0.5))
        self.num_shards = rng.choice((1, num_ps, num_ps, 2 * num_ps))
        plan = Plan(
            seed=self.seed,
            num_ps=num_ps,
            num_workers=num_workers,
            num_shards=self.num_shards,
            recovery=recovery,
            attach=rng.random() < 0.5,
            latency=latency,
            chunk=rng.choice(((1, 4096), (1 << 10, 1 << 16), (1 << 14, 1 << 20))),
            padding=padding,
            fillers=rng.randrange(3),
            groups=groups,
            bound=bound,
            batches=batches,
            faults=() if races else (*self._gone(num_ps, train_s), *faults.draw()),
            train_s=train_s,
            # With both, a ping takes as long as a peer may be silent.
            spread=rng.choice((0.0, 0.0, 1.0, 1.0 if latency[1] >= 0.1 else 2.0)),
            limits=self._limits(),
            first_step=rng.choice((0, 0, 5)) if groups else 0,
            all_workers=races or rng.random() < (0.3 if bound < 0 else 0.6),  # clocks are certain
            rule=rng.choice(RULES[:-1]),
            accumulator={
                "reduction_type": rng.choice(("SUM", "MEAN")),
                "max_staleness": rng.choice((0, 0, 2)),
            },
            cancels_takes=rng.random() < 0.3,
            works=()
            if races
            else tuple(name for name in WORKS if self._works(name)) + self._uneven(),
            sizes=self._sizes(tightness, has_padding=padding > 0),
            layouts=self._layouts(recovery, num_ps, groups),
            # Apart, so that what else is drawn of a seed stays.
            compression=random.Random(f"{self.seed}:compression").choice(
                (None, None, "bf16", "f16")
            ),
            sets_steps=random.Random(f"{self.seed}:steps").random() < 0.3,
            packed=(packed := random.Random(f"{self.seed}:packed")).random() < 0.2,
        )
        if plan.packed and packed.random() < 0.5:
            sizes = plan.sizes | {"packed": packed.choice((100, 1000))}
            plan = dataclasses.replace(plan, sizes=sizes)
        if rolls_back and has_saves and not races:
            plan = self._rolling_back(plan)
        if recovery == "checkpoint" and not races:
            plan = self._damaging(plan)
        if not races and not plan.works:  # their joins may take the request first
            plan = self._stopping(plan)
        if shape == "attach":
            plan = self._attaching(plan)
        if shape == "begins":
            plan = self._beginning(plan)
        if recovery == "replica" and rng.random() < 0.1:
            plan = self._with_small_budgets(plan)
        return self._with_memory(plan) if rng.random() < 0.5 else plan

    def _works(self, name: str) -> bool:
        return self.rng.random() < 0.15 or name == self.shape

    def _uneven(self) -> tuple[str, ...]:
        """Return what trains on uneven data, drawn apart, so that what else is drawn stays."""
        is_one = random.Random(f"{self.seed}:uneven").random() < 0.15
        return ("uneven",) if is_one or self.shape == "uneven" else ()

    def _rolling_back(self, plan: Plan) -> Plan:
        """Let a ps die after a save."""
        rng = self.rolls
        delay_s = rng.choice((0.0, round(10 ** rng.uniform(-4, 0.5), 5)))
        when = Trigger(0.0, "moment", "saved", rng.choice((1, 1, 2)), "", delay_s)
        target = f"ps-{rng.randrange(plan.num_ps)}"
        fault = Fault("kill", when, (target,), rng.choice((0.0, 0.3, 3.0)))
        return dataclasses.replace(plan, faults=(fault, *plan.faults))

    def _damaging(self, plan: Plan) -> Plan:
        """Let the newest checkpoint be damaged, and a ps die, drawn apart."""
        rng = random.Random(f"{self.seed}:damage")
        if self.shape != "damaged" and rng.random() >= 0.3:
            return plan
        batches = plan.batches
        if self.shape == "damaged":
            batches = tuple(self._saving(each, rng) for each in batches * rng.choice((1, 2)))
        faults = []
        for number in range(rng.choice((1, 1, 2))):
            count, delay_s = (
                rng.choice((2, 3)) + number,
                rng.choice((0.0, round(10 ** rng.uniform(-4, 0.5), 5))),
            )
            when = Trigger(0.0, "moment", "saved", count, "", delay_s)
            dies = dataclasses.replace(when, delay_s=delay_s + rng.choice((0.0, 0.001, 0.1)))
            target = f"ps-{rng.randrange(plan.num_ps)}"
            faults.append(Fault("damage", when, (), rng.choice((1.0, 20.0, 90.0))))
            faults.append(Fault("kill", dies, (target,), rng.choice((0.0, 0.3, 3.0))))
        others = plan.faults if rng.random() < 0.5 else ()
        return dataclasses.replace(plan, batches=batches, faults=(*faults, *others))

    def _saving(self, batch: Batch, rng: random.Random) -> Batch:
        """Return a batch that has columns of its own, and saves."""
        closures = [
            dataclasses.replace(
                each,
                calls=tuple(
                    dataclasses.replace(call, column=self._column(call.kind)) for call in each.calls
                ),
            )
            for each in batch.closures
        ]
        return dataclasses.replace(
            batch, closures=tuple(closures), save=rng.choice(("hot", "quiet", "quiet"))
        )

    def _stopping(self, plan: Plan) -> Plan:
        """Let a step ask for the end of training, drawn apart, so that what else is drawn stays."""
        rng = random.Random(f"{self.seed}:stops")
        if rng.random() >= 0.12:
            return plan
        number = rng.randrange(len(plan.batches))
        closures = list(plan.batches[number].closures)
        at = rng.randrange(len(closures))
        closures[at] = dataclasses.replace(closures[at], stops=True)
        batches = list(plan.batches)
        batches[number] = dataclasses.replace(batches[number], closures=tuple(closures))
        # What has begun by then surely ends by itself where nobody is lost.
        faults = plan.faults if rng.random() < 0.6 else ()
        return dataclasses.replace(plan, batches=tuple(batches), faults=faults)

    def _attaching(self, plan: Plan) -> Plan:
        """Let workers push all the time, and chiefs die while they save."""
        rng = self.rng
        self.columns.clear()
        kinds = rng.sample(EXACT, rng.choice((1, 2)))
        batches = []
        for _ in range(rng.choice((2, 4))):
            names = [rng.choice(kinds) for _ in range(rng.choice((12, 24)))]
            calls = [Call(name, self._column(name), rng.random() < 0.3) for name in names]
            batches.append(Batch(tuple(ClosurePlan((call,)) for call in calls), "hot"))
        faults = []
        for _ in range(rng.choice((1, 2, 4))):
            kind, _, name = rng.choice(SAVING).partition(" ")
            delay_s = rng.choice((0.0, round(10 ** rng.uniform(-4, -1), 5)))
            when = Trigger(0.0, kind, name, rng.randrange(1, 12), "", delay_s)
            worker = f"worker-{rng.randrange(plan.num_workers)}"
            dies = rng.choice((("chief-0",), ("chief-0",), ("chief-0", worker), (worker,)))
            if plan.recovery == "replica" and rng.random() < 0.3:
                dies = (f"ps-{rng.randrange(plan.num_ps)}",)
            faults.append(Fault("kill_many", when, dies, rng.choice((0.0, 0.3, 3.0))))
        if self.restores.random() < 0.3:
            faults = self._restored_in_vain(plan)
        return dataclasses.replace(
            plan, attach=True, groups=(), works=(), first_step=0, layouts=(), sets_steps=False,
            num_shards=rng.choice((plan.num_ps, 2 * plan.num_ps)), bound=-1,
            batches=tuple(batches), faults=tuple(faults),
        )  # fmt: skip

    def _restored_in_vain(self, plan: Plan) -> list[Fault]:
        """Let a chief that cannot attach, since a ps has died, die before it has restored."""
        rng = self.restores
        saved = Trigger(0.0, "moment", "saved", rng.choice((1, 2)))
        lost = "chief-0", f"ps-{rng.randrange(plan.num_ps)}"
        delay_s = round(10 ** rng.uniform(-1.5, 0.7), 5)
        when = Trigger(0.0, "message", "MarkRestore", plan.num_ps, "", delay_s)
        if rng.random() < 0.3:  # or before it begins to: the third time that a chief starts
            when = Trigger(0.0, "message", "GrantCoordinator", 3, "", delay_s / 2)
        return [
            Fault("kill_many", saved, lost, 0.3), Fault("kill_many", when, ("chief-0",), 0.3),
        ]  # fmt: skip

    def _beginning(self, plan: Plan) -> Plan:
        """Let the chief die once it has saved, and ps tasks while its next life begins."""
        rng = self.rng
        first, *others = plan.batches
        faults = [Fault("kill", Trigger(0.0, "moment", "saved"), ("chief-0",), 0.1)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            delay_s = round(10 ** rng.uniform(-1.5, 0.3), 5)
            when = Trigger(1e-3, "moment", "start", 1, "chief-0", delay_s)
            target = f"ps-{rng.randrange(plan.num_ps)}"
            faults.append(Fault("kill", when, (target,), rng.choice((0.0, 0.3, 3.0))))
        return dataclasses.replace(
            plan, attach=False, layouts=(), faults=tuple(faults), works=(),
            batches=(dataclasses.replace(first, save="quiet"), *others),
        )  # fmt: skip

    def _with_memory(self, plan: Plan) -> Plan:
        """Let all tasks be of one host; what they lend is small, as their values are."""
        rng = self.rng
        sizes = {"slabs": rng.choice(SIZES["slabs"].values), "used again": 16}
        if not plan.padding:
            sizes["lent"] = rng.choice((0, 0, 100))
            if rng.random() < 0.5:
                sizes["copied at once"] = rng.choice(SIZES["copied at once"].values)
            if self.shape == "sync" and random.Random(f"{self.seed}:kept").random() < 0.5:
                sizes |= {"lent": 0, "small bodies": 0}  # a push may return while parts are lent
        if not plan.groups and not plan.layouts and not plan.padding:
            plan = self._in_parts(plan)
        return dataclasses.replace(plan, shares=True, sizes=plan.sizes | sizes)

    def _in_parts(self, plan: Plan) -> Plan:
        """Let bodies be of one shard each, and some be read where they lie, beside others."""
        if random.Random(f"{self.seed}:parts").random() < 0.5:
            return plan
        sizes = {"members of a request": 1, "kept": 0}
        return dataclasses.replace(plan, num_shards=1, sizes=plan.sizes | sizes)

    def _with_small_budgets(self, plan: Plan) -> Plan:
        """Let ps tasks have little room for pushes, and less for entries under way to backups."""
        late_s = self.rng.choice(SIZES["acknowledged by a backup"].values[:2])
        sizes = {"entries shipped": 1, "acknowledged by a backup": late_s, "small bodies": 0}
        return dataclasses.replace(
            plan, limits=plan.limits | {"unfinished_bytes": 1}, sizes=plan.sizes | sizes
        )

    def _gone(self, num_ps: int, train_s: float) -> tuple[Fault, ...]:
        """Draw when a ps goes for good, in plans of that shape."""
        if self.shape != "gone":
            return ()
        when = Trigger(round(train_s * self.rng.random(), 4))
        return (Fault("vanish", when, (f"ps-{self.rng.randrange(num_ps)}",)),)

    def _sizes(self, tightness: float, *, has_padding: bool) -> dict[str, float]:
        """Draw which sizes are small; blocks often are, so that others come in between."""
        rng = self.rng
        if has_padding:  # of many pieces, which would take long
            return {}
        sizes = {
            name: rng.choice(size.values)
            for name, size in SIZES.items()
            if size.values and rng.random() < tightness
        }
        if rng.random() < 0.25:
            sizes |= {"blocks": rng.choice((8, 64)), "turns": 0}
            if rng.random() < 0.5:
                sizes["cores"] = rng.choice(SIZES["cores"].values)
            else:
                sizes["slow pieces"] = rng.choice(SIZES["slow pieces"].values)
        return sizes

    def _layouts(
        self, recovery: str, num_ps: int, groups: Sequence[GroupPlan]
    ) -> tuple[tuple[int, int], ...]:
        """Draw as how many ps tasks and shards later lives restore."""
        rng = self.rng
        if recovery == "none" or rng.random() < 0.75:
            return ()
        # A norm is summed up shard by shard, so with others its last bit may differ.
        shards = (1, 2, 3, num_ps, 2 * num_ps)
        cut_alike = any(group.limits or group.rule == "Lamb" for group in groups)
        least = 2 if recovery == "replica" else 1
        return tuple(
            (rng.randint(least, num_ps), self.num_shards if cut_alike else rng.choice(shards))
            for _ in range(rng.choice((1, 2)))
        )

    def _kinds(self, num_groups: int) -> list[str]:
        """Draw which tables are used, with wild weights."""
        rng = self.rng
        of_groups = [f"sync{number}" for number in range(num_groups)]
        if self.shape.startswith("sync"):
            return of_groups
        if self.shape == "metered":
            return ["metered"]
        kinds = rng.sample(ASYNCHRONOUS, rng.choice((1, 1, 2, 3))) + of_groups
        return [kind for kind in kinds for _ in range(rng.choice((1, 1, 5)))]

    def _group(self, num_workers: int) -> GroupPlan:
        rng = self.rng
        total = rng.choice((num_workers, num_workers, max(1, num_workers - 1), 1))
        needed = max(1, total + rng.choice((-2, -1, 0, 0, 0, 1, 3)))
        options: dict[str, Any] = {
            "reduction": rng.choice(("sum", "sum", "mean")), "pull_ahead": rng.random() < 0.5
        }  # fmt: skip
        match rng.choice(("free", "free", "strict", "deterministic", "tensorflow_compat")):
            case "free":
                pass
            case bound:
                options[bound] = True
                needed = total if bound == "deterministic" else needed
        options |= {
            "replicas_to_aggregate": needed,
            "total_num_replicas": total,
            "min_replicas": rng.choice((1, 1, 1, min(2, total), total)),
            "patience_s": rng.choice((10_000.0, 10_000.0, 1.0)),
        }
        rows = rng.random() < 0.2
        if rows and rng.random() < 0.5:
            options["sparse_divisor"] = "total"
        rule = rng.choice(("SGD", "SGD", "SGD", rng.choice(RULES)))
        if rule == "Lamb" and rows:
            rule = "Adam"
        limits = rng.choice(({}, {}, {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}))
        decay = {"decay": rng.choice((0.0, 0.5, 0.99)), "num_updates": rng.random() < 0.5}
        averages = rng.choice(({}, {}, decay))
        return GroupPlan(options, rng.random() < 0.5, rule, dict(limits), rows, averages)

    def _weight(self, kind: str) -> float:
        """Draw a weight: a power of two, with which sums are exact."""
        drawn: float = self.rng.choice((1.0, 1.0, 0.5, 2.0))
        return drawn if kind in self.weighted else 1.0

    def _limits(self) -> dict[str, int]:
        """Draw limits that are legal, and so low that tasks wait for each other all the time."""
        rng = self.rng
        low = {"unfinished_bytes": (1, 4096), "handshakes": (2, 4)}
        if rng.random() < 0.75:
            return {}
        return {name: rng.choice(values) for name, values in low.items() if rng.random() < 0.5}

    def _column(self, kind: str) -> int:
        self.columns[kind] = self.columns.get(kind, -1) + 1
        return self.columns[kind]

    def _race(self) -> Batch:
        """Draw a batch in which workers run ahead of those with much to do, up to the bound."""
        kind, pauses = self.rng.choice(BOUNDED), (0.0, 0.0, 0.0, 0.5)
        calls = [Call(kind, self._column(kind), True, self.rng.choice(pauses)) for _ in range(12)]
        return Batch(tuple(ClosurePlan((call,)) for call in calls))

    def _batch(self, kinds: Sequence[str], recovery: str) -> Batch:
        rng = self.rng
        pause_s = rng.choice((0.0, 0.002, 0.02, 0.3, 1.0))
        may_fail, may_cancel = rng.choice((0, 0, 0.1)), rng.choice((0, 0, 0.2))
        closures = []
        for number in range(rng.choice((1, 2, 4, 12))):
            calls = []
            for _ in range(rng.choice((1, 1, 2))):
                kind = rng.choice(kinds)
                calls.append(
                    Call(
                        kind,
                        self._column(kind),
                        rng.random() < 0.7,
                        round(rng.random() * pause_s, 5),
                        self._weight(kind),
                    )
                )
            closures.append(
                ClosurePlan(
                    tuple(calls),
                    fails=rng.random() < may_fail,
                    cancel_s=rng.random() * 2 if rng.random() < may_cancel else None,
                    needs=rng.randrange(number) if number and rng.random() < 0.1 else -1,
                )
            )
        save = "" if recovery == "none" else rng.choice(("", "hot", "quiet", "hot"))
        return Batch(tuple(closures), save, rng.choice((0.0, 0.0, 0.5, 3.0)))
