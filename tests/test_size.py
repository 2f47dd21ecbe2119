"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 45_400,
    "src": 61_403,
    "nodes": 583_764,
    "tests": 92_526,
    "net": 4_630,
    "api": 3_613,
    "store": 3_028,
    "top": 3_737,
    "sync": 3_331,
    "ps": 3_183,
    "numerics": 2_840,
    "status": 2_725,
    "client": 2_341,
    "chief": 2_284,
    "closures": 1_717,
    "training": 1_643,
    "launch": 1_634,
    "wire": 1_360,
    "cli": 1_533,
    "worker": 1_181,
    "backups": 1_027,
    "replicas": 1_101,
    "compat": 843,
    "serialization": 819,
    "checkpoints": 830,
    "testing": 9_932,
    "integrations": 4_576,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (10, 13),
    "closure": (135, 140),
    "pull": (108, 139),
    "push": (161, 196),
    "push_pull": (199, 263),
    "sync": (795, 671),
    "replica": (1_594, 1_394),
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
