"""The programs of the gallery in their short form; each ends with an error if it has not learned.

`make gallery` runs them in full.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import plain_environ

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(180)]

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("digits_modes", ("--ps", "2", "--workers", "4")),
        ("matrix_factorization", ("--ps", "2", "--workers", "2")),
        ("wide_and_deep", ("--ps", "2", "--workers", "3")),
        ("local_steps", ("--ps", "1", "--workers", "4")),
        ("evolution", ("--ps", "1", "--workers", "8")),
        ("search", ()),
    ],
)
def test_what_it_is_to_show_comes_out_and_is_drawn(
    name: str, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    script = [str(GALLERY / f"{name}.py")]
    command = ["-m", "psync", "run", *tasks, *script, "--"] if tasks else script
    end = subprocess.run(
        [sys.executable, *command, "--quick", "--out", str(tmp_path)],
        env=plain_environ(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert end.returncode == 0, f"{end.stdout}\n{end.stderr}"
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
