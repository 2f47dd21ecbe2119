"""``benchmarks/scaling.py``: every curve at a tiny size, from the command line to the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(180)]


def scaling(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--quick", "--repetitions", "1", *arguments]
    return subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )


def test_every_curve_has_its_points_and_its_panel(tmp_path: Path) -> None:
    done = scaling(tmp_path, "--sizes", "1", "3")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["quick"] is True
    for panel in written["panels"]:
        possible = [1] if panel["left_out"] else [1, 3]
        assert panel["lines"], panel["title"]
        for points in panel["lines"].values():
            assert [point["at"] for point in points] == possible
            assert all(point["runs"] == [point["median"]] for point in points)
        assert panel["title"] in done.stdout
    left_out = {line for panel in written["panels"] for line in panel["left_out"]}
    assert all("cores of the ps left out" in line for line in left_out)
    assert b"<svg" in (tmp_path / "scaling.svg").read_bytes()


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    done = scaling(tmp_path, "--curves", "bytes", "--sizes", str(1 << 50))
    assert done.returncode == 0, done.stderr
    line = f"{1 << 50:,} bytes of the variable left out: they take some 8388608.5 GiB of memory"
    assert line in done.stdout
    [panel] = json.loads((tmp_path / "scaling.json").read_text())["panels"]
    assert line in panel["left_out"][0]
    assert panel["lines"] == {}
