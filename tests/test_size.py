"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 46_310,
    "src": 62_268,
    "nodes": 588_629,
    "tests": 91_937,
    "net": 4_693,
    "api": 3_644,
    "store": 3_483,
    "top": 3_529,
    "sync": 3_450,
    "ps": 3_283,
    "numerics": 2_866,
    "status": 2_710,
    "client": 2_271,
    "chief": 2_313,
    "closures": 1_740,
    "training": 1_743,
    "launch": 1_666,
    "wire": 1_408,
    "cli": 1_551,
    "worker": 1_194,
    "backups": 1_145,
    "replicas": 1_101,
    "compat": 865,
    "serialization": 821,
    "checkpoints": 834,
    "testing": 9_886,
    "integrations": 4_577,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (10, 13),
    "closure": (140, 141),
    "pull": (110, 146),
    "push": (164, 218),
    "push_pull": (204, 288),
    "sync": (843, 687),
    "replica": (1_728, 1_433),
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
