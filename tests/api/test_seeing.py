"""What a program shows of its run: a dashboard, a log."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of, coordinating
from psync.api.cluster_coordinator import MAX_REPORTED
from psync.errors import ClosedError, ConfigurationError, UsageError
from psync.status.dashboard.run_log import FinishedRun
from psync.status.model import ShardStatus
from psync.status.sampling import running


async def test_a_run_log_has_statuses_and_placement(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with cluster_of(num_ps=2) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy, run_log=path) as coordinator:
            with strategy.scope():
                psync.Variable(np.zeros((4, 2), np.float32), name="w")
            assert coordinator.dashboard_url == ""
            await _a_moment(coordinator)
    run = FinishedRun(path)
    last = run.status_at(len(run) - 1)
    assert last.placement == (
        ShardStatus("w", 0, (2, 2), "float32", 16, 0),
        ShardStatus("w", 1, (2, 2), "float32", 16, 1),
    )
    assert (run.ended, len(last.workers), last.state) == (True, 2, "ended")


async def test_a_log_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    async with cluster_of() as cluster:
        coordinator = psync.ClusterCoordinator(cluster.strategy(), run_log=tmp_path / "no" / "x")
        with pytest.raises(ConfigurationError, match="No such file or directory"):
            await coordinator.start()


async def test_the_environment_asks_for_a_log_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_RUN_LOG", str(tmp_path / "run.jsonl"))
    async with coordinating():
        pass
    assert FinishedRun(tmp_path / "run.jsonl").ended
    async with coordinating(run_log=""):
        pass


async def test_a_dashboard_lasts_as_long_as_its_coordinator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    async with coordinating(dashboard="127.0.0.1:0") as (_, coordinator):
        url = coordinator.dashboard_url
        assert f"psync: dashboard at {url}\n" in capsys.readouterr().err
        coordinator.report({"loss": 0.5})
        base, _, token = url.partition("?token=")
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            async with client.get(f"{base}api/view") as answer:
                view = json.loads(await answer.text())
        assert view["num_workers"] == 2
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(base)
    with pytest.raises(ClosedError, match="dashboard_url"):
        _ = coordinator.dashboard_url


async def _a_moment(coordinator: psync.ClusterCoordinator) -> None:
    """Let the newest status become old: whoever asks again at once gets the same."""
    coordinator._seen.source._newest = None


async def test_of_names_that_are_reported_the_newest_are_kept() -> None:
    async with coordinating() as (_, coordinator):
        for number in range(MAX_REPORTED + 5):
            coordinator.report({f"loss {number}": 1.0})
        names = list((await coordinator.status()).reported)
    assert names == [f"loss {number}" for number in range(5, MAX_REPORTED + 5)]


async def test_a_report_tells_of_coordinators_that_run_and_of_those_that_start(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    async with psync.report(first):
        async with coordinating() as (_, coordinator):
            async with psync.report(second):
                coordinator.report({"loss": 0.25})
                await _a_moment(coordinator)
    for path in (first, second):
        page = path.read_text()
        assert '"reported loss":[' in page
        assert page.count('"schema":1') > 0


async def test_the_report_of_a_run_that_fails_is_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with psync.report(tmp_path / "run.html"), coordinating() as (_, coordinator):
            await _a_moment(coordinator)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()
    assert (tmp_path / "run.html").exists()


async def test_a_report_never_costs_the_result_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with psync.report(tmp_path / "run.html"):
        pass
    assert "no report was written" in caplog.text
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    async with psync.report(folder / "run.html"), coordinating() as (_, coordinator):
        await _a_moment(coordinator)
        folder.rmdir()
    assert f"report {folder / 'run.html'} cannot be written; it is in {elsewhere}" in caplog.text
    assert [path.name for path in elsewhere.glob("*/*")] == ["run.html"]


async def test_a_report_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        async with psync.report(tmp_path / "missing" / "run.html"):
            pass
    report = psync.report(tmp_path / "run.html")
    async with report:
        pass
    with pytest.raises(UsageError, match="it can be entered only once"):
        async with report:
            pass


async def test_a_coordinator_that_was_refused_is_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster_of() as cluster, psync.report(tmp_path / "run.html"):
        coordinator = psync.ClusterCoordinator(cluster.strategy(), metrics="nowhere")
        with pytest.raises(ConfigurationError, match='metrics: expected "HOST:PORT"'):
            await coordinator.start()
        assert all(run.loop is not asyncio.get_running_loop() for run in running)
    assert "no coordinator has run" in caplog.text


async def test_a_report_whose_log_has_vanished_never_costs_the_result_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "logs"))
    async with psync.report(tmp_path / "run.html"), coordinating() as (_, coordinator):
        await _a_moment(coordinator)
        for path in (tmp_path / "logs").iterdir():
            shutil.rmtree(path)
    assert "no report was written" in caplog.text


async def test_nothing_is_left_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "logs"))
    async with coordinating() as (_, coordinator):
        for number in range(2):
            async with psync.report(tmp_path / f"{number}.html"):
                await _a_moment(coordinator)
        assert coordinator._seen.source.asks_workers == 0
    gc.collect()
    assert list((tmp_path / "logs").iterdir()) == []
