"""The page in a real browser: headless Chromium, skipped where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard.run_log import FinishedRun, Recorder, RunLog, write_report
from psync.status.http import serving_dashboard
from psync.status.model import EventStatus, QueueStatus, ShardStatus, Status, StepsStatus
from statuses import live_show, ps, shares, status, worker

pytest.importorskip("aiohttp")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.processes,
    pytest.mark.slow,
]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--window-size=1280,1600",
    "--virtual-time-budget=4000",
)  # fmt: skip
PLACED = tuple(
    ShardStatus("hidden/kernel", number, (64, 64), "float32", 16384, number) for number in (0, 1)
)


def moment(at: float, num_workers: int) -> Status:
    workers = [
        worker(index, "lost") if index == 7 and at > 50 else
        worker(index, mean_s=0.1, work=shares(0.6, 0.1, 0.1, 0.1))
        for index in range(num_workers)
    ]  # fmt: skip
    return status(
        *workers, ps(0, bytes=16384, bytes_out_per_s=1e6), ps(1, bytes=16384), at=1e9 + at,
        queue=QueueStatus(queued=9, in_flight=9, finished=10, closures_per_s=1234.0 + at),
        steps=StepsStatus(5, 2.0, {"0": 30, "1": 10}), reported={"loss": 1 / (1 + at)},
        placement=PLACED,
        events=(EventStatus("joined", "<b>/job:worker/task:0</b> takes part", 3.0),),
    )  # fmt: skip


def live(num_workers: int, moments: int = 100) -> Recorder:
    show = live_show()
    for at in range(moments):
        show.add(moment(float(at), num_workers))
    return show


async def browse(
    show: Recorder | FinishedRun, *flags: str, query: str = ""
) -> tuple[str, list[str]]:
    """Open the page; return what it has become, and what the browser complains of."""
    async with serving_dashboard(show, "127.0.0.1:0") as url:
        return await opened(url + query, *flags)


async def opened(url: str, *flags: str) -> tuple[str, list[str]]:
    """Open a URL, as ``browse``."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode(), [line for line in err.decode().splitlines() if "CONSOLE" in line]


def texts(page: str, id_: str) -> str:
    """Return the text of an element."""
    inner = page.partition(f'id="{id_}"')[2].partition(">")[2]
    for end in ("</section>", "</table>", "</ul>", "</ol>", "</span>"):
        if end in inner:
            return re.sub(r"<[^>]*>", " ", inner.partition(end)[0])
    return ""


@pytest.mark.timeout(120)
async def test_a_live_run_is_drawn_without_complaints() -> None:
    page, complaints = await browse(live(4), "--dump-dom")
    assert complaints == []
    assert '<p id="alert" class="alert" role="status" hidden' in page
    assert "train.py · psync" in page
    assert "workers compute, or read data, for 60% of the time." in texts(page, "why")
    assert "1,333" in texts(page, "tiles")
    assert page.count('class="uplot') == 4
    assert page.count("<canvas") == 4 + 2
    assert "hidden/kernel [0]" in page
    assert re.search(r'id="states-card"[^>]*hidden', page)
    # Texts of the run are texts, whatever they look like.
    assert "&lt;b&gt;worker 0&lt;/b&gt; takes part" in page


@pytest.mark.timeout(120)
async def test_what_the_server_says_stands_on_the_page() -> None:
    class Broken(Recorder):
        async def view(self, span: str, time: float | None) -> str:
            raise ConfigurationError("run.jsonl: expected a line of a run log at byte 7")

    read: Any = None
    page, _ = await browse(Broken(read), "--dump-dom")
    assert "run.jsonl: expected a line of a run log at byte 7" in texts(page, "alert")


@pytest.mark.timeout(120)
async def test_a_thousand_workers_fit() -> None:
    page, complaints = await browse(live(1000), "--dump-dom")
    assert complaints == []
    assert "Worker 7 is lost" in texts(page, "why")
    assert "40 of 1,000: those in trouble, then the slowest" in texts(page, "workers-note")
    assert not re.search(r'id="states-card"[^>]*hidden', page)
    assert page.count("<td") < 1000


@pytest.mark.timeout(120)
async def test_a_run_log_has_a_way_through_time(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl", "train.py")
    for at in range(60):
        log.add(moment(float(at), 8))
    log.close()
    with contextlib.closing(FinishedRun(log.path)) as run:
        page, complaints = await browse(run, "--dump-dom")
    assert complaints == []
    assert "from its log" in page
    assert re.search(r'id="slider"[^>]*max="1000000059"', page)
    assert not re.search(r'<label id="travel"[^>]*hidden', page)


@pytest.mark.timeout(120)
async def test_a_report_is_the_page_of_the_whole_run_without_a_server(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl", "train.py")
    for at in range(60):
        log.add(moment(float(at), 8))
    log.close()
    path = write_report(log.path, tmp_path / "run.html")
    page, complaints = await opened(path.as_uri(), "--dump-dom")
    assert complaints == []
    assert page.count('class="uplot') == 4
    assert '<button type="button" data-span="run" aria-pressed="true">' in page
    assert re.search(r'id="slider"[^>]*max="1000000059"', page)
    assert "Worker 7 is lost" in texts(page, "why")
    assert "ended" in texts(page, "state")
    assert "&lt;b&gt;worker 0&lt;/b&gt; takes part" in page


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dark", [False, True])
async def test_it_is_painted_in_light_and_in_dark(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "page.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _, complaints = await browse(live(4), f"--screenshot={path}", *scheme)
    assert complaints == []
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 50_000  # an empty page has a tenth of that
