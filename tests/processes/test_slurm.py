"""The batch script of `psync launch slurm`, run: bash, tasks, and a node that is taken away.

Only SLURM is played: an `srun` that starts each rank with the environment that real ones have, on
nodes that are names in a network of its own, and an `scontrol` that notes what is requeued.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Network, network
from psync.integrations.batch_scripts import Batch, script
from tasks_by_hand import plain_environ
from tasks_by_hand import script as script_of_tests

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(170)]

SRUN = """\
#!{python}
import os, signal, subprocess, sys

sys.path.insert(0, {helpers!r})
from recorded_slurm import two_nodes

command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [subprocess.Popen(command, env={{**os.environ, **two_nodes(rank)}}) for rank in range(4)]
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda number, frame: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

SCONTROL = """\
#!/bin/sh
echo "$@" >> {requeued}
"""


class PlayedSlurm:
    """Runs one batch script, on two nodes."""

    def __init__(self, nodes: Network, directory: Path) -> None:
        self._nodes = nodes
        self._directory = directory
        self.requeued = directory / "requeued"
        commands = directory / "bin"
        commands.mkdir()
        helpers = str(Path(__file__).parents[1] / "helpers")
        for name, text in (
            ("srun", SRUN.format(python=sys.executable, helpers=helpers)),
            ("scontrol", SCONTROL.format(requeued=self.requeued)),
        ):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        path = (str(commands), os.path.dirname(sys.executable), os.environ["PATH"])
        self._environ = plain_environ(PATH=os.pathsep.join(path), SLURM_JOB_ID="23")
        tests = script_of_tests("anywhere.py", str(directory / "data"))
        self._script = directory / "train.sbatch"
        self._script.write_text(script(Batch("train", ("python", *tests), 2, 1)))

    def start(self, restarts: int = 0) -> None:
        """Begin the job, or begin it again."""
        for node in ("node1", "node2"):
            self._nodes.name(node)
        environ = {**self._environ, "SLURM_RESTART_COUNT": str(restarts)}
        self._process = self._nodes.start(["bash", str(self._script)], environ)

    def signal(self, signum: signal.Signals) -> None:
        """As `--signal=B:…` and scancel do: to the batch script alone."""
        self._process.send_signal(signum)

    def wait_for(self, text: str) -> str:
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(lines))

    def end(self) -> int:
        """Return the exit code."""
        self._process.communicate()
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[PlayedSlurm]:
    with network(tmp_path) as nodes:
        played = PlayedSlurm(nodes, tmp_path)
        played.start()
        yield played
        played.close()


def test_a_job_that_is_requeued_goes_on_and_counts_exactly(
    slurm: PlayedSlurm, tmp_path: Path
) -> None:
    slurm.wait_for("this process is /job:chief/task:0, as SlurmClusterResolver says")
    slurm.wait_for("counted 40")
    slurm.signal(signal.SIGUSR1)
    assert slurm.end() == 143
    assert slurm.requeued.read_text() == "requeue 23\n"
    slurm.start(restarts=1)
    assert int(slurm.wait_for("began at ").split()[-1]) >= 40
    slurm.wait_for("counted ")
    (tmp_path / "data" / "enough").touch()
    assert "total True" in slurm.wait_for("total ")
    assert slurm.end() == 0
    assert slurm.requeued.read_text() == "requeue 23\n"


def test_a_job_that_is_cancelled_is_not_requeued(slurm: PlayedSlurm) -> None:
    slurm.wait_for("counted 20")
    slurm.signal(signal.SIGTERM)
    assert slurm.end() == 143
    assert not slurm.requeued.exists()
