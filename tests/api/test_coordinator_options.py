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


def test_all_workers_have_to_be_there_unless_said_otherwise() -> None:
    assert (options().min_workers, options(min_workers=1).min_workers) == (2, 1)


def test_what_is_given_is_taken_over() -> None:
    given = options(
        connect_timeout=1.5,
        ps_timeout=2.5,
        closure_timeout=3.5,
        max_losses=4,
        max_flaps=None,
        watchdog_timeout=0,
        on_stall=print,
        insecure=True,
        attach=True,
    )
    assert given == CoordinatorOptions(2, 1.5, 2.5, 3.5, 4, None, None, print, True, True)


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


def test_the_environment_says_when_the_watchdog_speaks_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options(watchdog_timeout=None).watchdog_timeout_s is None
    monkeypatch.setenv("PSYNC_WATCHDOG_TIMEOUT", "30")
    assert options(watchdog_timeout=None).watchdog_timeout_s == 30
    assert options(watchdog_timeout=5).watchdog_timeout_s == 5
    assert options(watchdog_timeout=0).watchdog_timeout_s is None
