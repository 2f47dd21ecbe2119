"""The cluster description: jobs, tasks, addresses, names.

A cluster is described as TensorFlow describes it, so that programs which set ``TF_CONFIG`` can
start psync. Two things are stricter, because the alternative is a job that hangs: an address must
be one, and no two tasks may have the same.
"""

from __future__ import annotations

import ipaddress
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from psync.errors import ConfigurationError

MAX_TASKS = 1 << 20
"""Above any real task index; a typing error must not become a list of that length."""

MAX_UNIX_PATH_BYTES = 107
"""What a Unix socket's address holds on Linux, without the closing zero."""

_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_TASK_NAME = re.compile(rf"/job:({_JOB.pattern})/task:([0-9]{{1,7}})")
_HOST = re.compile(r"[^\s:/\[\]\x00-\x1f]*")
_ADDRESS_HINT = "write host:port, [IPv6 address]:port or unix:/path"


# --- names and addresses -----------------------------------------------------------------------


def task_name(job: str, index: int) -> str:
    """Return the task's name, as in ``/job:ps/task:0``."""
    return f"/job:{job}/task:{index}"


def parse_task_name(name: str) -> tuple[str, int]:
    """Return (job, index) of a name made by ``task_name``.

    Raises:
        ConfigurationError: If it is not such a name.
    """
    match = _TASK_NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(f"expected a task name such as /job:ps/task:0, got {name!r}")
    return match[1], int(match[2])


def device_name(job: str, index: int) -> str:
    """Return the device on which the task holds and computes, as TensorFlow writes it."""
    return f"/job:{job}/replica:0/task:{index}/device:CPU:0"


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets round an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int | None]:
    """Return (host, port) of ``host:port`` or ``[IPv6]:port``, (path, None) of ``unix:/path``.

    An empty host stands for all interfaces, port 0 for any free port: both only for listening.

    Raises:
        ConfigurationError: If it is none of these.
    """
    if address.startswith("unix:"):
        return _checked_unix_path(address), None
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as exc:
            raise ConfigurationError(f"address {address!r}: {exc}", hint=_ADDRESS_HINT) from None
    elif not _HOST.fullmatch(host):
        raise ConfigurationError(f"address {address!r}: {host!r} is not a host", hint=_ADDRESS_HINT)
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigurationError(
            f"address {address!r}: expected a port from 0 to 65535 at its end", hint=_ADDRESS_HINT
        )
    try:
        host.encode("idna")  # as getaddrinfo does, whose UnicodeError nobody expects
    except UnicodeError:
        raise ConfigurationError(
            f"address {address!r}: {host!r} is not a host name",
            hint="between dots, a host name has 1 to 63 letters, digits and hyphens",
        ) from None
    return host, int(port)


def _checked_unix_path(address: str) -> str:
    path = address.removeprefix("unix:")
    size = len(path.encode("utf-8", "surrogateescape"))
    if not path.startswith("/") or "\0" in path:
        raise ConfigurationError(
            f"address {address!r}: expected an absolute path after 'unix:'", hint=_ADDRESS_HINT
        )
    if size > MAX_UNIX_PATH_BYTES:
        raise ConfigurationError(
            f"address {address!r}: the path of a Unix socket has at most {MAX_UNIX_PATH_BYTES} "
            f"bytes, got {size}",
            hint="use a shorter directory",
        )
    return path


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address: a loopback address or a Unix socket.

    Names are not looked up: ``localhost`` is one, every other name is not.

    Raises:
        ConfigurationError: If it is not an address.
    """
    host, port = split_address(address)
    if port is None or host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _same_place(address: str) -> tuple[str, int | None]:
    """A key that is equal for two spellings of one address."""
    host, port = split_address(address)
    if port is None:
        return address, None
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        return host.lower(), port


# --- the cluster -------------------------------------------------------------------------------


class ClusterSpec:
    """The jobs of a cluster and the addresses of their tasks; immutable.

    A job is a list of addresses, or a dict from task index to address if not all tasks are known (a
    worker that joins late may know only the ps tasks and itself).

    Args:
        cluster: Mapping from job name to a list or tuple of addresses, or to a mapping from index
            (int, or str of digits) to address; or another ClusterSpec, which is copied.

    Raises:
        TypeError: A job name or an address is not a str, or a job is not a list, tuple or mapping.
        ConfigurationError: A job name, an index or an address is malformed, or two tasks have the
            same address.

    Example:
        >>> spec = ClusterSpec({"ps": ["10.0.0.1:2222"], "worker": {1: "10.0.0.3:2222"}})
        >>> spec.job_tasks("worker")
        [None, '10.0.0.3:2222']

    Source: TensorFlow ``tf.train.ClusterSpec``; there addresses are not checked, here malformed and
        duplicate ones are errors. There are no protocol buffers.
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._jobs
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "a cluster is a mapping from job name to addresses or another ClusterSpec, "
                f"got {reprlib.repr(cluster)}"
            )
        # job -> index -> address, indices ascending
        self._jobs: dict[str, dict[int, str]] = {
            _checked_job(job): _checked_tasks(job, cluster[job]) for job in cluster
        }
        self._check_unique()

    def _check_unique(self) -> None:
        seen: dict[tuple[str, int | None], str] = {}
        for job, tasks in self._jobs.items():
            for index, address in tasks.items():
                name = task_name(job, index)
                other = seen.setdefault(_same_place(address), name)
                if other != name:
                    raise ConfigurationError(
                        f"{other} and {name} have the same address {address!r}",
                        hint="give every task its own address",
                    )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in their original order."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return {job: list of addresses}, or {job: {index: address}} if indices are missing.

        A job without tasks is ``{}``, as in TensorFlow. The result is a copy.
        """
        return {
            job: list(tasks.values()) if tasks and max(tasks) + 1 == len(tasks) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of the job.

        Raises:
            ConfigurationError: There is no such job.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the known tasks of the job, ascending.

        Raises:
            ConfigurationError: There is no such job.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Raises:
            ConfigurationError: There is no such job, or no such task in it.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ConfigurationError(
                f"no task with index {task_index!r} in job {job_name!r}, which has "
                f"{known_indices(list(tasks))}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of the job's tasks by index, None for an unknown task.

        Raises:
            ConfigurationError: There is no such job.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        try:
            return self._jobs[job_name]
        except (KeyError, TypeError):
            raise ConfigurationError(
                f"no job {job_name!r} in the cluster, which has {listed(self._jobs)}"
            ) from None

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _checked_job(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"the name of a job is a str, got {reprlib.repr(job)}")
    if not _JOB.fullmatch(job):
        raise ConfigurationError(
            f"job name {job!r}: expected a letter, then letters, digits, '_', '.' or '-'"
        )
    return job


def _checked_tasks(job: str, tasks: object) -> dict[int, str]:
    """Return {index: address}, indices ascending."""
    if isinstance(tasks, list | tuple):
        pairs = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = [(_checked_index(job, key), address) for key, address in tasks.items()]
    else:
        raise TypeError(
            f"job {job!r}: expected a list of addresses or a mapping from index to address, "
            f"got {reprlib.repr(tasks)}"
        )
    checked: dict[int, str] = {}
    for index, address in sorted(pairs, key=lambda pair: pair[0]):
        if index in checked:
            raise ConfigurationError(f"{task_name(job, index)} is listed twice")
        checked[index] = _checked_address(task_name(job, index), address)
    return checked


def _checked_index(job: str, key: object) -> int:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(
            f"job {job!r}: a task index is an int or a str of digits, got {reprlib.repr(key)}"
        )
    if isinstance(key, str) and not re.fullmatch(r"[0-9]{1,7}", key):
        raise ConfigurationError(f"job {job!r}: expected a task index, got {key!r}")
    if not 0 <= int(key) < MAX_TASKS:
        raise ConfigurationError(
            f"job {job!r}: expected a task index from 0 to {MAX_TASKS - 1}, got {key}"
        )
    return int(key)


def _checked_address(name: str, address: object) -> str:
    if not isinstance(address, str):
        raise TypeError(f"{name}: an address is a str, got {reprlib.repr(address)}")
    try:
        host, port = split_address(address)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{name}: {exc.message}", hint=exc.hint) from None
    if not host or port == 0:
        raise ConfigurationError(
            f"{name}: address {address!r} has no {'port' if host else 'host'} that the other tasks "
            "could connect to",
            hint=_ADDRESS_HINT,
        )
    return address


def listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(repr(name) for name in names) or "no jobs"


def known_indices(indices: list[int]) -> str:
    """Say which tasks there are: "no tasks", "task 0", "tasks 0 to 3", "tasks 1, 4"."""
    if len(indices) < 2:
        return f"only task {indices[0]}" if indices else "no tasks"
    if indices[-1] - indices[0] + 1 == len(indices):
        return f"tasks {indices[0]} to {indices[-1]}"
    return f"tasks {', '.join(map(str, indices))}"
