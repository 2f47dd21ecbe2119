"""The bounds themselves; the modules that apply them test that they do."""

from __future__ import annotations

import dataclasses

import pytest

from psync.wire.limits import DEFAULT_LIMITS, HANDSHAKE_LIMITS, Limits


def test_defaults_hold_a_large_shard_and_a_small_header() -> None:
    assert DEFAULT_LIMITS == Limits()
    assert DEFAULT_LIMITS.header_bytes == 1 << 20
    assert DEFAULT_LIMITS.segment_bytes == 1 << 30
    assert DEFAULT_LIMITS.body_bytes == 4 << 30


def test_a_stranger_may_send_a_small_header_and_nothing_else() -> None:
    assert HANDSHAKE_LIMITS.header_bytes == 4096
    assert HANDSHAKE_LIMITS.segments == 0
    assert HANDSHAKE_LIMITS.segment_bytes == 0
    assert HANDSHAKE_LIMITS.body_bytes == 0
    assert DEFAULT_LIMITS.handshake_seconds == 5


def test_limits_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_LIMITS.segments = 1  # type: ignore[misc]
