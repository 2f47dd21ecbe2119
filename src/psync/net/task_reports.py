"""Reports of what this process does and waits for: on SIGUSR1, and where somebody asks.

A task says how it is described (``described_by``); a report is that, then the stacks of all
asyncio tasks and threads, then an end marker. No error of any part leaves it.

**SIGUSR1** is answered twice. ``faulthandler`` writes the bare stacks of all threads from C, at
once, also while a step is inside numpy or a lock and never returns to Python. Then a handler of
``signal.signal`` writes the report as soon as the main thread runs Python code again: between two
lines of a step that computes on the loop, too, for which a handler of the loop would wait. It
runs in the middle of anything, so it only reads, takes no lock, and writes to the descriptor and
not to ``sys.stderr``, whose buffer may be half written.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from psync.net.process_state import PerProcess
from psync.net.stacks import describe_tasks, describe_threads

logger = logging.getLogger(__name__)

REPORT_SIGNAL = signal.SIGUSR1

STDERR = 2

Description = Callable[[], Iterable[str]]

_descriptions: PerProcess[dict[object, Description]] = PerProcess(dict)
"""Of what runs in this process: one task; more in a cluster in memory."""


def add_description(describe: Description) -> Callable[[], None]:
    """Let reports contain the lines that ``describe()`` returns; return what ends that."""
    key, known = object(), _descriptions()
    known[key] = describe
    return lambda: known.pop(key, None) and None


@contextlib.contextmanager
def described_by(describe: Description) -> Iterator[None]:
    """Let reports contain the lines that ``describe()`` returns, as long as the context lasts."""
    remove = add_description(describe)
    try:
        yield
    finally:
        remove()


def report_text(why: str, descriptions: Iterable[Description] | None = None) -> str:
    """Return a report in full, several lines.

    Args:
        why: Follows "report of process …".
        descriptions: What it begins with; None: all that were added.
    """
    known = list(_descriptions().values()) if descriptions is None else descriptions
    lines = [f"psync: report of process {os.getpid()}, {why}"]
    for part in [*known, _tasks, describe_threads]:
        try:
            lines += part()
        except Exception as exc:  # what is described may be half-way through a change
            lines.append(f"(this part of the report failed: {type(exc).__name__}: {exc})")
    lines.append(f"psync: end of the report of process {os.getpid()}")
    return "\n".join(lines)


def report_on_signal() -> None:
    """From now on, answer SIGUSR1 with a report on stderr.

    Nothing happens where the program has a handler of its own, and in other threads than the main
    one. A launcher starts its tasks with the signal blocked, so that one which comes while they
    still import is not their end; here it is let in.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(REPORT_SIGNAL) is signal.SIG_DFL:
        signal.signal(REPORT_SIGNAL, _on_signal)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr is closed
            os.fstat(STDERR)
            faulthandler.register(REPORT_SIGNAL, file=STDERR, all_threads=True, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {REPORT_SIGNAL})


def _on_signal(signum: int, frame: object) -> None:
    data = (report_text("asked for by SIGUSR1") + "\n").encode("utf-8", "replace")
    with contextlib.suppress(OSError):  # nobody reads it; the disk is full
        while data:
            data = data[os.write(STDERR, data) :]


def _tasks() -> list[str]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return ["no event loop runs"]
    return describe_tasks(loop)
