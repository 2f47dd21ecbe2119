"""Results gather for one turn of the loop, and leave together by the connection that suits them."""

from __future__ import annotations

import numpy as np
import pytest

from psync.serialization.payloads import pack
from psync.worker.session import ClosureEnd, failed


def value(content: object) -> ClosureEnd:
    return ClosureEnd(
        "ok", pack(content, subject="it", receiver="the coordinator", main_by_name=False)
    )


def test_whoever_writes_to_a_value_hears_that_it_is_read_only_and_what_to_do() -> None:
    value = np.zeros(3, np.float32)
    value.flags.writeable = False
    with pytest.raises(ValueError, match="read-only") as caught:
        value += 1
    for _ in range(2):  # the same exception of two closures
        end = failed("error", caught.value, main_by_name=False)
        assert end.error is not None
        assert end.error[2].count("copy=True, out=, or value.copy()") == 1
