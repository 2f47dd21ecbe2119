"""Limits on unauthenticated peers: failed handshakes per address, open handshakes, log lines.

A secret of 128 bits is not to be guessed, so this protects no secret. It bounds what strangers
cost: the computations of a handshake, the places for those who have not proved themselves yet,
and a line of the log for each that failed.

* Each address has a *bucket* of so many failures; a minute fills an empty one. An address whose
  bucket is empty is refused until there is one in it again. A success fills it at once.
* **Loopback addresses and Unix sockets have none.** All tasks of a machine share the address, and
  one with a wrong secret, started again and again, must not keep the others out.
* So many buckets are remembered at most; the one that failed the longest ago is forgotten first.
* **A new connection always finds a place** (``displaced``): while all are taken it gets that of the
  oldest from the address that has most. So the silent keep no task out, from however many
  addresses they come; they only take each other's places. OpenSSH's ``MaxStartups`` drops
  newcomers by chance instead, which also drops a share of the members. To lose a place
  is a tenth of a failure: hundreds of workers that come at once take each other's, too.
* A quarter of the places is kept from addresses from which no peer has ever proved itself.
* So many lines about strangers stand in the log each minute; then there is one with the number of
  those that do not (``LogQuota``).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

MINUTE_S = 60.0

KEPT_SHARE = 4
"""One place of so many is kept from addresses of which nobody has proved himself."""

DISPLACED = 0.1
"""What it counts, in failures, to lose one's place: who did may not have had the time to speak."""

LINES_PER_MINUTE = 20
"""Lines about strangers: enough to see what is wrong, such as two secrets in one cluster."""

MAX_ADDRESSES = 1024
"""Buckets that are remembered, and addresses that have proved themselves: some 200 KiB."""

IPV6_PREFIX = 64
"""Bits of an IPv6 address that name a customer; the others he chooses himself."""

K = TypeVar("K")


def source_of(peername: object) -> str | None:
    """Return what counts as the address of a peer; None: its handshakes are not counted.

    Args:
        peername: As a socket gives it: (host, port, …), or something else for a Unix socket.
    """
    if not isinstance(peername, tuple) or not peername:
        return None
    host = str(peername[0])
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return None
    return str(ipaddress.ip_network((ip, IPV6_PREFIX), strict=False) if ip.version == 6 else ip)


class Place(NamedTuple):
    """Who is at his handshake."""

    source: str | None  # ``source_of``
    proved: bool  # whether somebody from there has proved himself before


def displaced(places: Mapping[K, Place], newcomer: Place, limit: int) -> K | None:
    """Return whose place goes to a newcomer; None: there is room.

    Args:
        places: Who is at his handshake, the oldest first.
        newcomer: Who comes; not among them.
        limit: How many may be.
    """
    strangers = {key: place for key, place in places.items() if not place.proved}
    if len(places) < limit and (newcomer.proved or len(strangers) < limit - limit // KEPT_SHARE):
        return None
    candidates = strangers or places
    counts = Counter(place.source for place in candidates.values())
    most = max(counts.values())
    return next(key for key, place in candidates.items() if counts[place.source] == most)


class FailedHandshakes:
    """The buckets of one task; single owner. Times in seconds, of a clock that does not go back.

    Args:
        per_minute: Failures in a full bucket.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        # What was in the bucket at the time of the last failure; the latest failure comes last.
        self._buckets: dict[str, tuple[float, float]] = {}
        self._proved: dict[str, None] = {}  # addresses of peers; the latest success comes last

    def allows(self, source: str | None, now: float) -> bool:
        """Whether somebody who comes from there is heard."""
        return source is None or self._left(source, now) >= 1

    def failed(self, source: str | None, now: float, failures: float = 1.0) -> bool:
        """Count a failure, or a part of one; return whether with it the source is refused."""
        if source is None:
            return False
        before = self._left(source, now)
        left = max(before - failures, 0.0)
        _remember(self._buckets, source, (left, now))
        return left < 1 <= before

    def succeeded(self, source: str | None) -> None:
        """Forget what has failed from there: somebody has proved himself."""
        if source is None:
            return
        self._buckets.pop(source, None)
        _remember(self._proved, source, None)

    def place(self, source: str | None) -> Place:
        """Return the claim to a place of somebody who comes from there. This machine is known."""
        return Place(source, source is None or source in self._proved)

    def _left(self, source: str, now: float) -> float:
        left, then = self._buckets.get(source, (self._per_minute, now))
        return min(left + (now - then) * self._per_minute / MINUTE_S, self._per_minute)


def _remember(known: dict[str, K], source: str, what: K) -> None:
    """Note the latest, and forget the first of more than ``MAX_ADDRESSES``."""
    known.pop(source, None)
    known[source] = what
    if len(known) > MAX_ADDRESSES:
        del known[next(iter(known))]


class LogQuota:
    """Which lines about strangers are written; single owner. Times as in ``FailedHandshakes``.

    A minute begins with the first of its lines.
    """

    _lines = 0  # of this minute
    _untold = 0  # lines that were not written
    ends = -MINUTE_S  # when this minute is over

    def allows(self, now: float) -> bool:
        """Count a line; return whether it may be written."""
        if now >= self.ends:
            self._lines, self.ends = 0, now + MINUTE_S
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            return True
        self._untold += 1
        return False

    def untold(self) -> int:
        """Return how many lines were not written since this was asked last."""
        untold, self._untold = self._untold, 0
        return untold
