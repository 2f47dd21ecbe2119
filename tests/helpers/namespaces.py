"""A network of its own, with names of its own, for processes that think they are on many machines.

Linux namespaces: its loopback device is its own, so ports are never taken, and so is /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest


class Network:
    """Starts processes that reach each other by name, and nobody else."""

    def __init__(self, holder: int, hosts: Path, flags: Sequence[str]) -> None:
        self._enter = ["nsenter", f"--target={holder}", *flags, "--"]
        self._hosts = hosts
        self._addresses: dict[str, str] = {}
        self._given = 0

    def name(self, *names: str) -> None:
        """Give names a new address."""
        self._given += 1
        address = f"127.1.{self._given // 250}.{self._given % 250 + 1}"
        self._addresses.update(dict.fromkeys(names, address))
        self._write()

    def forget(self, *names: str) -> None:
        """Let names have no address."""
        for name in names:
            self._addresses.pop(name, None)
        self._write()

    def _write(self) -> None:  # in place: it is mounted
        lines = [f"{address} {name}\n" for name, address in self._addresses.items()]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a process; signals to it reach the command itself."""
        return subprocess.Popen(
            [*self._enter, *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def call(self, command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
        """Return the exit code and the output of a command."""
        process = self.start(command, environ)
        out, _ = process.communicate()
        return process.returncode, out


SET_UP = """
set -e
ip link set lo up
mount --bind "$1" /etc/hosts
mount -t tmpfs tmpfs /run
echo ready
exec sleep infinity
"""


@contextlib.contextmanager
def network(directory: Path) -> Iterator[Network]:
    """Return a context manager for a network; skips the test where namespaces cannot be made."""
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    flags = ["--net", "--mount", *as_user]
    holder = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", SET_UP, "sh", str(hosts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            _, err = holder.communicate()
            pytest.skip(f"needs network namespaces: {err.strip()}")
        entered = [flag for flag in flags if flag != "--map-root-user"]
        yield Network(holder.pid, hosts, entered)
    finally:
        holder.kill()
        holder.communicate()
