"""HTTP servers of a task, on aiohttp: who may connect, for how long; metrics, and the dashboard.

Strangers reach these ports, and the task needs its descriptors for itself: so many connections are
open at one time, each for so long, and with one answer. A newcomer gets the place of the oldest.
What strangers send that is no HTTP costs a line of the log, and a bounded number of them.

Only GET and HEAD are answered. ``/metrics`` has numbers and names of tasks, and is for
everybody who reaches the address, as Prometheus expects it. Other pages have texts, too (names of
steps, errors), and need the token of the URL that is logged. Where it listens on a loopback
address, the Host header must be an address or localhost: a web page that a browser of this machine
shows must not read it by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import importlib.util
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psync.cluster import ip_of, is_loopback, join_address, split_address
from psync.errors import ConfigurationError, PsyncError, check_fits, naming
from psync.net.handshake_limits import LogQuota
from psync.net.platform import number_in, random_hex

if TYPE_CHECKING:
    from aiohttp import web

    from psync.status.dashboard.run_log import FinishedRun, Recorder

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of metrics."""

CONNECTIONS = 64
CONNECTION_S = 10.0
BACKLOG = 16
"""Connections that the loop accepts in one turn, beyond ``CONNECTIONS``."""

CLOSES_WITHIN_S = 1.0
"""Answers that are under way have so long when the run ends."""

TOKEN_BYTES = 24

EXTRAS = {"metrics": ("aiohttp", "prometheus_client"), "dashboard": ("aiohttp",)}
"""The packages that each needs."""

STATIC = Path(__file__).parent / "dashboard" / "static"
"""Files of the page."""

DEFAULT_ADDRESS = "127.0.0.1:0"
"""Of a dashboard."""

COOKIE_S = 30 * 24 * 3600

NO_TOKEN = (
    "This dashboard needs its token: open the URL that the program has printed, which ends in "
    "?token=…\n"
)

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

PAGES = {"/status": "application/json", "/spans": "application/msgpack"}
"""Content types of what there is besides metrics, for callers with the token."""


def check_can_serve(extra: str, address: str) -> tuple[str, int]:
    """Return where to listen, after checking all that can be checked before a run is started.

    Args:
        extra: "metrics" or "dashboard".
        address: "HOST:PORT".

    Raises:
        ConfigurationError: It is no address, or a package of the extra is not installed.
    """
    where = checked_address(extra, address)
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{extra}: {' and '.join(missing)} must be installed",
            hint=f'pip install "psync[{extra}]"',
        )
    return where


def checked_address(extra: str, address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", or raise ConfigurationError."""
    try:
        host, port = split_address(address)
    except ConfigurationError:
        host, port = "", None
    hint = '"127.0.0.1:0" takes any free port, for programs on this machine'
    check_fits(host != "" and port is not None, f'{extra}: expected "HOST:PORT"', address, hint)
    return host, port or 0


def address_in(environ: Mapping[str, str], variable: str) -> str:
    """Return the address that a variable, as ``PSYNC_METRICS``, holds; "": none.

    Raises:
        ConfigurationError: See ``check_can_serve``.
    """
    address = environ.get(variable, "")
    if address:
        with naming(variable):
            check_can_serve(variable.rpartition("_")[2].lower(), address)
    return address


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
    is_known = host == "localhost" or host in names
    return is_known or ip_of(host.removeprefix("[").removesuffix("]")) is not None


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
        for name in ("data_received", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(inner, name))

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
async def listening(
    extra: str, address: str, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
) -> AsyncIterator[str]:
    """Return a context in which GET and HEAD are answered; it yields the URL, without a path.

    Args:
        extra: For whose page it is; see ``check_can_serve``.
        address: "HOST:PORT"; port 0: any that is free.
        answer: Answers a request. Its ``PsyncError`` is answered with code 503.

    Raises:
        ConfigurationError: Nothing can listen there; and as of ``check_can_serve``.
    """
    host, port = check_can_serve(extra, address)
    from aiohttp import web

    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        try:
            if request.method in ("GET", "HEAD"):
                response = await answer(request)
            else:
                response = web.Response(status=405, text="only GET and HEAD\n")
        except PsyncError as exc:  # it ends just now, or a run log was written over
            response = web.Response(status=503, text=f"{exc.message}\n")
        response.headers.update(HEADERS)
        response.force_close()
        return response

    make = web.Server(respond, access_log=None, logger=_Log())
    guests: dict[_Guest, None] = {}
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Guest(make(), guests), host, port, backlog=BACKLOG
        )
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"{extra}: {address} is in use by another program",
                hint="use another port, or port 0 for a free one",
            ) from exc
        raise ConfigurationError(
            f"{extra}: cannot listen at {address}: {exc.strerror or exc}"
        ) from exc
    opens = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        yield f"http://{join_address(opens, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        await asyncio.sleep(0)  # requests that have just come begin
        make.pre_shutdown()
        await make.shutdown(CLOSES_WITHIN_S)
        for guest in list(guests):
            guest.leave()


@contextlib.asynccontextmanager
async def serving_metrics(
    address: str,
    metrics: Callable[[], Awaitable[str]],
    ask: Callable[[Mapping[str, str]], Awaitable[bytes]] | None = None,
    *,
    who: str = "",
) -> AsyncIterator[str]:
    """Return a context in which what a task counts is served; it yields the URL, which it logs.

    Args:
        address: "host:port"; port 0: a free one.
        metrics: Returns them in Prometheus's format.
        ask: Returns the status, or spans for a ``reader``; None: only metrics are served.
        who: Whose they are, for the log.

    Raises:
        ConfigurationError: As of ``listening``.
    """
    token = random_hex(TOKEN_BYTES)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        if is_loopback(address) and not is_allowed_host(request.headers.get("Host")):
            return web.Response(status=403, text="the Host header names another host\n")
        if request.path == "/metrics":
            kind, body = CONTENT_TYPE, (await metrics()).encode()
        elif ask is None or request.path not in PAGES:
            there = "/metrics" if ask is None else "/metrics and /status"
            return web.Response(status=404, text=f"there is {there}\n")
        elif is_token(request.query.get("token"), token):
            kind = PAGES[request.path]
            body = await ask({"reader": "", **request.query} if request.path == "/spans" else {})
        else:
            text = "the token is missing or another one; the program's log has the URL\n"
            return web.Response(status=403, text=text)
        return web.Response(headers={"Content-Type": kind}, body=body)

    async with listening("metrics", address, answer) as url:
        head = f"{who}: " if who else ""
        more = "" if ask is None else f", status at {url}/status?token={token}"
        logger.info("%smetrics at %s/metrics%s", head, url, more)
        yield url


def serving_task_metrics(
    address: str, task: str, statistics: Callable[[], Mapping[str, Any]]
) -> contextlib.AbstractAsyncContextManager[str]:
    """Return a context in which the process of one ps or worker serves its metrics.

    Args:
        address: As for ``serving_metrics``.
        task: Its name.
        statistics: Returns its counters.

    Raises:
        ConfigurationError: As of ``listening``.
    """

    async def metrics() -> str:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        from psync.status.exposition import task_exposition  # with numpy; a launcher has none

        process = CollectorRegistry()
        ProcessCollector(registry=process)
        return task_exposition(task, statistics()) + generate_latest(process).decode()

    return serving_metrics(address, metrics, who=task)


# The dashboard.


@contextlib.asynccontextmanager
async def serving_dashboard(show: Recorder | FinishedRun, address: str) -> AsyncIterator[str]:
    """Return a context in which the page of a run is served; it yields the URL, with the token.

    It answers, below wherever a proxy puts it, and only reads:

        GET ./?token=…     the page; the token moves into a cookie
        GET static/…       what it is made of
        GET api/view       what it shows, ?span=recent|run, and ?time= of a run log: see ``view``
        GET api/status     the status, as ``Status.to_json``

    Scripts send the token as ``Authorization: Bearer …``.

    Args:
        show: What it is about: a run that goes on, or a run log.
        address: "HOST:PORT"; port 0: any that is free. It may be asked for by addresses, localhost
            and the names in ``PSYNC_DASHBOARD_HOSTS``: those of proxies.

    Raises:
        ConfigurationError: aiohttp is not installed; the port is in use; or it is no address.
    """
    names = os.environ.get("PSYNC_DASHBOARD_HOSTS", "").lower().split(",")
    known = {name.strip() for name in names} - {""}
    token, cookie = random_hex(TOKEN_BYTES), ""
    files = {f"/{path.relative_to(STATIC.parent)}": path for path in STATIC.rglob("*.*")}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        query, path = request.query, request.path
        if not is_allowed_host(request.headers.get("Host"), known):
            text = "This name is not one of the dashboard's: see PSYNC_DASHBOARD_HOSTS.\n"
            return web.Response(status=421, text=text)
        given = query.get("token", request.cookies.get(cookie))
        given = bearer_of(request.headers.get("Authorization")) if given is None else given
        if not is_token(given, token):
            return web.Response(status=401, text=NO_TOKEN)
        if path == "/" and "token" in query:  # out of the address bar, and of the history
            # Lax: also for who comes by a link from somewhere else. Its path is the page's own,
            # as the browser sees it, so it is right behind a proxy, too.
            kept = f"{cookie}={token}; HttpOnly; SameSite=Lax; Max-Age={COOKIE_S}"
            return web.Response(status=303, headers={"Location": "./", "Set-Cookie": kept})
        if path == "/" or path in files:
            return web.FileResponse(files.get(path, STATIC / "index.html"))
        if path not in ("/api/view", "/api/status"):
            return web.Response(status=404, text="Not Found\n")
        span = query.get("span", "recent")
        time = number_in(query["time"]) if "time" in query else None
        if span not in ("recent", "run"):
            text = f"span: expected recent or run, got {span!r}\n"
            return web.Response(status=400, text=text)
        if time is not None and not math.isfinite(time):
            return web.Response(status=400, text="time: expected seconds since 1970\n")
        if path == "/api/view":
            return web.json_response(text=await show.view(span, time))
        status = await show.status(time)
        return web.json_response(text="{}" if status is None else status.to_json())

    async with listening("dashboard", address, answer) as url:
        if not is_loopback(address):
            logger.warning(
                "the dashboard at %s has no TLS: anyone who can read the network traffic can read "
                "its token",
                address,
            )
        # Cookies are shared by all ports of a host.
        cookie = f"psync-{url.rpartition(':')[2]}"
        yield f"{url}/?token={token}"
