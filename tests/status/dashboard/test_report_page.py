"""Reports: the page of a run in one file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard import run_log as report
from psync.status.dashboard.run_log import RunLog, check_path, write_report
from psync.status.model import Status
from statuses import status, worker


def run_log(folder: Path, *statuses: Status) -> Path:
    log = RunLog(folder / "run.jsonl", "train.py")
    for each in statuses:
        log.add(each)
    log.close()
    return log.path


def moments(count: int, note: str = "") -> list[Status]:
    return [
        status(worker(0), at=1e9 + at, reported={"loss": 1.0 / (1 + at)}, notes=(note,))
        for at in range(count)
    ]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="report" type="application/json">(.*?)</script>', page)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_everything_is_in_the_file(tmp_path: Path) -> None:
    log = run_log(tmp_path, *moments(5, "</script><b>"))
    path = tmp_path / "run.html"
    assert write_report(log, path) == path
    page = path.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\((?!["']?data:)""", page)
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    data = data_of(page)
    assert [moment["time"] for moment in data["moments"]] == [1e9 + at for at in range(5)]
    assert data["moments"][-1]["state"] == "ended"
    assert data["moments"][-1]["notes"] == ["</script><b>"]
    assert data["series"]["time"] == [1e9 + at for at in range(5)]
    assert data["series"]["reported loss"][1] == 0.5


def test_a_long_run_has_fewer_moments_and_all_of_its_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run_log(tmp_path, *moments(400))
    monkeypatch.setattr(report, "REPORT_MOMENTS", 10)
    data = data_of(write_report(log, tmp_path / "run.html").read_text())
    times = [moment["time"] - 1e9 for moment in data["moments"]]
    assert (len(times), times[0], times[-1]) == (10, 0, 399)
    assert len(data["series"]["time"]) == 400
    monkeypatch.setattr(report, "REPORT_BYTES", 10)
    data = data_of(write_report(log, tmp_path / "run.html").read_text())
    assert [moment["time"] - 1e9 for moment in data["moments"]] == [399]


def test_a_path_that_does_not_serve_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r'expected the name of a file.*"\.html"'):
        check_path(tmp_path / "run.json")
    with pytest.raises(ConfigurationError, match=r"No such file or directory\nhint: the folder"):
        check_path(tmp_path / "missing" / "run.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigurationError, match="expected the name of a file"):
        check_path(tmp_path / "folder.html")
    assert check_path(tmp_path / "run.html") == tmp_path / "run.html"
    assert os.listdir(tmp_path) == ["folder.html"]


def test_a_report_that_cannot_be_written_at_the_end_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run_log(tmp_path, *moments(2))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    written = write_report(log, tmp_path / "missing" / "run.html")
    assert written.is_relative_to(tmp_path / "elsewhere")
    assert written.name == "run.html"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        write_report(log, tmp_path / "missing" / "run.html")
