"""Pictures are drawn of whatever runs there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_runs import asynchronous_run, synchronous_run
from psync.bench import plots
from psync.bench.figures import figures_of

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draw once before files are counted: matplotlib opens its fonts and keeps them."""
    pytest.importorskip("matplotlib")
    figure = plots.new_figure(1, 1)
    figure.suptitle("text")
    figure.savefig(tmp_path_factory.mktemp("fonts") / "plot.png")


@pytest.fixture
def path(tmp_path: Path, open_fonts: None) -> Path:
    return tmp_path / "plot.png"


@pytest.mark.slow
def test_training_of_all_kinds_is_drawn(path: Path) -> None:
    runs = [figures_of(run(), "none slow") for run in (asynchronous_run, synchronous_run)]
    plots.plot_training([runs, runs[:1]], "s", path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_curves_of_any_number_are_drawn_and_empty_ones_passed_over(path: Path) -> None:
    points = [{"at": at, "median": 3.0, "min": 2.0, "max": 5.0 * at} for at in (1, 10)]
    panels = [
        {"title": "step; µs", "over": "workers", "lines": {"step": points, "first": points[:1]}},
        {"title": "nothing; µs", "over": "workers", "lines": {}},
    ]
    plots.plot_scaling(panels, path)
    assert path.read_bytes().startswith(PNG)
    plots.plot_scaling([], path.with_suffix(".svg"))
    assert b"<svg" in path.with_suffix(".svg").read_bytes()
