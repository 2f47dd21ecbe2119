"""An HTTP server: ``/metrics`` for Prometheus, and pages that need a token, such as ``/status``.

It answers GET and HEAD, one request a connection, and reads nothing else. ``/metrics`` has numbers
and names of tasks, and is for everybody who reaches the address, as Prometheus expects it. Other
pages have texts, too (names of steps, errors), and need the token of the URL that is logged.
Where it listens on a loopback address, the Host header must be an address or localhost: a web page
that a browser of this machine shows must not read it by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qs

from psync.cluster import is_loopback, split_address
from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.net.transport import reason
from psync.status.exposition import CONTENT_TYPE
from psync.status.guard import is_allowed_host, is_token

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_WITHIN_S = 5.0
TOKEN_BYTES = 16

_TEXT = "text/plain; charset=utf-8"

_Answer = tuple[HTTPStatus, str, str | bytes]
"""Status, content type, body."""

Metrics = Callable[[], Awaitable[str]]

Page = Callable[[Mapping[str, list[str]]], Awaitable[tuple[str, str | bytes]]]
"""Given the query, returns content type and body."""


class StatusServer:
    """Serves over HTTP what a task counts, or the status of a coordinator.

    Args:
        address: "host:port"; port 0: a free one.
        metrics: Returns them in Prometheus's format.
        pages: What else there is, for whoever has the token, by path. The first one is logged.
        who: Whose they are, for the log.

    Attributes:
        url: "http://127.0.0.1:9400"; "" before ``start``.

    Raises:
        ConfigurationError: The address is none.
    """

    def __init__(
        self,
        address: str,
        metrics: Metrics,
        pages: Mapping[str, Page] = types.MappingProxyType({}),
        *,
        who: str = "",
    ) -> None:
        host, port = _checked(address)
        self.url = ""
        self._metrics, self._pages = metrics, pages
        self._who = f"{who}: " if who else ""
        self._host, self._port = host, port
        self._token = random_hex(TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Cancellation: safe.

        Raises:
            ConfigurationError: The address is in use, or not this machine's.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=MAX_REQUEST_BYTES
            )
        except OSError as exc:
            raise ConfigurationError(
                f"metrics: cannot listen on {self._host}:{self._port}: {reason(exc)}",
                hint="port 0 takes a free one",
            ) from exc
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        first = next(iter(self._pages), "")
        more = f", {first[1:]} at {self.url}{first}?token={self._token}" if first else ""
        logger.info("%smetrics at %s/metrics%s", self._who, self.url, more)

    async def close(self) -> None:
        """Answer nobody any more. Cancellation: safe."""
        if self._server is not None:
            self._server.close()
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(list(self._answering))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs in one"
        self._answering.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(REQUEST_WITHIN_S):
                    writer.write(await self._response(reader))
                    await writer.drain()
        except asyncio.CancelledError:
            pass  # it is closed; the loop would report it as an error of a callback
        finally:
            self._answering.discard(task)
            writer.close()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _bytes("GET", (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TEXT, ""))
        request, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            return _bytes("GET", (HTTPStatus.BAD_REQUEST, _TEXT, "expected HTTP/1.1\n"))
        pairs = (line.partition(":") for line in lines if ":" in line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _bytes(method, await self._answer(method, target, headers))

    async def _answer(self, method: str, target: str, headers: Mapping[str, str]) -> _Answer:
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, "only GET and HEAD\n"
        if _is_loopback(self._host) and not is_allowed_host(headers.get("host")):
            return HTTPStatus.FORBIDDEN, _TEXT, "the Host header names another host\n"
        path, _, query = target.partition("?")
        try:
            if path == "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, await self._metrics()
            if path not in self._pages:
                there = " and ".join(("/metrics", *list(self._pages)[:1]))
                return HTTPStatus.NOT_FOUND, _TEXT, f"there is {there}\n"
            asked = parse_qs(query)
            if not is_token(asked.get("token", [""])[0], self._token):
                text = "the token is missing or another one; the program's log has the URL\n"
                return HTTPStatus.FORBIDDEN, _TEXT, text
            return HTTPStatus.OK, *await self._pages[path](asked)
        except PsyncError as exc:  # it ends just now
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{exc.message}\n"


def _checked(address: str) -> tuple[str, int]:
    """Return host and port. Raises ConfigurationError."""
    try:
        host, port = split_address(address)
    except ConfigurationError:
        host, port = "", None
    if not host or port is None:
        raise ConfigurationError(f'metrics: expected "host:port", got {address!r}')
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0")
    except ConfigurationError:
        return False


def _bytes(method: str, answer: _Answer) -> bytes:
    status, kind, text = answer
    body = text if isinstance(text, bytes) else text.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
