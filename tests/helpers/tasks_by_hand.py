"""Tasks of one cluster, each started as a user would: a command, TF_CONFIG, PSYNC_SECRET."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ports import claimed_ports

SCRIPTS = Path(__file__).parents[1] / "processes" / "scripts"
SERVE = ("-m", "psync", "task")
SECRET = "correct horse battery staple"


def script(name: str, *args: str) -> tuple[str, ...]:
    return (str(SCRIPTS / name), *args)


def plain_environ(**more: str) -> dict[str, str]:
    """The environment of the tests without what psync reads, and with ``more``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PSYNC_", "TF_CONFIG"))}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


runs: list[subprocess.Popen[str]] = []
"""What ``psync_run`` has started; killed when the test has ended."""


def psync_run(*args: str, workers: int = 2, **environ: str) -> subprocess.Popen[str]:
    """Start ``psync run`` with 2 ps tasks, and what it is to run."""
    run = subprocess.Popen(
        [sys.executable, "-m", "psync", "run", "--ps", "2", "--workers", str(workers), *args],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    runs.append(run)
    return run


@dataclass
class Ended:
    """What a process has left."""

    code: int
    out: str
    err: str


class ByHand:
    """A cluster whose tasks are started one by one."""

    def __init__(self, num_ps: int = 1, num_workers: int = 1) -> None:
        self._claims = contextlib.ExitStack()
        ports = self._claims.enter_context(claimed_ports(1 + num_ps + num_workers))
        chief, *others = [f"127.0.0.1:{port}" for port in ports]
        self.cluster = {"chief": [chief], "ps": others[:num_ps], "worker": others[num_ps:]}
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        job: str,
        index: int,
        command: Sequence[str] = SERVE,
        *,
        secret: str | None = SECRET,
        environ: Mapping[str, str] = {},
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        config = {"cluster": self.cluster, "task": {"type": job, "index": index}}
        secrets = {} if secret is None else {"PSYNC_SECRET": secret}
        process = subprocess.Popen(
            [sys.executable, *command],
            env=plain_environ(**{"TF_CONFIG": json.dumps(config), **secrets, **environ}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(
        self,
        job: str,
        index: int,
        command: Sequence[str] = SERVE,
        *,
        secret: str | None = SECRET,
        environ: Mapping[str, str] = {},
    ) -> Ended:
        """Start a task that ends by itself, and return what it has left."""
        return ended(self.start(job, index, command, secret=secret, environ=environ))

    def serve_all(self) -> list[subprocess.Popen[str]]:
        """Start every ps and worker, with debug logs, and wait until they listen."""
        tasks = [
            self.start(job, index, (*SERVE, "--log-level", "debug"))
            for job in ("ps", "worker")
            for index in range(len(self.cluster[job]))
        ]
        for task in tasks:
            wait_for_line(task, " serves at ")
        return tasks

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self._claims.close()


@contextlib.contextmanager
def by_hand(num_ps: int = 1, num_workers: int = 1) -> Iterator[ByHand]:
    cluster = ByHand(num_ps, num_workers)
    try:
        yield cluster
    finally:
        cluster.close()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a process."""
    out, err = process.communicate()
    return Ended(process.returncode, out, err)


def wait_for_line(process: subprocess.Popen[str], text: str, stream: str = "stderr") -> str:
    """Read until a line with ``text``."""
    lines = []
    for line in getattr(process, stream):
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"no {text!r} in {lines}")


def interrupt(process: subprocess.Popen[str]) -> Ended:
    """Press Ctrl-C, as it were."""
    process.send_signal(signal.SIGINT)
    return ended(process)


def children_of(pid: int) -> dict[str, int]:
    """Process ids of a launcher's tasks by name, as in ``ps-0``."""
    children = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environ = Path(f"/proc/{child}/environ").read_text()
        found = re.search(r'"task": \{"type": "(\w+)", "index": (\d)\}', environ)
        assert found, environ
        children[f"{found[1]}-{found[2]}"] = int(child)
    return children


def wait_until_gone(pids: dict[str, int]) -> None:
    """Wait for the end of processes that are not our children."""
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            select.select([end], [], [])
            os.close(end)
