"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 40_975,
    "src": 57_583,
    "nodes": 556_090,
    "tests": 88_633,
    "net": 4_371,
    "api": 3_364,
    "store": 2_688,
    "top": 3_567,
    "sync": 2_668,
    "ps": 2_715,
    "numerics": 2_643,
    "status": 2_445,
    "client": 2_109,
    "chief": 2_490,
    "closures": 1_602,
    "training": 1_462,
    "launch": 1_562,
    "wire": 1_104,
    "cli": 1_281,
    "worker": 1_133,
    "backups": 892,
    "replicas": 641,
    "compat": 649,
    "serialization": 804,
    "checkpoints": 785,
    "testing": 10_504,
    "integrations": 4_609,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (7, 12),
    "closure": (101, 114),
    "pull": (67, 97),
    "push": (116, 162),
    "push_pull": (140, 206),
    "sync": (360, 590),
    "replica": (898, 1_283),
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
