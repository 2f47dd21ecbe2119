"""psync beside its peers and beside floors: the same work, each in processes of its own, in turns.

Each system is a program that stays alive: its first line names it and the works that it knows; then
it answers orders, a line of JSON each. ``{"work": "pull", "mib": 64, "steps": 8}`` is answered by
``{"done": 16, "seconds": 0.4}``, of all workers together, or by ``{"error": "…"}``. What is not
installed says ``{"missing": "tensorflow"}`` and ends. Row by row, repetition by repetition, systems
take turns, so that whatever else the machine does hits all of them; a ratio is the median of the
ratios of neighbours. The others idle meanwhile, and what CPU that takes is measured, too: who
takes much of it, because he polls, is stopped until it is his turn again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from psync.bench import report
from psync.bench.figures import Figures
from psync.bench.sync_async import machine
from psync.errors import ConfigurationError

SMALL, SMALL_SHAPE = 100, (64, 64)  # variables of the work "variables"
ROWS_OF_TABLE, COLUMNS, IDS = 1_000_000, 64, 4096  # of the work "lookup"

OWN = "psync"
LIMIT_S = 180.0
"""Of one answer."""

IDLE_S = 3.0
MAX_IDLE = 0.05
"""Share of a core that a system may take while others are measured; if it needs more, it is stopped
then. torch RPC, whose transport polls, takes all cores."""

SCRIPTS = ("tensorflow1.py", "tensorflow2.py", "torch_rpc.py", "ray_actors.py")
FLOOR_SCRIPTS = (
    "raw_tcp.py", "raw_unix.py", "shared_memory.py", "shared_views.py", "memcpy.py",
    "arithmetic.py",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: What systems call it.
        unit: Of the figure.
        steps: Of each worker, in one repetition.
        mib: Size of the variable, or of the whole model.
        amount: What one step counts for.
    """

    work: str
    unit: str
    steps: int
    mib: float = 0.0
    amount: float = 1.0

    @property
    def name(self) -> str:
        """What the table calls it."""
        sizes = {0.0: "", 0.04: ", 40 KB", 16.0: ", 16 MB"}
        size = sizes.get(self.mib, f", {self.mib:g} MiB")
        work, comma, rest = self.work.partition(",")
        return NAMES.get(work, work) + size + comma + rest


NAMES = {
    "closures": "empty closures or calls",
    "push": "push + SGD",
    "variables": f"{SMALL} variables, pull + push",
    "lookup": f"lookup of {IDS:,} × {COLUMNS} in 1 M rows",
    "synchronous": "synchronous steps",
    "asynchronous": "asynchronous gradients",
    "synchronous closures": "synchronous steps as closures",
}

TRAINED = (0.04, 300), (16.0, 25)
ROWS = (
    Row("closures", "1/s", 5_000),
    Row("pull", "GiB/s", 200, 1.0, 1 / 1024),
    Row("pull", "GiB/s", 12, 64.0, 64 / 1024),
    Row("push", "GiB/s", 200, 1.0, 1 / 1024),
    Row("push", "GiB/s", 12, 64.0, 64 / 1024),
    Row("variables", "steps/s", 100),
    Row("lookup", "M ids/s", 100, amount=IDS / 1e6),
    *(
        Row(work, unit, steps, mib)
        for work, unit in (
            ("synchronous", "steps/s"),
            ("asynchronous", "gradients/s"),
            ("asynchronous, with a backup", "gradients/s"),
            ("synchronous closures", "steps/s"),
            ("synchronous closures, with a backup", "steps/s"),
        )
        for mib, steps in TRAINED
    ),
)


class System:
    """A program that measures, between its start and its end.

    Args:
        command: Of it.

    Raises:
        ConfigurationError: It cannot be started, ends, or says nothing that is an answer.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.polls = False  # it takes much of the CPU while it idles, see ``MAX_IDLE``
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PSYNC_LOG_LEVEL": "warning"},
            )
        except OSError as exc:
            raise ConfigurationError(
                f"{command[0]} cannot be started: {exc.strerror}",
                hint="--peers takes the Python of an environment in which the peers are installed",
            ) from exc
        try:
            greeting = self._answer()
        except BaseException:
            self.close()
            raise
        self.missing: str | None = greeting.get("missing")
        self.pid = self._process.pid
        self.name = str(greeting.get("name"))
        self.version = str(greeting.get("version"))
        self.works: Sequence[str] = greeting.get("works", ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End it: it ends by itself when there are no more orders; else it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self.polls:
            self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def pause(self) -> None:
        """Stop it, with all its processes, until it is measured again: it polls."""
        self.polls = True
        self._signal(signal.SIGSTOP)

    def measure(self, row: Row, steps: int) -> float:
        """Return the rate of a row, in its unit. Raises ConfigurationError."""
        if not self.polls:
            return self._measure(row, steps)
        self._signal(signal.SIGCONT)
        try:
            return self._measure(row, steps)
        finally:
            self._signal(signal.SIGSTOP)

    def _measure(self, row: Row, steps: int) -> float:
        assert self._process.stdin is not None
        order = {"work": row.work, "mib": row.mib, "steps": steps}
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("has ended") from None
        answer = self._answer()
        if "error" in answer:
            raise self._failure(f"{row.name}: {answer['error']}")
        return float(answer["done"] * row.amount / answer["seconds"])

    def cpu_seconds(self) -> float:
        """Return the CPU time that it and its descendants have used."""
        return sum(cpu_seconds_below(self.pid).values())

    def _signal(self, number: signal.Signals) -> None:
        for pid in cpu_seconds_below(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        with _killed_after(self._process, LIMIT_S):
            line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        except ValueError:
            pass
        raise self._failure(f"gave no answer but {line!r:.80}")

    def _failure(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{' '.join(self._command)}: {what}", hint="run it by itself: it says what it needs"
        )


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cpu_seconds_below(root: int) -> dict[int, float]:
    """Return the CPU time that a process and each of its descendants have used, by their ids."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: used.get(pid, 0.0) for pid in below}


def measure(
    systems: Sequence[System],
    rows: Sequence[Row],
    repetitions: int,
    quick: bool,
    note: Callable[[str], None],
) -> list[Figures]:
    """Measure all rows by all systems that know them, in turns.

    Args:
        systems: psync first.
        rows: What to measure.
        repetitions: Of each row, beside one that warms up.
        quick: Fewer steps.
        note: Called with what runs next.

    Returns:
        A dict for each row: ``name``, ``unit``, and ``systems``, by name: ``min``, ``median``,
        ``max``, ``runs``, and for others than psync ``ratio``, how many times as fast psync is.
    """
    results: list[Figures] = []
    for row in rows:
        taking_part = [system for system in systems if row.work in system.works]
        steps = max(row.steps // 4, 3) if quick else row.steps
        runs: dict[str, list[float]] = {system.name: [] for system in taking_part}
        for repetition in range(repetitions + 1):
            note(f"{row.name}, repetition {repetition} of {repetitions}")
            for system in taking_part:
                rate = system.measure(row, steps if repetition else max(steps // 4, 2))
                if repetition:
                    runs[system.name].append(rate)
        results.append({"name": row.name, "unit": row.unit, "systems": compared(runs)})
    return results


def compared(runs: Mapping[str, Sequence[float]]) -> dict[str, Figures]:
    """Return the figures of systems in one row, from the rates of their repetitions."""
    own = runs.get(OWN)
    figures: dict[str, Figures] = {}
    for name, rates in runs.items():
        figures[name] = {
            "min": min(rates), "median": statistics.median(rates), "max": max(rates),
            "runs": rates,
        }  # fmt: skip
        if own is not None and name != OWN:
            pairs = zip(own, rates, strict=True)
            figures[name]["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return figures


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], note: Callable[[str], None]
) -> Iterator[list[System]]:
    """Return a context manager with the systems that are installed."""
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        for command in commands:
            note(f"starting {' '.join(command)}")
            system = stack.enter_context(System(command))
            if system.missing is None:
                systems.append(system)
            else:
                note(f"left out: {system.missing} is not installed")
        yield systems


def idle_cpu(systems: Sequence[System], seconds: float) -> dict[str, float]:
    """Return the share of a core that each system takes while nothing is ordered."""
    time.sleep(seconds)  # some are still starting
    before = [system.cpu_seconds() for system in systems]
    time.sleep(seconds)
    return {
        system.name: (system.cpu_seconds() - was) / seconds
        for system, was in zip(systems, before, strict=True)
    }


def commands_of(python: str | None, scripts: Path) -> list[list[str]]:
    """Return the commands of psync, of peers in another Python, and of floors.

    Args:
        python: A Python that has peers; None: psync and floors alone.
        scripts: The folder of the programs.

    Raises:
        ConfigurationError: They are not there.
    """
    own = [[sys.executable, "-m", "psync.bench.psync_rows"]]
    asked = [(python, name) for name in SCRIPTS if python]
    asked += [(sys.executable, name) for name in FLOOR_SCRIPTS]
    for _, name in asked:
        if not (scripts / name).is_file():
            raise ConfigurationError(
                f"{scripts / name} is missing",
                hint="it comes with the sources of psync: run this there, or say where it is",
            )
    return own + [[str(interpreter), str(scripts / name)] for interpreter, name in asked]


def run(python: str | None, scripts: Path, out: Path, *, quick: bool, rows: str) -> int:
    """Measure, print the table, and write ``peers.json`` and ``peers.md`` in ``out``.

    Args:
        python: As for ``commands_of``.
        scripts: Likewise.
        out: A folder, which may not be there yet.
        quick: Fewer and shorter repetitions.
        rows: Only rows that have this in their names.

    Raises:
        ConfigurationError: No row is called so; or a system fails, or gives a wrong result.
    """
    chosen = [row for row in ROWS if rows in row.name]
    if not chosen:
        raise ConfigurationError(
            f"no row has {rows!r} in its name", hint="; ".join(row.name for row in ROWS)
        )
    commands = commands_of(python, scripts)
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(
        f"{about['cores']} cores, Python {about['python']}, load before: {about['load_before']:.1f}"
    )
    with started(commands, _note) as systems:
        idle = idle_cpu(systems, IDLE_S)
        for system in systems:
            if idle[system.name] > MAX_IDLE:
                _note(f"{system.name} polls, and is stopped while others are measured")
                system.pause()
        results = measure(systems, chosen, 2 if quick else 5, quick, _note)
        versions = {system.name: system.version for system in systems}
    measured = {"machine": about, "versions": versions, "idle_cpu": idle, "rows": results}
    (out / "peers.json").write_text(json.dumps(measured, indent=1))
    names = [name for name in versions if any(name in row["systems"] for row in results)]
    text = report.peers_table(results, names)
    (out / "peers.md").write_text(text + "\n")
    print(text)
    print("\n" + "; ".join(f"{name} {version}" for name, version in versions.items()))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in idle.items() if share >= 0.001)
    print(f"CPU of a core while nothing is ordered: {shares or 'none'}")
    return 0


def _note(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)
