"""An HTTP server for the status: ``/metrics`` for Prometheus, ``/status``, ``/spans`` of traces.

It answers GET and HEAD, one request a connection, and reads nothing else. ``/metrics`` has numbers
and names of tasks, and is for everybody who reaches the address, as Prometheus expects it.
``/status``, JSON, has texts, too (names of steps, errors), and needs the token of the URL that is
logged; so does ``/spans``, which has what ``psync trace`` asks for.
Where it listens on a loopback address, the Host header must name one: a web page that a browser of
this machine shows must not read it by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import msgpack

from psync.cluster import is_loopback, split_address
from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.net.transport import reason
from psync.status.exposition import CONTENT_TYPE, exposition

if TYPE_CHECKING:
    from psync.status.sampling import StatusSource

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_WITHIN_S = 5.0
TOKEN_BYTES = 16

_JSON, _TEXT, _BINARY = "application/json", "text/plain; charset=utf-8", "application/msgpack"

_Answer = tuple[HTTPStatus, str, str | bytes]
"""Status, content type, body."""


class StatusServer:
    """Serves the status of one coordinator over HTTP.

    Args:
        source: Of the status.
        address: "host:port"; port 0: a free one.

    Attributes:
        url: "http://127.0.0.1:9400"; "" before ``start``.

    Raises:
        ConfigurationError: The address is none.
    """

    def __init__(self, source: StatusSource, address: str) -> None:
        host, port = _checked(address)
        self.url = ""
        self._source = source
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
        logger.info(
            "metrics at %s/metrics, status at %s/status?token=%s", self.url, self.url, self._token
        )

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
        named = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if _is_loopback(self._host) and not _is_loopback(named):
            return HTTPStatus.FORBIDDEN, _TEXT, "the Host header names another host\n"
        url = urlsplit(target)
        if url.path not in ("/metrics", "/status", "/spans"):
            return HTTPStatus.NOT_FOUND, _TEXT, "there are /metrics and /status\n"
        if url.path != "/metrics" and not self._is_token(url.query):
            text = "the token is missing or another one; the program's log has the URL\n"
            return HTTPStatus.FORBIDDEN, _TEXT, text
        try:
            if url.path == "/spans":
                return HTTPStatus.OK, _BINARY, await self._spans(parse_qs(url.query))
            status = await self._source.status()
        except PsyncError as exc:  # it ends just now
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{exc.message}\n"
        if url.path == "/status":
            return HTTPStatus.OK, _JSON, status.to_json()
        return HTTPStatus.OK, CONTENT_TYPE, exposition(status)

    async def _spans(self, query: Mapping[str, list[str]]) -> bytes:
        """Return what tasks have recorded: msgpack of a list of (task, reading)."""
        reader, last = query.get("reader", [""])[0], "last" in query
        readings = await self._source.spans.read(reader, last=last)
        return msgpack.packb(readings)  # type: ignore[no-any-return]

    def _is_token(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self._token.encode())


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
    body = text.encode() if isinstance(text, str) else text
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
