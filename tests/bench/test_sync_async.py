"""The whole benchmark: parts, files, and what it says if something is missing or wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_runs import asynchronous_run, synchronous_run
from psync.bench import plots, sync_async, virtual_runs
from psync.bench.checks import WrongResultError
from psync.bench.figures import Figures, backup_figures, figures_of
from psync.bench.sync_async import Options
from psync.errors import ConfigurationError

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def figures(setting: str) -> list[Figures]:
    synchronous = synchronous_run()
    return [
        figures_of(asynchronous_run(), setting),
        figures_of(synchronous, setting) | backup_figures(synchronous),
    ]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the pictures, which are not drawn: matplotlib would keep its fonts open."""
    names: list[str] = []
    for plot in ("plot_training", "plot_backups"):
        monkeypatch.setattr(plots, plot, lambda *args: names.append(args[-1].name))
    return names


def test_the_parts_that_were_asked_for_are_printed_and_written(
    tmp_path: Path,
    drawn: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(quick: bool, note: Callable[[str], None]) -> list[Figures]:
        note("something")
        return figures(virtual_runs.GIVEN_UP) + figures(virtual_runs.FINISHED)

    monkeypatch.setattr(virtual_runs, "measure", measure)
    out = tmp_path / "new" / "folder"
    assert sync_async.run(Options(parts=["virtual"], quick=True, out=out)) == 0
    captured = capsys.readouterr()
    assert captured.err == "… something\n"
    assert "late gradients given up" in captured.out
    assert "Best number" not in captured.out  # of one number of backups nothing is best
    assert "no slow one" in captured.out
    assert drawn == ["sync_vs_async_100_workers.png", "sync_vs_async_backups.png"]
    written = json.loads((out / "sync_vs_async.json").read_text())
    assert written.keys() == {"machine", "quick", "virtual"}
    assert written["virtual"][1]["staleness_of_dropped"] == {"1": 1}


def test_a_wrong_result_ends_the_benchmark_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(quick: bool, note: Callable[[str], None]) -> list[Figures]:
        raise WrongResultError("wrong result: the counter")

    monkeypatch.setattr(virtual_runs, "measure", measure)
    assert sync_async.run(Options(parts=["virtual"], out=tmp_path)) == 1
    assert capsys.readouterr().err == "wrong result: the counter\n"
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="matplotlib"):
        sync_async.run(Options(out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
