"""Cluster resolver that merges several others."""

from __future__ import annotations

import reprlib
from typing import Any

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError, DuplicateTaskError
from psync.net.resolvers import ClusterResolver


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
                f"UnionClusterResolver: no argument {', '.join(map(repr, unknown))}",
                hint="those by name are task_type, task_id and rpc_layer",
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
        try:
            return ClusterSpec(merged)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{self.source}: {exc.message}", hint=exc.hint) from None

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
            hint="where one of them gives indices, lists count from 0",
        )
    return one | other
