"""Other processes of this user ask for the status: here another endpoint, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import psync
from psync.cluster_roles import CHIEF
from psync.errors import (
    ConfigurationError,
    ConnectionLost,
)
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.transport import SocketNetwork
from psync.status.model import Status
from psync.status.reading import reading_status
from psync.status.run_files import newest_run
from psync.status.serving import ServedStatus, is_served
from psync.testing import MemoryNetwork
from psync.wire.messages import Shutdown

STATUS = Status(1.0, 7, "train.py", 2.0, 3.0, "running", "nothing")


class Source:
    """A status without a cluster."""

    program = "train.py"

    def __init__(self) -> None:
        self.answer: Any = STATUS

    async def status(self) -> Status:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer

    async def close(self) -> None: ...


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's runtime directory, of a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        monkeypatch.delenv("PSYNC_STATUS", raising=False)
        yield Path(made)


@contextlib.asynccontextmanager
async def serving_of(source: Any = None) -> AsyncIterator[ServedStatus]:
    status = ServedStatus(source or Source(), Platform(SocketNetwork()))
    await status.start()
    try:
        yield status
    finally:
        await status.close()


async def test_whoever_finds_the_run_file_gets_the_status(runtime: Path) -> None:
    async with serving_of():
        run = newest_run()
        assert run.program == "train.py"
        async with reading_status(run) as reader:
            assert await reader.read() == STATUS
            assert await reader.read() == STATUS
    assert list((runtime / "psync").iterdir()) == []


async def test_nothing_but_the_status_can_be_asked_for(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_of():
        run = newest_run()
        endpoint = Endpoint(Platform(SocketNetwork(), Secret(run.token.encode())), CHIEF, 0, {})
        peer = await endpoint.connect(run.address, CHIEF)
        with pytest.raises(ConnectionLost):
            await peer.call(Shutdown("please"))
        await endpoint.close()
        assert "this task does not serve Shutdown" in caplog.text


@pytest.mark.parametrize("obstacle", ["a file", "open to all", "too long"])
async def test_where_the_file_cannot_be_written_the_log_says_so_and_that_is_all(
    runtime: Path,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "psync")
    if obstacle == "a file":
        (runtime / "psync").write_text("")
    elif obstacle == "open to all":
        (runtime / "psync").mkdir()
        (runtime / "psync").chmod(0o777)
    else:
        long = runtime / ("x" * 100)
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    async with serving_of():
        assert "nobody can ask for the status of this run: " in caplog.text


async def test_what_a_killed_run_has_left_is_taken_away(runtime: Path) -> None:
    (runtime / "psync").mkdir(mode=0o700)
    left = runtime / "psync" / "1-0.json"
    left.write_text(
        '{"schema": 1, "pid": 1, "started": 1, "program": "a", "token": "", '
        f'"address": "unix:{runtime}/1-0.sock"}}'
    )
    left.chmod(0o600)
    async with serving_of():
        assert not left.exists()


@pytest.mark.parametrize(("value", "expected"), [("", True), ("1", True), ("0", False)])
def test_it_can_be_turned_off(value: str, expected: bool) -> None:
    assert is_served(Platform(SocketNetwork()), {"PSYNC_STATUS": value}) is expected


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="PSYNC_STATUS: expected 0 or 1, got 'no'"):
        is_served(Platform(SocketNetwork()), {"PSYNC_STATUS": "no"})


def test_a_cluster_in_memory_is_not_seen_from_outside() -> None:
    assert not is_served(Platform(MemoryNetwork()), {})


@pytest.mark.processes
async def test_the_coordinator_of_a_local_cluster_can_be_asked(runtime: Path) -> None:
    async with psync.LocalCluster(1, 1) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            async with reading_status(newest_run()) as reader:
                seen = await reader.read()
            assert seen == await coordinator.status()
            assert [worker.task for worker in seen.workers] == ["/job:worker/task:0"]
    assert list((runtime / "psync").iterdir()) == []
