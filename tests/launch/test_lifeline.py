"""A task whose launcher has gone ends, with all that it has started."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterator

import pytest

from process_tools import script, watching

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def on_a_lifeline(*kind: str) -> Iterator[tuple[list[int], list[select.poll], int]]:
    """A sleeper that leads a session: its process ids, their ends, our end of its lifeline."""
    read_end, write_end = os.pipe()
    command = script("sleeper.py", *kind)
    environ = {**os.environ, "PSYNC_LIFELINE_FD": str(read_end)}
    with contextlib.ExitStack() as stack:
        with open(read_end, "rb"):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environ,
                    stdout=subprocess.PIPE,
                    pass_fds=[read_end],
                    start_new_session=True,
                )
            )
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2 if kind else 1)]
        ends = [stack.enter_context(watching(pid)) for pid in pids]
        yield pids, ends, write_end


@pytest.mark.parametrize("kind", [(), ("parent",), ("parent", "stubborn")])
def test_a_task_and_what_it_has_started_end_when_the_launcher_has_gone(
    kind: tuple[str, ...],
) -> None:
    with on_a_lifeline(*kind) as (_, ends, write_end):
        assert not any(end.poll(0) for end in ends)
        os.close(write_end)
        for end in ends:
            end.poll()
