"""Whom a task that listens does not even listen to: addresses from which too many have failed.

Layer: L1. Imports: nothing of psync.

A secret of 128 bits is not to be guessed, so this protects no secret. It bounds what strangers
cost: the computations of a handshake, and a line of the log for each that failed.

* Each address has a *bucket* of so many failures; a minute fills an empty one. From an address
  whose bucket is empty nobody is heard until there is one in it again. A success fills it at once.
* **Loopback addresses and Unix sockets have none.** All tasks of a machine share the address, and
  one with a wrong secret, started again and again, must not keep the others out.
* So many buckets are remembered at most; the one that failed the longest ago is forgotten first.
* While all places for handshakes are taken, and most of them by one address, whoever comes takes
  the place of the oldest from there (``crowding``): slow strangers keep nobody else out.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

MINUTE_S = 60.0

MAX_ADDRESSES = 1024
"""Buckets that are remembered: some 200 KiB."""

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
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            if ip.is_loopback:
                return None
            return str(ipaddress.ip_network((ip, IPV6_PREFIX), strict=False))
        ip = ip.ipv4_mapped
    return None if ip.is_loopback else str(ip)


def crowding(sources: Mapping[K, str | None]) -> K | None:
    """Return whose place goes to whoever comes next; None: nobody's.

    Args:
        sources: Who is at his handshake, the oldest first, and from where (``source_of``).
    """
    counts = Counter(source for source in sources.values() if source is not None)
    for source, count in counts.most_common(1):
        if 2 * count > len(sources):
            return next(key for key, other in sources.items() if other == source)
    return None


class FailedHandshakes:
    """The buckets of one task; single owner. Times in seconds, of a clock that does not go back.

    Args:
        per_minute: Failures in a full bucket.
        addresses: Buckets that are remembered.
    """

    def __init__(self, per_minute: int, addresses: int = MAX_ADDRESSES) -> None:
        self._per_minute = per_minute
        self._addresses = addresses
        # What was in the bucket at the time of the last failure; the latest failure comes last.
        self._buckets: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def allows(self, source: str | None, now: float) -> bool:
        """Whether somebody who comes from there is heard."""
        return source is None or self._left(source, now) >= 1

    def failed(self, source: str | None, now: float) -> bool:
        """Count a failure; return whether it is the one with which the source is refused."""
        if source is None:
            return False
        before = self._left(source, now)
        left = max(before - 1, 0.0)
        self._buckets.pop(source, None)
        self._buckets[source] = (left, now)
        if len(self._buckets) > self._addresses:
            del self._buckets[next(iter(self._buckets))]
        return left < 1 <= before

    def succeeded(self, source: str | None) -> None:
        """Forget what has failed from there: somebody has proved himself."""
        if source is not None:
            self._buckets.pop(source, None)

    def _left(self, source: str, now: float) -> float:
        left, then = self._buckets.get(source, (self._per_minute, now))
        return min(left + (now - then) * self._per_minute / MINUTE_S, self._per_minute)
