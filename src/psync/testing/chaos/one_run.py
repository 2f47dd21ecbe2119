"""One chaotic run: start it, let the killer and the network loose, compare what is left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from psync.testing.chaos import oracle, program, replay
from psync.testing.chaos.evidence import Victim, read_journal, victims_of
from psync.testing.chaos.killer import Kill, Killer, KillPlan
from psync.testing.chaos.scenes import SCENES, NotPlayed, Stage
from psync.testing.chaos_proxy import ChaosProxy
from psync.testing.sabotage import notes_in
from psync.testing.sabotage.message_loss import FORMS

START_S = 60.0
END_S = 120.0
LOOK_EVERY_S = 0.05

LOSSES = {
    "*": {"request": 0.001, "reply": 0.001, "in_flight": 0.001, "min_each": 1},
    "Update": {"request": 0.004, "reply": 0.004, "in_flight": 0.002, "min_each": 2},
    "CloseStep": {"request": 0.004, "reply": 0.004, "in_flight": 0.002, "min_each": 1},
}


@dataclass(frozen=True)
class RunPlan:
    """What is done in one run."""

    seed: int
    seconds: float
    settings: program.Settings
    kills: KillPlan
    losses: Mapping[str, Any] | None = None
    failpoints: str = ""
    without: str = ""
    cuts_pause_s: float = 0.0  # mean seconds between two faults of a proxy; 0: there are no proxies
    log_level: str = "warning"
    scene: str = ""  # of ``scenes``, which is played instead of what the killer does


def staged(plan: RunPlan, name: str) -> RunPlan:
    """Return the plan with all that a scene needs."""
    scene = SCENES[name]
    settings = dataclasses.replace(plan.settings, **scene.settings)
    losses = scene.losses_in(Path(settings.directory))
    return dataclasses.replace(
        plan, scene=name, settings=settings, losses=losses, failpoints=scene.failpoints
    )


@dataclass
class Result:
    """What came of a run."""

    plan: RunPlan
    faults: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    passed_over: int = 0
    notes: Mapping[str, Counter[str]] = field(default_factory=dict)
    expected: oracle.Expected = field(default_factory=oracle.Expected)
    checked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    proxies: Sequence[ChaosProxy] = ()


async def run(plan: RunPlan) -> Result:
    """Do it. Everything that it leaves is in the directory of the settings.

    Cancellation: All processes are ended.
    """
    result = Result(plan)
    directory = Path(plan.settings.directory)
    for name in ("notes", "applies"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as network, _launched(plan) as launcher:
        try:
            proxies = await _announce(launcher, plan, network)
            tasks = {"chief": 1, "ps": plan.settings.num_ps, "worker": plan.settings.num_workers}
            rng = random.Random(f"{plan.seed}/{plan.settings.mode}/kills")
            killer = Killer(launcher.pid, directory, tasks, plan.kills, rng)
            result.kills = killer.kills
            result.proxies = proxies
            if plan.scene:
                stage = Stage(launcher.pid, directory, result.kills)
                await _unless_it_ends(launcher, _play(plan.scene, stage, result))
            else:
                await _unless_it_ends(launcher, _chaos(killer, proxies, plan))
            result.passed_over = killer.passed_over
            await asyncio.to_thread((directory / program.STOP).touch)
            async with asyncio.timeout(END_S):
                code = await asyncio.to_thread(launcher.wait)
            if code:
                result.faults.append(f"psync run ended with code {code}: see {directory}/run.log")
        except _Over as exc:
            result.faults.append(f"{exc}: see {directory}/run.log")
        except TimeoutError:
            await _ask_all(launcher.pid)
            result.faults.append(
                f"training has not ended {END_S:g} s after the last fault: see {directory}/run.log"
            )
    result.seconds = time.monotonic() - began
    await asyncio.to_thread(_judge, result, directory)
    return result


class _Over(Exception):
    """The run has ended before its time."""


async def _play(name: str, stage: Stage, result: Result) -> None:
    """Play a scene; the run goes on to its end in any case."""
    try:
        result.checked.append(await SCENES[name].play(stage))
    except NotPlayed as exc:
        result.faults.append(f"scene {name}: {exc}")


@contextlib.asynccontextmanager
async def _launched(plan: RunPlan) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Start ``psync run``; at the end nothing of it is left."""
    directory, settings = Path(plan.settings.directory), plan.settings
    command = [
        sys.executable, "-m", "psync", "run", program.__file__,
        "--ps", str(settings.num_ps), "--workers", str(settings.num_workers),
        "--max-restarts", "1000", "--chief-restarts", "100", "--log-level", plan.log_level,
    ]  # fmt: skip
    environ = {
        **os.environ,
        **settings.to_environment(),
        "PSYNC_TESTING_NOTES": str(directory / "notes"),
        "PSYNC_TESTING_APPLY_LOG": str(directory / "applies"),
        "PSYNC_TESTING_WITHOUT": plan.without,
        "PSYNC_FAILPOINTS": plan.failpoints,
    }
    if plan.losses:
        environ["PSYNC_TESTING_LOSS"] = json.dumps({**plan.losses, "seed": plan.seed})
    with (directory / "run.log").open("ab") as log:
        launcher = subprocess.Popen(  # noqa: ASYNC220 - the loop does nothing else yet
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(15.0)
            except subprocess.TimeoutExpired:
                launcher.kill()  # its tasks end with it: see processes
                launcher.wait()


async def _chaos(killer: Killer, proxies: Sequence[ChaosProxy], plan: RunPlan) -> None:
    """Let killer and network loose, until the killer's time is over."""
    faults = [asyncio.ensure_future(proxy.torment(plan.cuts_pause_s)) for proxy in proxies]
    try:
        await killer.run(plan.seconds)
    finally:
        for fault in faults:
            fault.cancel()
        await asyncio.gather(*faults, return_exceptions=True)


async def _announce(
    launcher: subprocess.Popen[bytes], plan: RunPlan, network: contextlib.AsyncExitStack
) -> list[ChaosProxy]:
    """Tell the program where its tasks are, once they are known: behind proxies, if there are."""
    deadline = time.monotonic() + START_S
    while not (found := victims_of(launcher.pid)):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise _Over("psync run has not started anything")
        await asyncio.sleep(LOOK_EVERY_S)
    some: Victim = next(iter(found.values()))
    addresses = {}
    proxies: list[ChaosProxy] = []
    for job in ("ps", "worker") if plan.cuts_pause_s else ():
        for address in some.config["cluster"][job]:
            proxy = ChaosProxy(address, f"{plan.seed}/{job}/{len(proxies)}")
            proxies.append(await network.enter_async_context(proxy))
            addresses[address] = proxy.address
    path = Path(plan.settings.directory, "addresses.json")
    path.with_suffix(".new").write_text(json.dumps(addresses))
    path.with_suffix(".new").rename(path)
    return proxies


async def _unless_it_ends(launcher: subprocess.Popen[bytes], chaos: Any) -> None:
    work = asyncio.ensure_future(chaos)
    try:
        while not work.done():
            if launcher.poll() is not None:
                raise _Over(f"psync run ended early, with code {launcher.returncode}")
            await asyncio.wait([work], timeout=0.2)
        work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _ask_all(launcher: int) -> None:
    """Let every task say in the log what it does."""
    for victim in victims_of(launcher).values():
        victim.send(signal.SIGUSR1)
    await asyncio.sleep(2.0)


def _judge(result: Result, directory: Path) -> None:
    """Compare what is left with what must be."""
    settings = result.plan.settings
    result.notes = notes_in(directory / "notes")
    result.expected = oracle.read(read_journal(directory))
    final = directory / program.FINAL
    if not final.exists():
        result.faults.append("there are no final values")
        return
    with np.load(final) as arrays:
        found = dict(arrays)
    result.faults += oracle.check(result.expected, found, settings.num_ps, settings.rows)
    faults, looked_at = replay.check(directory / "applies", found)
    result.faults += faults
    result.checked.append(looked_at)
    result.checked.append(f"counters of {result.expected.stop} closures on {settings.num_ps} ps")


SHOWN = 12  # faults


def summary(result: Result, again: str) -> str:
    """Return the text.

    Args:
        result: Of the run.
        again: The command that runs it again.
    """
    plan, expected = result.plan, result.expected
    kinds = Counter((kill.job, kill.signal) for kill in result.kills)
    pushing = Counter((kill.job, kill.signal) for kill in result.kills if kill.in_flight)
    lines = [
        f"chaos: seed {plan.seed}, {plan.settings.mode}, recovery {plan.settings.recovery}, "
        f"{plan.settings.num_ps} ps, {plan.settings.num_workers} workers, {result.seconds:.0f} s",
        "",
        "killed or stopped            times   with a push in flight",
        *(
            f"  {job:<8} {signal:<16} {count:>5} {pushing[job, signal]:>10}"
            for (job, signal), count in sorted(kinds.items())
        ),
    ]
    if result.passed_over:
        lines.append(f"  nobody could be killed in time: {result.passed_over} times")
    if result.proxies:
        lines += [
            "",
            f"proxies: {sum(p.cuts for p in result.proxies)} cuts, "
            f"{sum(p.stalls for p in result.proxies)} stalls, "
            f"{sum(p.holes for p in result.proxies)} black holes",
        ]
    lines += ["", *losses_of(result.notes), "", *failpoints_of(result.notes)]
    lines += [
        f"closures done: {len(expected.done)}, lives of the program: {expected.lives}, "
        f"checkpoints: {expected.checkpoints}, rollbacks: {expected.rollbacks} (closures undone: "
        f"{len(expected.undone)})"
        + (f", backups that took over: {expected.failovers}" if expected.failovers else ""),
        *(f"checked: {what}" for what in result.checked),
        "",
    ]
    if not result.faults:
        return "\n".join([*lines, "nothing was found"])
    lines += [f"FAULT: {fault}" for fault in result.faults[:SHOWN]]
    if len(result.faults) > SHOWN:
        lines.append(f"… and {len(result.faults) - SHOWN} more")
    return "\n".join([*lines, f"left in {plan.settings.directory}", f"again: {again}"])


def deaths_of(result: Result) -> Counter[str]:
    """Return how many tasks of each job have died, by a signal or at a failpoint."""
    deaths = Counter(kill.job for kill in result.kills if kill.signal != "SIGSTOP")
    for task, counts in result.notes.items():
        job = task.partition("-")[0]
        deaths[job] += sum(n for line, n in counts.items() if line.startswith("failpoint "))
    return +deaths


def losses_of(notes: Mapping[str, Counter[str]]) -> list[str]:
    """Return a line for each kind of message that occurred."""
    lost: Counter[tuple[str, str]] = Counter()
    kinds: set[str] = set()
    for counts in notes.values():
        for line, count in counts.items():
            match line.split():
                case ["lost", kind, form]:
                    lost[kind, form] += count
                    kinds.add(kind)
                case ["met", kind]:
                    kinds.add(kind)
    if not kinds:
        return ["messages lost: none"]
    return [
        f"messages lost           {'  '.join(f'{form:>9}' for form in FORMS)}",
        *(
            f"  {kind:<20}  {'  '.join(f'{lost[kind, form]:>9}' for form in FORMS)}"
            for kind in sorted(kinds)
        ),
    ]


def failpoints_of(notes: Mapping[str, Counter[str]]) -> list[str]:
    """Return a line for each failpoint that has acted."""
    hits: Counter[str] = Counter()
    for counts in notes.values():
        for line, count in counts.items():
            if line.startswith("failpoint "):
                hits[line.removeprefix("failpoint ")] += count
    return [f"failpoint {name}: {count} deaths" for name, count in sorted(hits.items())]
