"""The benchmark of synchronous against asynchronous training: runs, output, JSON, plots."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psync.bench import plots, real_runs, report, virtual_runs
from psync.bench.checks import WrongResultError
from psync.bench.digits import load
from psync.bench.figures import Figures
from psync.launch.process import loop_factory

PARTS = ("processes", "virtual")
PACKAGES = ("psync", "numpy", "uvloop", "msgspec")
NAME = "sync_vs_async"  # of the files


@dataclass(frozen=True)
class Options:
    """What to run."""

    parts: Sequence[str] = PARTS
    workers: Sequence[int] = (2, 4)  # real processes; virtual ones are always 100
    quick: bool = False
    out: Path = Path("out")


def run(options: Options) -> int:
    """Run the parts; results go to stdout and to files in ``options.out``.

    Returns:
        The exit code: 1 if a run's variables are not what its pushes make of them.

    Raises:
        ConfigurationError: matplotlib or scikit-learn is missing.
    """
    _check(options)
    try:
        _run(options)
    except WrongResultError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


def _check(options: Options) -> None:
    """Say what is missing at once, not after the first minutes."""
    load("train")
    plots.new_figure(1, 1)


def _run(options: Options) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(
        f"{about['cores']} cores, Python {about['python']}, "
        + ", ".join(f"{name} {version}" for name, version in about["packages"].items())
        + f"; load before: {about['load_before']:.1f}"
    )
    written: dict[str, Any] = {"machine": about, "quick": options.quick}
    for part, measure in zip(PARTS, (_processes, _virtual), strict=True):
        if part in options.parts:
            written[part] = measure(options)
    path = options.out / f"{NAME}.json"
    path.write_text(json.dumps(written, indent=1))
    print(f"\nfigures: {path}")


def _processes(options: Options) -> list[Figures]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(real_runs.measure(options.workers, options.quick, _note))
    for workers, those in itertools.groupby(results, lambda result: int(result["workers"])):
        settings = _by_setting(those)
        for runs in settings:
            _say(f"{workers} worker processes, {runs[0]['setting']}")
            print(report.training_table(runs))
            print(*report.findings(runs), sep="\n")
        _draw(options, f"{workers}_workers", plots.plot_training, settings, "s")
    return results


def _virtual(options: Options) -> list[Figures]:
    results = virtual_runs.measure(options.quick, _note)
    settings = _by_setting(results)
    for runs in settings:
        _say(f"{runs[0]['workers']} workers in virtual time, {runs[0]['setting']}")
        print(report.training_table(runs))
        print()
        print(report.backups_table([run for run in runs if run["backups"] is not None]))
        print(*report.findings(runs), sep="\n")
    _draw(options, "100_workers", plots.plot_training, settings[:1], "virtual s")
    _draw(options, "backups", plots.plot_backups, settings)
    return results


def _by_setting(results: Any) -> list[list[Figures]]:
    groups = itertools.groupby(results, lambda result: str(result["setting"]))
    return [list(runs) for _, runs in groups]


def _draw(options: Options, name: str, draw: Any, *figures: Any) -> None:
    path = options.out / f"{NAME}_{name}.png"
    draw(*figures, path)
    print(f"plot: {path}")


def _note(what: str) -> None:
    """Say on stderr what runs, where somebody may be watching."""
    print(f"… {what}", file=sys.stderr, flush=True)


def _say(title: str) -> None:
    print(f"\n{title}\n", flush=True)


def machine() -> dict[str, Any]:
    """Say where the figures come from."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "load_before": os.getloadavg()[0],
    }
