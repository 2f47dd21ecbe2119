"""HTTP servers of a task, on aiohttp: who may connect, for how long; ``/metrics`` and ``/status``.

Strangers reach these ports, and the task needs its descriptors for itself: so many connections are
open at one time, each for so long, and with one answer. A newcomer gets the place of the oldest.
What strangers send that is no HTTP costs a line of the log, and a bounded number of them.

``StatusServer`` answers GET and HEAD. ``/metrics`` has numbers and names of tasks, and is for
everybody who reaches the address, as Prometheus expects it. Other pages have texts, too (names of
steps, errors), and need the token of the URL that is logged. Where it listens on a loopback
address, the Host header must be an address or localhost: a web page that a browser of this machine
shows must not read it by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import ipaddress
import logging
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from psync.cluster import is_loopback, split_address
from psync.errors import ConfigurationError, PsyncError
from psync.net.handshake_limits import LogQuota
from psync.net.platform import random_hex
from psync.status.exposition import CONTENT_TYPE, task_exposition

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

CONNECTIONS = 64
CONNECTION_S = 10.0
BACKLOG = 16
"""Connections that the loop accepts in one turn, beyond ``CONNECTIONS``."""

CLOSES_WITHIN_S = 1.0
"""Answers that are under way have so long when the run ends."""

TOKEN_BYTES = 16

_TEXT = "text/plain; charset=utf-8"

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "psync",
}
"""Of every answer."""

Page = Callable[[Mapping[str, str]], Awaitable[tuple[str, str | bytes]]]
"""Given the query, returns content type and body."""


def host_and_port(address: str, what: str) -> tuple[str, int]:
    """Return where to listen.

    Raises:
        ConfigurationError: It is no "HOST:PORT".
    """
    try:
        host, port = split_address(address)
    except ConfigurationError:
        host, port = "", None
    if not host or port is None:
        raise ConfigurationError(
            f'{what}: expected "HOST:PORT", got {address!r}',
            hint='"127.0.0.1:0" takes any free port, for programs on this machine',
        )
    return host, port


def check_installed(what: str, *packages: str) -> None:
    """Check that an extra is there.

    Raises:
        ConfigurationError: One of its packages is not.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{what}: {' and '.join(missing)} must be installed",
            hint=f'pip install "psync[{what}]"',
        )


def check_metrics() -> None:
    """Check that metrics can be served. Raises ConfigurationError."""
    check_installed("metrics", "aiohttp", "prometheus_client")


# Who may ask: whoever has the token, which stands in the URL that is printed, and in a cookie once
# the dashboard's page was opened. A page of somebody else's cannot read ours (same origin). By
# giving its own name our address (DNS rebinding) it could become the same origin, so names that are
# not known are refused.


def is_allowed_host(header: str | None, names: Collection[str] = ()) -> bool:
    """Return whether a request's Host is one under which a dashboard is asked for.

    Addresses are, as no DNS is asked for them, and ``localhost``.

    Args:
        header: "127.0.0.1:9400", "localhost:9400", "[::1]:9400"; None: there is none.
        names: Others that are, in lower case, such as that of a proxy.
    """
    host = (header or "").strip().lower()
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal() and not (":" in name and name[:1] != "["):
        host = name
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_token(given: str | None, token: str) -> bool:
    """Return whether somebody has the token; how long it takes says nothing about it."""
    # Bytes that are no UTF-8 come as surrogates.
    return hmac.compare_digest((given or "").encode("utf-8", "surrogatepass"), token.encode())


def bearer_of(header: str | None) -> str | None:
    """Return the token of an ``Authorization: Bearer …`` header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class _Log(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp says of requests, in a bounded number of lines."""

    def __init__(self) -> None:
        super().__init__(logger, {})
        self._quota = LogQuota()

    def exception(self, msg: object, *args: object, **more: Any) -> None:
        """Write down that a request has failed."""
        exc = more.get("exc_info")
        if isinstance(exc, ConnectionError) or not self._quota.allows(
            asyncio.get_running_loop().time()
        ):
            return
        if untold := self._quota.untold():
            self.logger.warning("%d log lines about HTTP requests were suppressed", untold)
        if isinstance(exc, UnicodeError) or getattr(exc, "code", 500) < 500:
            who = args[0] if args else "somebody"
            self.logger.warning("%s has sent an invalid HTTP request", who)
        else:
            self.logger.error(msg, *args, exc_info=exc)

    debug = exception  # with the request, and so perhaps the token


class _Guest(asyncio.Protocol):
    """A connection with a place and a deadline; what it says is aiohttp's.

    Args:
        inner: Of aiohttp.
        guests: All of one server, the oldest first.
    """

    def __init__(self, inner: asyncio.Protocol, guests: dict[_Guest, None]) -> None:
        self._inner, self._guests = inner, guests
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._deadline = asyncio.get_running_loop().call_later(CONNECTION_S, self.leave)
        self._guests[self] = None
        if len(self._guests) > CONNECTIONS:
            next(iter(self._guests)).leave()
        self._inner.connection_made(transport)

    def leave(self) -> None:
        """Hang up, whatever was not sent."""
        self._guests.pop(self, None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.pop(self, None)
        self._deadline.cancel()
        self._inner.connection_lost(exc)


@contextlib.asynccontextmanager
async def listening(application: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Return a context in which an application answers; it yields the port.

    Args:
        application: Of aiohttp.
        host: Where to listen.
        port: 0: any that is free.

    Raises:
        OSError: Nothing can listen there.
    """
    from aiohttp import web

    runner = web.AppRunner(
        application, access_log=None, logger=_Log(), shutdown_timeout=CLOSES_WITHIN_S
    )
    await runner.setup()
    make = runner.server
    assert make is not None, "it is set up"
    guests: dict[_Guest, None] = {}
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Guest(make(), guests), host, port, backlog=BACKLOG
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()
        for guest in list(guests):
            guest.leave()


def shown(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


class StatusServer:
    """Serves over HTTP what a task counts, or the status of a coordinator.

    Args:
        address: "host:port"; port 0: a free one.
        metrics: Returns them in Prometheus's format.
        pages: What else there is, for whoever has the token, by path. The first one is logged.
        who: Whose they are, for the log.

    Raises:
        ConfigurationError: The address is none, or the extra ``metrics`` is not installed.
    """

    def __init__(
        self,
        address: str,
        metrics: Callable[[], Awaitable[str]],
        pages: Mapping[str, Page] = types.MappingProxyType({}),
        *,
        who: str = "",
    ) -> None:
        self._host, self._port = host_and_port(address, "metrics")
        check_metrics()
        self._metrics, self._pages = metrics, pages
        self._who = f"{who}: " if who else ""
        self._token = random_hex(TOKEN_BYTES)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Return a context in which it answers; it yields the URL, "http://127.0.0.1:9400".

        Raises:
            ConfigurationError: The address is in use, or not this machine's.
        """
        from aiohttp import web

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._respond)
        async with contextlib.AsyncExitStack() as stack:
            try:
                here = listening(application, self._host, self._port)
                port = await stack.enter_async_context(here)
            except OSError as exc:
                from psync.net.transport import reason  # with numpy, which a launcher never loads

                raise ConfigurationError(
                    f"metrics: cannot listen on {self._host}:{self._port}: {reason(exc)}",
                    hint="port 0 takes a free one",
                ) from exc
            url = f"http://{shown(self._host)}:{port}"
            first = next(iter(self._pages), "")
            more = f", {first[1:]} at {url}{first}?token={self._token}" if first else ""
            logger.info("%smetrics at %s/metrics%s", self._who, url, more)
            yield url

    async def _respond(self, request: web.Request) -> web.Response:
        from aiohttp import web

        status, kind, body = await self._answer(request)
        headers = {
            "Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        response = web.Response(
            status=status, headers=headers, body=body.encode() if isinstance(body, str) else body
        )
        response.force_close()
        return response

    async def _answer(self, request: web.Request) -> tuple[int, str, str | bytes]:
        """Return status, content type and body."""
        host = request.headers.get("Host")
        if request.method not in ("GET", "HEAD"):
            return 405, _TEXT, "only GET and HEAD\n"
        if is_loopback(f"{shown(self._host)}:0") and not is_allowed_host(host):
            return 403, _TEXT, "the Host header names another host\n"
        try:
            if request.path == "/metrics":
                return 200, CONTENT_TYPE, await self._metrics()
            if request.path not in self._pages:
                there = " and ".join(("/metrics", *list(self._pages)[:1]))
                return 404, _TEXT, f"there is {there}\n"
            if not is_token(request.query.get("token"), self._token):
                text = "the token is missing or another one; the program's log has the URL\n"
                return 403, _TEXT, text
            return 200, *await self._pages[request.path](request.query)
        except PsyncError as exc:  # it ends just now
            return 503, _TEXT, f"{exc.message}\n"


# Metrics of one ps or worker, served by its own process.


def serving_metrics(
    address: str, task: str, statistics: Callable[[], Mapping[str, Any]]
) -> contextlib.AbstractAsyncContextManager[str]:
    """Return a context in which Prometheus may ask a task; the log has the URL.

    Args:
        address: "host:port", port 0 for a free one.
        task: Its name.
        statistics: Returns its counters.

    Raises:
        ConfigurationError: That is no address, or one that is in use.
    """

    async def metrics() -> str:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        process = CollectorRegistry()
        ProcessCollector(registry=process)
        return task_exposition(task, statistics()) + generate_latest(process).decode()

    return StatusServer(address, metrics, who=task).serving()
