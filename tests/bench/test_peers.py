"""The measurement beside TensorFlow; a small program stands in for it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from psync.bench import peers
from psync.bench.checks import WrongResultError
from psync.bench.peers import Case
from psync.errors import ConfigurationError
from psync.launch.local import LocalCluster

SMALL = [
    Case(True, "small", 0.001, 3), Case(True, "small", 0.001, 3, pull_ahead=False),
    Case(False, "small", 0.001, 3), Case(True, "small", 0.001, 3, ps_recovery="replica"),
    Case(False, "small", 0.001, 3, ps_recovery="replica"),
]  # fmt: skip


def program(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return sys.executable, str(path)


def test_the_sizes_are_those_of_tensorflow_programs() -> None:
    nbytes = [peers.NUM_VARIABLES * 4 * case.shape[0] * case.shape[1] for case in peers.CASES]
    small, large = 0.04 * (1 << 20), 16 << 20
    expected = [small] * 3 + [large] * 2 + [small] * 2 + [large] * 2
    assert nbytes == pytest.approx(expected, rel=0.01)


@pytest.mark.virtual_time
async def test_all_variables_are_checked_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    right = peers.check_values

    def check(case: Case, updates: int, *values: np.ndarray) -> None:
        right(case, updates, *values)
        checked.append(updates)

    monkeypatch.setattr(peers, "check_values", check)
    async with LocalCluster(2, 2, processes=False) as cluster:
        for case in SMALL:
            with pytest.raises(ZeroDivisionError):  # in virtual time steps take none
                await peers.run_psync(cluster, 2, case)
    assert checked == [8, 8, 16, 8, 16]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: str(case.name))
@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_variable_is_found(case: Case, wrong: int) -> None:
    fresh = np.full((3, 10), 1 - (1 - 2 * peers.RATE) ** 8)
    values = [fresh, fresh, np.array(8 * peers.RATE), np.array(8)]
    peers.check_values(case, 8, *values)
    values[wrong] = values[wrong] - np.array([peers.RATE, peers.RATE, peers.RATE, 1][wrong])
    with pytest.raises(WrongResultError, match=r"expected .* to .*, got"):
        peers.check_values(case, 8, *values)


async def test_tensorflow_is_told_the_case_and_tells_its_figure(tmp_path: Path) -> None:
    text = 'import sys; print(\'{"updates": %s, "seconds": 0.5}\' % sys.argv[3])'
    command = program(tmp_path, text)
    assert await peers.run_tensorflow(command, 2, SMALL[0]) == 6.0


@pytest.mark.parametrize(
    "text",
    ["raise SystemExit(1)", "print('nonsense')", "print('{}')", "import signal; signal.pause()"],
)
async def test_a_program_that_measures_nothing_is_named_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    if "pause" in text:
        monkeypatch.setattr(peers, "LIMIT_S", 0.5)
    command = program(tmp_path, text)
    async with asyncio.timeout(20):
        with pytest.raises(ConfigurationError, match=r"program\.py gave no figure for sync, small"):
            await peers.run_tensorflow(command, 2, SMALL[0])


def test_ratios_are_those_of_neighbours() -> None:
    rates = {(SMALL[0], "psync"): [8.0, 90.0, 10.0], (SMALL[0], "tensorflow"): [2.0, 30.0, 5.0]}
    result = peers.result_of(SMALL[0], 2, rates)
    assert result["ratio"] == 3.0
    assert result["psync"]["median"] == 10.0
