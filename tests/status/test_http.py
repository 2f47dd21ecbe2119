"""The status over HTTP: what is answered to whom."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

from psync.errors import ClosedError, ConfigurationError
from psync.net.handshake_limits import LINES_PER_MINUTE
from psync.status import http
from psync.status.http import (
    CONNECTIONS,
    HEADERS,
    bearer_of,
    check_can_serve,
    is_allowed_host,
    is_token,
    serving_metrics,
    serving_task_metrics,
)
from psync.status.model import Status
from status_by_hand import STATUS, Source, http_server

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")


async def nothing() -> str:
    return ""


class World:
    def __init__(self, url: str, source: Source, token: str) -> None:
        self.source, self.token = source, token
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    async def say(self, request: bytes) -> tuple[int, str]:
        """Send bytes; return status code and body."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.decode().partition("\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    async def get(self, path: str, host: str = "localhost", method: str = "GET") -> tuple[int, str]:
        return await self.say(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


@contextlib.asynccontextmanager
async def serving(
    caplog: pytest.LogCaptureFixture, address: str = "127.0.0.1:0"
) -> AsyncIterator[World]:
    caplog.set_level(logging.INFO, "psync")
    source: Any = Source()
    async with http_server(source, address) as url:
        found = re.search(r"status at \S+/status\?token=(\w+)", caplog.text)
        assert found is not None
        yield World(url, source, found[1])


async def test_metrics_are_for_everybody(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        code, text = await world.get("/metrics")
        assert (code, "psync_up_seconds 2.0" in text) == (200, True)


async def test_the_status_needs_the_token(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        code, text = await world.get(f"/status?token={world.token}")
        assert code == 200
        assert Status.from_json(text) == STATUS
        for query in ("", "?token=", "?token=00", "?tok=%C3%A9", "?token=%ff"):
            code, text = await world.get(f"/status{query}")
            assert (code, "the token is missing" in text) == (403, True)


async def test_a_head_has_no_body(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        assert await world.get("/metrics", method="HEAD") == (200, "")


async def test_the_host_must_be_of_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        for host in ("localhost:80", "127.0.0.1:9", "[::1]:9", "10.0.0.1"):
            assert (await world.get("/metrics", host))[0] == 200
        for host in ("", "evil.example", "127.0.0.1.evil.example", "a b", "["):
            assert (await world.get("/metrics", host))[0] == 403


async def test_what_else_is_asked_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        for request, code in (
            (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
            (b"GET /secrets HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
            (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
            (b"GET /metrics HTTP/1.0\r\n\r\n", 403),
            (b"nonsense\r\n\r\n", 400),
            (b"\x00\xff\r\n\r\n", 400),
            (b"GET / HTTP/2\r\n\r\n", 400),
            (b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
            (b"GET /status?token=%ff&token HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
            (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, 400),
        ):
            with contextlib.suppress(ConnectionError):  # it hangs up while we still send
                assert (await world.say(request))[0] == code, request
            assert (await world.get("/metrics"))[0] == 200  # it goes on


async def test_one_who_says_nothing_is_hung_up_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 0.01)
    async with serving(caplog) as world:
        assert await world.say(b"GET /met") == (0, "")


async def test_one_who_does_not_read_is_hung_up_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 0.05)

    async def large() -> str:
        return "x" * (64 << 20)

    caplog.set_level(logging.INFO, "psync")
    async with serving_metrics("127.0.0.1:0", large) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1000):
                received += len(piece)
        assert 0 < received < 64 << 20
        writer.close()


@pytest.mark.promise("input.http-bounded")
async def test_so_many_are_connected_and_the_oldest_makes_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(caplog) as world:
        silent = [await asyncio.open_connection(world.host, world.port) for _ in range(200)]
        for reader, _ in silent[:-CONNECTIONS]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert (await world.get("/metrics"))[0] == 200
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()


async def test_what_strangers_send_costs_so_many_lines_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(caplog) as world:
        caplog.clear()
        for number in range(100):
            request = (b"nonsense\r\n\r\n", b"G\xffT / HTTP/1.1\r\n\r\n")[number % 2]
            assert (await world.say(request))[0] == 400
            assert (await world.get("/status", "\xff"))[0] == 403
        lines = caplog.text.splitlines()
        assert len(lines) == LINES_PER_MINUTE
        assert all("127.0.0.1 has sent an invalid HTTP request" in line for line in lines)


async def test_one_who_is_connected_does_not_keep_it_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(caplog) as world:
        reader, writer = await asyncio.open_connection(world.host, world.port)
        assert (await world.get("/metrics"))[0] == 200
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_coordinator_that_ends_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        world.source.answer = ClosedError("it is closed")
        assert await world.get("/metrics") == (503, "it is closed\n")


async def test_an_address_that_is_taken_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(caplog) as world:
        address = f"127.0.0.1:{world.port}"
        with pytest.raises(ConfigurationError, match=f"metrics: {address} is in use by another"):
            async with serving_metrics(address, nothing):
                pass


def test_what_is_no_address_is_refused() -> None:
    for address in ("", "9100", ":9100", "unix:/tmp/a", "a:b", "a:99999"):
        text = f'metrics: expected "HOST:PORT", got {address!r}'
        with pytest.raises(ConfigurationError, match=text):
            check_can_serve("metrics", address)


async def test_a_task_has_metrics_and_no_status(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync")
    async with serving_metrics("127.0.0.1:0", nothing, who="/job:ps/task:0") as url:
        world = World(url, Source(), "")
        assert await world.get("/metrics") == (200, "")
        assert await world.get("/status?token=") == (404, "there is /metrics\n")
        assert f"/job:ps/task:0: metrics at {url}/metrics" in caplog.text
        assert "token" not in caplog.text


def test_without_its_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="aiohttp and prometheus_client must be") as caught:
        http_server(Source())
    assert caught.value.hint == 'pip install "psync[metrics]"'
    with pytest.raises(ConfigurationError, match="dashboard: aiohttp must be installed"):
        check_can_serve("dashboard", "127.0.0.1:0")


def test_hosts_that_are_ours_and_hosts_that_are_not() -> None:
    for host in (
        "localhost", "localhost:8787", "LOCALHOST:1", "127.0.0.1:8787", "10.1.2.3", "[::1]:8787",
        "[::1]", "::1", "jupyter.example.com", "jupyter.example.com:443",
    ):  # fmt: skip
        assert is_allowed_host(host, ["jupyter.example.com"])
    for other in (
        None, "", "evil.example.com", "evil.example.com:8787", "localhost.evil.com",
        "127.0.0.1.nip.io", "jupyter.example.com", "localhost:x",
    ):  # fmt: skip
        assert not is_allowed_host(other)


def test_tokens() -> None:
    assert is_token("abc", "abc")
    for wrong in (None, "", "ab", "abcd", "äbc", "\udcff", "\ud800"):
        assert not is_token(wrong, "abc")


def test_bearers() -> None:
    assert bearer_of("Bearer abc") == bearer_of("bearer  abc ") == "abc"
    assert bearer_of(None) is bearer_of("") is bearer_of("Basic abc") is None


def test_nothing_from_elsewhere_is_loaded() -> None:
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]


def worker_counters() -> dict[str, Any]:
    return {"network": {"connections": 2, "bytes_received": 10, "bytes_sent": 20}, "work": {}}


async def test_it_is_asked_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync")
    async with serving_task_metrics("127.0.0.1:0", "/job:worker/task:0", worker_counters):
        found = re.search(
            r"/job:worker/task:0: metrics at (http://127.0.0.1:\d+/metrics)", caplog.text
        )
        assert found is not None
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(found[1]).read().decode())
    assert 'psync_task_sent_bytes_total{task="/job:worker/task:0"} 20.0' in text
    for name in ("cpu_seconds_total", "start_time_seconds", "resident_memory_bytes", "open_fds"):
        assert f"\nprocess_{name} " in text
