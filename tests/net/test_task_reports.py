"""Reports that tell all they can, and never break what they are about."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Iterator

import pytest

from psync.net import task_reports
from psync.net.task_reports import add_description, described_by, report_on_signal, report_text


@pytest.fixture
def signal_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_report_has_what_was_described_then_stacks_then_an_end(turns):
    with described_by(lambda: ["/job:ps/task:0: all is well"]):
        lines = report_text("for a test").splitlines()
    assert lines[0] == f"psync: report of process {os.getpid()}, for a test"
    assert lines[1] == "/job:ps/task:0: all is well"
    assert any(line.startswith("asyncio tasks: ") for line in lines)
    assert any(line.startswith("threads: ") for line in lines)
    assert lines[-1] == f"psync: end of the report of process {os.getpid()}"
    assert lines[1] not in report_text("again").splitlines()


def test_an_error_of_one_part_is_told_and_leaves_the_others():
    def fails() -> list[str]:
        raise RuntimeError("dictionary changed size during iteration")

    remove = add_description(fails)
    text = report_text("for a test")
    remove()
    remove()  # no harm
    assert "(this part of the report failed: RuntimeError: dictionary changed size" in text
    assert "threads: " in text


def test_without_a_loop_there_are_threads():
    assert "no event loop runs" in report_text("for a test")


def test_a_handler_of_the_programs_own_is_left_alone(signal_as_before):
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
    report_on_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [True]


def test_a_signal_that_came_before_is_answered_once_it_can_be(signal_as_before, capfd):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.raise_signal(signal.SIGUSR1)  # for this thread alone: others do not block it
    report_on_signal()
    error = capfd.readouterr().err
    assert "asked for by SIGUSR1" in error
    assert "psync: end of the report" in error


def test_a_step_that_computes_on_the_loop_is_seen_in_the_middle_of_it(signal_as_before, capfd):
    async def main() -> None:
        report_on_signal()
        computes_for_long()

    def computes_for_long() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):
            pass

    asyncio.run(main())
    error = capfd.readouterr().err
    assert "Current thread" in error  # faulthandler's, from C
    assert "in computes_for_long" in error
    assert "runs just now: see the stack of its thread" in error


def test_where_nobody_reads_stderr_the_program_goes_on(signal_as_before, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(task_reports, "STDERR", write)
    task_reports._on_signal(signal.SIGUSR1, None)  # EPIPE
    os.close(write)
    task_reports._on_signal(signal.SIGUSR1, None)  # EBADF
    report_on_signal()
    assert signal.getsignal(signal.SIGUSR1) is task_reports._on_signal
