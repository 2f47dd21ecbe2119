"""Programs are asked for their status from outside, over real sockets; and what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from psync.errors import (
    ConfigurationError,
    DeadlineExceeded,
    RemoteProtocolError,
)
from psync.net.trace_file import Reading
from psync.status import reading
from psync.status.reading import UrlReader, reading_status
from psync.status.run_files import Run, chosen_run
from status_by_hand import STATUS, Source, http_server, serving_of


async def test_a_reader_hears_that_the_run_has_ended(runtime: Path) -> None:
    async with serving_of() as status:
        run = chosen_run()
        async with reading_status(run) as reader:
            await status.close()
            with pytest.raises(ConfigurationError, match=r"train.py \(process \d+\) has ended"):
                await reader.read()
        with pytest.raises(
            ConfigurationError,
            match=r"\(process \d+\) has ended, or is "
            "unreachable",
        ):
            async with reading_status(run):
                pass


async def test_who_has_another_token_gets_nothing(runtime: Path) -> None:
    async with serving_of():
        run = dataclasses.replace(chosen_run(), token="0" * 64)
        with pytest.raises(ConfigurationError, match="is unreachable"):
            async with reading_status(run):
                pass


async def test_a_run_that_does_not_answer_is_named(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ANSWERS_WITHIN_S", 0.01)
    source = Source()
    async with serving_of(source):
        async with reading_status(chosen_run()) as reader:
            source.answer = None
            with pytest.raises(DeadlineExceeded, match=r"\(process \d+\) has not answered"):
                await reader.read()
            source.answer = ValueError("a bug")
            with pytest.raises(RemoteProtocolError, match=r"cannot report its status: .*a bug"):
                await reader.read()


async def test_what_is_no_status_is_refused(runtime: Path) -> None:
    async with serving_of() as status:
        run: Run = chosen_run()
        async with reading_status(run) as reader:
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
    server = http_server(source or Source())
    await server.start()
    try:
        yield f"{server.url}/status", caplog.text.rpartition("?token=")[2].strip()
    finally:
        await server.close()


async def test_a_url_gives_the_status_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    async with over_http(caplog) as (url, token):
        reader = UrlReader(f"{url}?token={token}")
        assert await reader.read() == STATUS
        assert await reader.read() == STATUS


async def test_a_url_with_another_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with over_http(caplog) as (url, _):
        with pytest.raises(ConfigurationError, match=f"{url}: 403 Forbidden: the token is missing"):
            await UrlReader(f"{url}?token=secret").read()


async def test_where_nobody_answers_the_url_is_named_without_its_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with over_http(caplog) as (url, _):
        pass
    with pytest.raises(ConfigurationError, match=f"{url} does not answer: ") as failed:
        await UrlReader(f"{url}?token=secret").read()
    assert "secret" not in str(failed.value)


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not answer"):
        await UrlReader("http://[/").read()


# Traces.


async def test_a_run_gives_what_its_tasks_have_recorded(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    reading = Reading("/job:chief/task:0", b"body", 1.0, 2.0)
    async with serving_of(source):
        async with reading_status(chosen_run()) as reader:
            assert await reader.read_spans("r") == [reading]
            assert await reader.read_spans("r", last=True) == [reading]
    assert source.spans.asked == [("r", False), ("r", True)]
    async with over_http(caplog, source) as (url, token):
        by_url = UrlReader(f"{url}?token={token}")
        assert await by_url.read_spans("s") == [reading]
        assert await by_url.read_spans("s", last=True) == [reading]
        with pytest.raises(ConfigurationError, match=f"{url[:-7]}/spans: 403 Forbidden"):
            await UrlReader(f"{url}?token=secret").read_spans("s")
        with pytest.raises(ConfigurationError, match="expected the URL of a status"):
            await UrlReader(f"{url[:-7]}/metrics").read_spans("s")
    assert source.spans.asked[2:] == [("s", False), ("s", True)]


async def test_what_is_no_part_of_a_trace_is_refused(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_http(caplog) as (url, token):
        by_url = UrlReader(f"{url}?token={token}")
        monkeypatch.setattr(by_url, "_get", lambda url: b"\x93\1\2\3")
        with pytest.raises(RemoteProtocolError, match="expected parts of a trace"):
            await by_url.read_spans("r")
