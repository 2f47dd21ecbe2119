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
import logging
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from psync.cluster import is_loopback
from psync.net.platform import random_hex
from psync.status.http import TOKEN_BYTES, bearer_of, is_allowed_host, is_token, listening

if TYPE_CHECKING:
    from aiohttp import web

    from psync.status.dashboard.recorder import Recorder
    from psync.status.dashboard.run_log import FinishedRun

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

DEFAULT_ADDRESS = "127.0.0.1:0"

COOKIE_S = 30 * 24 * 3600

NO_TOKEN = (
    "This dashboard needs its token: open the URL that the program has printed, which ends in "
    "?token=…\n"
)


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
    known = frozenset(name.lower() for name in names)
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
        span, time = query.get("span", "recent"), None
        if span not in ("recent", "run"):
            text = f"span: expected recent or run, got {span!r}\n"
            return web.Response(status=400, text=text)
        if "time" in query:
            with contextlib.suppress(ValueError):
                time = float(query["time"])
            if time is None or not math.isfinite(time):
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
