"""Many seeds at once, each in a process that was started fresh; and one seed twice.

A child reads jobs from its standard input, a line of JSON each, and answers each with a report.
Answers are used in the order of the jobs, so that what is printed does not depend on who was
faster. A child that says nothing for too long is ended: that seed hangs, which is a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psync
from psync.testing.simulation.drawing import drawn
from psync.testing.simulation.mutants import MUTANTS
from psync.testing.simulation.plan import Plan
from psync.testing.simulation.run import Report, simulate

SEED_LIMIT_S = 120.0
"""Of a wall clock, which no seed reaches by far."""

JOBS_OF_A_CHILD = 500
"""After so many it is replaced by a fresh one."""

BUGS = ("AttributeError", "NameError", "TypeError", "values to unpack")
"""In what an oracle says of a run in which code did not fit together, such as a mutant's."""

ANSWER_LIMIT = 1 << 28  # bytes


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        plan: As JSON; "": that of the seed.
        without: Safeguards that are switched off.
        mutant: A rule that is wrong.
        canary: Whether one seed in a hundred fails on purpose.
        trace: Whether the trace is wanted.
        turns: Whether each turn of the loop is on it.
    """

    seed: int
    shape: str = "any"
    plan: str = ""
    without: tuple[str, ...] = ()
    mutant: str = ""
    canary: bool = False
    trace: bool = False
    turns: bool = False

    def run(self) -> Report:
        """Run it here."""
        plan = Plan.from_json(self.plan) if self.plan else drawn(self.seed, self.shape)
        report = simulate(
            plan,
            frozenset(self.without),
            mutant=self.mutant,
            canary=self.canary,
            turns=self.turns,
        )
        if not self.trace:
            report.trace = []
        return report

    def command(self) -> str:
        """Return the command that runs it again."""
        words = [f"--replay {self.seed}", f"--shape {self.shape}" if self.shape != "any" else ""]
        words += [f"--without {name}" for name in self.without]
        words += [f"--mutant {self.mutant}" if self.mutant else "", "--canary" * self.canary]
        return " ".join(("python -m psync.testing.simulation", *filter(None, words)))


def serve(jobs: IO[str], answers: IO[str], *, fresh: bool = False) -> None:
    """Be a child: run what comes, and answer.

    Args:
        jobs: A line of JSON each.
        answers: Gets a line for each job.
        fresh: Whether each job runs in a process that has run no other one: a fork of this one,
            which takes some milliseconds. Importing everything takes longer than a run.
    """
    gc.freeze()  # modules need not be looked at after each run
    for line in jobs:
        if not fresh:
            _serve(line, answers)
        elif pid := os.fork():
            _, status = os.waitpid(pid, 0)
            if status:
                sys.exit(f"the process of a run has ended with status {status}")
        else:
            try:
                _serve(line, answers)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


def _serve(line: str, answers: IO[str]) -> None:
    made = json.loads(line)
    job = Job(**{**made, "without": tuple(made["without"])})
    answers.write(json.dumps(job.run().as_dict()) + "\n")
    answers.flush()


class Child:
    """A process that runs jobs, one after the other.

    Args:
        hash_seed: Its PYTHONHASHSEED.
        fresh: Whether each job has a fresh process.
    """

    def __init__(self, hash_seed: int, *, fresh: bool = False) -> None:
        self._hash_seed = hash_seed
        self._fresh = fresh
        self._process: asyncio.subprocess.Process | None = None
        self._ran: list[int] = []

    async def run(self, job: Job) -> Report:
        """Run a job; a child that dies or hangs has found something, too."""
        if len(self._ran) == JOBS_OF_A_CHILD:
            await self.close()
        if self._process is None:
            await self._start()
        before = self._ran.copy()
        if not self._fresh:
            self._ran.append(job.seed)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), SEED_LIMIT_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await self.close()
            return Report(job.seed, "hangs", f"hangs: no end within {SEED_LIMIT_S:g} real seconds")
        if not line:
            code = await process.wait()
            await self.close()
            return Report(job.seed, "crash", f"crash: the simulator ended with exit code {code}")
        return Report(**{**json.loads(line), "before": before})

    async def _start(self) -> None:
        environment = os.environ | {
            "PYTHONHASHSEED": str(self._hash_seed),
            "PYTHONPATH": str(Path(psync.__file__).parents[1]),
            "OPENBLAS_NUM_THREADS": "1",  # its threads would only wait for each other
        }
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "psync.testing.simulation", "--serve", *["--fresh"] * self._fresh,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, limit=ANSWER_LIMIT,
            start_new_session=True,  # a group with those that run jobs for it
        )  # fmt: skip

    async def close(self) -> None:
        """End the process."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        self._process = None
        self._ran = []


async def run_all(
    jobs: Iterable[Job], num_children: int, *, hash_seed: int = 1, fresh: bool = False
) -> AsyncGenerator[tuple[Job, Report], None]:
    """Run jobs in as many processes, and yield what came of each, in their order.

    Args:
        jobs: What to run.
        num_children: How many run at once.
        hash_seed: PYTHONHASHSEED of the first process; the next ones have the next numbers.
        fresh: Whether each job has a fresh process.
    """
    jobs = list(jobs)
    loop = asyncio.get_running_loop()
    reports: list[asyncio.Future[Report]] = [loop.create_future() for _ in jobs]
    left = iter(range(len(jobs)))

    async def work(child: Child) -> None:
        for number in left:
            try:
                reports[number].set_result(await child.run(jobs[number]))
            except Exception as exc:
                reports[number].set_exception(exc)

    children = [Child(hash_seed + number, fresh=fresh) for number in range(num_children)]
    workers = [asyncio.create_task(work(child)) for child in children]
    try:
        for job, report in zip(jobs, reports, strict=True):
            yield job, await report
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in children))


@dataclass
class Sweep:
    """The results of many runs.

    Attributes:
        seeds: Number of runs.
        twins: Number of runs that ran twice with the same history.
        differing: Seeds that had two histories.
        seconds: Real time.
        reached: For each mark, the number of seeds that reached it.
    """

    seeds: int = 0
    twins: int = 0
    differing: list[int] = field(default_factory=list)
    virtual_s: float = 0.0
    seconds: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[Job, Report]] = field(default_factory=list)

    def add(self, job: Job, report: Report) -> None:
        """Count a run."""
        self.seeds += 1
        self.virtual_s += report.virtual_s
        self.injected.update(report.injected)
        self.marks.update(report.marks)
        self.reached.update(list(report.marks))
        if report.oracle:
            self.violations.append((job, report))

    def merge(self, other: Sweep) -> None:
        """Add the results of other runs."""
        for name in vars(self):
            value = getattr(self, name)
            if isinstance(value, Counter):
                value.update(getattr(other, name))
            else:
                setattr(self, name, value + getattr(other, name))


class Kept:
    """The results of a sweep that was interrupted, in a file: the sweep can go on from there.

    Each line holds the results of some seeds. The file belongs to the source as it is, a shape
    and a Python: other commits of the same source use it, too.

    Args:
        folder: Folder of such files. None keeps nothing.
        shape: The shape of the plans.
    """

    def __init__(self, folder: Path | None, shape: str) -> None:
        self._file = folder and folder / f"{_source()}-{shape}-{sys.version_info[1]}.jsonl"

    def __str__(self) -> str:
        return str(self._file)

    def take(self, jobs: Sequence[Job]) -> tuple[Sweep, list[Job]]:
        """Return the results of jobs that have run before, and the jobs that are left."""
        sweep = Sweep()
        left = {job.seed: job for job in jobs}
        lines = self._file.read_bytes().splitlines() if self._file and self._file.exists() else ()
        for line in lines:
            with contextlib.suppress(ValueError):  # it was being written when the machine stopped
                ran, results = json.loads(line)
                if left.keys() >= set(ran):
                    results["violations"] = [
                        (left[report["seed"]], Report(**report)) for report in results["violations"]
                    ]
                    sweep.merge(Sweep(**results))
                    for seed in ran:
                        del left[seed]
        return sweep, list(left.values())

    def add(self, jobs: Sequence[Job], results: Sweep) -> None:
        """Keep the results of jobs."""
        if self._file is None:
            return
        told = vars(results) | {"violations": [asdict(report) for _, report in results.violations]}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(f"\n{json.dumps([[job.seed for job in jobs], told])}\n")


def _source() -> str:
    """Return a hash of the modules of psync."""
    root = Path(psync.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the commit of this source, or "": there is no git."""
    try:
        done = subprocess.run(
            ("git", "rev-parse", "HEAD"), cwd=Path(psync.__file__).parent, text=True,
            capture_output=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def seeds(first: int, count: int, commit_share: float) -> list[int]:
    """Return seeds: some in a row, and a share that is drawn from the commit's hash."""
    hash_ = commit()
    drawn_ones = round(count * commit_share) if hash_ else 0
    rng = random.Random(hash_)
    return [
        *range(first, first + count - drawn_ones),
        *(rng.randrange(1 << 31) for _ in range(drawn_ones)),
    ]


@dataclass(frozen=True)
class Find:
    """What became of the search for a mutant.

    Attributes:
        oracle: Which found it; "": none did.
        tried: How many seeds that took.
        job: The run that found it.
    """

    mutant: str
    tried: int
    oracle: str = ""
    job: Job | None = None


async def hunt(mutant: str, first: int, most: int, num_children: int) -> Find:
    """Run a mutant until an oracle notices it.

    Args:
        mutant: Its name.
        first: The first seed; shapes take turns.
        most: How many runs are tried.
        num_children: How many run at once.

    What fails without the mutant, too, proves nothing, nor does a mutant that is written wrong.
    """
    shapes = MUTANTS[mutant].shapes
    jobs = [
        Job(first + at // len(shapes), shapes[at % len(shapes)], mutant=mutant)
        for at in range(most)
    ]
    tried = 0
    async with contextlib.aclosing(run_all(jobs, num_children)) as runs:
        async for job, report in runs:
            tried += 1
            if report.oracle and not any(each in report.violation for each in BUGS):
                sound = Child(1)
                plain = await sound.run(dataclasses.replace(job, mutant=""))
                await sound.close()
                if not plain.oracle:
                    return Find(mutant, tried, report.oracle, job)
    return Find(mutant, tried)


async def difference(job: Job, before: Sequence[int] = ()) -> str:
    """Run a job twice, in fresh processes; return where the traces part, or "".

    Args:
        job: What is run.
        before: Seeds that run in one of the processes first.
    """
    traces = []
    for hash_seed, first_ones in ((1, before), (1001, ())):
        child = Child(hash_seed)
        for seed in first_ones:
            await child.run(dataclasses.replace(job, seed=seed))
        traces.append((await child.run(dataclasses.replace(job, trace=True, turns=True))).trace)
        await child.close()
    first, second = traces
    if first == second:
        return ""
    at = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    lines = [f"two runs of seed {job.seed} part at entry {at} of their traces:"]
    lines += ["           " + told(entry) for entry in first[max(0, at - 20) : at]]
    for name, trace in (("one", first), ("the other", second)):
        lines.append(f"{name:>9}: " + (told(trace[at]) if at < len(trace) else "has ended"))
    return "\n".join(lines)


def told(entry: Sequence[Any]) -> str:
    """Return an entry of a trace as a line."""
    at_s, turns, kind, process, *what = entry
    return f"{at_s:10.4f} {turns:6d} {process:10} {kind:8} {' '.join(map(str, what))}"
