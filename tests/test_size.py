"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 43_396,
    "src": 59_789,
    "nodes": 573_437,
    "tests": 91_290,
    "net": 4_483,
    "api": 3_576,
    "store": 2_992,
    "top": 3_692,
    "sync": 2_985,
    "ps": 2_965,
    "numerics": 2_726,
    "status": 2_494,
    "client": 2_273,
    "chief": 2_636,
    "closures": 1_703,
    "training": 1_561,
    "launch": 1_629,
    "wire": 1_253,
    "cli": 1_383,
    "worker": 1_171,
    "backups": 929,
    "replicas": 653,
    "compat": 677,
    "serialization": 815,
    "checkpoints": 800,
    "testing": 10_279,
    "integrations": 4_619,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

CALLS = {
    "message": (10, 13),
    "closure": (125, 138),
    "pull": (103, 135),
    "push": (159, 193),
    "push_pull": (196, 261),
    "sync": (690, 766),
    "replica": (1_362, 1_508),
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
