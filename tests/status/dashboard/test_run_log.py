"""Run logs: written, bounded, read; and files that are none."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard import run_log
from psync.status.dashboard.run_log import FinishedRun, RunLog, check_head
from psync.status.dashboard.view import LANE_CELLS
from psync.status.model import ShardStatus
from statuses import logged, shares, status, worker
from view_schema import check_view

PLACED = (ShardStatus("w", 0, (2, 3), "float32", 24, 1),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def written(path: Path, moments: int = 3, **options: object) -> RunLog:
    log = RunLog(path, "train.py", **options)  # type: ignore[arg-type]
    for at in range(moments):
        log.add(status(worker(), at=float(at)))
    return log


def times(run: FinishedRun) -> list[float]:
    return [each.time for each in logged(run)]


def test_what_is_written_is_read(path: Path) -> None:
    log = RunLog(path, "train.py")
    log.add(status(worker(), at=1.0))
    log.add(status(worker(1, "lost"), at=2.0, reported={"loss": 0.5}, placement=PLACED))
    log.close()
    log.close()
    run = FinishedRun(path)
    assert (len(run), run.ended) == (2, True)
    assert logged(run) == [
        status(worker(), at=1.0),
        status(worker(1, "lost"), at=2.0, state="ended", reported={"loss": 0.5}, placement=PLACED),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_end_or_any_moment_of_it_is_shown(path: Path) -> None:
    log = RunLog(path, "train.py")
    for at in range(400):
        state = "lost" if at >= 200 else "busy"
        log.add(status(worker(0, state, work=shares(0.5)), at=1000.0 + at, placement=PLACED))
    log.close()
    run = FinishedRun(path)
    view = json.loads(await run.view("run", None))
    check_view(view)
    assert (view["mode"], view["ended"], view["time"]) == ("log", True, 1399.0)
    assert view["state"] == "ended"
    assert view["moments"] == {"first": 1000.0, "last": 1399.0}
    assert (view["series"]["time"][0], view["series"]["time"][-1]) == (1000.0, 1399.0)
    assert [each["total"] for each in view["placement"]] == ["24 B, 1 shards"]
    assert len(view["lanes"]["times"]) == LANE_CELLS
    view = json.loads(await run.view("recent", 1210.7))
    assert (view["time"], view["workers"][0]["state"]) == (1210.0, "lost")
    assert view["state"] == "running"
    assert (view["series"]["time"][0], view["series"]["time"][-1]) == (1000.0, 1210.0)
    (lane,) = view["lanes"]["rows"]
    assert [cell[0] for cell in lane[-12:]] == ["busy"] + ["lost"] * 11
    for time, found in ((0.0, 1000.0), (1000.0, 1000.0), (9e9, 1399.0), (None, 1399.0)):
        seen = await run.status(time)
        assert seen is not None
        assert seen.time == found
    assert json.loads(await run.view("recent", 0.0))["series"]["time"] == [1000.0]


def test_the_format_is_lines_of_json(path: Path) -> None:
    log = RunLog(path, "train.py")
    log.add(status(worker(), placement=PLACED))
    log.close()
    head, placed, seen, end = map(json.loads, path.read_text().splitlines())
    assert head == {"psync_run_log": 1, "program": "train.py", "interval_s": 1.0}
    assert seen["status"]["schema"] == 1
    assert placed["placement"] == [
        {"variable": "w", "shard": 0, "shape": [2, 3], "dtype": "float32", "nbytes": 24, "ps": 1}
    ]
    assert end == {"end": {}}


def test_a_program_that_was_killed_leaves_a_log(path: Path) -> None:
    log = written(path)
    with path.open("ab") as file:
        file.write(b'{"status":{"time"')
    run = FinishedRun(path)
    assert (times(run), run.ended) == ([0, 1, 2], False)
    log.close()


def test_a_program_that_was_started_again_goes_on_with_it(path: Path) -> None:
    written(path)._file.close()
    with path.open("ab") as file:
        file.write(b'{"status":{"time"')  # it was killed here
    written(path, 2, append=True).close()
    run = FinishedRun(path)
    assert (times(run), run.ended) == ([0, 1, 2, 0, 1], True)
    written(path, 2).close()  # another run
    assert times(FinishedRun(path)) == [0, 1]


def test_appending_to_nothing_is_a_new_log(path: Path) -> None:
    written(path, 1, append=True).close()
    assert times(FinishedRun(path)) == [0]


def test_a_log_is_bounded_and_tells_of_the_whole_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 12_000
    monkeypatch.setattr(run_log, "MAX_BYTES", limit)
    log = RunLog(path, "train.py")
    for at in range(300):
        log.add(status(worker(), at=float(at), placement=PLACED))
        assert path.stat().st_size <= limit
    log.close()
    run = FinishedRun(path)
    seen = times(run)
    assert seen[0] < 40
    assert seen[-1] > 260
    assert sorted(seen) == seen
    assert {each.placement for each in logged(run)} == {PLACED}
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_thinning_keeps_where_variables_lay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 12_000)
    log = RunLog(path, "train.py")
    for at in range(200):  # a variable more with each status
        log.add(status(worker(), at=float(at), placement=PLACED * (at // 20)))
        assert path.stat().st_size <= 12_000
    log.close()
    run = FinishedRun(path)
    assert all(len(each.placement) == each.time // 20 for each in logged(run))


def test_a_disk_that_is_full_leaves_no_draft(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 5_000)
    log = RunLog(path, "train.py")
    monkeypatch.setattr(os, "replace", lambda *_: os.open("/proc/no/such", os.O_RDONLY))
    for at in range(100):
        log.add(status(worker(), at=float(at)))
    assert caplog.text.count("is no longer written: No such file") == 1
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.owner"]
    log.close()


def test_a_log_that_others_could_read_is_this_users_alone(path: Path) -> None:
    written(path, 1).close()
    path.chmod(0o644)
    written(path, 1).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_is_read_as_it_was_opened_whatever_takes_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 5_000)
    log = RunLog(path, "train.py")
    for at in range(6):
        log.add(status(worker(), at=float(at)))
    run = FinishedRun(path)
    inode = path.stat().st_ino
    while path.stat().st_ino == inode:
        log.add(status(worker(), at=9.0))
    log.close()
    assert times(run) == [0, 1, 2, 3, 4, 5]


def test_of_a_log_that_is_too_long_every_second_moment_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_MOMENTS", 8)
    written(path, 20).close()
    assert times(FinishedRun(path)) == [0, 4, 8, 12, 16]


def test_a_line_without_an_end_is_not_read_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_LINE_BYTES", 2000)
    written(path, 1).close()
    with path.open("a") as file:
        file.write("x" * 9000)
    with pytest.raises(ConfigurationError, match=r"expected a line of a run log at byte \d+"):
        FinishedRun(path)


@pytest.mark.parametrize("text", ["", "hello\n", "[1]\n", '{"a": 1}\n', "\x80\n"])
def test_a_file_that_is_no_run_log_is_one_error(path: Path, text: str) -> None:
    path.write_text(text, "latin-1")
    with pytest.raises(ConfigurationError, match=r"expected a run log of psync, got something"):
        FinishedRun(path)


def test_a_file_of_something_else_is_not_overwritten(path: Path) -> None:
    path.write_text("precious\n")
    with pytest.raises(ConfigurationError, match=r"expected a run log of psync"):
        RunLog(path, "train.py")
    assert path.read_text() == "precious\n"


def test_logs_of_another_version_of_nothing_and_of_nowhere(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run.jsonl: No such file"):
        FinishedRun(path)
    with pytest.raises(ConfigurationError, match=r"No such file"):
        RunLog(path / "x" / "run.jsonl", "train.py")
    path.write_text('{"psync_run_log": 2}\n')
    with pytest.raises(ConfigurationError, match=r"expected a run log of schema 1, got 2"):
        check_head(path)
    path.write_text('{"psync_run_log": 1}\n')
    with pytest.raises(ConfigurationError, match=r"the run log has no status"):
        FinishedRun(path)


@pytest.mark.parametrize("line", ['{"status":{}}', '{"status":', "x", '{"placement": [1]}'])
def test_a_line_that_is_broken_is_one_error(path: Path, line: str) -> None:
    written(path, 1).close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=r"expected a line of a run log at byte \d+"):
        FinishedRun(path)


def test_what_a_newer_version_writes_is_passed_over(path: Path) -> None:
    log = written(path, 1)
    log.close()
    with path.open("a") as file:
        file.write('{"profile": [1, 2]}\n')
    assert times(FinishedRun(path)) == [0]


def test_only_one_program_writes_a_log(path: Path) -> None:
    log = written(path, 1)
    again = written(path, 1)  # of this process
    owner = path.with_name("run.jsonl.owner")
    assert owner.exists()
    log.close()
    again.close()
    assert not owner.exists()
    before = path.read_bytes()
    with open(owner, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"program": "other.py", "pid": 7, "host": "here", "since": 1.5e9}')
        file.flush()
        for append in (False, True):
            with pytest.raises(ConfigurationError, match=r"other\.py \(process 7 on here, "):
                RunLog(path, "train.py", append=append)
    assert path.read_bytes() == before
    assert FinishedRun(path).ended  # reading needs no owner
    written(path, 1).close()


def test_something_else_in_the_place_of_a_log_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", tmp_path / "loop", tmp_path, Path("/dev/zero")):
        for use in (FinishedRun, lambda path: RunLog(path, "train.py")):
            with pytest.raises(ConfigurationError, match=str(path)):
                use(path)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_nesting_is_no_run_log(path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for line in (nested, f'{{"placement":{nested}}}', f'{{"status":{nested}}}'):
        path.write_text(f"{line}\n")
        with pytest.raises(ConfigurationError, match="expected a run log"):
            FinishedRun(path)
        path.unlink()
        written(path, 1).close()
        with open(path, "a") as file:
            file.write(f"{line}\n")
        with pytest.raises(ConfigurationError, match="expected a line of a run log at byte"):
            FinishedRun(path)
        path.unlink()
