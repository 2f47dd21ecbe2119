"""The targets of fuzz/, on inputs that hypothesis makes: no exception that is not documented, and
no more memory than the limits allow. ``make fuzz`` runs the same targets for longer."""

from __future__ import annotations

import importlib
import logging
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).parent.parent.parent / "fuzz"
NO_TARGETS = {"driver", "run", "samples", "templates"}
TARGETS = sorted(path.stem for path in FUZZ.glob("*.py") if path.stem not in NO_TARGETS)
MEMORY_BYTES = 16 << 20
FEW = {"tasks": 25}  # inputs of those for which a whole cluster is started

targets: dict[str, tuple[Any, list[bytes]]] = {}


@pytest.fixture(scope="module", autouse=True)
def path_of_targets() -> Iterator[None]:
    sys.path.insert(0, str(FUZZ))
    yield
    sys.path.remove(str(FUZZ))


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "psync")


def target(name: str) -> tuple[Any, list[bytes]]:
    if name not in targets:
        targets[name] = importlib.import_module(name).setup()
    return targets[name]


def test_there_is_a_target_for_all_that_comes_from_outside() -> None:
    assert TARGETS == [
        "configurations",
        "descriptions",
        "frames",
        "handshakes",
        "headers",
        "lent",
        "manifests",
        "snapshots",
        "tasks",
    ]


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_a_good_input(name: str) -> None:
    one_input, seeds = target(name)
    for seed in seeds[:: 8 if name in FEW else 1]:
        one_input(seed)


@pytest.mark.promise("input.documented-errors")
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_seeds_end_in_documented_errors_within_bounded_memory(name: str) -> None:
    one_input, seeds = target(name)
    mutated = importlib.import_module("driver").mutated
    one_input(seeds[0])  # what is imported and kept once does not count
    tracemalloc.start()
    try:

        @settings(max_examples=FEW.get(name, 300), deadline=None, database=None)
        @given(st.integers(0, 2**32))
        def each(seed: int) -> None:
            one_input(mutated(random.Random(seed), seeds))

        each()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES * (4 if name in FEW else 1)


@pytest.mark.promise("input.documented-errors")
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_end_in_documented_errors(name: str) -> None:
    one_input, _ = target(name)

    @settings(max_examples=FEW.get(name, 200), deadline=None)
    @given(st.binary(max_size=300))
    def each(data: bytes) -> None:
        one_input(data)

    each()


def test_the_driver_finds_what_is_wrong_and_keeps_the_input(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text((FUZZ / "driver.py").read_text())
    (tmp_path / "wrong.py").write_text(
        "from driver import fuzz\n"
        "def one_input(data):\n"
        "    assert b'\\xff' not in data\n"
        "fuzz(__file__, lambda: (one_input, [b'abc']))\n"
    )
    command = [sys.executable, str(tmp_path / "wrong.py"), "--plain", "--seconds", "20"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 1
    assert "wrong: finding after " in ended.stderr
    found = tmp_path.parent / "out" / "fuzz" / "wrong-finding"
    assert b"\xff" in found.read_bytes()
    again = subprocess.run([*command[:2], "--input", str(found)], capture_output=True, check=False)
    assert again.returncode == 1
