"""Steps leave nothing to the garbage collector.

What refers to itself is not gone when it is over, but when the collector comes by. Until then it
keeps what it refers to: values that a ps has lent, so that updates find no memory side by side.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from message_counts import WORKS, Case, counting, traffic_of
from psync.testing import run_virtual


@pytest.fixture
def garbage() -> Iterator[Counter[str]]:
    """What the collector finds of operations that are done as ``traffic_of`` does them."""
    counting.garbage = Counter()
    gc.disable()
    yield counting.garbage
    counting.garbage = None
    gc.enable()


@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("operation", [*WORKS, "empty closure"])
def test_an_operation_leaves_no_cycle(operation: str, backup: bool, garbage: Counter[str]) -> None:
    run_virtual(traffic_of, operation, Case(2, 1, 6, backup))
    assert not garbage
