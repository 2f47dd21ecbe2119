"""Hosts that are reached over ssh: a real sshd on loopback, with several names.

Each host is an address of its own, 127.0.0.2 and so on, at which one sshd listens, with a
configuration and keys of its own; nothing of the user's is read.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from ports import claimed_ports

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
IS_POSSIBLE = SSHD is not None and sys.platform == "linux"
WHY_NOT = "needs sshd (Debian: openssh-server), and Linux's loopback addresses"


class SshHosts:
    """A running sshd, and how to reach it.

    Attributes:
        ssh: The command for ``psync run --ssh``.
        log: What sshd writes.
    """

    def __init__(self, directory: Path, *hosts: str) -> None:
        self.directory = directory
        self.log = directory / "sshd.log"
        for name in ("host_key", "user_key", "other_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)],
                check=True,
            )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it keeps what has no privileges
        addresses = {host: f"127.0.0.{number}" for number, host in enumerate(hosts, 2)}
        self._claims = contextlib.ExitStack()
        (self.port,) = self._claims.enter_context(claimed_ports(1))
        keys = directory / "authorized_keys"
        keys.write_text((directory / "user_key.pub").read_text())
        self._configuration = directory / "sshd_config"
        self._configuration.write_text(
            "\n".join(
                [
                    *(f"ListenAddress {address}:{self.port}" for address in addresses.values()),
                    f"HostKey {directory / 'host_key'}",
                    f"AuthorizedKeysFile {keys}",
                    f"PidFile {directory / 'pid'}",
                    "StrictModes no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "UsePAM no",
                    "MaxStartups 100",
                    "PermitRootLogin prohibit-password",
                ]
            )
        )
        known = directory / "known_hosts"
        key = (directory / "host_key.pub").read_text()
        known.write_text("".join(f"[{at}]:{self.port} {key}" for at in addresses.values()))
        config = directory / "ssh_config"
        lines = [f"UserKnownHostsFile {known}", f"User {getpass.getuser()}", "IdentityAgent none"]
        lines += ["IdentitiesOnly yes", f"IdentityFile {directory / 'user_key'}"]
        for host, address in addresses.items():
            lines += [f"Host {host}", f"  HostName {address}", f"  Port {self.port}"]
        config.write_text("\n".join(lines) + "\n")
        self.ssh = f"ssh -F {config}"
        self.start()

    def start(self) -> None:
        """Start sshd, and wait until it listens."""
        assert SSHD is not None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self._configuration)], stderr=log
            )
        while True:
            try:
                socket.create_connection(("127.0.0.2", self.port)).close()
            except ConnectionRefusedError:
                assert self._process.poll() is None, self.log.read_text()
            else:
                return

    def sessions(self) -> list[int]:
        """Return the processes of sshd that serve a connection."""
        return children_of(self._process.pid)

    def pause(self) -> None:
        """Let it accept no connections, until ``start``; those that are open stay."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End sshd and what it serves, as when a host is turned off."""
        sessions = self.sessions()
        self.pause()
        for pid in sessions:
            for each in [pid, *children_of(pid)]:
                if b"sshd" in command_of(each):
                    kill(each)
        self._claims.close()


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(pid: int) -> None:
    """Kill a process, which may have gone."""
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
