"""A program that a test speaks with: a line to its stdin, a line of its stdout."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PSYNC = [sys.executable, "-m", "psync"]


class Program:
    """A chief under a launcher. The first line that it prints is its ``greeting``."""

    def __init__(self, command: Sequence[str | Path], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.greeting = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def ask(self, text: str) -> str:
        self.say(text)
        return self.line()

    def wait_for_error(self, text: str) -> str:
        """The next line of stderr that has the text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return line
        raise AssertionError(f"nothing said {text!r}")

    def there(self, number: int) -> set[int]:
        """Process ids of workers, once there are so many."""
        word, *pids = self.ask(f"who {number}").split()
        assert word == "workers"
        return {int(pid) for pid in pids}

    def end(self) -> tuple[int, str]:
        """Close its stdin; return its exit code, and what it has printed to its end."""
        out, _ = self.process.communicate()
        return self.process.returncode, out

    def interrupt(self, signum: int = signal.SIGINT) -> int:
        """Send it a signal; return its exit code."""
        self.process.send_signal(signum)
        self.process.communicate()
        return self.process.returncode


@contextlib.contextmanager
def program(command: Sequence[str | Path], environ: dict[str, str]) -> Iterator[Program]:
    running = Program(command, environ)
    try:
        yield running
    finally:
        running.process.terminate()
        with running.process:  # which closes its pipes, and waits
            pass
