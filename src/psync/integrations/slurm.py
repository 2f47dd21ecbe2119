"""Cluster resolver for SLURM: the tasks of a job step, from the variables that ``srun`` sets.

Tasks are counted node by node in SLURM's own order (sorted as text, n10 would come before n9), and
a step whose ranks were given out in another order is refused.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import reprlib
from collections.abc import Mapping, MutableMapping
from typing import NoReturn

from psync.cluster import MAX_TASKS, ClusterSpec
from psync.errors import ConfigurationError, naming
from psync.integrations.launchers import jobs_of, port_of
from psync.net.resolvers import ClusterResolver

_HINT = "start the program with srun: srun --ntasks=5 --distribution=block python train.py"
_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")  # a comma that is not in brackets
_HOST = re.compile(r"(?:[^\s\[\],]|\[[0-9,-]+\])+")
_PART = re.compile(r"[^\[\]]+|\[[^\[\]]+\]")  # of a host: text, or a bracket
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")


class SlurmClusterResolver(ClusterResolver):
    """A cluster of the tasks of this SLURM job step.

    The step's tasks are numbered node by node, in SLURM's order of the nodes. Jobs take them in the
    order of the job names: with ``{"chief": 1, "ps": 2, "worker": 4}`` the chief is rank 0, the ps
    tasks are ranks 1 and 2. Task n of a node listens on port ``port_base + n``. The constructor
    reads the environment once.

    Args:
        jobs: Number of tasks of each job; the total must be that of the step. None: all are
            workers.
        port_base: Port of the first task of each node.
        gpus_per_node: Number of GPUs of each node; None: as many as ``gpus_per_task`` needs.
        gpus_per_task: Number of GPUs of each task; None: its share of ``gpus_per_node``. psync does
            not detect GPUs; with neither argument it counts none.
        tasks_per_node: Number of tasks of each node by name, or of all nodes; None: SLURM's.
        auto_set_gpu: Whether to set ``CUDA_VISIBLE_DEVICES`` of this process to its task's GPUs, if
            it has any.
        rpc_layer: Prefix of the addresses that ``master()`` returns.
        environ: Mapping in which SLURM's variables are looked up and ``CUDA_VISIBLE_DEVICES`` is
            set; None: the environment of this process.

    Raises:
        ConfigurationError: A variable is missing or malformed (``SLURM_PROCID``,
            ``SLURM_STEP_NUM_TASKS``, ``SLURM_STEP_NODELIST``, ``SLURM_STEP_TASKS_PER_NODE``); the
            jobs and the step differ in their number of tasks; a node has too few GPUs; or SLURM
            runs this task on another node than expected.

    Source: TensorFlow ``SlurmClusterResolver``; there nodes are sorted as text, so that n10 comes
        before n9 and tasks get addresses of other nodes than they run on.
    """

    source = "SlurmClusterResolver"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: Mapping[str, int] | int | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        rank = _number(environ, "SLURM_PROCID")
        jobs = {"worker": _number(environ, "SLURM_STEP_NUM_TASKS")} if jobs is None else jobs
        _check_counts("jobs", jobs)
        nodes = _nodes(environ, tasks_per_node)
        # (node, number on the node) of each rank
        places = [(node, number) for node, count in nodes.items() for number in range(count)]
        if sum(jobs.values()) != len(places):
            raise ConfigurationError(
                f"{self.source}: the jobs have {sum(jobs.values())} tasks ({dict(jobs)}), but the "
                f"job step has {len(places)}",
                hint="jobs={'chief': 1, 'ps': 2, 'worker': 4} needs srun --ntasks=7",
            )
        if rank >= len(places):
            _malformed("SLURM_PROCID", str(rank), f"a rank below {len(places)}")
        _check_node(environ, rank, *places[rank])
        tasks = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
        self._task_type, self._task_id = tasks[rank]
        addresses: dict[str, list[str]] = {job: [] for job in sorted(jobs)}
        for (job, _), (node, number) in zip(tasks, places, strict=True):
            addresses[job].append(f"{node}:{port_base + number}")
        with naming(self.source):
            self._cluster_spec = ClusterSpec(addresses)
        self._rpc_layer = rpc_layer
        gpus = _gpus(gpus_per_node, gpus_per_task, max(nodes.values()))
        self._num_accelerators = {"GPU": gpus} if gpus else {}
        if auto_set_gpu and gpus:
            first = places[rank][1] * gpus
            numbers = range(first, first + gpus)
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the job step."""
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return (task type, task index) of this process."""
        return self.task_type, self.task_id


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a list in SLURM's short form: ``n[1-2],m5,o[3-4,6,7-9]``.

    Zeros in front are kept: ``n[08-10]`` is n08, n09, n10.

    Raises:
        ConfigurationError: If it is malformed, or has more than ``cluster.MAX_TASKS`` hosts.
    """
    hosts: list[str] = []
    for host in _BETWEEN_HOSTS.split(text):
        if not _HOST.fullmatch(host):
            _malformed("host list", text, "hosts such as n[1-2],m5,o[3-4,6]")
        parts = [
            _numbers(part[1:-1], text) if part.startswith("[") else [part]
            for part in _PART.findall(host)
        ]
        _check_count(len(hosts) + math.prod(map(len, parts)), "host list", text)
        hosts += map("".join, itertools.product(*parts))
    return hosts


def expand_task_counts(text: str) -> list[int]:
    """Return the number of tasks of each node, of SLURM's short form: ``3(x2),2,11(x4)``.

    Raises:
        ConfigurationError: If it is malformed, or has more than ``cluster.MAX_TASKS`` nodes.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece)
        if match is None:
            _malformed("tasks per node", text, "numbers such as 3(x2),2")
        repeats = int(match[2] or 1)
        _check_count(len(counts) + repeats, "tasks per node", text)
        counts += [int(match[1])] * repeats
    return counts


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of one bracket, as text of the width that they are written in."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            _malformed("host list", text, "ranges such as [1-3,7] in brackets")
        _check_count(int(last) - int(first), "host list", text)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _nodes(
    environ: Mapping[str, str], tasks_per_node: Mapping[str, int] | int | None
) -> dict[str, int]:
    """Return the number of tasks on each node, in SLURM's order of the nodes."""
    if isinstance(tasks_per_node, Mapping):
        nodes = dict(tasks_per_node)
    else:
        hosts = expand_hostlist(_text(environ, "SLURM_STEP_NODELIST"))
        if tasks_per_node is None:
            counts = expand_task_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
        else:
            counts = [tasks_per_node] * len(hosts)
        if len(counts) != len(hosts):
            raise ConfigurationError(
                f"SlurmClusterResolver: {len(hosts)} nodes in SLURM_STEP_NODELIST, {len(counts)} "
                "in SLURM_STEP_TASKS_PER_NODE"
            )
        nodes = dict(zip(hosts, counts, strict=True))
    _check_counts("tasks per node", nodes)
    return nodes


def _check_node(environ: Mapping[str, str], rank: int, node: str, number: int) -> None:
    """Refuse a step whose ranks SLURM has given out in another way than node by node."""
    said = environ.get("SLURMD_NODENAME", node), environ.get("SLURM_LOCALID", str(number))
    if said != (node, str(number)):
        raise ConfigurationError(
            f"SlurmClusterResolver: rank {rank} is task {said[1]} of node {said[0]!r}, expected "
            f"task {number} of {node!r}",
            hint="ranks must be assigned node by node: srun --distribution=block …",
        )


def _gpus(per_node: int | None, per_task: int | None, most_tasks: int) -> int:
    """Return the number of GPUs of each task."""
    if per_task is None:
        per_task = (per_node or 0) // most_tasks
    if per_node is not None and per_task * most_tasks > per_node:
        raise ConfigurationError(
            f"SlurmClusterResolver: {most_tasks} tasks of {per_task} GPUs on a node that has "
            f"{per_node}"
        )
    return per_task


def _text(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable)
    if value is None:
        raise ConfigurationError(f"SlurmClusterResolver: {variable} is not set", hint=_HINT)
    return value


def _number(environ: Mapping[str, str], variable: str) -> int:
    value = _text(environ, variable)
    if not re.fullmatch(r"[0-9]{1,7}", value):
        _malformed(variable, value, "a number")
    return int(value)


def _check_counts(what: str, counts: Mapping[str, int]) -> None:
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        _malformed(what, str(dict(counts)), "whole numbers")
    _check_count(sum(counts.values()), what, str(dict(counts)))


def _check_count(count: int, what: str, text: str) -> None:
    if count > MAX_TASKS:
        _malformed(what, text, f"at most {MAX_TASKS}")


def _malformed(what: str, text: str, expected: str) -> NoReturn:
    raise ConfigurationError(
        f"SlurmClusterResolver: {what}: expected {expected}, got {reprlib.repr(text)}"
    )


# For ``resolve_cluster``.

PORT = 8888
"""Of the first task of each node, unless ``PSYNC_PORT`` names one."""


def found_in(environ: Mapping[str, str]) -> ClusterResolver | None:
    """Return the resolver of this process's job step; None: it is in none of several tasks."""
    number = environ.get("SLURM_STEP_NUM_TASKS", "")
    if number in ("", "1"):  # 1: a shell, as of `srun --pty bash`
        return None
    jobs = jobs_of(environ, number, "SLURM")
    return SlurmClusterResolver(jobs, port_of(environ, PORT), environ=dict(environ))


def advice(environ: Mapping[str, str]) -> str:
    """Return what is missing where this is a job, but no step; "": it is none."""
    if "SLURM_JOB_ID" not in environ:
        return ""
    return "in a SLURM job, start the tasks with srun: srun --ntasks=4 python train.py"
