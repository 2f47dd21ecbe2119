"""The exit codes of the table in docs/reference/configuration.md, "How a process ends"."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from pathlib import Path

import pytest

from tasks_by_hand import (
    ByHand,
    by_hand,
    children_of,
    ended,
    script,
    wait_for_line,
    wait_until_gone,
)

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reference" / "configuration.md"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def table() -> dict[str, list[int]]:
    """Codes after each signal, by the process's name."""
    text = DOCUMENT.read_text().partition("## How a process ends")[2]
    rows = re.findall(r"^\| (.+?) \| .+ \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {name: [int(code) for code in codes] for name, *codes in rows}


def worker_that_serves(cluster: ByHand) -> subprocess.Popen[str]:
    worker = cluster.start("worker", 0)
    wait_for_line(worker, " serves at ")
    return worker


def ps(cluster: ByHand) -> subprocess.Popen[str]:
    task = cluster.start("ps", 0)
    wait_for_line(task, " serves at ")
    return task


def chief(cluster: ByHand) -> subprocess.Popen[str]:
    cluster.serve_all()
    program = cluster.start("chief", 0, script("idle.py"))
    wait_for_line(program, "connected", "stdout")
    return program


def worker_with_the_program(cluster: ByHand) -> subprocess.Popen[str]:
    cluster.start("ps", 0)
    cluster.start("chief", 0, script("sessions.py", "100000"))
    worker = cluster.start("worker", 0, script("sessions.py", "100000"))
    wait_for_line(worker, " is at work as ", "stdout")
    return worker


def evaluator(cluster: ByHand) -> subprocess.Popen[str]:
    task = cluster.start("evaluator", 0, script("evaluated.py", "/nonexistent"))
    wait_for_line(task, "evaluator ", "stdout")
    return task


def launcher(cluster: ByHand) -> subprocess.Popen[str]:
    run = cluster.start("chief", 0, ("-m", "psync", "run", *script("idle.py")))
    wait_for_line(run, "connected", "stdout")
    return run


STARTS = {
    "`psync run`": launcher,
    "chief": chief,
    "worker that runs the program (`on_workers=True`)": worker_with_the_program,
    "worker": worker_that_serves,
    "ps": ps,
    "evaluator": evaluator,
}


def test_the_table_names_every_process() -> None:
    assert list(table()) == list(STARTS)


@pytest.mark.promise("failures.exit-codes")
@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
@pytest.mark.parametrize("name", STARTS)
def test_a_signal_ends_it_with_the_code_of_the_table(name: str, signum: signal.Signals) -> None:
    with by_hand() as cluster:
        process = STARTS[name](cluster)
        children = children_of(process.pid) if name == "`psync run`" else {}
        process.send_signal(signum)
        left = ended(process)
        assert left.code == table()[name][SIGNALS.index(signum)]
        assert "Traceback" not in left.err
        wait_until_gone(children)


@pytest.mark.smoke
def test_a_chief_that_hangs_up_tells_the_others_to_exit() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        program = cluster.start("chief", 0, script("idle.py"))
        wait_for_line(program, "connected", "stdout")
        program.send_signal(signal.SIGHUP)
        assert ended(program).code == 129
        assert [ended(task).code for task in tasks] == [0, 0]


def test_who_cannot_start_ends_with_code_2() -> None:
    with by_hand() as cluster:
        for job in ("ps", "worker"):
            assert cluster.run(job, 0, secret="short").code == 2
        assert cluster.run("chief", 0, script("idle.py"), secret="short").code == 2
        assert cluster.run("evaluator", 0, script("idle.py")).code == 2
        assert cluster.run("chief", 0, ("-m", "psync", "run", "no-such-script.py")).code == 2


def test_a_step_that_computes_when_its_worker_is_interrupted_runs_again_elsewhere() -> None:
    """The first Ctrl-C waits for the loop; the second is raised inside the step."""
    with by_hand() as cluster:
        cluster.start("ps", 0)
        chief = cluster.start("chief", 0, script("steps.py", "computes"))
        worker = cluster.start("worker", 0)
        wait_for_line(worker, "computing", "stdout")
        end = os.pidfd_open(worker.pid)
        try:
            while not select.select([end], [], [], 0.05)[0]:
                worker.send_signal(signal.SIGINT)
        finally:
            os.close(end)
        assert ended(worker).code in (130, -signal.SIGINT), "the last one may come at its very end"
        wait_for_line(cluster.start("worker", 0), "computing", "stdout")
        assert chief.poll() is None
