"""What users say of a coordinator, and what the environment does where they say nothing."""

from __future__ import annotations

from typing import Any

import pytest

import psync
from psync.coordinator import CoordinatorOptions
from psync.errors import ConfigurationError

CLUSTER = psync.ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]})


def options(**given: Any) -> CoordinatorOptions:
    strategy = psync.ParameterServerStrategy(psync.SimpleClusterResolver(CLUSTER))
    return psync.ClusterCoordinator(strategy, **given)._options


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"min_workers": 0}, "min_workers: expected 1 to 2, got 0"),
        ({"min_workers": 3}, "min_workers: expected 1 to 2, got 3"),
        ({"closure_timeout": 0}, "closure_timeout: expected seconds above 0, got 0"),
        ({"max_losses": 0}, "max_losses: expected at least 1, got 0"),
        ({"max_flaps": -1}, "max_flaps"),
        ({"watchdog_timeout": -1}, "watchdog_timeout: expected seconds, 0 or above, got -1"),
        ({"watchdog_timeout": float("inf")}, "watchdog_timeout: expected seconds"),
        ({"watchdog_timeout": float("nan")}, "watchdog_timeout: expected seconds"),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        options(**given)
