"""The cluster that pods of Kubernetes make, found by their labels.

Layer: L2. Imports: errors, cluster, resolvers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError, ConnectFailed
from psync.resolvers import ClusterResolver


class ExecutableLocation(enum.Enum):
    """Where this process runs: that says how it finds the Kubernetes API."""

    WITHIN_CLUSTER = "within_cluster"  # in a pod: by the pod's service account
    OFF_CLUSTER = "off_cluster"  # elsewhere: by the user's kubeconfig


class PodLister(Protocol):
    """What is used of ``kubernetes.client.CoreV1Api``."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
        """Return an object whose ``items`` are the pods that have these labels."""


class KubernetesClusterResolver(ClusterResolver):
    """The pods that carry given labels, at a port that is the same for all.

    The tasks of a job are the pods of its first selector in the order of their names, then those
    of the next. The API is asked again at every ``cluster_spec()``, which blocks meanwhile. Labels
    do not tell which of the pods this process is: assign ``task_type`` and ``task_id``, or leave
    them where it is none of them.

    Args:
        job_to_label_mapping: Label selectors of each job: ``{"ps": ["job-name=ps"], …}``. None:
            ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: Where each task listens.
        rpc_layer: What ``master()`` puts before addresses.
        override_client: Asked instead of the Kubernetes API: see ``PodLister``.
        executable_location: Where this process runs, as an ``ExecutableLocation`` or its value.
        use_pod_ip: Whether a task is at its pod's address instead of its host's: so it must be
            unless pods share their host's network, and where a host has several of them.

    Raises:
        ImportError: If the package ``kubernetes`` is not installed.
        ConfigurationError: If the location is none, or there is no configuration of the API.

    Source: TensorFlow ``KubernetesClusterResolver``.
    """

    source = "KubernetesClusterResolver"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = None,
        override_client: PodLister | None = None,
        executable_location: ExecutableLocation | str = ExecutableLocation.WITHIN_CLUSTER,
        *,
        use_pod_ip: bool = False,
    ) -> None:
        try:
            location = ExecutableLocation(executable_location)
        except ValueError:
            raise ConfigurationError(
                "KubernetesClusterResolver: executable_location: expected one of "
                f"{[place.value for place in ExecutableLocation]}, got {executable_location!r}"
            ) from None
        if job_to_label_mapping is None:
            job_to_label_mapping = {"worker": ["job-name=tensorflow"]}
        self._selectors = {
            job: _selectors(job, job_to_label_mapping) for job in job_to_label_mapping
        }
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._use_pod_ip = use_pod_ip
        self._client = _client(location) if override_client is None else override_client

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks that run now.

        Raises:
            ConnectFailed: If the API does not answer, or refuses.
            ConfigurationError: If a pod does not run, or two tasks have one address.
        """
        jobs = {
            job: [self._address(pod) for selector in selectors for pod in self._pods(selector)]
            for job, selectors in self._selectors.items()
        }
        try:
            return ClusterSpec(jobs)
        except ConfigurationError as exc:
            raise ConfigurationError(
                f"{self.source}: {exc.message}",
                hint="use_pod_ip=True, where a host has several of the pods",
            ) from None

    def _pods(self, selector: str) -> list[Any]:
        """Return the pods with these labels, in the order of their names."""
        try:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        except Exception as exc:  # of the client, its HTTP library, or the API
            raise ConnectFailed(
                f"{self.source}: the pods with {selector!r} could not be listed: {exc}",
                hint="the service account needs a cluster role that may list pods",
            ) from exc
        return sorted(pods, key=lambda pod: str(pod.metadata.name))

    def _address(self, pod: Any) -> str:
        name, phase = pod.metadata.name, pod.status.phase
        if phase != "Running":
            raise ConfigurationError(
                f'{self.source}: pod "{name}" does not run, its phase is "{phase}"',
                hint="wait until all pods run, then ask again",
            )
        ip = pod.status.pod_ip if self._use_pod_ip else pod.status.host_ip
        if not ip:
            raise ConfigurationError(f'{self.source}: pod "{name}" has no address yet')
        return f"[{ip}]:{self._port}" if ":" in ip else f"{ip}:{self._port}"


def _selectors(job: str, mapping: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    selectors = mapping[job]
    if isinstance(selectors, str) or not all(isinstance(text, str) for text in selectors):
        raise ConfigurationError(
            f"KubernetesClusterResolver: job {job!r}: expected a list of label selectors, got "
            f"{selectors!r}"
        )
    return tuple(selectors)


def _client(location: ExecutableLocation) -> PodLister:
    """Return a client of the Kubernetes API."""
    try:
        from kubernetes import client, config
    except ImportError as exc:
        raise ImportError(
            "KubernetesClusterResolver needs the package kubernetes\n"
            "hint: pip install 'psync[kubernetes]'"
        ) from exc
    try:
        if location is ExecutableLocation.OFF_CLUSTER:
            config.load_kube_config()
        else:
            config.load_incluster_config()
    except config.ConfigException as exc:
        raise ConfigurationError(
            f"KubernetesClusterResolver: {location.value}: {exc}",
            hint="outside of a pod: executable_location='off_cluster'",
        ) from exc
    made: PodLister = client.CoreV1Api()
    return made
