"""Cluster resolver for Kubernetes: pods by their DNS names, or by labels from the API.

Pods of a StatefulSet, and those of an indexed Job, have names that count from 0 and that a
headless service puts into the DNS: ``train-ps-0.train``. That is all a task has to know, so by
default no API is asked, no right is needed, and a pod that does not run yet is simply one that is
not reached yet. A pod's own name comes into the DNS only after the pod has begun, so a task waits
for the name at which it listens.

The API is for pods without such names: it lists one namespace until all pods run that have not
ended. Names are sorted with their numbers as numbers: ps-10 comes after ps-2.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from psync.cluster import ClusterSpec, join_address
from psync.errors import ConfigurationError, ConnectFailed
from psync.integrations.launchers import jobs_of, port_of
from psync.net.resolvers import ClusterResolver

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Pause between two questions to the API, while pods are waited for."""

REPORT_EVERY_S = 10.0
"""Between two lines that say which pods are waited for."""

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod reads its own namespace."""

_ENDED = ("Succeeded", "Failed")
_DNS_NAME = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SOURCE = "KubernetesClusterResolver"


class ExecutableLocation(enum.Enum):
    """Where this process runs, which determines how it finds the Kubernetes API."""

    WITHIN_CLUSTER = "within_cluster"  # in a pod: by the pod's service account
    OFF_CLUSTER = "off_cluster"  # elsewhere: by the user's kubeconfig


class PodLister(Protocol):
    """The part of ``kubernetes.client.CoreV1Api`` that psync uses."""

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any:
        """Return an object whose ``items`` are the pods of a namespace with these labels."""


class KubernetesClusterResolver(ClusterResolver):
    """A cluster of the pods of StatefulSets or indexed Jobs, by name; or of pods with given labels.

    **By name**, if ``jobs`` and ``service`` are given: task 2 of job ``ps`` is at
    ``SERVICE-ps-2.SERVICE``. Each job is a StatefulSet or an indexed Job named ``SERVICE-JOB``,
    whose pods have the headless service as their ``serviceName`` or ``subdomain``. The service
    needs ``publishNotReadyAddresses: true``. The API is not used.

    **By labels**, if ``job_to_label_mapping`` or ``override_client`` is given, or the location is
    off the cluster. The tasks of a job are the pods of its first selector in the order of their
    names (numbers as numbers), then those of the next one. ``cluster_spec`` blocks until all of
    them run; pods that have ended are skipped. Each call asks the API again.

    In both cases, the pod's name (``HOSTNAME``) determines the task of this process, unless
    ``task_type`` and ``task_id`` are assigned.

    Args:
        job_to_label_mapping: Label selectors of each job: ``{"ps": ["job-name=ps"], …}``. None, if
            the API is used: ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: Port on which each task listens.
        rpc_layer: Prefix of the addresses that ``master()`` returns.
        override_client: Object to ask instead of the Kubernetes API: see ``PodLister``.
        executable_location: Where this process runs, as an ``ExecutableLocation`` or its value.
        jobs: Number of tasks of each job: ``{"chief": 1, "ps": 2, "worker": 4}``. By labels, number
            of pods to wait for; for a job that is not named, all existing pods.
        service: Name of the headless service.
        names: Names of a job's StatefulSet or indexed Job if it is not ``SERVICE-JOB``. For a
            JobSet ``train``, which is its own service, ``{"ps": "train-ps-0", …}``.
        namespace: Namespace of the pods. None: by name, that of this pod, which is not written out;
            by labels, that of this pod, or of the kubeconfig's context.
        use_pod_ip: Whether, by labels, a task is at its pod's address. Otherwise it is at its
            host's address, for pods that share their host's network.
        timeout_s: Seconds to wait for pods, by labels.
        environ: Mapping in which ``HOSTNAME`` is looked up; None: the environment of this process.

    Raises:
        ImportError: The API is needed, and the package ``kubernetes`` is not installed.
        ConfigurationError: An argument is invalid, or there is no configuration of the API.

    Source: TensorFlow ``KubernetesClusterResolver``, which knows labels only.
    """

    source = _SOURCE

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = None,
        override_client: PodLister | None = None,
        executable_location: ExecutableLocation | str = ExecutableLocation.WITHIN_CLUSTER,
        *,
        jobs: Mapping[str, int] | None = None,
        service: str | None = None,
        names: Mapping[str, str] | None = None,
        namespace: str | None = None,
        use_pod_ip: bool = True,
        timeout_s: float = 600.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        try:
            location = ExecutableLocation(executable_location)
        except ValueError:
            raise ConfigurationError(
                f"{_SOURCE}: executable_location: expected one of "
                f"{[place.value for place in ExecutableLocation]}, got {executable_location!r}"
            ) from None
        counts = dict(jobs or {})
        for job, count in counts.items():
            if type(count) is not int or count < 1:
                raise ConfigurationError(
                    f"{_SOURCE}: jobs: {job!r}: expected the number of its tasks, got {count!r}"
                )
        self._rpc_layer = rpc_layer
        host = (os.environ if environ is None else environ).get("HOSTNAME") or socket.gethostname()
        self._host = host.partition(".")[0]
        self._found: _Names | _Labels
        in_pod = location is ExecutableLocation.WITHIN_CLUSTER
        if job_to_label_mapping is None and override_client is None and in_pod:
            self._found = _Names(counts, service, dict(names or {}), namespace, tf_server_port)
            return
        if service is not None or names is not None:
            raise ConfigurationError(
                f"{_SOURCE}: service and names find pods by name, job_to_label_mapping by label; "
                "only one of them is possible",
                hint="pass either service and jobs, or job_to_label_mapping",
            )
        mapping = job_to_label_mapping
        if mapping is None:
            mapping = {"worker": ["job-name=tensorflow"]}
        if unknown := sorted(counts.keys() - mapping.keys()):
            raise ConfigurationError(f"{_SOURCE}: jobs: {unknown[0]!r} has no label selectors")
        selectors = {job: _selectors(job, mapping) for job in mapping}
        client = _client(location) if override_client is None else override_client
        namespace = namespace or _own_namespace(location if override_client is None else None)
        self._found = _Labels(
            client, namespace, selectors, counts, tf_server_port, use_pod_ip, timeout_s
        )

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks; by labels, block until all their pods run.

        Raises:
            ConnectFailed: The API does not answer, or refuses; or pods do not run in time.
            ConfigurationError: Two tasks have one address.
        """
        return self._found.cluster_spec()

    def _said(self, answer: str) -> Any:
        """Find this pod's task; it has none if it carries none of the labels.

        Raises:
            ConfigurationError: If pods are found by their names, and this one has none of them.
        """
        if answer not in ("task_type", "task_id"):
            return None
        task_type, task_id = self._found.task_of(self._host)
        return task_type if answer == "task_type" else task_id


class _Names:
    """Tasks that are known by the names of their pods."""

    def __init__(
        self,
        counts: dict[str, int],
        service: str | None,
        names: dict[str, str],
        namespace: str | None,
        port: int,
    ) -> None:
        if not counts or service is None:
            missing = "jobs" if not counts else "service"
            raise ConfigurationError(
                f"{_SOURCE}: {missing} is missing",
                hint='jobs={"chief": 1, "ps": 2, "worker": 4}, service="train", where "train" is '
                "the headless service of the StatefulSets or indexed Jobs train-chief, train-ps "
                "and train-worker; or pass job_to_label_mapping to ask the API",
            )
        if unknown := sorted(names.keys() - counts.keys()):
            raise ConfigurationError(f"{_SOURCE}: names: {unknown[0]!r} is not one of jobs")
        self._counts = counts
        self._names = {job: names.get(job, f"{service}-{job}") for job in counts}
        for name in (service, *self._names.values(), *([namespace] if namespace else [])):
            if not re.fullmatch(_DNS_NAME, name):
                raise ConfigurationError(
                    f"{_SOURCE}: expected a name of lower-case letters, digits and dashes, got "
                    f"{name!r}"
                )
        self._domain = f"{service}.{namespace}.svc" if namespace else service
        self._port = port

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(
            {
                job: [
                    f"{self._names[job]}-{index}.{self._domain}:{self._port}"
                    for index in range(count)
                ]
                for job, count in self._counts.items()
            }
        )

    def task_of(self, host: str) -> tuple[str, int]:
        name, _, number = host.rpartition("-")
        for job, count in self._counts.items():
            if self._names[job] == name and number.isdecimal() and int(number) < count:
                return job, int(number)
        ranges = [f"{self._names[job]}-[0…{count - 1}]" for job, count in self._counts.items()]
        raise ConfigurationError(
            f'{_SOURCE}: this pod is called "{host}", but the tasks are {", ".join(ranges)}',
            hint="pass the names of the StatefulSets or indexed Jobs as names=…, and their numbers "
            "of tasks as jobs=…; or set task_type and task_id",
        )


@dataclass
class _Labels:
    """Tasks whose pods carry given labels."""

    client: PodLister
    namespace: str
    selectors: dict[str, tuple[str, ...]]
    counts: dict[str, int]
    port: int
    use_pod_ip: bool
    timeout_s: float
    pods: dict[str, list[Any]] | None = None  # as found last; None before

    def cluster_spec(self) -> ClusterSpec:
        start = time.monotonic()
        reported = start
        while True:
            self.pods, missing = {}, []
            for job in self.selectors:
                self.pods[job], reasons = self._running(job)
                missing += reasons
            if not missing:
                break
            now = time.monotonic()
            why = "; ".join(missing)
            if now - start >= self.timeout_s:
                raise ConnectFailed(
                    f"{_SOURCE}: not all pods run after {self.timeout_s:g} s: {why}",
                    hint=f"kubectl describe pods --namespace {self.namespace}",
                )
            if now - reported >= REPORT_EVERY_S:
                reported = now
                logger.warning("%s has been waiting for %.0f s: %s", _SOURCE, now - start, why)
            time.sleep(min(POLL_S, start + self.timeout_s - now))
        jobs = {job: [self._address(pod) for pod in pods] for job, pods in self.pods.items()}
        try:
            return ClusterSpec(jobs)
        except ConfigurationError as exc:
            hint = None if self.use_pod_ip else "use_pod_ip=True: a host has several of the pods"
            raise ConfigurationError(f"{_SOURCE}: {exc.message}", hint=hint) from None

    def task_of(self, host: str) -> tuple[str, int] | tuple[None, None]:
        if self.pods is None:
            self.cluster_spec()
        assert self.pods is not None  # a cluster_spec that returns has found them
        for job, pods in self.pods.items():
            for index, pod in enumerate(pods):
                name = str(pod.metadata.name)
                # A pod of an indexed Job is called NAME-INDEX-xxxxx, and its host NAME-INDEX.
                if name == host or (re.search(r"-\d+$", host) and name[:-6] == host):
                    return job, index
        return None, None

    def _running(self, job: str) -> tuple[list[Any], list[str]]:
        """Return the pods that run, in order, and for what else there is to wait."""
        running, reasons = [], []
        for selector in self.selectors[job]:
            for pod in self._list(selector):
                phase = pod.status.phase
                if phase in _ENDED or getattr(pod.metadata, "deletion_timestamp", None):
                    continue
                if phase != "Running":
                    reasons.append(f'pod "{pod.metadata.name}" is {phase}')
                elif not self._ip(pod):
                    reasons.append(f'pod "{pod.metadata.name}" has no address yet')
                else:
                    running.append(pod)
        expected = self.counts.get(job)
        if expected is not None and len(running) != expected:
            reasons.append(f"{len(running)} of {expected} pods of job {job!r} run")
        elif not running and not reasons:
            labels = " or ".join(map(repr, self.selectors[job]))
            reasons.append(f"no pod with {labels} runs in namespace {self.namespace!r}")
        return running, reasons

    def _list(self, selector: str) -> list[Any]:
        """Return the pods with these labels in the order of their names, 10 after 2."""
        try:
            pods = self.client.list_namespaced_pod(self.namespace, label_selector=selector).items
        except Exception as exc:  # of the client, its HTTP library, or the API
            raise ConnectFailed(
                f"{_SOURCE}: the pods with {selector!r} in namespace {self.namespace!r} could not "
                f"be listed: {exc}",
                hint="the service account needs a role in that namespace that may list pods; with "
                "jobs=… and service=… no role is needed",
            ) from exc
        return sorted(pods, key=lambda pod: _in_parts(str(pod.metadata.name)))

    def _ip(self, pod: Any) -> Any:
        return pod.status.pod_ip if self.use_pod_ip else pod.status.host_ip

    def _address(self, pod: Any) -> str:
        return join_address(self._ip(pod), self.port)


def _in_parts(name: str) -> list[tuple[int, str]]:
    """Return a key by which names are in order with their numbers as numbers."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D+", name)
    ]


def _selectors(job: str, mapping: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    selectors = mapping[job]
    if isinstance(selectors, str) or not all(isinstance(text, str) for text in selectors):
        raise ConfigurationError(
            f"{_SOURCE}: job {job!r}: expected a list of label selectors, got {selectors!r}"
        )
    return tuple(selectors)


def _own_namespace(location: ExecutableLocation | None) -> str:
    """Return the namespace of this pod, or of the kubeconfig's context."""
    if location is ExecutableLocation.OFF_CLUSTER:
        from kubernetes import config

        _, context = config.list_kube_config_contexts()
        return str(context["context"].get("namespace") or "default")
    try:
        return NAMESPACE_FILE.read_text(encoding="ascii").strip() or "default"
    except OSError:  # not in a pod, or one without a service account
        return "default"


def _client(location: ExecutableLocation) -> PodLister:
    """Return a client of the Kubernetes API."""
    try:
        from kubernetes import client, config
    except ImportError as exc:
        raise ImportError(
            f"{_SOURCE} needs the package kubernetes\nhint: pip install 'psync[kubernetes]'; with "
            "jobs=… and service=… it is not needed"
        ) from exc
    try:
        if location is ExecutableLocation.OFF_CLUSTER:
            config.load_kube_config()
        else:
            config.load_incluster_config()
    except config.ConfigException as exc:
        raise ConfigurationError(
            f"{_SOURCE}: {location.value}: {exc}",
            hint="outside of a pod: executable_location='off_cluster'",
        ) from exc
    made: PodLister = client.CoreV1Api()
    return made


# For ``resolve_cluster``.

PORT = 8470
"""Of each task, unless ``PSYNC_PORT`` names one."""


def found_in(environ: Mapping[str, str]) -> ClusterResolver | None:
    """Return the resolver of this pod, where ``PSYNC_SERVICE`` names its service; else None."""
    service = environ.get("PSYNC_SERVICE")
    if not service:
        return None
    return KubernetesClusterResolver(
        jobs=jobs_of(environ, "", "Kubernetes"), service=service,
        namespace=environ.get("PSYNC_NAMESPACE") or None,
        tf_server_port=port_of(environ, PORT), environ=environ,
    )  # fmt: skip


def advice(environ: Mapping[str, str]) -> str:
    """Return what is missing where this is a pod, but no service is named; "": it is none."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    return (
        "in a pod, set PSYNC_SERVICE to the headless service and PSYNC_JOBS to the numbers of "
        "tasks, as the manifests of psync launch kubernetes do"
    )
