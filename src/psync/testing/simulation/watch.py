"""Coverage of a run: the situations that matter in which it has been.

They are read from the trace of a run, after it: starts and deaths, places that were reached,
requests that were served, what the program was told, what tasks have logged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

MARKS = (
    # Deaths.
    "two processes die at once",
    "three processes die at once",
    "all ps tasks are dead",
    "a machine dies",
    "a ps dies while variables are created",
    "a process that serves several ps tasks dies",
    "ps 0 dies while a step is closing",
    "another ps dies while a step is closing",
    "a ps dies while a step is measured",
    "a worker dies while a step is closing",
    "a worker dies with a push begun",
    "a worker dies between the parts of a push",
    "a worker dies with a push on its way",
    "the chief dies while closures run",
    "the chief dies while it begins",
    "a stopped worker goes on after its session has ended",
    "a stopped ps goes on after it was given up",
    # Copies and fail-overs.
    "a ps dies within a copy",
    "a ps dies while a copy is filled",
    "two ps tasks die within one copy",
    "ps 0 and another ps die within one copy",
    "a second death before the copies after a fail-over are complete",
    "a fail-over while a step is closing",
    "a promoted ps 0 closes a step again",
    "two fail-overs in one life",
    "a ps dies during a fail-over",
    "a worker dies during a fail-over",
    "the chief dies during a fail-over",
    "a ps is started again during a fail-over",
    "a save and a fail-over at once",
    "a fail-over with a push on its way",
    "a fail-over ends as a rollback",
    "a ps goes on without its backup",
    "a ps dies before its backup has acknowledged what came last",
    "a ps and its backup are compared",
    "two ps tasks that back each other up have both budgets full",
    "updates wait at locks or gates of two ps tasks with full budgets",
    # Rollbacks and checkpoints.
    "a rollback undoes closures that were done",
    "a rollback undoes nothing",
    "a rollback while a step is closing",
    "a rollback while a gang runs",
    "a ps dies during a rollback",
    "a worker dies during a rollback",
    "the chief dies during a rollback",
    "a ps is started again during a rollback",
    "a save and a rollback at once",
    "a rollback passes over a checkpoint whose damage the chief finds",
    "a rollback passes over a checkpoint whose damage a ps finds",
    "a rollback passes over two checkpoints",
    "a rollback to the checkpoint before a damaged one undoes closures that were done",
    "a ps dies during a rollback that has passed over a checkpoint",
    "a checkpoint is damaged, and nobody reads what is",
    "a ps dies during a save",
    "the chief dies during a save",
    "a worker dies during a save",
    "a save fails",
    "a save begins anew",
    "a cut is taken anew",
    "a push waits at a gate",
    "a cut while an update is between its coming and its end",
    "a life goes on from a checkpoint",
    "a life goes on from a checkpoint that nobody was told of",
    "a life restores into another number of shards",
    "a life restores into another number of ps tasks",
    "all that was left at the end is restored",
    # Fresh starts.
    "a coordinator starts again since a ps was lost",
    "ps tasks start afresh before variables are created",
    "ps tasks start afresh while variables are created",
    "ps tasks start afresh while a checkpoint is restored",
    # Lives and sessions.
    "a chief attaches",
    "a chief attaches after a fail-over",
    "a chief attaches after a rollback",
    "an attach is refused",
    "the chief dies while it restores a checkpoint",
    "a session ends with a push on its way",
    "a worker leaves",
    "a worker leaves during a save",
    "a join waits long enough to say so",
    "sizes are smaller than usual",
    "several threads compute at once",
    "a program closes its coordinator while it trains",
    "a program ends because a ps is gone for good",
    "a program ends although a ps is gone for good",
    "a program ends although a worker is gone for good",
    # Memory that tasks share.
    "memory is lent",
    "memory cannot be lent",
    "a connection is lost over which something is lent",
    "what was lent is read after the connection has been lost",
    "a worker holds a ps's memory across an update",
    # Requests and closures.
    "a reply is lost and the request repeated",
    "a request is lost and repeated",
    "a reply is lost while the request is worked on",
    "a stale push",
    "a step of which no other ps is told",
    "a worker is ahead by all that a bound allows",
    "a closure runs again on another worker",
    "a closure runs again and is told duplicate",
    "a duplicate is answered after a fail-over",
    "a duplicate is answered after a rollback",
    "a closure is cancelled while it pushes",
    "a cancelled closure has counted before",
    "a step raises after its calls",
    "a step asks for the end of training",
    "a program sets how many updates an optimizer has made",
    "pushes of one optimizer are counted on several ps tasks",
    # Gangs and locks.
    "a gang's member dies",
    "whoever holds a lock dies",
    # Accumulators, copies of workers, data shards.
    "a worker dies that has changed its copy",
    "a gradient in an accumulator is stale",
    "a take waits during a fail-over",
    "a take waits during a rollback",
    "a take is cancelled",
    "a data shard runs again after its worker's loss",
    "a data shard is handed out again after an error",
    "a data shard's step raises, and the shard comes again",
    "data shards go on from a checkpoint",
    "a closure finds that its worker's data ended",
    "a worker begins its own data anew",
    "a worker's own data go on from a saved position",
    "a gang meets in a collective, all of it",
    "a gang of several meets in a collective, all of it",
    "a gang ends by an error of a replica",
    "a gang ends by the loss of a worker",
    "a gang ends by the loss of a ps",
)
"""All of them, in the order in which they are printed."""

MUST_BE_REACHED_BY = 20_000
"""So many seeds after which a mark that was never reached is a failure."""


AT_ONCE_S = 0.01

_COPIED = re.compile(r"INFO /job:ps/task:\d+: its backup in the process of /job:ps/task:(\d+) is")
_SERVED = re.compile(r"INFO /job:ps/task:(\d+) is served by its backup, in the process of "
                     r"/job:ps/task:(\d+)")  # fmt: skip
_LOST = re.compile(r"\w+ /job:(\w+)/task:(\d+)(?: at \S+)? "
                   r"(?:is lost|cannot be reached|is unreachable|was)")  # fmt: skip


def marks_of(trace: Sequence[Any]) -> dict[str, int]:
    """Return how often each mark was reached in a run that left this trace."""
    watch = _Watch()
    for at_s, _, kind, process, what in trace:
        handle = _HANDLERS.get(kind)
        if handle is not None:
            handle(watch, at_s, process, what)
    return dict(watch.found)


class _Watch:
    """What is known while the trace is read."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.living: set[str] = set()
        self.deaths: list[float] = []  # that were close to each other
        self.stopped: set[str] = set()
        self.given_up: set[str] = set()
        self.closing: set[str] = set()  # processes that have decided on a step
        self.measuring: set[str] = set()
        self.is_alone = False  # no other ps was told of the step that was decided last
        self.step_cut = False  # who was closing a step has died
        self.promoted: set[str] = set()  # processes that serve ps 0 in another one's place
        self.serves: dict[str, set[str]] = {}  # by process, whose tasks
        self.copying: Counter[str] = Counter()  # by host, copies that are not complete
        self.filling = False
        self.shipping: set[str] = set()  # ps tasks whose backups have not answered
        self.died_in_copy: set[str] = set()
        self.recovery = ""  # "fail-over" or "rollback", while it lasts
        self.prepares = self.passed_over = self.is_damaged = False  # of a rollback
        self.fresh_copies = False  # a fail-over ended, and its copies are not complete
        self.fail_overs = 0  # in this life
        self.ever: set[str] = set()  # kinds of recovery that there were
        self.saving = False
        self.saved: set[str] = set()
        self.beginning = False
        self.creating = self.restoring = False
        self.pushing: Counter[str] = Counter()  # by process, pushes that have begun
        self.between: set[str] = set()
        self.sent: set[str] = set()
        self.updating: Counter[str] = Counter()  # by ps, updates that came
        self.gates: set[str] = set()
        self.runs: dict[str, list[str]] = {}  # of each closure, on whom
        self.told: dict[str, list[str]] = {}
        self.open: set[str] = set()  # closures that run
        self.lost: set[tuple[str, str, str]] = set()  # form, process, message
        self.gang = False
        self.copies: set[str] = set()  # workers that have changed theirs
        self.locks = 0

    def mark(self, name: str, holds: object = True) -> None:
        if holds:
            self.found[name] += 1

    # Deaths and starts.

    def start(self, at_s: float, process: str, _: str) -> None:
        self.living.add(process)
        self.stopped.discard(process)
        if process == "chief-0":
            self.beginning, self.creating, self.restoring = True, False, False
            self.recovery, self.saving, self.fail_overs, self.locks = "", False, 0, 0
            self.passed_over = False
            self.open.clear()
        elif process.startswith("ps") and self.recovery:
            self.mark(f"a ps is started again during a {self.recovery}")

    def kill(self, at_s: float, process: str, _: str) -> None:
        self.deaths = [*(at for at in self.deaths if at_s - at <= AT_ONCE_S), at_s]
        self.mark("two processes die at once", len(self.deaths) == 2)
        self.mark("three processes die at once", len(self.deaths) == 3)
        self.living.discard(process)
        job = process.partition("-")[0]
        who = {"ps": "a ps", "worker": "a worker"}.get(job, "the chief")
        if self.recovery:
            self.mark(f"{who} dies during a {self.recovery}")
        self.mark(f"{who} dies during a save", self.saving)
        {"ps": self._ps_dies, "worker": self._worker_dies}.get(job, self._chief_dies)(process)
        for group in (self.closing, self.measuring, self.between, self.sent, self.gates,
                      self.shipping):  # fmt: skip
            group.discard(process)
        for counts in (self.pushing, self.updating, self.copying):
            counts.pop(process, None)

    def _ps_dies(self, process: str) -> None:
        self.mark("all ps tasks are dead", not any(name.startswith("ps") for name in self.living))
        self.mark("a ps dies while variables are created", self.creating)
        self.mark("a ps dies during a rollback that has passed over a checkpoint", self.passed_over)
        self.mark("a process that serves several ps tasks dies", len(self._served(process)) > 1)
        if process in self.closing:
            self.mark("ps 0 dies while a step is closing")
            self.step_cut = True
        else:
            self.mark("another ps dies while a step is closing", self.closing)
        self.mark("a ps dies while a step is measured", self.measuring)
        self.mark("a ps dies before its backup has acknowledged what came last",
                  process in self.shipping)  # fmt: skip
        if self.copying.total():
            self.mark("a ps dies within a copy")
            self.mark("a ps dies while a copy is filled", self.filling)
            self.mark("two ps tasks die within one copy", self.died_in_copy - {process})
            both = self.died_in_copy | {process}
            self.mark("ps 0 and another ps die within one copy", "ps-0" in both and len(both) > 1)
            self.died_in_copy = both
        self.mark("a second death before the copies after a fail-over are complete",
                  self.fresh_copies)  # fmt: skip
        self.serves.pop(process, None)
        self.promoted.discard(process)

    def _served(self, process: str) -> set[str]:
        moved = {task for host, tasks in self.serves.items() if host != process for task in tasks}
        return ({process} | self.serves.get(process, set())) - moved

    def _worker_dies(self, process: str) -> None:
        self.mark("a worker dies while a step is closing", self.closing)
        self.mark("a worker dies with a push begun", self.pushing[process])
        self.mark("a worker dies between the parts of a push", process in self.between)
        self.mark("a worker dies with a push on its way", process in self.sent)
        self.mark("a gang's member dies", self.gang)
        self.mark("a worker dies that has changed its copy", process in self.copies)
        self.copies.discard(process)

    def _chief_dies(self, process: str) -> None:
        self.mark("the chief dies while closures run", self.open)
        self.mark("the chief dies while it begins", self.beginning)
        self.mark("the chief dies while it restores a checkpoint", self.restoring)
        self.mark("whoever holds a lock dies", self.locks > 0)

    def stop(self, at_s: float, process: str, _: str) -> None:
        self.stopped.add(process)
        self.given_up.discard(process)

    def go_on(self, at_s: float, process: str, _: str) -> None:
        self.stopped.discard(process)
        if process in self.given_up:
            worker = process.startswith("worker")
            self.mark("a stopped worker goes on after its session has ended", worker)
            self.mark("a stopped ps goes on after it was given up", process.startswith("ps"))

    def fault(self, at_s: float, process: str, what: str) -> None:
        form, _, message = what.partition(" ")
        self.mark("a machine dies", form == "host_dies")
        self.mark("a reply is lost while the request is worked on", form == "lose_in_flight")
        if form in ("lose_reply", "lose_request"):
            self.lost.add((form.removeprefix("lose_"), process, message))

    # Requests and places.

    def message(self, at_s: float, process: str, what: str) -> None:
        if self.lost:
            for form in ("reply", "request"):
                if (form, process, what) in self.lost:
                    self.lost.discard((form, process, what))
                    self.mark("a reply is lost and the request repeated", form == "reply")
                    self.mark("a request is lost and repeated", form == "request")
        match what:
            case "BeginBackup":
                if not self.copying.total():
                    self.died_in_copy = set()
                self.copying[process] += 1
                self.filling = False
            case "FillSnapshot":
                self.filling = self.copying.total() > 0
            case "PrepareSnapshot":
                self.prepares = True
            case "CreateShards":
                self.creating = self.beginning
            case "CloseStep":
                self.is_alone = False
            case "Gate":
                self.gates.add(process)
            case "OpenGate":
                self.gates.discard(process)
            case "Update":
                self.restoring = self.beginning
                self.mark("a push waits at a gate", process in self.gates)
            case "Freeze":
                self.mark("a cut while an update is between its coming and its end",
                          self.updating.total())  # fmt: skip
            case "CancelClosures":
                self.mark("a closure is cancelled while it pushes", self.pushing[process])
            case "EndSession" | "Fence":
                self.mark("a session ends with a push on its way", self.sent)
            case "ReachCollective":
                self.gang = True
            case "LockShards":
                self.locks += 1
            case "UnlockShards":
                self.locks = max(0, self.locks - 1)

    def place(self, at_s: float, process: str, what: str) -> None:
        match what:
            case "ps0.step.decided":
                self.closing.add(process)
                self.is_alone = sum(name.startswith("ps-") for name in self.living) > 1
                if self.step_cut and process in self.promoted:
                    self.mark("a promoted ps 0 closes a step again")
                self.step_cut = False
            case "ps0.step.applied":
                self.closing.discard(process)
                self.mark("a step of which no other ps is told", self.is_alone)
            case "ps.step.measured":
                self.measuring.add(process)
            case "ps.step.applied":
                self.measuring.discard(process)
            case "ps.backup.sending":
                self.shipping.add(process)
            case "ps.backup.taken":
                self.shipping.discard(process)
            case "worker.push.begun":
                self.pushing[process] += 1
            case "worker.push.between_ps":
                self.between.add(process)
            case "worker.push.sent":
                self.sent.add(process)
            case "worker.push.answered":
                self.pushing[process] = max(0, self.pushing[process] - 1)
                self.between.discard(process)
                self.sent.discard(process)
            case "ps.push.received":
                self.updating[process] = 1
            case "ps.push.applied" | "ps.assign.applied":
                self.updating[process] = 0

    # What the program is told.

    def life(self, at_s: float, process: str, what: str) -> None:
        self.beginning = self.creating = self.restoring = False
        attached = what.startswith("attached True")
        self.mark("a chief attaches", attached)
        for kind in self.ever:
            self.mark(f"a chief attaches after a {kind}", attached)
        restored = what.rpartition("restored ")[2]
        self.mark("a life goes on from a checkpoint", restored != "None")
        self.mark("a life goes on from a checkpoint that nobody was told of",
                  restored not in {"None", *self.saved})  # fmt: skip

    def unattached(self, at_s: float, process: str, what: str) -> None:
        self.mark("an attach is refused")

    def event(self, at_s: float, process: str, what: str) -> None:
        if what.startswith("FailoverEvent"):
            self.ever.add("fail-over")
            self.fail_overs += 1
            self.mark("two fail-overs in one life", self.fail_overs == 2)
            self.fresh_copies = bool(self.copying.total())
            self.recovery = "" if self.recovery == "fail-over" else self.recovery
        elif what.startswith("RollbackEvent"):
            self.ever.add("rollback")
            undone = "closures=()" not in what
            self.mark("a rollback undoes closures that were done", undone)
            self.mark("a rollback undoes nothing", not undone)
            self.mark("a rollback to the checkpoint before a damaged one undoes closures that were "
                      "done", undone and self.passed_over)  # fmt: skip
            self.mark("a checkpoint is damaged, and nobody reads what is",
                      self.is_damaged and not self.passed_over)  # fmt: skip
            self.passed_over = False
            self.recovery = ""

    def save(self, at_s: float, process: str, _: str) -> None:
        self.saving = True
        if self.recovery:
            self.mark(f"a save and a {self.recovery} at once")

    def save_ends(self, at_s: float, process: str, name: str) -> None:
        self.saving = False
        self.saved.add(name)

    def save_fails(self, at_s: float, process: str, _: str) -> None:
        self.saving = False
        self.mark("a save fails")

    def run(self, at_s: float, process: str, closure: str) -> None:
        before = self.runs.setdefault(closure, [])
        self.mark("a closure runs again on another worker", before and process not in before)
        before.append(process)
        self.open.add(closure)

    def hear(self, at_s: float, process: str, what: str) -> None:
        closure, _, outcome = what.split(" ", 2)
        self.told.setdefault(closure, []).append(outcome)
        self.mark("a stale push", outcome == "stale")
        if outcome == "duplicate":
            again = len(self.runs.get(closure, ())) > 1
            self.mark("a closure runs again and is told duplicate", again)
            for kind in self.ever:
                self.mark(f"a duplicate is answered after a {kind}")

    def end(self, at_s: float, process: str, what: str) -> None:
        closure, _, state = what.partition(" ")
        self.open.discard(closure)
        self.gang = False
        self.mark("a step raises after its calls", state == "failed")
        counted = {"accepted", "duplicate"} & set(self.told.get(closure, ()))
        self.mark("a cancelled closure has counted before", state == "cancelled" and counted)

    def damage(self, at_s: float, process: str, _: str) -> None:
        self.is_damaged = True

    def mend(self, at_s: float, process: str, _: str) -> None:
        self.is_damaged = False

    def copy(self, at_s: float, process: str, _: str) -> None:
        self.copies.add(process)

    def reached(self, at_s: float, process: str, name: str) -> None:
        assert name in MARKS, name
        self.mark(name)

    # What tasks log.

    def log(self, at_s: float, process: str, text: str) -> None:
        if "its backup takes over" in text and process == "chief-0":
            self._recovery_begins("fail-over")
        elif text.endswith("all ps tasks roll back to the newest checkpoint"):
            self.mark("a fail-over ends as a rollback", self.recovery == "fail-over")
            self._recovery_begins("rollback")
        elif text.endswith("nothing has been computed yet: starting again"):
            self.mark("a coordinator starts again since a ps was lost")
        elif text.endswith("nothing has been computed yet: it starts again"):
            when = (
                "while a checkpoint is restored" if self.restoring
                else "while variables are created" if self.creating
                else "before variables are created"
            )  # fmt: skip
            self.mark(f"ps tasks start afresh {when}")
        elif "rollback passes over ckpt-" in text:
            finds = "a ps finds" if self.prepares else "the chief finds"
            self.mark(f"a rollback passes over a checkpoint whose damage {finds}")
            self.mark("a rollback passes over two checkpoints", self.passed_over)
            self.passed_over, self.prepares = True, False
        elif "continues without its backup" in text:
            self.mark("a ps goes on without its backup")
        elif "saving a checkpoint starts again" in text:
            self.mark("a save begins anew")
        elif "cut " in text and "is retried: " in text:
            self.mark("a cut is taken anew")
        elif "has left (" in text:
            self.mark("a worker leaves")
            self.mark("a worker leaves during a save", self.saving)
        elif "join waits: " in text:
            self.mark("a join waits long enough to say so")
        elif served := _SERVED.match(text):
            task, host = (f"ps-{number}" for number in served.groups())
            for tasks in self.serves.values():
                tasks.discard(task)
            self.serves.setdefault(host, set()).add(task)
            if task == "ps-0" != host:
                self.promoted.add(host)
        elif copied := _COPIED.match(text):
            host = f"ps-{copied[1]}"
            self.copying[host] = max(0, self.copying[host] - 1)
            if not self.copying.total():
                self.fresh_copies = self.filling = False
        if lost := _LOST.match(text):
            name = f"{lost[1]}-{lost[2]}"
            if name in self.stopped:
                self.given_up.add(name)

    def _recovery_begins(self, kind: str) -> None:
        self.recovery, self.prepares = kind, False
        self.mark(f"a {kind} while a step is closing", self.closing or self.step_cut)
        self.mark("a fail-over with a push on its way", kind == "fail-over" and self.sent)
        self.mark("a rollback while a gang runs", kind == "rollback" and self.gang)
        self.mark(f"a save and a {kind} at once", self.saving)


_HANDLERS = {
    "start": _Watch.start, "kill": _Watch.kill, "stop": _Watch.stop, "go on": _Watch.go_on,
    "fault": _Watch.fault, "message": _Watch.message, "place": _Watch.place, "life": _Watch.life,
    "unattached": _Watch.unattached, "event": _Watch.event, "save": _Watch.save,
    "saved": _Watch.save_ends, "save failed": _Watch.save_fails, "run": _Watch.run,
    "told": _Watch.hear, "ended": _Watch.end, "log": _Watch.log,
    "mark": _Watch.reached, "copy": _Watch.copy, "damage": _Watch.damage, "mend": _Watch.mend,
}  # fmt: skip
"""By kind of entry."""
