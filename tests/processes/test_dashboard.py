"""`psync run --dashboard --log`, and `psync dashboard` of the log: a real run."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from psync.status.dashboard.run_log import FinishedRun
from view_schema import check_view

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

SCRIPTS = Path(__file__).parent / "scripts"
PSYNC = [sys.executable, "-m", "psync"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def url_in(stream: IO[str]) -> str:
    for line in stream:
        found = re.search(r"http://\S+token=\w+", line)
        if found:
            return found[0]
    raise AssertionError("no URL was printed")


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


def test_a_run_is_shown_while_it_lasts_and_afterwards_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [*PSYNC, "run", str(SCRIPTS / "seen.py"), "--ps", "2", "--workers", "2", "--dashboard",
         "--log", str(log)],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as run:  # fmt: skip
        try:
            assert run.stderr is not None
            url = url_in(run.stderr)
            for found in views(url):  # until workers have said twice what their time went to
                check_view(found)
                if found["series"].get("compute", [None])[-1] and found["placement"]:
                    break
            assert (found["program"], found["mode"]) == ("seen.py", "live")
            shares = [found["series"][kind][-1] for kind in ("compute", "pull", "push", "free")]
            assert 80 < sum(shares) <= 100.5
            assert found["placement"][0]["parts"][0]["name"] == "w [0]"
        finally:
            run.communicate("\n")
        assert run.returncode == 0
    assert FinishedRun(log).ended
    with subprocess.Popen(
        [*PSYNC, "dashboard", str(log)], stdout=subprocess.PIPE, text=True
    ) as page:
        try:
            assert page.stdout is not None
            found = view(url_in(page.stdout), "?span=run")
            check_view(found)
            assert (found["program"], found["mode"], found["ended"]) == ("seen.py", "log", True)
        finally:
            page.send_signal(signal.SIGINT)
            page.communicate()
        assert page.returncode == 0


def test_a_port_in_use_ends_the_run_with_one_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = subprocess.run(
            [*PSYNC, "run", str(SCRIPTS / "seen.py"), "--dashboard-address", address],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert run.returncode == 2
    assert f"dashboard: {address} is in use by another program" in run.stderr


def test_a_run_whose_chief_is_killed_is_in_its_report(tmp_path: Path) -> None:
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
    run = subprocess.run(
        [*PSYNC, "run", str(script), "--report", str(report)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 128 + signal.SIGKILL
    assert f"psync: the report of the run is in {report}\n" in run.stderr
    assert '"reported life":[' in report.read_text()


def test_without_a_coordinator_there_is_no_report_and_the_exit_code_stays(tmp_path: Path) -> None:
    script, report = tmp_path / "nothing.py", tmp_path / "run.html"
    script.write_text("async def main(): raise SystemExit(7)\nimport psync; psync.run(main)\n")
    run = subprocess.run(
        [*PSYNC, "run", str(script), "--report", str(report)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, report.exists()) == (7, False)
    assert "psync: no report was written: no coordinator has run\n" in run.stderr


def test_two_programs_do_not_write_one_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    command = [*PSYNC, "run", str(SCRIPTS / "seen.py"), "--log", str(log)]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "ready\n"
            second = subprocess.run(
                command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
        finally:
            first.communicate("\n")
    assert second.returncode == 2
    assert re.search(rf"seen\.py \(process \d+ on .*\) writes the run log {log}", second.stderr)
    assert FinishedRun(log).ended
    assert sorted(tmp_path.glob("run*")) == [log]


@pytest.mark.promise("input.http-bounded")
@pytest.mark.timeout(180)
def test_saves_go_on_in_a_flood_of_connections(tmp_path: Path) -> None:
    """The chief has 256 descriptors; strangers open more, and are silent."""
    command = [
        *PSYNC, "run", str(SCRIPTS / "owning.py"), "--ps", "1", "--workers", "1", "--dashboard",
        "--metrics-port", "0", "--log-level", "info", "--", str(tmp_path / "saved"),
    ]  # fmt: skip

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with subprocess.Popen(
        command, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=few_descriptors,
    ) as run:  # fmt: skip
        silent: list[socket.socket] = []
        try:
            assert run.stdin is not None
            assert run.stdout is not None
            assert run.stderr is not None
            ports: dict[str, int] = {}
            while len(ports) < 2:
                found = re.search(
                    r"(status|dashboard) at http://127.0.0.1:(\d+)", run.stderr.readline()
                )
                if found:
                    ports[found[1]] = int(found[2])
            threading.Thread(target=run.stderr.read, daemon=True).start()
            assert run.stdout.readline() == "opened\n"
            for name, count in (("dashboard", 300), ("status", 70)):
                silent += [
                    socket.create_connection(("127.0.0.1", ports[name])) for _ in range(count)
                ]
            for number in range(1, 4):
                run.stdin.write("\n")
                run.stdin.flush()
                assert run.stdout.readline() == f"ckpt-{number:08d}\n"
            with socket.create_connection(("127.0.0.1", ports["status"])) as asking:
                asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert asking.recv(15) == b"HTTP/1.1 200 OK"
        finally:
            run.terminate()
            for each in silent:
                each.close()
