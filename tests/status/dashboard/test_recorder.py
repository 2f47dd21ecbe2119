"""A status a second."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from psync.status.dashboard.recorder import Recorder
from psync.status.dashboard.run_log import FinishedRun, RunLog
from psync.status.model import ShardStatus, Status
from statuses import status, worker

W, V = (ShardStatus(name, 0, (2,), "float32", 8, 0) for name in "wv")


class Cluster:
    """Has a status, and more variables as time goes on."""

    def __init__(self) -> None:
        self.asked = 0
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
    recorder = Recorder(cluster.status, RunLog(path, "train.py"), interval_s=0.001)
    recorder.start()
    await cluster.asked_again(3)
    cluster.placed = (W, V)
    await cluster.asked_again(2)
    await recorder.close()
    await recorder.close()
    assert recorder.show.newest == status(worker(), at=float(cluster.asked), placement=(W, V))
    run = FinishedRun(path)
    written = [each.time for each in run.statuses()]
    assert written == sorted(written)
    assert written[-1] == cluster.asked
    assert run.ended
    assert {each.placement for each in run.statuses()} == {(W,), (W, V)}
    assert path.read_text().count('{"placement"') == 2


async def test_an_error_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    recorder = Recorder(cluster.status, interval_s=0.001)
    cluster.fails = True
    recorder.start()
    await cluster.asked_again(3)
    cluster.fails = False
    await cluster.asked_again(2)
    cluster.fails = True
    await recorder.close()
    assert recorder.show.newest is not None
    assert caplog.text.count("the dashboard cannot read the status") == 2


async def test_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, log = Cluster(), RunLog(tmp_path / "run.jsonl", "train.py")

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log, "add", full)
    recorder = Recorder(cluster.status, log, interval_s=0.001)
    with caplog.at_level(logging.WARNING):
        recorder.start()
        await cluster.asked_again(4)
        await recorder.close()
    assert caplog.text.count("is no longer written: No space left on device") == 1
    log.close()
