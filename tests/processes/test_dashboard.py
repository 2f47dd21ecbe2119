"""`psync run --dashboard --log`, and `psync dashboard` of the log: a real run."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from live_program import PSYNC, program
from psync.status.dashboard.run_log import FinishedRun
from view_schema import check_view

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

SCRIPTS = Path(__file__).parent / "scripts"
SEEN: list[str | Path] = [*PSYNC, "run", SCRIPTS / "seen.py"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def ran(command: Sequence[str | Path], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def view(url: str, query: str = "") -> dict[str, Any]:
    base, _, token = url.partition("?token=")
    asked = urllib.request.Request(f"{base}api/view{query}")
    asked.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def views(url: str) -> Iterator[dict[str, Any]]:
    while True:
        found = view(url)
        if found:
            yield found


def test_a_run_is_shown_while_it_lasts_and_afterwards_from_its_log(
    environ: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl"
    with program(
        [*SEEN, "--ps", "2", "--workers", "2", "--dashboard", "--log", log], environ
    ) as run:
        url = run.wait_for_error("dashboard at ").split()[-1]
        for found in views(url):  # until workers have said twice what their time went to
            check_view(found)
            if found["series"].get("compute", [None])[-1] and found["placement"]:
                break
        assert (found["program"], found["mode"]) == ("seen.py", "live")
        shares = [found["series"][kind][-1] for kind in ("compute", "pull", "push", "free")]
        assert 80 < sum(shares) <= 100.5
        assert found["placement"][0]["parts"][0]["name"] == "w [0]"
        assert run.end()[0] == 0
    assert FinishedRun(log).ended
    with program([*PSYNC, "dashboard", log], environ) as page:
        found = view(page.greeting, "?span=run")
        check_view(found)
        assert (found["program"], found["mode"], found["ended"]) == ("seen.py", "log", True)
        assert page.interrupt() == 0


def test_a_port_in_use_ends_the_run_with_one_error(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = ran([*SEEN, "--dashboard-address", address], environ)
    assert run.returncode == 2
    assert f"dashboard: {address} is in use by another program" in run.stderr


def test_a_run_whose_chief_is_killed_is_in_its_report(
    environ: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import asyncio, os, signal, sys\n"
        "import psync\n"
        "async def main():\n"
        "    strategy = psync.ParameterServerStrategy()\n"
        "    async with psync.ClusterCoordinator(strategy) as coordinator:\n"
        "        coordinator.report({'life': int(os.environ['PSYNC_RESTART_COUNT'])})\n"
        "        moments = 0\n"
        "        while moments < 3:\n"
        "            moments = open(os.environ['PSYNC_RUN_LOG']).read().count('\"life\"')\n"
        "            await asyncio.sleep(0.05)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "psync.run(main)\n"
    )
    report = tmp_path / "run.html"
    run = ran([*PSYNC, "run", script, "--report", report], environ)
    assert run.returncode == 128 + signal.SIGKILL
    assert f"psync: the report of the run is in {report}\n" in run.stderr
    assert '"reported life":[' in report.read_text()


def test_without_a_coordinator_there_is_no_report_and_the_exit_code_stays(
    environ: dict[str, str], tmp_path: Path
) -> None:
    script, report = tmp_path / "nothing.py", tmp_path / "run.html"
    script.write_text("async def main(): raise SystemExit(7)\nimport psync; psync.run(main)\n")
    run = ran([*PSYNC, "run", script, "--report", report], environ)
    assert (run.returncode, report.exists()) == (7, False)
    assert "psync: no report was written: no coordinator has run\n" in run.stderr


def test_two_programs_do_not_write_one_log(environ: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    command = [*SEEN, "--log", log]
    with program(command, environ) as first:
        second = ran(command, environ)
        first.end()
    assert second.returncode == 2
    assert re.search(rf"seen\.py \(process \d+ on .*\) writes the run log {log}", second.stderr)
    assert FinishedRun(log).ended
    assert sorted(tmp_path.glob("run*")) == [log]


@pytest.mark.promise("input.http-bounded")
@pytest.mark.timeout(180)
def test_saves_go_on_in_a_flood_of_connections(environ: dict[str, str], tmp_path: Path) -> None:
    """The chief has 256 descriptors; strangers open more, and are silent."""
    command = [
        "sh", "-c", 'ulimit -n 256; exec "$@"', "few", *PSYNC, "run", SCRIPTS / "owning.py",
        "--dashboard", "--metrics-port", "0", "--", tmp_path / "saved",
    ]  # fmt: skip
    with program(command, environ) as run, contextlib.ExitStack() as silent:
        assert run.greeting == "opened"
        ports: dict[str, int] = {}
        while len(ports) < 2:
            line = run.wait_for_error("at http://")
            for name, port in re.findall(r"(status|dashboard) at http://127.0.0.1:(\d+)", line):
                ports[name] = int(port)
        for name, count in (("dashboard", 300), ("status", 70)):
            for _ in range(count):
                silent.enter_context(socket.create_connection(("127.0.0.1", ports[name])))
        for number in range(1, 4):
            assert run.ask("") == f"ckpt-{number:08d}"
        with socket.create_connection(("127.0.0.1", ports["status"])) as asking:
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert asking.recv(15) == b"HTTP/1.1 200 OK"
