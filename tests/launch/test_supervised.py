"""Tasks under a scheduler that starts again what does not end with 0: PSYNC_SUPERVISED."""

from __future__ import annotations

import signal

import pytest

from tasks_by_hand import by_hand, ended, script, wait_for_line

SUPERVISED = {"PSYNC_SUPERVISED": "1"}


@pytest.mark.parametrize(("environ", "code"), [({}, 0), (SUPERVISED, 143)])
@pytest.mark.parametrize("command", [("-m", "psync", "task"), script("anywhere.py", "/nowhere")])
def test_a_worker_that_leaves_says_whether_it_is_needed_again(
    environ: dict[str, str], code: int, command: tuple[str, ...]
) -> None:
    with by_hand() as cluster:
        worker = cluster.start("worker", 0, command, environ=environ)
        wait_for_line(worker, " serves at ")
        worker.send_signal(signal.SIGTERM)
        assert ended(worker).code == code


@pytest.mark.parametrize(("environ", "others"), [({}, [0, 0]), (SUPERVISED, [None, None])])
def test_a_chief_that_comes_back_leaves_the_others(
    environ: dict[str, str], others: list[int | None]
) -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        chief = cluster.start("chief", 0, script("idle.py"), environ=environ)
        wait_for_line(chief, "connected", "stdout")
        chief.send_signal(signal.SIGTERM)
        assert ended(chief).code == 143
        if others == [0, 0]:
            assert [ended(task).code for task in tasks] == others
        else:
            again = cluster.start("chief", 0, script("idle.py"), environ=environ)
            wait_for_line(again, "connected", "stdout")
            assert [task.poll() for task in tasks] == others


def test_it_is_one_or_not() -> None:
    with by_hand() as cluster:
        run = cluster.run("ps", 0, environ={"PSYNC_CHIEF_TIMEOUT": "0.1", "PSYNC_SUPERVISED": "x"})
        assert run.code == 2
        assert "PSYNC_SUPERVISED: expected 0 or 1, got 'x'" in run.err
