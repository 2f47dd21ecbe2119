"""The batch script. tests/processes/test_slurm.py runs it, tests/integrations lint it."""

from __future__ import annotations

import os
from pathlib import Path

from psync.cli.launch.slurm import Batch, script

GOLDEN = Path(__file__).parent / "golden" / "train.sbatch"

ASKED = Batch(
    "train",
    ("python", "train.py", "--note", "two words"),
    num_ps=2,
    num_workers=4,
    cpus_per_task=8,
    time="12:00:00",
    options=("--partition=gpu",),
    setup=("module load python",),
)


def test_the_script_is_as_it_was() -> None:
    text = script(ASKED)
    if os.environ.get("PSYNC_REWRITE"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, f"read the diff; then PSYNC_REWRITE=1: {GOLDEN}"


def test_options_stand_before_the_first_command() -> None:
    lines = script(ASKED).splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options == list(range(1, len(options) + 1))


def test_the_secret_is_on_no_command_line() -> None:
    (srun,) = [line for line in script(ASKED).splitlines() if line.startswith("srun")]
    assert "SECRET" not in srun
