"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 42_870,
    "src": 59_274,
    "nodes": 569_907,
    "tests": 88_512,
    "net": 4_417,
    "api": 3_524,
    "store": 3_000,
    "top": 3_616,
    "sync": 3_073,
    "ps": 2_950,
    "numerics": 2_679,
    "status": 2_431,
    "client": 2_289,
    "chief": 2_594,
    "closures": 1_650,
    "training": 1_535,
    "launch": 1_618,
    "wire": 1_096,
    "cli": 1_336,
    "worker": 1_152,
    "backups": 957,
    "replicas": 656,
    "compat": 678,
    "serialization": 819,
    "checkpoints": 800,
    "testing": 10_293,
    "integrations": 4_616,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (10, 12),
    "closure": (109, 116),
    "pull": (93, 115),
    "push": (147, 173),
    "push_pull": (180, 233),
    "sync": (578, 671),
    "replica": (1_197, 1_317),
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
