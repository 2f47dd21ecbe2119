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

SMALL, SMALL_SHAPE = 100, (16, 16)  # variables of the work "variables"
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
        command: Its command.
        checkout: Root of the sources of psync that it uses, if these are others than our own.

    Raises:
        ConfigurationError: It cannot be started, ends, or says nothing that is an answer.
    """

    def __init__(self, command: Sequence[str], checkout: Path | None = None) -> None:
        self._command = command
        environment = {**os.environ, "PSYNC_LOG_LEVEL": "warning"}
        if checkout is not None:
            environment["PYTHONPATH"] = os.fspath(checkout / "src")
        self.polls = False  # it takes much of the CPU while it idles, see ``MAX_IDLE``
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                process_group=0,  # Ctrl-C is for us
            )
        except OSError as exc:
            raise ConfigurationError(
                f"{command[0]} cannot be started: {exc.strerror}",
                hint="--peers takes the Python interpreter of an environment with the other "
                "systems",
            ) from exc
        try:
            greeting = self._answer()
        except BaseException:
            self.close()
            raise
        self.missing: str | None = greeting.get("missing")
        self.pid = self._process.pid
        self.name = str(greeting.get("name"))
        if checkout is not None:
            self.name += f" in {checkout.name}"
        self.version = str(greeting.get("version"))
        self.works: Sequence[str] = greeting.get("works", ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(now=kind is KeyboardInterrupt)

    def close(self, *, now: bool = False) -> None:
        """End it: it ends when there are no more orders; otherwise it is killed.

        Args:
            now: Whether it may be in the middle of an order, which is not waited for.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self.polls:
            self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if now:
            self._process.terminate()
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
            f"{' '.join(self._command)}: {what}", hint="run it separately to see what it needs"
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
) -> Iterator[Figures]:
    """Measure all rows by all systems that know them, in turns.

    Args:
        systems: psync first.
        rows: What to measure.
        repetitions: Of each row, beside one that warms up.
        quick: Fewer steps.
        note: Called with what runs next.

    Yields:
        A dict for each row, when it has been measured: ``name``, ``unit``, and ``systems``, by
        name: ``min``, ``median``, ``max``, ``runs``, and for others than psync ``ratio``, how many
        times as fast psync is.
    """
    for row in rows:
        taking_part = [system for system in systems if row.work in system.works]
        steps = max(row.steps // 4, 3) if quick else row.steps
        runs: dict[str, list[float]] = {system.name: [] for system in taking_part}
        for repetition in range(repetitions + 1):
            note(f"{row.name}, repetition {repetition} of {repetitions}")
            for system in taking_part[:: 1 if repetition % 2 else -1]:
                rate = system.measure(row, steps if repetition else max(steps // 4, 2))
                if repetition:
                    runs[system.name].append(rate)
        yield {"name": row.name, "unit": row.unit, "systems": compared(runs)}


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
    commands: Sequence[Sequence[str]],
    note: Callable[[str], None],
    against: Path | None = None,
) -> Iterator[list[System]]:
    """Return a context manager with the systems that are installed.

    Args:
        commands: psync's first.
        note: Called with what starts next.
        against: Another checkout of psync, which runs right after ours.
    """
    checkouts: list[tuple[Sequence[str], Path | None]] = [(command, None) for command in commands]
    if against is not None:
        checkouts.insert(1, (commands[0], against))
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        for command, checkout in checkouts:
            note(f"starting {' '.join(command)}" + (f" of {checkout}" if checkout else ""))
            system = stack.enter_context(System(command, checkout))
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


def commands_of(python: str | None, scripts: Path, *, floors: bool = True) -> list[list[str]]:
    """Return the commands of psync, of peers in another Python, and of floors.

    Args:
        python: A Python that has peers; None: psync and floors alone.
        scripts: The folder of the programs.
        floors: Whether floors take part.

    Raises:
        ConfigurationError: They are not there.
    """
    own = [[sys.executable, "-m", "psync.bench.psync_rows"]]
    asked = [(python, name) for name in SCRIPTS if python]
    asked += [(sys.executable, name) for name in FLOOR_SCRIPTS if floors]
    for _, name in asked:
        if not (scripts / name).is_file():
            raise ConfigurationError(
                f"{scripts / name} is missing",
                hint="it is part of psync's sources: run this in a checkout, or pass --scripts",
            )
    return own + [[str(interpreter), str(scripts / name)] for interpreter, name in asked]


def run(
    python: str | None,
    scripts: Path,
    out: Path,
    *,
    quick: bool,
    rows: str,
    only_psync: bool = False,
    against: Path | None = None,
    resume: bool = False,
) -> int:
    """Measure, print the table, and write ``peers.json`` and ``peers.md`` in ``out``.

    Both files are written after each row. Ctrl-C prints the table of the rows so far.

    Args:
        python: As for ``commands_of``.
        scripts: Likewise.
        out: A folder, which may not be there yet.
        quick: Fewer and shorter repetitions.
        rows: Only rows that have this in their names.
        only_psync: Leave out peers and floors.
        against: Another checkout of psync, which takes part.
        resume: Keep the rows that ``peers.json`` has, and measure the others.

    Raises:
        ConfigurationError: No row is called so; or a system fails, or gives a wrong result; or
            what is to be resumed was measured in another way, or is not there.
    """
    chosen = [row for row in ROWS if rows in row.name]
    if not chosen:
        raise ConfigurationError(
            f"no row name contains {rows!r}", hint="; ".join(row.name for row in ROWS)
        )
    commands = commands_of(None if only_psync else python, scripts, floors=not only_psync)
    if against is not None:
        _check_checkout(against := against.resolve())
    out.mkdir(parents=True, exist_ok=True)
    how = {"quick": quick, "only_psync": only_psync, "against": against and str(against)}
    measured: Figures = {"machine": machine(), "how": how, "rows": []}
    if resume:
        measured = _resumed(out / "peers.json", how)
    done = {row["name"] for row in measured["rows"]}
    left = [row for row in chosen if row.name not in done]
    about = measured["machine"]
    print(
        f"{about['cores']} cores, Python {about['python']}, load before: {about['load_before']:.1f}"
    )
    interrupted = False
    try:
        with started(commands, _note, against) as systems:
            measured["versions"] = {system.name: system.version for system in systems}
            measured["idle_cpu"] = idle = idle_cpu(systems, IDLE_S)
            for system in systems:
                if idle[system.name] > MAX_IDLE:
                    _note(f"{system.name} polls, and is stopped while others are measured")
                    system.pause()
            for result in measure(systems, left, 2 if quick else 5, quick, _note):
                measured["rows"].append(result)
                _write(out, measured)
    except KeyboardInterrupt:
        interrupted = True
    print(_table(measured))
    if interrupted:
        print(f"\ninterrupted: {len(measured['rows'])} rows are in {out / 'peers.json'}; "
              "--resume measures the others")  # fmt: skip
        return 130
    versions, idle = measured["versions"], measured["idle_cpu"]
    print("\n" + "; ".join(f"{name} {version}" for name, version in versions.items()))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in idle.items() if share >= 0.001)
    print(f"CPU of a core while nothing is ordered: {shares or 'none'}")
    return 0


def _check_checkout(root: Path) -> None:
    """Check that a folder is a checkout of psync that can be measured."""
    if not (root / "src" / "psync" / "bench" / "psync_rows.py").is_file():
        raise ConfigurationError(
            f"{root} is not a checkout of psync: it has no src/psync/bench/psync_rows.py",
            hint="git worktree add --detach FOLDER COMMIT creates one",
        )
    found = subprocess.run(
        [sys.executable, "-c", "import psync; print(psync.__file__)"],
        env={**os.environ, "PYTHONPATH": os.fspath(root / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not found.stdout.startswith(os.fspath(root)):
        raise ConfigurationError(
            f"this Python does not import psync from {root}, but: "
            f"{(found.stdout or found.stderr).strip()[-300:]}"
        )


def _resumed(file: Path, how: Figures) -> Figures:
    """Return what an interrupted run has measured.

    Raises:
        ConfigurationError: There is no such run, or it measured in another way.
    """
    try:
        measured: Figures = json.loads(file.read_text())
        before = measured["how"]
        names = [row["name"] for row in measured["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ConfigurationError(
            f"nothing to resume: {file} has no rows ({exc!r})",
            hint="run it without --resume",
        ) from exc
    if before != how:
        raise ConfigurationError(
            f"{file} was measured with {before}, this run would use {how}",
            hint="resume with the same options, or measure into another folder: --out",
        )
    _note(f"measured before: {'; '.join(names) or 'nothing'}")
    return measured


def _table(measured: Figures) -> str:
    results = measured["rows"]
    versions = measured.get("versions", {})
    names = [name for name in versions if any(name in row["systems"] for row in results)]
    return report.peers_table(results, names)


def _write(out: Path, measured: Figures) -> None:
    """Write both files; a reader sees the old ones or the new ones."""
    for name, text in (
        ("peers.json", json.dumps(measured, indent=1)),
        ("peers.md", _table(measured) + "\n"),
    ):
        (out / f"{name}.part").write_text(text)
        (out / f"{name}.part").replace(out / name)


def _note(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)
