"""A status a second."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard import run_log as recorder_module
from psync.status.dashboard.run_log import FinishedRun, Recorder, RunLog, shown
from psync.status.model import ShardStatus, Status
from statuses import live_show, logged, status, worker
from view_schema import check_view

pytestmark = pytest.mark.usefixtures("hurried")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 0.001)


W, V = (ShardStatus(name, 0, (2,), "float32", 8, 0) for name in "wv")


class Cluster:
    """Has a status, and more variables as time goes on."""

    program = "train.py"

    def __init__(self) -> None:
        self.asked = self.asks_workers = 0
        self.fails = False
        self.placed: tuple[ShardStatus, ...] = (W,)
        self.news = asyncio.Condition()

    async def status(self) -> Status:
        self.asked += 1
        async with self.news:
            self.news.notify_all()
        if self.fails:
            raise RuntimeError("no status")
        return status(worker(), at=float(self.asked), placement=self.placed)

    async def asked_again(self, times: int) -> None:
        until = self.asked + times
        async with self.news:
            await self.news.wait_for(lambda: self.asked >= until)


async def test_it_takes_one_after_the_other_and_a_last_one(tmp_path: Path) -> None:
    cluster, path = Cluster(), tmp_path / "run.jsonl"
    log = RunLog(path, "train.py")
    recorder = recorder_of(cluster, log)
    recorder.start()
    await cluster.asked_again(3)
    cluster.placed = (W, V)
    await cluster.asked_again(2)
    await recorder.close()
    await recorder.close()
    log.close()
    assert recorder.history.moments[-1] == status(
        worker(), at=float(cluster.asked), placement=(W, V)
    )
    run = FinishedRun(path)
    written = [each.time for each in logged(run)]
    assert written == sorted(written)
    assert written[-1] == cluster.asked
    assert run.ended
    assert {each.placement for each in logged(run)} == {(W,), (W, V)}
    assert path.read_text().count('{"placement"') == 2


async def test_the_page_shows_the_newest_moment_of_a_run_that_goes_on() -> None:
    show = live_show()
    assert (await show.view("recent", None), await show.status(None)) == ("{}", None)
    show.history.add(status(worker(), at=1.0))
    show.history.add(status(worker(0, "lost"), at=2.0))
    view = json.loads(await show.view("recent", None))
    check_view(view)
    assert (view["mode"], view["time"], view["series"]["time"]) == ("live", 2.0, [1.0, 2.0])
    assert (await show.status(5.0)) is show.history.moments[-1]


async def test_an_error_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    recorder = recorder_of(cluster)
    cluster.fails = True
    recorder.start()
    await cluster.asked_again(3)
    cluster.fails = False
    await cluster.asked_again(2)
    cluster.fails = True
    await recorder.close()
    assert recorder.history.moments
    assert caplog.text.count("the dashboard cannot read the status") == 2


async def test_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, log = Cluster(), RunLog(tmp_path / "run.jsonl", "train.py")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log, "_append", full)
    recorder = recorder_of(cluster, log)
    with caplog.at_level(logging.WARNING):
        recorder.start()
        await cluster.asked_again(4)
        await recorder.close()
        log.close()
    assert caplog.text.count("is no longer written: No space left on device") == 1


def recorder_of(cluster: Any, log: RunLog | None = None) -> Recorder:
    return Recorder(cluster, log)


async def record(address: str | None = "", log: Path | str | None = "") -> str:
    """Show or write down a run that ends at once; return the URL."""
    source: Any = Cluster()
    async with shown(source, address, log) as url:
        return url


async def test_coordinators_of_one_program_share_the_log_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("PSYNC_RUN_LOG", str(path))
    for _ in range(2):
        await record(None, None)
    assert path.read_text().count('"psync_run_log"') == 2
    await record(None, path)
    assert path.read_text().count('"psync_run_log"') == 1  # replaced, as its caller says


async def test_what_is_given_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PSYNC_RUN_LOG", str(tmp_path / "other.jsonl"))
    monkeypatch.setenv("PSYNC_DASHBOARD", "nowhere")
    for log in (tmp_path / "run.jsonl", ""):
        await record(log=log)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["run.jsonl"]
    assert capsys.readouterr().err == ""


async def test_a_log_without_a_dashboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    url = await record(log=str(path))
    assert (url, capsys.readouterr().err) == ("", "")
    assert FinishedRun(path).ended
    monkeypatch.setenv("PSYNC_RESTART_COUNT", "1")
    await record(log=str(path))
    assert len(FinishedRun(path)) >= 2


async def test_a_dashboard_prints_its_url(capsys: pytest.CaptureFixture[str]) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    source: Any = Cluster()
    async with shown(source, "127.0.0.1:0", "") as shown_at:
        assert capsys.readouterr().err == f"psync: dashboard at {shown_at}\n"
        url, _, token = shown_at.partition("?token=")
        asked = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        async with asked as client, client.get(f"{url}api/view") as answer:
            assert json.loads(await answer.text())["program"] == "train.py"


async def test_a_log_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        await record(log=str(tmp_path / "no" / "run.jsonl"))
