"""Cluster resolver for torchrun: the ranks of a job, which meet at its store.

Tasks have no addresses before they run: each says where it listens.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Mapping
from typing import Any

from psync.cluster import ClusterSpec, join_address
from psync.errors import ConfigurationError, ConnectFailed
from psync.integrations.launchers import jobs_of
from psync.net.resolvers import ClusterResolver, interface_towards

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


class TorchrunClusterResolver(ClusterResolver):
    """The ranks of a torchrun job, given out to the jobs of a cluster; rank 0 is the chief.

    Jobs take ranks in the order of their names: of ``{"chief": 1, "ps": 2, "worker": 4}`` the ps
    tasks are ranks 1 and 2. Each task listens at a free port of the interface by which it reaches
    rank 0; ``cluster_spec`` blocks until all have said theirs. Make one of it in a process.

    Args:
        jobs: Tasks of each job; together as many as there are ranks.
        environ: The environment of this process, or a part of it. The store itself is found by
            torch, in the environment.

    Raises:
        ConfigurationError: A variable of torchrun is missing or malformed, or the jobs have other
            tasks than there are ranks. From ``cluster_spec``: torch is not installed.
        ConnectFailed: From ``cluster_spec``: ranks did not come, or the store has gone.
    """

    source = "torchrun"

    def __init__(self, jobs: Mapping[str, int], *, environ: Mapping[str, str]) -> None:
        self._rank, self._size = (_number(environ, name) for name in ("RANK", "WORLD_SIZE"))
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ConfigurationError(f"torchrun: {name} is not set")
        self._master = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
        if sum(jobs.values()) != self._size or self._rank >= self._size:
            raise ConfigurationError(
                f"torchrun: the jobs have {sum(jobs.values())} tasks ({dict(jobs)}), and rank "
                f"{self._rank} is one of {self._size}"
            )
        restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"psync/{environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}"
        self._tasks = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
        self._task_type, self._task_id = self._tasks[self._rank]
        self._cluster_spec: ClusterSpec | None = None  # None before tasks have met
        self.listening: dict[str, socket.socket] = {}  # by address; of this task, if it serves
        self._store: Any = None  # kept open: rank 0 may be the one that keeps it

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks, once all of them listen. Blocks meanwhile."""
        if self._cluster_spec is None:
            self._cluster_spec = ClusterSpec(self._meet())
        return self._cluster_spec

    def _meet(self) -> dict[str, list[str]]:
        store = self._store = _store_of_torchrun()
        own = self._listen()
        try:
            store.set(f"{self._key}/{self._rank}", own)
            told = [store.get(f"{self._key}/{rank}").decode() for rank in range(self._size)]
        except Exception as exc:  # torch.distributed.DistError is a RuntimeError, of old versions
            raise ConnectFailed(
                f"torchrun: not all {self._size} ranks have said where they listen: {exc}"
            ) from exc
        addresses: dict[str, list[str]] = {}
        for (job, _), address in zip(self._tasks, told, strict=True):
            addresses.setdefault(job, []).append(address)
        return addresses

    def _listen(self) -> str:
        """Listen at a free port of the interface that leads to rank 0; return the address."""
        host, port = self._master
        try:
            own, family = interface_towards(host, port)
            listener = socket.create_server((own, 0), family=family, backlog=1024)
        except OSError as exc:
            raise ConnectFailed(f"torchrun: no way to MASTER_ADDR {host!r}: {exc}") from exc
        address = join_address(own, listener.getsockname()[1])
        self.listening[address] = listener  # kept for a chief, too: nobody else gets its port
        return address


def _store_of_torchrun() -> Any:
    try:
        from torch import distributed
    except ImportError as exc:
        raise ConfigurationError(
            "torchrun: tasks find each other through torch's store, but torch cannot be imported: "
            f"{exc}",
            hint="pip install 'psync[torch]'",
        ) from exc
    try:
        store, _, _ = next(distributed.rendezvous("env://"))
    except Exception as exc:
        raise ConnectFailed(f"torchrun: its store is not there: {exc}") from exc
    return store


def _number(environ: Mapping[str, str], variable: str) -> int:
    value = environ.get(variable, "")
    if not re.fullmatch("[0-9]{1,7}", value):
        raise ConfigurationError(f"torchrun: {variable}: expected a number, got {value!r}")
    return int(value)


def found_in(environ: Mapping[str, str]) -> ClusterResolver | None:
    """Return the resolver of this process's job, the same one each time; None: it is in none."""
    if not environ.get("TORCHELASTIC_RUN_ID"):
        return None
    # One for the process: tasks meet once, and each of them listens at one address.
    names = (*TORCHRUN_VARIABLES, "PSYNC_JOBS")
    return _resolver(tuple((name, environ[name]) for name in names if name in environ))


@functools.cache
def _resolver(variables: tuple[tuple[str, str], ...]) -> ClusterResolver:
    environ = dict(variables)
    jobs = jobs_of(environ, environ.get("WORLD_SIZE", ""), "torchrun")
    return TorchrunClusterResolver(jobs, environ=environ)


def advice(environ: Mapping[str, str]) -> str:
    """Return ""; a process that torchrun has started has all its variables."""
    return ""
