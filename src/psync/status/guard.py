"""Who may look at a dashboard: whoever has its token, under a name that is its own.

The token stands in the URL that is printed, and in a cookie once the page was opened. A page of
somebody else's cannot read ours (same origin); by giving its own name our address (DNS rebinding)
it could become the same origin, so names that are not known are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping

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


def is_allowed_host(header: str | None, names: Collection[str] = ()) -> bool:
    """Return whether a request's Host is one under which a dashboard is asked for.

    Addresses are, as no DNS is asked for them, and ``localhost``.

    Args:
        header: "127.0.0.1:8787", "localhost:8787", "[::1]:8787"; None: there is none.
        names: Others that are, in lower case, such as that of a proxy.
    """
    host = _without_port((header or "").strip().lower())
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not (":" in name and name[:1] != "[") else host


def is_token(given: str | None, token: str) -> bool:
    """Return whether somebody has the token; how long it takes says nothing about it."""
    # Bytes that are no UTF-8 come as surrogates.
    return hmac.compare_digest((given or "").encode("utf-8", "surrogatepass"), token.encode())


def bearer_of(header: str | None) -> str | None:
    """Return the token of an ``Authorization: Bearer …`` header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
