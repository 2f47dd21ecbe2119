"""Which task of which cluster this process is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError
from psync.net.resolvers import ClusterResolver, TFConfigClusterResolver, training_cluster


@dataclass(frozen=True, slots=True)
class OwnTask:
    """Who this process is."""

    resolver: ClusterResolver
    cluster: ClusterSpec
    job: str
    index: int

    @property
    def name(self) -> str:
        """As in ``/job:worker/task:0``."""
        return task_name(self.job, self.index)

    @property
    def leads(self) -> bool:
        """Whether the others exit when it does: the chief, or worker 0 where there is none."""
        first = (self.job, self.index) == ("worker", 0) and "chief" not in self.cluster.jobs
        return self.job == "chief" or first

    @property
    def address(self) -> str:
        """Where it is known."""
        return self.cluster.task_address(self.job, self.index)


def own_task(resolver: ClusterResolver | None) -> OwnTask:
    """Return which task a resolver says this process is; without one, ``TF_CONFIG`` says it.

    Raises:
        ConfigurationError: ``TF_CONFIG`` is not set, or the cluster's description is wrong or does
            not say which task it is.
    """
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            raise ConfigurationError(
                "TF_CONFIG is not set, so this process belongs to no cluster",
                hint=f"to train on this machine: psync run {sys.argv[0]} --ps 1 --workers 2",
            )
        resolver = TFConfigClusterResolver()
    cluster, job, index = training_cluster(resolver)
    if job == "evaluator":
        return OwnTask(resolver, cluster, job, index or 0)
    if job is None or index is None:
        raise ConfigurationError(
            "the cluster's description does not say which task this process is",
            hint='TF_CONFIG needs "task": {"type": "worker", "index": 0}, or the like',
        )
    return OwnTask(resolver, cluster, job, index)
