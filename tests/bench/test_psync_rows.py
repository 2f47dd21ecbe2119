"""psync's side of the comparison with peers."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from psync.bench import peers, psync_rows
from psync.bench.checks import WrongResultError
from psync.bench.peers import System
from psync.bench.psync_rows import RATE, check_values


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_variable_is_found(synchronous: bool, wrong: int) -> None:
    fresh = np.full((3, 10), 1 - (1 - 2 * RATE) ** 8)
    values = [fresh, fresh, np.array(8 * RATE), np.array(8)]
    check_values(synchronous, 8, *values)
    values[wrong] = values[wrong] - np.array([RATE, RATE, RATE, 1][wrong])
    with pytest.raises(WrongResultError, match=r"expected .* to .*, got"):
        check_values(synchronous, 8, *values)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_psync_knows_all_works_and_its_variables_are_right() -> None:
    with System([sys.executable, "-m", "psync.bench.psync_rows"]) as own:
        assert set(own.works) == {row.work for row in peers.ROWS} == set(psync_rows.WORKS)
        for row in peers.ROWS:
            if row.mib <= 1:
                assert own.measure(row, 3) > 0
