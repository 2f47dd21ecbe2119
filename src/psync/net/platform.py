"""The platform of a task: network, randomness, clock and secret, given and never reached for.

A test gives an in-memory network, a seeded generator and a counter; the defaults are the
machine's. Time inside a loop is the loop's (``loop.time()``), which may be virtual.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from psync.net.secret import Secret
from psync.net.workforce import Workforce
from psync.wire.limits import Limits

if TYPE_CHECKING:
    from psync.net.shared.regions import SharedMemory
    from psync.net.transport import Network


T = TypeVar("T")

entropy: ContextVar[Callable[[int], bytes]] = ContextVar("psync_entropy", default=os.urandom)
"""Random bytes for names that must differ from process to process; a simulation draws them."""


def random_hex(num_bytes: int) -> str:
    """Return a random name of twice as many hexadecimal digits."""
    return entropy.get()(num_bytes).hex()


class GivenUp:
    """Tasks that will not come back, by address: whoever started them does not start them again."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._listeners: dict[Callable[[str, str], None], None] = {}

    def note(self, address: str, reason: str) -> None:
        """The task at ``address`` is gone for good.

        Args:
            address: Where it listened.
            reason: What became of it, as in "exited with code 1 and is not started again".
        """
        self._reasons[address] = reason
        for listener in list(self._listeners):
            listener(address, reason)

    def forget(self, address: str) -> None:
        """Another task listens at ``address`` now."""
        self._reasons.pop(address, None)

    def reason(self, address: str) -> str | None:
        """Return what became of a task; None: it is there, or may come."""
        return self._reasons.get(address)

    def listen(self, listener: Callable[[str, str], None]) -> Callable[[], object]:
        """Call ``listener(address, reason)`` for each, also for those that are gone already.

        Returns:
            What ends that.
        """
        for address, reason in self._reasons.items():
            listener(address, reason)
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)


class Parts:
    """Which class is built where a test may want another one; see ``psync.testing.sabotage``."""

    def of(self, cls: type[T]) -> type[T]:
        """Return the class to build: ``cls``, or a subclass of it."""
        return cls


def _new_memory() -> SharedMemory:
    from psync.net.shared.regions import SharedMemory  # with numpy, which a launcher never loads

    return SharedMemory()


@dataclass(frozen=True)
class Platform:
    """The surroundings of one task."""

    network: Network
    secret: Secret | None = None  # None: the cluster runs without one
    limits: Limits = field(default_factory=Limits)
    parts: Parts = field(default_factory=Parts)
    random_bytes: Callable[[int], bytes] = os.urandom  # nonces
    uniform: Callable[[], float] = random.random  # jitter, in [0, 1)
    new_incarnation: Callable[[], int] = time.time_ns  # grows each time a task starts
    now: Callable[[], float] = time.monotonic  # seconds; uvloop's own clock counts milliseconds
    given_up: GivenUp = field(default_factory=GivenUp)  # told by whoever starts the tasks
    workforce: Workforce = field(default_factory=Workforce)  # likewise
    memory: SharedMemory = field(default_factory=_new_memory)  # of which others may read parts
    threads: bool = True  # whether user code may run in threads: not under a virtual clock
