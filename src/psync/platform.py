"""What a task is given instead of reaching for it: network, randomness, clock, secret.

Layer: L2. Imports: access, failpoints, wire.limits.

A test gives an in-memory network, a seeded generator and a counter; the defaults are the
machine's. Time inside a loop is the loop's (``loop.time()``), which may be virtual.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psync.access import Secret
from psync.failpoints import Failpoints
from psync.wire.limits import Limits

if TYPE_CHECKING:
    from psync.lost_messages import MessageLosses
    from psync.transport import Network


@dataclass(frozen=True)
class Platform:
    """The surroundings of one task."""

    network: Network
    secret: Secret | None = None  # None: the cluster runs without one
    limits: Limits = field(default_factory=Limits)
    failpoints: Failpoints = field(default_factory=Failpoints)
    losses: MessageLosses | None = None  # requests of others that a test wants to be lost here
    apply_log: str = ""  # directory in which a ps writes down what it applies, for tests
    random_bytes: Callable[[int], bytes] = os.urandom  # nonces
    uniform: Callable[[], float] = random.random  # jitter, in [0, 1)
    new_incarnation: Callable[[], int] = time.time_ns  # grows each time a task starts
    threads: bool = True  # whether user code may run in threads: not under a virtual clock
