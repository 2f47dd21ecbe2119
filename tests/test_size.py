"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 41_567,
    "src": 57_945,
    "nodes": 557_917,
    "tests": 88_546,
    "net": 4_362,
    "api": 3_429,
    "store": 2_788,
    "top": 3_581,
    "sync": 2_879,
    "ps": 2_758,
    "numerics": 2_666,
    "status": 2_405,
    "client": 2_157,
    "chief": 2_511,
    "closures": 1_644,
    "training": 1_488,
    "launch": 1_566,
    "wire": 1_096,
    "cli": 1_281,
    "worker": 1_141,
    "backups": 918,
    "replicas": 656,
    "compat": 667,
    "serialization": 794,
    "checkpoints": 780,
    "testing": 10_277,
    "integrations": 4_606,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (7, 12),
    "closure": (102, 116),
    "pull": (73, 103),
    "push": (122, 166),
    "push_pull": (152, 216),
    "sync": (383, 616),
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
