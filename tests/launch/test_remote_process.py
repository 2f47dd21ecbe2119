"""A process on another host, as the launcher sees it."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from psync.launch.process_loop import GRACE_S
from psync.launch.remote_process import RemoteProcess


class Host:
    """Notes what it is told, and kills when it is asked to."""

    name = "b"

    def __init__(self, *, connected: bool = True) -> None:
        self.is_connected = connected
        self.told: list[Any] = []
        self.process = RemoteProcess("worker", "worker-0", self, 7)

    def tell(self, **message: Any) -> None:
        self.told.append(message["signal"] if message["do"] == "signal" else message["do"])


async def test_it_says_where_it_is_and_how_it_has_ended() -> None:
    process = Host().process
    process.pid = 4711
    assert process.describe() == "process 4711 on b is running"
    process.ended(3)
    process.ended(4)  # who said it first is right
    assert await process.wait() == process.returncode == 3
    assert process.describe() == "process 4711 on b exited with code 3"


@pytest.mark.virtual_time
async def test_stopping_asks_then_kills_then_does_not_wait_for_a_silent_host() -> None:
    host, loop = Host(), asyncio.get_running_loop()
    began = loop.time()
    assert await host.process.stop() == -signal.SIGKILL
    assert host.told == [signal.SIGTERM, "kill"]
    assert loop.time() - began == 2 * GRACE_S
    host.process.send_signal(signal.SIGUSR1)
    host.process.kill()
    assert len(host.told) == 2


async def test_one_that_waits_for_its_host_has_nothing_to_end() -> None:
    host = Host(connected=False)
    host.process.send_signal(signal.SIGUSR1)
    assert host.process.returncode is None
    assert await host.process.stop() == -signal.SIGTERM
