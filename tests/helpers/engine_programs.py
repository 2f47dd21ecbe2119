"""Programs on Ray and Dask, in tests/integrations/engines: running one, hearing what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
HERE = TESTS / "integrations" / "engines"
EXAMPLES = TESTS.parent / "examples"
SOURCE = TESTS.parent / "src"


def environ(**more: str) -> dict[str, str]:
    """What programs inherit: nothing that psync or Ray would read but what is given."""
    others = ("PSYNC_", "TF_CONFIG", "RAY_")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(others)},
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def run(
    command: list[str], *, heard: Callable[[dict[str, Any]], None] | None = None, **more: str
) -> tuple[dict[str, Any], list[str]]:
    """Run a program to its end.

    Args:
        command: Arguments of Python.
        heard: Told each time that it says something, with all that it has said.
        more: Variables.

    Returns:
        What it has said (``counting.say``), and all lines that it printed.
    """
    program = subprocess.Popen(
        [sys.executable, *command], env=environ(**more),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said: dict[str, Any] = {}
    lines: list[str] = []
    assert program.stdout is not None
    with program:
        for line in program.stdout:
            lines.append(line.rstrip())
            if line.startswith("SAYS "):
                said.update(json.loads(line.removeprefix("SAYS ")))
                if heard is not None:
                    heard(said)
    assert program.returncode == 0, "\n".join(lines)
    return said, lines


class RayNodes:
    """A Ray cluster of several nodes; see ray_nodes.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_nodes.py")],
            env=environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._line()
        self.removed: list[str] = []

    def remove(self, address: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{address}\n")
        self.process.stdin.flush()
        assert self._line() == "removed"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate(timeout=60)

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a driver. What tasks print is not left out where it repeats."""
        return {"RAY_ADDRESS": self.address, "RAY_DEDUP_LOGS": "0"}
