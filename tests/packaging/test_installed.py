"""The wheel in an environment with nothing else, on each Python of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_IMPORT_S = 0.010  # of processor time: `import psync` alone

PROGRAM = """
import numpy as np

import psync


async def main():
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")
        optimizer = psync.optimizers.SGD(1.0)

        async def step():
            await optimizer.apply_gradients([(-np.ones(3, np.float32), w)])

        for _ in range(10):
            coordinator.schedule(step)
        await coordinator.join()
        print(await w.read())


if __name__ == "__main__":
    psync.run(main)
"""

TYPED = """
from typing import assert_type

import numpy as np

import psync


async def use(coordinator: psync.ClusterCoordinator, w: psync.Variable) -> None:
    async def step(scale: float) -> str:
        return str(scale)

    remote = coordinator.submit(step, 2.0)
    assert_type(remote, psync.RemoteValue[str])
    assert_type(await coordinator.fetch(remote), str)
    await w.assign(np.zeros(3))
    coordinator.submit(step, "two")  # the mistake
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return what a command prints, which has to end with code 0."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_program_trains(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    psync = installed.parent / "psync"
    assert run(psync, "run", "train.py", "--ps", "2", "--workers", "2", cwd=tmp_path) == (
        "[10. 10. 10.]\n"
    )


def test_importing_it_costs_next_to_nothing(installed: Path, tmp_path: Path) -> None:
    timing = "import time; a = time.process_time(); import psync; print(time.process_time() - a)"
    times = [float(run(installed, "-c", timing, cwd=tmp_path)) for _ in range(7)]
    assert min(times) <= MAX_IMPORT_S


def test_every_public_name_is_there(installed: Path, tmp_path: Path) -> None:
    code = "import psync; print(len([getattr(psync, name) for name in psync.__all__]))"
    assert int(run(installed, "-c", code, cwd=tmp_path)) > 100


def test_a_variable_that_breaks_tasks_has_no_effect_but_an_error(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [installed.parent / "psync", "run", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "PSYNC_FAILPOINTS": "anything"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "PSYNC_FAILPOINTS" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("shell", "script", "word"),
    [
        ("bash", "complete -o nosort", "1"),
        ("zsh", "#compdef psync", "1"),
        ("fish", "complete", "che"),  # click asks fish for the word itself
    ],
)
def test_shells_complete_its_commands(
    shell: str, script: str, word: str, installed: Path, tmp_path: Path
) -> None:
    psync = installed.parent / "psync"
    assert script in run(psync, cwd=tmp_path, _PSYNC_COMPLETE=f"{shell}_source")
    typed = {"COMP_WORDS": "psync che", "COMP_CWORD": word}
    found = run(psync, cwd=tmp_path, _PSYNC_COMPLETE=f"{shell}_complete", **typed)
    assert "checkpoint" in found


def test_both_type_checkers_read_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("pyright")
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    mistake = next(n for n, line in enumerate(TYPED.splitlines(), 1) if "mistake" in line)

    def checked(*command: str | Path) -> str:
        here = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path, env=here, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip

    printed = checked(
        "mypy", "--strict", "--output=json", "--python-executable", installed, program
    )
    errors = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [error["line"] for error in errors if error["severity"] == "error"] == [mistake], printed
    printed = checked("pyright", "--outputjson", "--pythonpath", installed, program)
    found = json.loads(printed)["generalDiagnostics"]
    lines = [one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"]
    assert set(lines) == {mistake}, found  # once for each overload, maybe


def test_the_constraints_hold_for_every_python(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = run(installed, "-c", code, cwd=tmp_path).lower().split()
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert [n for n in names if n != "psync" and f"{n.replace('_', '-')}==" not in pinned] == []
