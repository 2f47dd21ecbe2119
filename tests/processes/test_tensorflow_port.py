"""The ported script of docs/howto/tensorflow.md, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import ended, plain_environ

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "tensorflow.md"


def test_the_ported_script_learns_on_two_workers(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# after\n(.*?)```", DOCUMENT.read_text(), flags=re.S)
    script = tmp_path / "train.py"
    script.write_text(code)
    command = ["psync", "run", str(script), "--ps", "2", "--workers", "2"]
    run = ended(
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=plain_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert run.code == 0
    assert run.err == ""
    losses = [float(line.split()[1]) for line in run.out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 1e-3 * losses[0]
