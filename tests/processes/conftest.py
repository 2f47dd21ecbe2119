from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

import tasks_by_hand


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment whose run files are of this test; a short path, as sockets have names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield {**os.environ, "XDG_RUNTIME_DIR": made, "COLUMNS": "120"}


@pytest.fixture(autouse=True)
def _end_runs() -> Iterator[None]:
    yield
    while tasks_by_hand.runs:
        run = tasks_by_hand.runs.pop()
        run.kill()
        run.communicate()
