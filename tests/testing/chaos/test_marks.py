"""Marks of pushes under way: what a killer sees from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from psync.testing.chaos.evidence import PushMarks, in_flight


def test_a_push_is_seen_while_it_is_under_way_and_not_afterwards(tmp_path: Path) -> None:
    marks, others = PushMarks(tmp_path / "marks"), PushMarks(tmp_path / "marks")
    me = os.getpid()
    assert others.snapshot(3) == {}
    with marks.pushing(1):
        assert others.snapshot(3) == {1: (me, 1)}
    assert others.snapshot(3) == {1: (me, 2)}
    with pytest.raises(ValueError, match="no luck"), marks.pushing(1):
        raise ValueError("no luck")
    assert others.snapshot(3)[1][1] % 2 == 0, "a push that fails is over, too"
    marks.close()
    others.close()


def test_a_worker_that_is_killed_in_a_push_leaves_its_mark_and_its_next_life_begins_anew(
    tmp_path: Path,
) -> None:
    program = (
        "import os, signal; from psync.testing.chaos.evidence import PushMarks\n"
        f"with PushMarks({str(tmp_path / 'marks')!r}).pushing(0):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    victim = subprocess.Popen([sys.executable, "-c", program])
    assert victim.wait() == -signal.SIGKILL
    marks = PushMarks(tmp_path / "marks")
    assert marks.snapshot(1) == {0: (victim.pid, 1)}
    with marks.pushing(0):
        assert marks.snapshot(1) == {0: (os.getpid(), 3)}
    marks.close()


def test_only_what_was_under_way_before_and_after_and_lived_counts() -> None:
    before = {0: (10, 1), 1: (11, 4), 2: (12, 7), 3: (13, 9)}
    after = {0: (10, 1), 1: (11, 5), 2: (12, 8), 3: (13, 9)}
    alive = {0: 10, 1: 11, 2: 12, 3: 99}  # 3 was started again: the mark is of its earlier life
    assert in_flight(before, after, alive) == {0}
