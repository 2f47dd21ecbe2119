"""Programs without async, as processes: what they print, and how they end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tasks_by_hand import ended, script, wait_for_line

PYTHON, SCRIPT = sys.executable, *script("blocking.py")
PRINTED = "fetched [0.0, 1.0, 2.0, 3.0] w [6.0, 6.0]\n"


def test_a_script_starts_a_cluster_trains_and_ends() -> None:
    done = subprocess.run([PYTHON, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, PRINTED), done.stderr


@pytest.mark.parametrize(
    ("command", "signum", "code"),
    [
        ([SCRIPT, "wait"], signal.SIGINT, -signal.SIGINT),
        (
            ["-m", "psync", "run", SCRIPT, "--ps", "1", "--workers", "1", "--", "run"],
            signal.SIGTERM,
            143,
        ),
    ],
    ids=["alone", "under psync run"],
)
def test_a_signal_ends_what_is_waited_for_and_the_cluster_with_it(
    command: list[str], signum: signal.Signals, code: int
) -> None:
    process = subprocess.Popen([PYTHON, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == PRINTED
    wait_for_line(process, "joining", "stdout")
    process.send_signal(signum)
    end = ended(process)
    assert end.code == code
    assert "interrupted" in end.out
