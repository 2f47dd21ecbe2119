"""The status of a running coordinator or session, for its program and its user's processes.

Others ask over a Unix socket that a run file names (``run_files``), or over HTTP, with a token made
for that. The cluster's connections have nothing to do with it: the status can be asked for, and
what a trace needs, and nothing else. A cluster in memory is seen by its program only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec import msgpack

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.net.platform import Platform, flag
from psync.net.tls import TlsNetwork
from psync.net.trace_file import Reading
from psync.net.transport import SocketNetwork
from psync.status.exposition import exposition
from psync.status.http import address_in, check_can_serve, serving_metrics
from psync.status.model import Status
from psync.status.run_files import Run, answering, ask, directory_of_runs

if TYPE_CHECKING:
    from psync.status.sampling import ClusterSource

logger = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 5.0
"""The program's own code may keep its loop for a while."""

MAX_ERROR_BYTES = 1024


class ServedStatus:
    """The status of one program, which may be asked for while it starts and while it runs.

    Args:
        source: Of the status.
        platform: Of the program.
        metrics: Where to serve it over HTTP, as "host:port"; None: as ``PSYNC_METRICS`` says.
        dashboard: Where to show it; "": nowhere. This and ``log`` as for ``shown``.
        log: Path of the run log; "": none.

    Attributes:
        dashboard_url: With its token; "": there is none.

    Raises:
        ConfigurationError: ``PSYNC_STATUS`` is neither 0 nor 1, or an address is none.
    """

    def __init__(
        self,
        source: ClusterSource,
        platform: Platform,
        metrics: str | None = None,
        dashboard: str | None = "",
        log: str | os.PathLike[str] | None = "",
    ) -> None:
        self.source = source
        self._dashboard, self._log, self.dashboard_url = dashboard, log, ""
        is_outside = isinstance(platform.network, SocketNetwork | TlsNetwork)  # and not in memory
        self._is_served = flag(os.environ, "PSYNC_STATUS") is not False and is_outside
        if metrics is None and is_outside:
            metrics = address_in(os.environ, "PSYNC_METRICS")
        self._http: contextlib.AbstractAsyncContextManager[str] | None = None
        if metrics:
            check_can_serve("metrics", metrics)
            self._http = serving_metrics(metrics, self._metrics, self._answer)
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Let processes of this user ask.

        That they cannot, because a directory cannot be written for example, is no more than noted
        in the log.

        Raises:
            ConfigurationError: An address is in use, or the run log cannot be written.

        Cancellation: ``close`` still has to be called; so it is after an error.
        """
        self.source.begin()
        if self._http is not None:
            await self._stack.enter_async_context(self._http)
        if self._is_served:
            try:
                found = answering(directory_of_runs(), self.source.program, self._answer)
                await self._stack.enter_async_context(found)
            except (OSError, ConfigurationError) as exc:
                logger.info("the status of this run is not available: %s", exc)
        asked = (self._dashboard, "PSYNC_DASHBOARD"), (self._log, "PSYNC_RUN_LOG")
        if any(os.environ.get(name) if given is None else given for given, name in asked):
            from psync.status.dashboard.run_log import shown

            page = shown(self.source, self._dashboard, self._log)
            self.dashboard_url = await self._stack.enter_async_context(page)

    async def _answer(self, question: Mapping[str, Any]) -> bytes:
        """Return the status; if a ``reader`` is named, what tasks have recorded for it."""
        if "reader" not in question:
            return (await self.source.status()).to_json().encode()
        reader = question["reader"]
        readings = await self.source.spans.read_all(reader, last="last" in question)
        body: bytes = msgpack.encode(readings)
        return body

    async def _metrics(self) -> str:
        return exposition(await self.source.status())

    async def close(self) -> None:
        """Answer nobody any more. Cancellation: a connection may still be closing."""
        try:
            await self._stack.aclose()
        finally:
            await self.source.close()


# For whoever asks, from another process.


class StatusReader:
    """Asks a program again and again.

    Args:
        who: The program, for errors.
        ask: Asks it for the status, or by ``reader`` and ``last`` for parts of a trace.
    """

    def __init__(self, who: str, ask: Callable[..., Awaitable[bytes]]) -> None:
        self._who, self._ask = who, ask

    async def read(self) -> Status:
        """Return the status as of now.

        Raises:
            ConfigurationError: The run has ended or refuses, or something else answers there.
            DeadlineExceeded: It does not answer, and may later.
            RemoteProtocolError: It uses another version of psync.

        Cancellation: Safe; an answer over HTTP is waited for, in a thread.
        """
        return Status.from_json(await self._ask())

    async def read_spans(self, name: str, *, last: bool = False) -> list[Reading]:
        """Return what tasks have recorded; see ``SpanCollector``, and ``read`` for errors."""
        body = await self._ask(reader=name, **({"last": 1} if last else {}))
        try:
            return [Reading(*reading) for reading in msgpack.decode(body)]
        except (ValueError, TypeError, RecursionError) as exc:
            raise RemoteProtocolError(f"{self._who}: expected parts of a trace") from exc


def reader_of_run(run: Run) -> StatusReader:
    """Return what asks a program of this user, as its run file says."""

    return StatusReader(str(run), partial(ask, run, ANSWERS_WITHIN_S))


def reader_of_url(url: str) -> StatusReader:
    """Return what asks a program over HTTP.

    Args:
        url: Of its status, as the log of the program has it, with the token.
    """
    status, _, token = url.partition("?")
    # What a proxy between here and there would answer is no status.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def ask_url(**question: Any) -> bytes:
        if not question:
            return await asyncio.to_thread(get, status, token)
        if not status.endswith("/status"):
            raise ConfigurationError(
                f"{status}: expected the URL of a status, as in the program's log",
                hint="http://127.0.0.1:9400/status?token=…; see --metrics-port of psync run",
            )
        spans = status.removesuffix("/status") + "/spans"
        return await asyncio.to_thread(get, spans, f"{token}&{urlencode(question)}")

    def get(where: str, query: str) -> bytes:
        try:
            with opener.open(f"{where}?{query}", timeout=ANSWERS_WITHIN_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as exc:
            with exc:
                text = exc.read(MAX_ERROR_BYTES).decode("utf-8", "replace").strip()
            raise ConfigurationError(f"{where}: {exc.code} {exc.reason}: {text}") from exc
        except (OSError, ValueError, HTTPException) as exc:
            raise ConfigurationError(
                f"{where} does not answer: {exc}", hint="has the program ended?"
            ) from exc

    return StatusReader(status, ask_url)
