"""Safeguards that tests switch off."""

from __future__ import annotations

import logging

import pytest

from psync.errors import ConfigurationError
from psync.testing.sabotage.switches import NAMES, VARIABLE, switched_off


def test_a_task_that_is_wrong_on_purpose_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "psync"):
        assert switched_off({VARIABLE: "dedup, staleness"}) == {"dedup", "staleness"}
    assert "wrong on purpose, without dedup, staleness" in caplog.text


def test_a_safeguard_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match="unknown safeguard dedupe") as caught:
        switched_off({VARIABLE: "dedupe"})
    assert all(name in (caught.value.hint or "") for name in NAMES)
