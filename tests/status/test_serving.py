"""Other processes of this user ask for the status: over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import psync
from psync.errors import ConfigurationError, DeadlineExceeded, RemoteProtocolError
from psync.launch.cluster import LaunchedClusterResolver
from psync.net.platform import Platform
from psync.net.trace_file import Reading
from psync.net.transport import SocketNetwork
from psync.status import serving
from psync.status.model import Status
from psync.status.run_files import chosen_run, socket_of
from psync.status.serving import ServedStatus, reader_of_run, reader_of_url
from psync.testing import MemoryNetwork
from status_by_hand import STATUS, Source, http_server, serving_of


async def test_whoever_finds_the_run_file_gets_the_status(runtime: Path) -> None:
    async with serving_of():
        run = chosen_run()
        assert run.program == "train.py"
        reader = reader_of_run(run)
        assert await reader.read() == STATUS
        assert await reader.read() == STATUS
    assert list((runtime / "psync").iterdir()) == []


@pytest.mark.parametrize("obstacle", ["a file", "open to all", "too long"])
async def test_where_the_file_cannot_be_written_the_log_says_so_and_that_is_all(
    runtime: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        assert "the status of this run is not available: " in caplog.text


async def test_it_can_be_turned_off(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, count in (("", 2), ("1", 2), ("0", 0)):
        monkeypatch.setenv("PSYNC_STATUS", value)
        async with serving_of():
            assert len(list(runtime.glob("psync/*"))) == count  # a run file and its socket
    monkeypatch.setenv("PSYNC_STATUS", "no")
    with pytest.raises(ConfigurationError, match="PSYNC_STATUS: expected 0 or 1, got 'no'"):
        async with serving_of():
            pass


async def test_a_cluster_in_memory_is_not_seen_from_outside(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_METRICS", "nowhere")
    source: Any = Source()
    status = ServedStatus(source, Platform(MemoryNetwork()))
    await status.start()
    assert list(runtime.iterdir()) == []
    await status.close()
    with pytest.raises(ConfigurationError, match=r"^PSYNC_METRICS: metrics: expected"):
        ServedStatus(source, Platform(SocketNetwork()))


@pytest.mark.processes
async def test_the_coordinator_of_a_local_cluster_can_be_asked(runtime: Path) -> None:
    async with psync.LocalCluster(1, 1) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            reader = reader_of_run(chosen_run())
            seen = await reader.read()
            status = await coordinator.status()
            assert (seen.pid, seen.state, seen.queue) == (status.pid, status.state, status.queue)
            assert (seen.workers, seen.placement) == (status.workers, status.placement)
            assert [worker.task for worker in seen.workers] == ["/job:worker/task:0"]
    assert list((runtime / "psync").iterdir()) == []


@pytest.mark.processes
async def test_a_coordinator_that_waits_for_a_worker_says_for_whom(runtime: Path) -> None:
    async with psync.LocalCluster(1, 1) as cluster:
        there = cluster.resolver.cluster_spec().as_dict()
        with socket.create_server(("127.0.0.1", 0)) as nobody:  # who listens, and never answers
            missing = f"127.0.0.1:{nobody.getsockname()[1]}"
            resolver = LaunchedClusterResolver(cluster.resolver.platform)
            workers = {0: there["worker"][0], 1: missing}
            by_index = {job: dict(enumerate(places)) for job, places in there.items()}
            resolver.name_tasks({**by_index, "worker": workers})
            coordinator = psync.ClusterCoordinator(psync.ParameterServerStrategy(resolver))
            starting = asyncio.ensure_future(coordinator.start())
            seen = await status_when(lambda seen: seen.workers[0].state == "idle")
            assert (seen.state, seen.workers[1].state) == ("starting", "connecting")
            assert seen.workers[1].address == missing
            starting.cancel()
            await asyncio.wait((starting,))
    assert list((runtime / "psync").iterdir()) == []


async def status_when(holds: Callable[[Status], bool]) -> Status:
    """The newest run's status, as soon as something holds."""
    while True:
        try:
            reader = reader_of_run(chosen_run())
            if holds(seen := await reader.read()):
                return seen
        except ConfigurationError:  # it has not begun
            await asyncio.sleep(0)


async def test_a_reader_hears_that_the_run_has_ended(runtime: Path) -> None:
    async with serving_of() as status:
        reader = reader_of_run(chosen_run())
        await status.close()
        with pytest.raises(ConfigurationError, match=r"train.py \(process \d+\) has ended"):
            await reader.read()


async def test_who_has_another_token_gets_nothing(runtime: Path) -> None:
    async with serving_of():
        run = dataclasses.replace(chosen_run(), token="0" * 64)
        with pytest.raises(ConfigurationError, match="refuses: the token is not that of this run"):
            await reader_of_run(run).read()


async def test_what_is_no_question_is_refused(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_of():
        where = socket_of(chosen_run())
        for line in (b"[]\n", b'{"reader": "r"}\n', b"GET / HTTP/1.1\n"):
            reader, writer = await asyncio.open_unix_connection(where)
            writer.write(line)
            assert json.loads(await reader.readline()).keys() == {"error"}
            writer.close()
        assert await reader_of_run(chosen_run()).read() == STATUS


async def test_a_run_that_does_not_answer_is_named(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    async with serving_of(source):
        reader = reader_of_run(chosen_run())
        monkeypatch.setattr(serving, "ANSWERS_WITHIN_S", 0.01)
        source.answer = None
        with pytest.raises(DeadlineExceeded, match=r"\(process \d+\) has not answered"):
            await reader_of_run(chosen_run()).read()
        source.answer = ValueError("a bug")
        with pytest.raises(ConfigurationError, match=r"refuses: .*a bug"):
            await reader.read()


async def test_what_is_no_status_is_refused(runtime: Path) -> None:
    async with serving_of() as status:
        reader = reader_of_run(chosen_run())
        status.source.answer = type("Odd", (), {"to_json": lambda self: "[]"})()
        with pytest.raises(RemoteProtocolError, match="expected the status of a run"):
            await reader.read()


# By URL.


@contextlib.asynccontextmanager
async def over_http(
    caplog: pytest.LogCaptureFixture, source: Any = None
) -> AsyncIterator[tuple[str, str]]:
    """A server; its URL, and the token."""
    caplog.set_level(logging.INFO, "psync")
    async with http_server(source or Source()) as url:
        yield f"{url}/status", caplog.text.rpartition("?token=")[2].strip()


async def test_a_url_gives_the_status_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    async with over_http(caplog) as (url, token):
        reader = reader_of_url(f"{url}?token={token}")
        assert await reader.read() == STATUS
        assert await reader.read() == STATUS


async def test_a_url_with_another_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with over_http(caplog) as (url, _):
        with pytest.raises(ConfigurationError, match=f"{url}: 403 Forbidden: the token is missing"):
            await reader_of_url(f"{url}?token=secret").read()


async def test_where_nobody_answers_the_url_is_named_without_its_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with over_http(caplog) as (url, _):
        pass
    with pytest.raises(ConfigurationError, match=f"{url} does not answer: ") as failed:
        await reader_of_url(f"{url}?token=secret").read()
    assert "secret" not in str(failed.value)
    with pytest.raises(ConfigurationError, match="does not answer"):
        await reader_of_url("http://[/").read()


# Traces.


async def test_a_run_gives_what_its_tasks_have_recorded(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    reading = Reading("/job:chief/task:0", b"body", 1.0, 2.0)
    async with serving_of(source):
        reader = reader_of_run(chosen_run())
        assert await reader.read_spans("r") == [reading]
        assert await reader.read_spans("r", last=True) == [reading]
    assert source.spans.asked == [("r", False), ("r", True)]
    async with over_http(caplog, source) as (url, token):
        by_url = reader_of_url(f"{url}?token={token}")
        assert await by_url.read_spans("s") == [reading]
        assert await by_url.read_spans("s", last=True) == [reading]
        with pytest.raises(ConfigurationError, match=f"{url[:-7]}/spans: 403 Forbidden"):
            await reader_of_url(f"{url}?token=secret").read_spans("s")
        with pytest.raises(ConfigurationError, match="expected the URL of a status"):
            await reader_of_url(f"{url[:-7]}/metrics").read_spans("s")
    assert source.spans.asked[2:] == [("s", False), ("s", True)]


async def test_what_is_no_part_of_a_trace_is_refused(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def odd(name: str, *, last: bool = False) -> list[int]:
        return [1]

    source = Source()
    monkeypatch.setattr(source.spans, "read_all", odd)
    async with over_http(caplog, source) as (url, token), serving_of(source):
        by_socket = reader_of_run(chosen_run())
        for reader in (by_socket, reader_of_url(f"{url}?token={token}")):
            with pytest.raises(RemoteProtocolError, match="expected parts of a trace"):
                await reader.read_spans("r")
