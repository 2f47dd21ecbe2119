"""The server of the page (aiohttp): read-only, for whoever has the token.

It answers, below wherever a proxy puts it:

    GET ./?token=…     the page; the token moves into a cookie
    GET static/…       what it is made of
    GET api/view       what it shows, ?span=recent|run, and ?time= of a run log: see ``view``
    GET api/status     the status, as ``Status.to_json``

Scripts send the token as ``Authorization: Bearer …``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psync.cluster import is_loopback
from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.status.http import (
    HEADERS,
    bearer_of,
    check_installed,
    host_and_port,
    is_allowed_host,
    is_token,
    listening,
    shown,
)

if TYPE_CHECKING:
    from aiohttp import web

    from psync.status.dashboard.recorder import Recorder
    from psync.status.dashboard.run_log import FinishedRun

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

TOKEN_BYTES = 24

DEFAULT_ADDRESS = "127.0.0.1:0"

COOKIE_S = 30 * 24 * 3600

NO_TOKEN = (
    "This dashboard needs its token: open the URL that the program has printed, which ends in "
    "?token=…\n"
)


def check_can_serve(address: str) -> None:
    """Check what can be checked before a run is started for it.

    Raises:
        ConfigurationError: aiohttp is not installed, or it is no address.
    """
    host_and_port(address, "dashboard")
    check_installed("dashboard", "aiohttp")


@contextlib.asynccontextmanager
async def serving(
    show: Recorder | FinishedRun, address: str, names: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Return a context in which a page is served; it yields the URL, with the token.

    Args:
        show: What it is about: a run that goes on, or a run log.
        address: "HOST:PORT"; port 0: any that is free.
        names: Hosts by which it may be asked for, beside addresses and localhost: of a proxy.

    Raises:
        ConfigurationError: aiohttp is not installed; the port is in use; or it is no address.
    """
    check_can_serve(address)
    host, port = host_and_port(address, "dashboard")
    token = random_hex(TOKEN_BYTES)
    pages = _Pages(show, token, frozenset(name.lower() for name in names))
    async with contextlib.AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(listening(pages.application(), host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"dashboard: {address} is in use by another program",
                    hint="use another port, or port 0 for a free one",
                ) from exc
            raise ConfigurationError(
                f"dashboard: cannot listen at {address}: {exc.strerror or exc}"
            ) from exc
        if not is_loopback(address):
            logger.warning(
                "the dashboard at %s has no TLS: anyone who can read the network traffic can read "
                "its token",
                address,
            )
        pages.cookie = f"psync-{bound}"
        opens = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        yield f"http://{shown(opens)}:{bound}/?token={token}"


class _Pages:
    """The answers of one server."""

    def __init__(self, show: Recorder | FinishedRun, token: str, names: frozenset[str]) -> None:
        self._show = show
        self._token = token
        self._names = names
        self._web: Any = None
        self.cookie = "psync"  # its name: cookies are shared by all ports of a host

    def application(self) -> web.Application:
        """Return the application."""
        from aiohttp import web

        self._web = web

        async def guard(request: Any, handler: Any) -> Any:  # a method cannot be marked as one
            return await self._guard(request, handler)

        application = web.Application(middlewares=[web.middleware(guard)])
        application.on_response_prepare.append(_protect)
        application.router.add_get("/", self._page)
        application.router.add_get("/api/view", self._view)
        application.router.add_get("/api/status", self._status)
        application.router.add_static("/static/", STATIC)
        return application

    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer whoever may look."""
        web = self._web
        if not is_allowed_host(request.headers.get("Host"), self._names):
            text = "This name is not one of the dashboard's: see PSYNC_DASHBOARD_HOSTS.\n"
            return self._refusal(421, text)
        given = request.query.get("token")
        if given is None:
            given = request.cookies.get(self.cookie)
            given = bearer_of(request.headers.get("Authorization")) if given is None else given
        if not is_token(given, self._token):
            return self._refusal(401, NO_TOKEN)
        try:
            response = await handler(request)
        except web.HTTPException as exc:
            return self._refusal(exc.status, f"{exc.reason}\n")
        except PsyncError as exc:  # a log that was written over
            return self._refusal(503, f"{exc.message}\n")
        except OSError:  # a name that no file can have
            return self._refusal(404, "Not Found\n")
        response.force_close()
        return response

    def _refusal(self, status: int, text: str) -> web.Response:
        response: web.Response = self._web.Response(status=status, text=text)
        response.force_close()
        return response

    async def _page(self, request: web.Request) -> Any:
        if "token" in request.query:  # out of the address bar, and of the history
            response = self._web.Response(status=303, headers={"Location": "./"})
            # Lax: also for who comes by a link from somewhere else. Its path is the page's own,
            # as the browser sees it, so it is right behind a proxy, too.
            response.headers["Set-Cookie"] = (
                f"{self.cookie}={self._token}; HttpOnly; SameSite=Lax; Max-Age={COOKIE_S}"
            )
            return response
        return self._web.FileResponse(STATIC / "index.html")

    async def _view(self, request: web.Request) -> Any:
        span = request.query.get("span", "recent")
        if span not in ("recent", "run"):
            reason = f"span: expected recent or run, got {span!r}"
            raise self._web.HTTPBadRequest(reason=reason)
        return self._web.json_response(text=await self._show.view(span, self._time_of(request)))

    async def _status(self, request: web.Request) -> Any:
        status = await self._show.status(self._time_of(request))
        return self._web.json_response(text="{}" if status is None else status.to_json())

    def _time_of(self, request: web.Request) -> float | None:
        text = request.query.get("time")
        if text is None:
            return None
        with contextlib.suppress(ValueError):
            if math.isfinite(time := float(text)):
                return time
        raise self._web.HTTPBadRequest(reason="time: expected seconds since 1970")


async def _protect(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
