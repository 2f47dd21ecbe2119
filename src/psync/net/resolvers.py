"""Cluster resolvers: the cluster's tasks and this process's own, and the default of them.

A resolver has TensorFlow's interface, so that programs keep theirs. What it says is checked by
``training_cluster``, which the strategy and ``run_task`` call before anything is connected: a wrong
``TF_CONFIG`` is one line that names the field, not a job that waits.

``resolve_cluster`` asks several surroundings, of which the first that applies is believed. What
was opened in this program comes before what its launcher says, and an inner launcher before an
outer one, for each passes its own environment on: ``psync run`` (TF_CONFIG) may be called by hand
inside all others, torchrun is started by SLURM and in pods, and srun in neither. The resolvers of
schedulers are in ``psync.integrations``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import reprlib
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from psync.cluster import ClusterSpec, validate_for_training, with_chief
from psync.errors import ConfigurationError, DuplicateTaskError, naming

T = TypeVar("T")


class ClusterResolver(ABC):
    """Base class of resolvers: a description of the cluster, and of this process's place in it.

    A subclass defines ``cluster_spec``, and ``task_type`` and ``task_id`` unless they are assigned.
    Results may change from call to call. Values passed to the constructor or assigned win over
    those of the source.

    Source: TensorFlow ``tf.distribute.cluster_resolver.ClusterResolver``. Resolvers do not detect
        accelerators, since the user's array library chooses where to compute.
    """

    source: ClassVar[str] = "cluster resolver"
    """Where the answers come from, for messages."""

    # Given to the constructor or assigned; None: as the source says.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = None
    _num_accelerators: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and addresses of the cluster as they are known now."""

    def _said(self, answer: str) -> Any:
        """Return what the source says of one of the properties below; None: nothing."""
        return None

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if it is not one of the tasks. May be assigned."""
        return self._said("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process in its job; None if it is not one of the tasks. May be assigned."""
        return self._said("task_id") if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Prefix of the addresses of ``master``, as in ``grpc://host:port``. May be assigned."""
        return self._said("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type: Job of the task; None: that of this process.
            task_id: Index of the task; None: that of this process.
            rpc_layer: Prefix of the address; None: the resolver's ``rpc_layer``.

        Raises:
            ConfigurationError: The cluster has no such task; or no task is given and this process
                is not one.
        """
        rpc_layer = rpc_layer or self.rpc_layer
        known = self._known_master(task_type is not None and task_id is not None, rpc_layer)
        if known is not None:
            return known
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            raise ConfigurationError(
                f"{self.source}: master() needs a task type and a task index, got {job!r} and "
                f"{index!r}"
            )
        return _url(self.cluster_spec().task_address(job, index), rpc_layer)

    def _known_master(self, is_task_given: bool, rpc_layer: str | None) -> str | None:
        """Return what ``master`` returns, whatever the task's address is; None: that."""
        return None

    @property
    def environment(self) -> str:
        """The launcher's name of the environment (``cloud``), or an empty string."""
        known = self._said("environment") if self._environment is None else self._environment
        return known or ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return the number of accelerators by kind: empty, unless they were given."""
        return dict(self._num_accelerators)


open_cluster: ContextVar[ClusterResolver | None] = ContextVar("psync_open_cluster", default=None)
"""The innermost cluster that is open in this context; see ``opened``."""

_open_in_process: list[ClusterResolver] = []  # in any context, the last one at the end


@contextlib.contextmanager
def opened(resolver: ClusterResolver) -> Iterator[None]:
    """Return a context manager inside which a cluster is the default: ``resolve_cluster``.

    It may be left in another context than the one in which it was entered.
    """
    before = open_cluster.get()
    open_cluster.set(resolver)
    _open_in_process.append(resolver)
    try:
        yield
    finally:
        _open_in_process.remove(resolver)
        if open_cluster.get() is resolver:
            open_cluster.set(before)


def _url(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def training_cluster(resolver: ClusterResolver) -> tuple[ClusterSpec, str | None, int | None]:
    """Return what a parameter-server job uses of the resolver's answers, checked.

    Returns:
        (cluster without evaluators, task type, task index); both None if the program describes
        the cluster itself and is not one of its tasks.

    Raises:
        ConfigurationError: If no parameter-server job can run on that; the message names the field.
    """
    spec, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if spec and task_type is None and isinstance(resolver, TFConfigClusterResolver):
        raise ConfigurationError(
            "TF_CONFIG: task.type is missing",
            hint='name the task of this process: "task": {"type": "worker", "index": 0}',
        )
    return validate_for_training(spec, task_type, task_id, source=resolver.source)


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program itself describes.

    Args:
        cluster_spec: The cluster.
        master: Result of ``master()`` when no task is given, or only its job or index.
        task_type: Job of this process, or None.
        task_id: Index of this process, or None.
        environment: Value of ``environment``.
        num_accelerators: Result of ``num_accelerators()``.
        rpc_layer: Prefix of the addresses that ``master()`` returns.

    Raises:
        TypeError: ``cluster_spec`` is not a ClusterSpec, or ``master`` is not a str.

    Source: TensorFlow ``SimpleClusterResolver``.
    """

    source = "SimpleClusterResolver"

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec: expected a psync.ClusterSpec, got {reprlib.repr(cluster_spec)}"
            )
        if not isinstance(master, str):
            raise TypeError(f"master: expected a str, got {reprlib.repr(master)}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster passed to the constructor."""
        return self._cluster_spec

    def _known_master(self, is_task_given: bool, rpc_layer: str | None) -> str | None:
        return None if is_task_given else _url(self._master, rpc_layer)


class TFConfigClusterResolver(ClusterResolver):
    """A cluster that the environment variable ``TF_CONFIG`` describes.

    The variable is ``{"cluster": {job: [address, …] or {index: address}}, "task": {"type": …,
    "index": …}}``, and optionally ``rpc_layer``, ``session_master`` and ``environment``. Other
    fields are ignored. The job ``master``, the older name of ``chief``, is returned as ``chief``.

    ``master()`` returns ``session_master`` unchanged, for every task. It returns an empty string if
    there is no cluster, or if the cluster is a single task.

    The variable is read again at every access. Values passed to the constructor win over it, and
    values assigned to ``task_type``, ``task_id`` or ``rpc_layer`` win over both.

    Args:
        task_type: Job of this process, instead of the variable's.
        task_id: Index of this process, instead of the variable's.
        rpc_layer: Prefix of the addresses that ``master()`` returns, instead of the variable's.
        environment: Value of ``environment``, instead of the variable's.
        environ: Mapping in which ``TF_CONFIG`` is looked up; None: the environment of this process.

    Raises:
        ConfigurationError: The variable is set and malformed. Raised by every access, not by the
            constructor; the message names the field.

    Source: TensorFlow ``TFConfigClusterResolver``; there a malformed field causes arbitrary errors
        where it is used.
    """

    source = "TF_CONFIG"

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._environ = os.environ if environ is None else environ

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of ``TF_CONFIG``, evaluators included; empty if it has none."""
        config = self._config()
        cluster = _in(config, "cluster", dict, "an object") or {}
        if not cluster and "sparseCluster" in config:
            raise ConfigurationError(
                "TF_CONFIG: sparseCluster is not supported, expected cluster",
                hint='list all tasks as "cluster"; in a TFJob leave out enableDynamicWorker',
            )
        try:
            with naming("TF_CONFIG: cluster"):
                return with_chief(ClusterSpec(cluster))
        except TypeError as exc:
            raise ConfigurationError(f"TF_CONFIG: cluster: {exc}") from None

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if it is unknown. May be assigned."""
        kind = super().task_type
        return "chief" if kind == "master" else kind

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    def _said(self, answer: str) -> Any:
        config = self._config()
        if answer in ("rpc_layer", "environment"):
            return _in(config, answer, str, "text")
        task = _in(config, "task", dict, "an object") or {}
        if answer == "task_type":
            kind = task.get("type")
            # TensorFlow takes a number; the check of the cluster says what is wrong.
            return str(kind) if type(kind) is int else _in(task, "task.type", str, "text")
        index = task.get("index")
        if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
            return int(index)
        if index is not None and type(index) is not int:
            raise _misfit("task.index: ", "a whole number", index)
        return index

    def _known_master(self, is_task_given: bool, rpc_layer: str | None) -> str | None:
        session_master = _in(self._config(), "session_master", str, "text")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        return "" if not spec or [len(spec.job_tasks(job)) for job in spec.jobs] == [1] else None

    def _config(self) -> dict[str, Any]:
        text = self._environ.get("TF_CONFIG")
        if text is None:
            return {}
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ConfigurationError(
                f"TF_CONFIG: expected a JSON object, got text that is not JSON: {exc}",
                hint='for example {"cluster": {"chief": ["host:port"], "ps": […], "worker": […]}, '
                '"task": {"type": "worker", "index": 0}}',
            ) from None
        if not isinstance(config, dict):
            raise _misfit("", "a JSON object", config)
        return config


def _in(config: dict[str, Any], field: str, kind: type[T], expected: str) -> T | None:
    value = config.get(field.rpartition(".")[2])
    if value is not None and not isinstance(value, kind):
        raise _misfit(f"{field}: ", expected, value)
    return value


def _misfit(where: str, expected: str, got: object) -> ConfigurationError:
    return ConfigurationError(f"TF_CONFIG: {where}expected {expected}, got {reprlib.repr(got)}")


class UnionClusterResolver(ClusterResolver):
    """The jobs of several resolvers as one cluster; everything else comes from the first resolver.

    If several resolvers describe a job as lists, it has the tasks of all, in the order of the
    resolvers. If one of them gives indices, all do (a list counts from 0), and each index may occur
    once.

    Args:
        cluster_resolvers: Resolvers, at least one, in order.
        task_type: Job of this process, instead of the first resolver's.
        task_id: Index of this process, instead of the first resolver's, including 0.
        rpc_layer: Prefix of the addresses that ``master()`` returns, instead of the first
            resolver's.

    Raises:
        ConfigurationError: No resolver is given, or an argument is unknown.
        TypeError: An argument is not a ClusterResolver.

    Source: TensorFlow ``UnionResolver``; there an override with 0 or an empty text is ignored.
    """

    source = "UnionClusterResolver"

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigurationError(
                f"UnionClusterResolver: unknown argument {', '.join(map(repr, unknown))}",
                hint="keyword arguments are task_type, task_id and rpc_layer",
            )
        if not cluster_resolvers:
            raise ConfigurationError("UnionClusterResolver: expected at least one resolver")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "UnionClusterResolver: expected psync.ClusterResolver objects, got "
                    f"{reprlib.repr(resolver)}"
                )
        self._resolvers = cluster_resolvers
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of all resolvers.

        Raises:
            DuplicateTaskError: Two resolvers give the same index of a job; also a KeyError.
            ConfigurationError: Two tasks have one address.
            Exception: An exception of a resolver.
        """
        descriptions = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, Any] = {}
        for jobs in descriptions:
            for job, tasks in jobs.items():
                merged[job] = _merged(job, merged[job], tasks) if job in merged else tasks
        with naming(self.source):
            return ClusterSpec(merged)

    def _said(self, answer: str) -> Any:
        return getattr(self._resolvers[0], answer)

    def _known_master(self, is_task_given: bool, rpc_layer: str | None) -> str | None:
        return None if is_task_given else self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return the result of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _merged(
    job: str, known: list[str] | dict[int, str], more: list[str] | dict[int, str]
) -> list[str] | dict[int, str]:
    """Return the tasks of a job that two resolvers describe."""
    if isinstance(known, list) and isinstance(more, list):
        return known + more
    one, other = (
        dict(enumerate(tasks)) if isinstance(tasks, list) else tasks for tasks in (known, more)
    )
    twice = sorted(one.keys() & other.keys())
    if twice:
        raise DuplicateTaskError(
            f"UnionClusterResolver: job {job!r}: several resolvers give task "
            f"{', '.join(map(str, twice))}",
            hint="if one resolver gives indices, lists of the others count from 0",
        )
    return one | other


# The default.

LAUNCHERS = ("torchrun", "SLURM", "Kubernetes")
"""Who may have said what cluster this is, in the order in which they are believed, after TF_CONFIG.
The module of that name in ``psync.integrations`` finds it (``found_in``), and says what is missing
where it nearly is (``advice``)."""


def resolve_cluster(environ: Mapping[str, str] | None = None) -> ClusterResolver:
    """Return the resolver of the cluster that this process is in.

    The first of these that applies:

    1. An open cluster of this program: a ``LocalCluster``, or one of ``psync.integrations``,
       between its start and its stop; inside ``psync.run``, the resolver it was given or has found.
    2. ``TF_CONFIG``, which ``psync run`` sets as well.
    3. torchrun (``TORCHELASTIC_RUN_ID``): rank 0 is the chief.
    4. SLURM: a job step of several tasks, as started by srun.
    5. Kubernetes: ``PSYNC_SERVICE`` names the headless service, as in the manifests of ``psync
       launch kubernetes``.

    The last three use two more variables:

    - ``PSYNC_JOBS``, the number of tasks of each job: ``ps=2,worker=4``. There is one chief unless
      it says ``chief=0``. Under torchrun and SLURM the total is known; by default there is one ps,
      and the remaining tasks are workers.
    - ``PSYNC_PORT``, the port of each task; under SLURM the port of the first task of each node.

    Args:
        environ: Mapping of environment variables; None: the environment of this process, and the
            open clusters of this program.

    Raises:
        ConfigurationError: None applies (with a hint), or the variables of one are malformed.

    Example:
        resolver = psync.resolve_cluster()
        print(resolver.source, resolver.task_type, resolver.task_id)
    """
    if environ is None:
        environ = os.environ
        # Each cell of a notebook has its own context: if it has no cluster, the process may have.
        if (here := open_cluster.get()) is not None:
            return here
        if len(set(_open_in_process)) > 1:
            raise ConfigurationError(
                "several clusters are open in this process, but none in this context",
                hint="name one: psync.ParameterServerStrategy(cluster.resolver)",
            )
        if _open_in_process:
            return _open_in_process[0]
    if environ.get("TF_CONFIG"):
        return TFConfigClusterResolver(environ=environ)
    advice: list[str] = []
    for name in LAUNCHERS:  # by its name, and late: most processes are elsewhere
        launcher = importlib.import_module(f"psync.integrations.{name.lower()}")
        resolver: ClusterResolver | None = launcher.found_in(environ)
        if resolver is not None:
            return resolver
        advice += filter(None, [launcher.advice(environ)])
    script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"  # of a command, or none
    advice += [
        f"to train on this machine: psync run {script} --ps 1 --workers 2",
        "or open a psync.LocalCluster(1, 2) in the program, and start that by asyncio.run",
    ]
    raise ConfigurationError(
        "this process belongs to no cluster: the program has opened none, and the variables of "
        f"{', '.join(['TF_CONFIG', *LAUNCHERS])} describe none",
        hint="; ".join(advice),
    )


def interface_towards(host: str, port: int) -> tuple[str, socket.AddressFamily]:
    """Return this machine's own address on the way to another one, and its family.

    No packet is sent: only the route is looked up.

    Raises:
        OSError: The name cannot be resolved, or there is no way.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        own: str = probe.getsockname()[0]
    return own, family
