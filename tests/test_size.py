"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 42_790,
    "src": 59_189,
    "nodes": 569_197,
    "tests": 88_562,
    "net": 4_415,
    "api": 3_524,
    "store": 2_990,
    "top": 3_615,
    "sync": 3_030,
    "ps": 2_950,
    "numerics": 2_680,
    "status": 2_431,
    "client": 2_270,
    "chief": 2_594,
    "closures": 1_650,
    "training": 1_535,
    "launch": 1_618,
    "wire": 1_096,
    "cli": 1_333,
    "worker": 1_149,
    "backups": 957,
    "replicas": 656,
    "compat": 678,
    "serialization": 819,
    "checkpoints": 800,
    "testing": 10_288,
    "integrations": 4_616,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (7, 12),
    "closure": (102, 116),
    "pull": (74, 107),
    "push": (123, 172),
    "push_pull": (154, 224),
    "sync": (386, 638),
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
