"""Cluster resolver that merges several others."""

from __future__ import annotations

import reprlib
from typing import Any

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError, DuplicateTaskError
from psync.net.resolvers import ClusterResolver


class UnionClusterResolver(ClusterResolver):
    """The jobs of several resolvers as one cluster; all else is as the first of them says.

    A job that several describe as lists has the tasks of all, one list after the other. Where one
    of them gives indices, all do (a list counts from 0), and each index may be there once.

    Args:
        cluster_resolvers: At least one, in order.
        task_type: Job of this process, instead of the first resolver's.
        task_id: Its index, instead of the first resolver's; 0 too.
        rpc_layer: What ``master()`` puts before addresses, instead of the first resolver's.

    Raises:
        ConfigurationError: If no resolver is given, or an argument that there is not.
        TypeError: If one is no ClusterResolver.

    Source: TensorFlow ``UnionResolver``; there an override with 0 or an empty text is passed
        over.
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
            DuplicateTaskError: If two give the same index of a job; also a KeyError.
            ConfigurationError: If they give one address to two tasks.
            Exception: What a resolver raises.
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
        """Return what the first resolver does."""
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
