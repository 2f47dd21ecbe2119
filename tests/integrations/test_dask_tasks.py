"""Tasks of psync in processes of Dask workers: they end with their client."""

from __future__ import annotations

import pytest

from engine_programs import HERE, run

pytest.importorskip("distributed")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = str(HERE / "dask_programs.py")


def test_nothing_stays_of_a_client_that_was_killed() -> None:
    said, _ = run([PROGRAMS, "a_client_is_lost"])
    assert said == {"there": 3, "left": []}
