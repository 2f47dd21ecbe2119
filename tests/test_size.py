"""Ceilings of the figures in ``helpers/figures.py``; lower one when the code is below it."""

from __future__ import annotations

import sys

import pytest

from figures import OPERATIONS, per_operation, sizes

SIZES = {
    "core": 40_995,
    "src": 57_648,
    "nodes": 556_829,
    "tests": 88_966,
    "net": 4_376,
    "api": 3_362,
    "store": 2_676,
    "top": 3_564,
    "sync": 2_600,
    "ps": 2_734,
    "numerics": 2_626,
    "status": 2_451,
    "client": 2_101,
    "chief": 2_515,
    "closures": 1_602,
    "training": 1_481,
    "launch": 1_586,
    "wire": 1_102,
    "cli": 1_302,
    "worker": 1_121,
    "backups": 892,
    "replicas": 641,
    "compat": 646,
    "serialization": 804,
    "checkpoints": 813,
    "testing": 10_548,
    "integrations": 4_610,
    "bench": 1_495,
}
"""Code lines by package, of the core and of all; syntax nodes; lines of tests."""

WORK = {
    "message": (532, 6, 11),
    "closure": (4_281, 99, 113),
    "pull": (4_090, 63, 95),
    "push": (7_173, 112, 160),
    "push_pull": (8_439, 136, 206),
    "sync": (21_842, 347, 582),
    "replica": (42_680, 735, 1_168),
}
"""Bytecodes and Python calls of one operation, and its calls into C, on Python 3.11."""


def test_there_is_no_more_than_there_was() -> None:
    found = sizes()
    assert set(found) <= set(SIZES), "a new package needs a ceiling"
    assert {name: size for name, size in found.items() if size > SIZES[name]} == {}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counts are those of Python 3.11")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_takes_no_more_work_than_it_did(operation: str) -> None:
    found = [round(count) for count in per_operation(operation)]
    assert [min(pair) for pair in zip(found, WORK[operation], strict=True)] == found
