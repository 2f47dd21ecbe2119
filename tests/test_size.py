"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 47_319,
    "src": 63_284,
    "nodes": 593_091,
    "tests": 107_531,
    "net": 4_823,
    "api": 3_736,
    "store": 3_481,
    "top": 3_539,
    "sync": 3_445,
    "ps": 3_235,
    "numerics": 2_809,
    "status": 2_735,
    "client": 2_595,
    "chief": 2_393,
    "closures": 1_873,
    "training": 1_805,
    "launch": 1_703,
    "wire": 1_431,
    "cli": 1_573,
    "worker": 1_283,
    "backups": 1_145,
    "replicas": 1_143,
    "compat": 905,
    "serialization": 834,
    "checkpoints": 833,
    "testing": 9_988,
    "integrations": 4_479,
    "bench": 1_498,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (11, 13),
    "closure": (145, 141),
    "pull": (167, 151),
    "push": (351, 274),
    "push_pull": (436, 353),
    "sync": (963, 716),
    "replica": (1_923, 1_484),
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
