from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment whose run files are of this test; a short path, as sockets have names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield {**os.environ, "XDG_RUNTIME_DIR": made, "COLUMNS": "120"}
