"""The dashboard and the run log of a coordinator: asked for, begun and ended with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard.attached import Attached, Wanted, hosts_of, wanted
from psync.status.dashboard.run_log import FinishedRun
from psync.status.model import Status
from statuses import status, worker


class Source:
    """The status of a cluster that does not change."""

    program = "train.py"
    asks_workers = False

    async def status(self) -> Status:
        return status(worker())


def attached(**what: Any) -> Attached:
    source: Any = Source()
    return Attached(Wanted(**what), source)


def test_what_is_given_goes_before_the_environment() -> None:
    environ = {"PSYNC_DASHBOARD": "a:1", "PSYNC_RUN_LOG": "x", "PSYNC_RESTART_COUNT": "2"}
    assert wanted(None, None, environ) == Wanted("a:1", "x", (), True)
    assert wanted("b:2", Path("y"), environ) == Wanted("b:2", "y", (), True)
    assert wanted("", "", environ) == Wanted("", "", (), True)
    assert wanted(None, None, {}) == Wanted()


async def test_coordinators_of_one_program_share_the_log_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("PSYNC_RUN_LOG", str(path))
    source: Any = Source()
    for _ in range(2):
        run = Attached(wanted(None, None), source)
        await run.start()
        await run.close()
    assert path.read_text().count('"psync_run_log"') == 2
    assert not wanted(None, path, {}).continues  # that one is replaced, as its caller says


def test_names_of_proxies() -> None:
    assert hosts_of({"PSYNC_DASHBOARD_HOSTS": " a.example.com,b, "}) == ("a.example.com", "b")
    assert hosts_of({}) == ()


async def test_a_log_without_a_dashboard(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    run = attached(log=str(path))
    await run.start()
    await run.close()
    assert (run.url, capsys.readouterr().err) == ("", "")
    assert FinishedRun(path).ended
    again = attached(log=str(path), continues=True)
    await again.start()
    await again.close()
    assert len(FinishedRun(path)) >= 2


async def test_a_dashboard_prints_its_url(capsys: pytest.CaptureFixture[str]) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    run = attached(address="127.0.0.1:0")
    await run.start()
    try:
        assert capsys.readouterr().err == f"psync: dashboard at {run.url}\n"
        url, _, token = run.url.partition("?token=")
        asked = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        async with asked as client, client.get(f"{url}api/view") as answer:
            assert json.loads(await answer.text())["program"] == "train.py"
    finally:
        await run.close()


async def test_a_log_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    run = attached(log=str(tmp_path / "no" / "run.jsonl"))
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        await run.start()
    await run.close()
