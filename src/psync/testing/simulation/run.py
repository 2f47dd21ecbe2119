"""One seed from its plan to its verdict."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import gc
import logging
import os
import re
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psync
from psync.api import scopes
from psync.checkpoints.ownership import let_go_of_all
from psync.net.shared import regions
from psync.ps import cooperative_work
from psync.ps.updates import PsUpdates
from psync.serialization import payloads
from psync.store import commit_log
from psync.testing.clock import Deadlock, describe_tasks
from psync.testing.seams import fresh_process
from psync.testing.simulation.journal import Journal, Violation
from psync.testing.simulation.mutants import MUTANTS, mutated
from psync.testing.simulation.plan import Plan
from psync.testing.simulation.processes import ProcessLoop, current_process
from psync.testing.simulation.ps_oracle import noting_arrivals, noting_judgement
from psync.testing.simulation.tight import replaced, tightened
from psync.testing.simulation.watch import marks_of
from psync.testing.simulation.world import World

CANARIES = 100
"""With ``--canary`` one seed of so many fails."""

IN_MEMORY = next(filter(os.path.isdir, ("/dev/shm",)), None)
"""A directory whose files are in memory; None: there is none, and seeds take longer."""

PATH_LENGTH = 200
"""Of the directory of checkpoints: messages that name it are as long on each machine."""


def _without_directories(format_exception: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *args, **options: [
        re.sub(r'File ".*/', 'File "', line) for line in format_exception(*args, **options)
    ]


for _name in psync.__all__:  # names are loaded when they are first used, which is here
    getattr(psync, _name)

ALIKE = (
    (scopes, "place_of", lambda _: lambda frame: "program.py:1"),
    (payloads, "format_exception", _without_directories),
    (commit_log, "CHECK_EVERY", lambda _: 1),
    (cooperative_work, "usable_cores", lambda _: lambda: 1),
    (regions, "SHRINK_S", lambda _: 0.05),
    (PsUpdates, "_admit", noting_arrivals),
    (PsUpdates, "_judge", noting_judgement),
)
"""What would travel, and says where the source lies: a seed had another history there. So would
it with another number of cores. And each backup is compared with its primary after each entry, and
memory that was lent goes soon, as a run lasts for seconds; oracles know which updates arrived.
"""

ENDS = ("psync.backups.host", "psync.ps.cooperative_work")
"""Loggers that say nothing else at ERROR than that a backup is not what its primary is, or that a
ps could not go on: which nothing that is done here may cause.
"""


@dataclass
class Report:
    """What came of a run.

    Attributes:
        oracle: Which check failed; "": none did.
        violation: What it says.
        at_s: When, in virtual time.
        entry: Of the trace, the last one before it.
        trace: Everything that happened; left out where nobody asked for it.
        before: Seeds that had run in its process before.
    """

    seed: int
    oracle: str = ""
    violation: str = ""
    at_s: float = 0.0
    entry: int = 0
    trace_hash: str = ""
    virtual_s: float = 0.0
    turns: int = 0
    injected: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    trace: list[Any] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can tell it."""
        return dataclasses.asdict(self)


def simulate(
    plan: Plan,
    without: frozenset[str] = frozenset(),
    *,
    mutant: str = "",
    canary: bool = False,
    turns: bool = False,
) -> Report:
    """Run a plan and return what was found.

    Args:
        plan: What happens.
        without: Safeguards that are switched off.
        mutant: One of ``mutants.MUTANTS``: a rule that is wrong during this run.
        canary: Whether one seed in a hundred fails on purpose.
        turns: Whether each turn of the loop is put on the trace.
    """
    there = set(sys.modules)
    with fresh_process(), _quiet_end(), replaced(ALIKE), mutated(mutant), tightened(plan.sizes):
        if mutant:
            without |= MUTANTS[mutant].without
        report = _simulate(plan, without, canary, turns)
    late = sorted(name for name in set(sys.modules) - there if name.startswith("psync."))
    if late:  # and have kept, for all runs to come, what was replaced during this one
        raise RuntimeError(f"imported in the midst of a run, not before it: {', '.join(late)}")
    return report


def _simulate(plan: Plan, without: frozenset[str], canary: bool, turns: bool) -> Report:
    report = Report(plan.seed)
    worlds: list[World] = []
    loop = ProcessLoop(plan.seed, time_limit_s=plan.train_s + 1000)
    with (
        _heard(worlds),
        tempfile.TemporaryDirectory(prefix="psync-sim-", dir=IN_MEMORY) as directory,
    ):
        place = Path(directory, "x" * (PATH_LENGTH - len(directory)))
        place.mkdir()
        if turns:
            loop.on_turn = lambda who, what: worlds[0].note("turn", who, what) if worlds else None
        main = loop.create_task(_run(plan, place, without, worlds))
        try:
            loop.run_until_complete(main)
        except Violation as exc:
            _blame(report, worlds[0], exc)
        except Deadlock as exc:
            _blame(report, worlds[0], Violation("liveness", str(exc), loop.time()))
        finally:
            loop.is_over = True
            asyncio.set_event_loop(loop)  # that which the buried find, instead of a new one
            for world in worlds:  # one, unless the plan makes no sense
                world.bury()
                Journal.put_away()
            asyncio.set_event_loop(None)
            report.virtual_s, report.turns = loop.time(), loop.turns
            loop.close()
    if canary and not report.oracle and zlib.crc32(f"{plan.seed}:canary".encode()) % CANARIES == 0:
        _blame(report, world, Violation("canary", "fails on purpose", report.virtual_s))
    report.trace, report.trace_hash = world.trace, world.trace_hash()
    report.injected = dict(world.injected)
    report.marks = marks_of(world.trace)
    return report


async def _run(plan: Plan, directory: Path, without: frozenset[str], worlds: list[World]) -> None:
    world = World(plan, directory, without)
    worlds.append(world)
    try:
        await world.run()
    except TimeoutError:
        if not world.journal.violations:
            _, waits = describe_tasks(world.loop)
            raise Violation("liveness", f"no end: {waits}") from None
    world.network.check()
    if world.journal.violations:
        raise world.journal.violations[0]


def _blame(report: Report, world: World, violation: Violation) -> None:
    report.oracle, report.at_s = violation.oracle, violation.at_s
    report.violation = "\n".join(map(str, world.journal.violations[:5])) or str(violation)
    report.entry = bisect.bisect_right([entry[0] for entry in world.trace], violation.at_s) - 1


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """Collect garbage at one point: afterwards; nobody hears what it still says."""
    collects = gc.isenabled()
    gc.disable()  # what is collected may have effects
    hook, sys.unraisablehook = sys.unraisablehook, _ignore
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
            gc.collect()
            let_go_of_all()
    finally:
        sys.unraisablehook = hook
        if collects:
            gc.enable()


def _ignore(unraisable: object) -> None:
    """What the dead would still do, when they are taken away, concerns nobody."""


class _Ears(logging.Handler):
    """Puts what tasks log on the trace."""

    def __init__(self, worlds: list[World]) -> None:
        super().__init__()
        self._worlds = worlds

    def handle(self, record: logging.LogRecord) -> bool:
        """Note the first line of a record."""
        process = current_process.get()
        if self._worlds:
            world = self._worlds[0]
            text = record.getMessage().partition("\n")[0].replace(str(world.directory), "DIR")
            name = process.name if process is not None else ""
            world.note("log", name, f"{record.levelname} {text}")
            if record.name in ENDS and record.levelno >= logging.ERROR:
                error = record.exc_info[1] if record.exc_info else None
                message = f"{name}: {text}: {error!r}"
                world.journal.violations.append(Violation("twin", message, world.loop.time()))
        return True


@contextlib.contextmanager
def _heard(worlds: list[World]) -> Iterator[None]:
    """Put what tasks log on the trace, and print nothing of it."""
    ears = _Ears(worlds)
    changed = [(logging.getLogger("psync"), logging.INFO), (logging.getLogger("asyncio"), 100)]
    before = [(logger.level, logger.propagate) for logger, _ in changed]
    for logger, level in changed:
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(ears)
    try:
        yield
    finally:
        for (logger, _), (level, propagates) in zip(changed, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagates
            logger.removeHandler(ears)
