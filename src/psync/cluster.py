"""The cluster description: jobs, tasks, addresses, names, and the roles of tasks in training.

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

from psync.errors import ConfigurationError, check_fits, naming

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
    limit = f"the path of a Unix socket has at most {MAX_UNIX_PATH_BYTES} bytes"
    fits = size <= MAX_UNIX_PATH_BYTES
    check_fits(fits, f"address {address!r}: {limit}", size, "use a shorter directory")
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
    ip = ip_of(host)
    return ip is not None and (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host that is an IP address as one; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _same_place(address: str) -> tuple[str, int | None]:
    """A key that is equal for two spellings of one address."""
    host, port = split_address(address)
    return (address if port is None else str(ip_of(host) or host.lower())), port


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
    fits = re.fullmatch(r"[0-9]{1,7}", str(key)) is not None and int(key) < MAX_TASKS
    check_fits(fits, f"job {job!r}: expected a task index from 0 to {MAX_TASKS - 1}", key)
    return int(key)


def _checked_address(name: str, address: object) -> str:
    if not isinstance(address, str):
        raise TypeError(f"{name}: an address is a str, got {reprlib.repr(address)}")
    with naming(name):
        host, port = split_address(address)
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


# --- roles in training ---------------------------------------------------------------------------

TRAINING_JOBS = ("chief", "worker", "ps")
JOBS = (*TRAINING_JOBS, "evaluator")

CHIEF = "/job:chief/task:0"
"""The name under which the chief speaks to the other tasks, whatever its task is called."""

ENQUIRER = 2**62
"""Incarnation of who asks for its own; above all that a clock of nanoseconds gives."""


def with_chief(spec: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the job ``master``, the chief's older name, called ``chief``.

    Raises:
        ConfigurationError: If it has both.
    """
    jobs = spec.as_dict()
    if "master" not in jobs:
        return spec
    if "chief" in jobs:
        raise ConfigurationError(
            "the cluster has both a 'chief' and a 'master', which are the same job"
        )
    return ClusterSpec({"chief" if job == "master" else job: jobs[job] for job in jobs})


def validate_for_training(
    spec: ClusterSpec, task_type: str | None, task_id: int | None, *, source: str = "cluster"
) -> tuple[ClusterSpec, str | None, int | None]:
    """Check that a parameter-server job can run on the cluster, and return what is used of it.

    Only the chief, and a program that is no task of the cluster (``task_type`` None), need the
    whole cluster; a ps, or a worker that joins late, may know only itself. ``master`` is accepted
    for ``chief``. An evaluator is not part of the training cluster: it is left out.

    Args:
        spec: The cluster, as configured.
        task_type: Job of this process, or None if it is not one of the tasks.
        task_id: Its index; may be None where the job has one task only.
        source: Where this came from, for messages: ``TF_CONFIG``.

    Returns:
        (cluster without evaluators, task type, task index).

    Raises:
        TypeError: If ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: If the cluster is empty, has an unknown job, more than one chief or
            evaluator, no ps or no worker; or if the own task is not in it.

    Source: TensorFlow ``ParameterServerStrategyV2`` and ``multi_worker_util``; there a listed
    evaluator is connected to like a worker, and training hangs.
    """
    if not isinstance(task_type, str | None) or not isinstance(task_id, int | None):
        raise TypeError(
            f"{source}: expected a task type (str) and a task index (int), or None, got "
            f"{task_type!r} and {task_id!r}"
        )
    with naming(f"{source}: cluster"):
        jobs = with_chief(spec).as_dict()
    if not jobs:
        raise ConfigurationError(
            f"{source}: cluster is missing or empty",
            hint="on one machine, start the program with: psync run SCRIPT --ps 2 --workers 2",
        )
    for job in jobs:
        expected, at_most_one = f"{source}: cluster.{job}: expected", job in ("chief", "evaluator")
        check_fits(job in JOBS, f"{expected} the jobs 'chief', 'worker', 'ps' or 'evaluator'", job)
        count = len(jobs[job])
        check_fits(count <= 1 or not at_most_one, f"{expected} at most one {job}", count)
    task_type = "chief" if task_type == "master" else task_type
    evaluators = jobs.pop("evaluator", [])
    training = ClusterSpec(jobs)
    for job in ("ps", "worker") if task_type in (None, "chief") else ():
        if not jobs.get(job):
            raise ConfigurationError(
                f"{source}: cluster.{job}: expected at least one {job}, got none"
            )
    if task_type is not None and (task_type != "evaluator" or evaluators):
        own = ClusterSpec({"evaluator": evaluators}) if task_type == "evaluator" else training
        task_id = _checked_task(own, task_type, task_id, source)
    return training, task_type, task_id


def _checked_task(spec: ClusterSpec, task_type: str, task_id: int | None, source: str) -> int:
    """Return the index of the own task."""
    expected = f"{source}: task.type: expected 'chief', 'worker', 'ps' or 'evaluator'"
    check_fits(task_type in JOBS, expected, task_type)
    if task_type not in spec.jobs:
        raise ConfigurationError(
            f"{source}: task.type is {task_type!r}, but the cluster has only {listed(spec.jobs)}"
        )
    indices = spec.task_indices(task_type)
    if task_id is None and len(indices) == 1:
        return indices[0]
    if task_id not in indices:
        what = "is missing" if task_id is None else f"is {task_id}"
        raise ConfigurationError(
            f"{source}: task.index {what}, and the job {task_type!r} has {known_indices(indices)}"
        )
    return task_id


# --- who is who --------------------------------------------------------------------------------


def is_chief(spec: ClusterSpec, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Return whether a task is the one that saves and logs for the whole cluster.

    This is the chief; in a cluster without a chief, worker 0. An evaluator is its own cluster and
    its own chief.

    Args:
        spec: The cluster.
        task_type: Job of the task. None: a program that is not a task, and not the chief.
        task_id: Index of the task; may be None if the job has only one task.

    Raises:
        TypeError: ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: The cluster is not one for training, or has no such task.

    Source: TensorFlow ``multi_worker_util.is_chief``.
    """
    _, job, index = validate_for_training(spec, task_type, task_id)
    first = "chief" not in with_chief(spec).jobs and (job, index) == ("worker", 0)
    return job in ("chief", "evaluator") or first


def worker_count(spec: ClusterSpec, task_type: str) -> int:
    """Return the number of chief and worker tasks; for an evaluator, the number of evaluators.

    Raises:
        ConfigurationError: The job is none of these: a ps does not compute.

    Source: TensorFlow ``multi_worker_util.worker_count``, which counts the chief as a worker. The
        chief of parameter-server training schedules, and computes nothing.
    """
    jobs = {"evaluator": ("evaluator",)}.get(task_type, ("chief", "worker"))
    fits = task_type in ("master", "chief", "worker", "evaluator")
    check_fits(fits, "task_type: expected 'chief', 'worker' or 'evaluator'", task_type)
    known = with_chief(spec)
    return sum(known.num_tasks(job) for job in jobs if job in known.jobs)


def id_in_cluster(spec: ClusterSpec, task_type: str, task_id: int | None = None) -> int:
    """Return a number that is unique among the tasks that ``worker_count`` counts.

    The chief is 0, workers follow it; evaluators are counted separately.

    Raises:
        TypeError: ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: The cluster is not one for training or has no such task; or the task is
            a ps, which has no such number.

    Source: TensorFlow ``multi_worker_util.id_in_cluster``.
    """
    _, job, index = validate_for_training(spec, task_type, task_id)
    fits = job not in (None, "ps")
    check_fits(fits, "task_type: expected 'chief', 'worker' or 'evaluator'", task_type)
    chiefs = "chief" in with_chief(spec).jobs and job == "worker"
    return (index or 0) + chiefs
