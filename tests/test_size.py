"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 48_640,
    "src": 64_614,
    "nodes": 600_260,
    "tests": 107_700,
    "net": 4_890,
    "api": 3_831,
    "store": 3_634,
    "top": 3_601,
    "sync": 3_564,
    "ps": 3_331,
    "numerics": 2_886,
    "status": 2_779,
    "client": 2_693,
    "chief": 2_394,
    "closures": 1_923,
    "training": 1_833,
    "launch": 1_708,
    "wire": 1_646,
    "cli": 1_594,
    "worker": 1_326,
    "backups": 1_174,
    "replicas": 1_168,
    "compat": 957,
    "serialization": 856,
    "checkpoints": 852,
    "testing": 9_988,
    "integrations": 4_488,
    "bench": 1_498,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (11, 14),
    "closure": (149, 147),
    "pull": (177, 170),
    "push": (368, 301),
    "push_pull": (460, 396),
    "sync": (996, 775),
    "replica": (1_990, 1_600),
}
"""Python calls of one operation, and its calls into C, on Python 3.11."""


def test_there_is_no_more_than_there_was() -> None:
    found = sizes()
    assert set(found) <= set(SIZES), "a new package needs a ceiling"
    assert {name: size for name, size in found.items() if size > SIZES[name]} == {}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counts are those of Python 3.11")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_takes_no_more_calls_than_it_did(operation: str) -> None:
    python, native = (round(calls) for calls in per_operation(operation))
    assert python <= CALLS[operation][0]
    assert native <= CALLS[operation][1]
