"""Cluster resolvers: the cluster's tasks and this process's own, from TF_CONFIG or arguments.

A resolver has TensorFlow's interface, so that programs keep theirs. What it says is checked by
``training_cluster``, which the strategy and ``run_task`` call before anything is connected: a wrong
``TF_CONFIG`` is one line that names the field, not a job that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from psync.cluster import ClusterSpec
from psync.cluster_roles import validate_for_training, with_chief
from psync.errors import ConfigurationError

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
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
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


def cluster_of_context() -> ClusterResolver | None:
    """Return the innermost cluster that is open in this context, or None.

    Cells of a notebook have a context each: what one has opened is not in that of the next. So
    where this context has none, it is that of the process.

    Raises:
        ConfigurationError: The process has several, and this context none.
    """
    known = open_cluster.get()
    if known is not None or not _open_in_process:
        return known
    if len(set(_open_in_process)) > 1:
        raise ConfigurationError(
            "several clusters are open in this process, and none of them in this context",
            hint="say which one: psync.ParameterServerStrategy(cluster.resolver)",
        )
    return _open_in_process[0]


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
            hint='say which task this process is: "task": {"type": "worker", "index": 0}',
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
        """Return the cluster of ``TF_CONFIG``, including evaluators; empty if it has none."""
        cluster = _in(self._config(), "cluster", dict, "an object") or {}
        try:
            return with_chief(ClusterSpec(cluster))
        except ConfigurationError as exc:
            raise ConfigurationError(f"TF_CONFIG: cluster: {exc.message}", hint=exc.hint) from None
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
        return _task_type_in(task) if answer == "task_type" else _task_index_in(task)

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
            raise ConfigurationError(
                f"TF_CONFIG: expected a JSON object, got {reprlib.repr(config)}"
            )
        return config


def _in(config: dict[str, Any], field: str, kind: type[T], expected: str) -> T | None:
    value = config.get(field.rpartition(".")[2])
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(
            f"TF_CONFIG: {field}: expected {expected}, got {reprlib.repr(value)}"
        )
    return value


def _task_type_in(task: dict[str, Any]) -> str | None:
    value = task.get("type")
    if type(value) is int:  # TensorFlow takes it; the check of the cluster says what is wrong
        return str(value)
    return _in(task, "task.type", str, "text")


def _task_index_in(task: dict[str, Any]) -> int | None:
    value = task.get("index")
    if value is None or type(value) is int:
        return value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    raise ConfigurationError(
        f"TF_CONFIG: task.index: expected a whole number, got {reprlib.repr(value)}"
    )
