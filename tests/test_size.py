"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 52_950,
    "src": 66_753,
    "nodes": 611_308,
    "tests": 126_605,
    "net": 5_562,
    "api": 4_087,
    "store": 3_625,
    "sync": 3_583,
    "ps": 3_359,
    "top": 3_279,
    "status": 3_023,
    "numerics": 2_989,
    "chief": 2_985,
    "launch": 2_887,
    "client": 2_779,
    "cli": 2_469,
    "closures": 2_022,
    "training": 1_925,
    "wire": 1_643,
    "compat": 1_400,
    "worker": 1_366,
    "backups": 1_154,
    "replicas": 1_015,
    "checkpoints": 899,
    "serialization": 867,
    "testing": 9_927,
    "integrations": 2_478,
    "bench": 1_397,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (25, 20),
    "closure": (196, 158),
    "pull": (249, 185),
    "push": (472, 321),
    "push_pull": (569, 411),
    "sync": (1_214, 818),
    "replica": (2_470, 1_682),
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
