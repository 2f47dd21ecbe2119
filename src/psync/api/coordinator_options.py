"""What users say of a coordinator when they make it, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from psync.closures.flapping import Flapping
from psync.errors import ConfigurationError
from psync.net.environment import watchdog_timeout as watchdog_timeout_here


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """As the arguments of ``ClusterCoordinator``, which explains them."""

    min_workers: int
    connect_timeout_s: float
    ps_timeout_s: float
    closure_timeout_s: float | None  # None: a step may take as long as it likes
    max_losses: int
    max_flaps: int | None  # None: as often as it likes
    watchdog_timeout_s: float | None  # None: there is no watchdog
    on_stall: Callable[[str], object] | None
    insecure: bool
    attach: bool


def checked_options(
    num_workers: int,
    *,
    min_workers: int | None,
    connect_timeout: float,
    ps_timeout: float,
    closure_timeout: float | None,
    max_losses: int,
    max_flaps: int | None,
    watchdog_timeout: float | None,
    on_stall: Callable[[str], object] | None,
    insecure: bool,
    attach: bool,
) -> CoordinatorOptions:
    """Return the options of a coordinator, with what the environment says where nothing is given.

    Args:
        num_workers: Workers of the cluster.
        min_workers: As for ``ClusterCoordinator``, like all that follow.
        connect_timeout: Seconds.
        ps_timeout: Seconds.
        closure_timeout: Seconds, or None.
        max_losses: At least 1.
        max_flaps: A number, or None.
        watchdog_timeout: Seconds, 0, or None: as the environment says.
        on_stall: Called with a text.
        insecure: A bool.
        attach: A bool.

    Raises:
        ConfigurationError: One is out of range.
    """
    if min_workers is not None and not 1 <= min_workers <= num_workers:
        raise ConfigurationError(f"min_workers: expected 1 to {num_workers}, got {min_workers}")
    if closure_timeout is not None and not closure_timeout > 0:
        raise ConfigurationError(
            f"closure_timeout: expected seconds above 0, got {closure_timeout}"
        )
    if max_losses < 1:
        raise ConfigurationError(f"max_losses: expected at least 1, got {max_losses}")
    Flapping(max_flaps)  # is it a limit?
    return CoordinatorOptions(
        min_workers=num_workers if min_workers is None else min_workers,
        connect_timeout_s=connect_timeout,
        ps_timeout_s=ps_timeout,
        closure_timeout_s=closure_timeout,
        max_losses=max_losses,
        max_flaps=max_flaps,
        watchdog_timeout_s=_watchdog_timeout(watchdog_timeout),
        on_stall=on_stall,
        insecure=insecure,
        attach=attach,
    )


def _watchdog_timeout(given: float | None) -> float | None:
    if given is None:
        return watchdog_timeout_here()
    if not 0 <= given < math.inf:
        raise ConfigurationError(f"watchdog_timeout: expected seconds, 0 or above, got {given}")
    return given or None
