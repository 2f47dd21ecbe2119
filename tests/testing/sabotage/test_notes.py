"""Notes of test hooks: they outlive the task that wrote them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from psync.testing.sabotage.notes import Notes, notes_in


def test_lines_are_counted_over_all_lives_of_a_task(tmp_path: Path) -> None:
    for _ in range(2):
        notes = Notes(str(tmp_path), "ps-0")
        notes.add("failpoint", "ps.push.applied")
        notes.close()
        notes.close()
    assert notes.earlier() == Counter({"failpoint ps.push.applied": 2})
    assert notes_in(tmp_path) == {"ps-0": notes.earlier()}


def test_a_line_is_there_although_its_process_was_killed_at_once(tmp_path: Path) -> None:
    program = (
        "import os, signal; from psync.testing.sabotage.notes import Notes; "
        "Notes.from_environment(os.environ).add('here'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    config = json.dumps({"cluster": {}, "task": {"type": "worker", "index": 3}})
    environ = {**os.environ, "PSYNC_TESTING_NOTES": str(tmp_path), "TF_CONFIG": config}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert notes_in(tmp_path) == {"worker-3": Counter({"here": 1})}
