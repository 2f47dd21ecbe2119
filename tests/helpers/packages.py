"""Building psync as it is released, and environments that have nothing but its wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"  # 2023-11-14, any instant after 1980: zip knows none before


def build(source: Path, out: Path, *options: str) -> list[Path]:
    """Build with the backend of this environment; return what was built, sorted by name."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source]
    done = subprocess.run(
        command, env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return sorted(out.iterdir())


def make_environment(folder: Path, python: Path, wheel: Path) -> Path:
    """Install a wheel, and what it requires, in a new environment; return its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    inside = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet"]
    quiet = ["--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel]
    done = subprocess.run([*pip, *quiet], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return inside
