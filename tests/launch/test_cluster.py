"""What all clusters that a program starts have in common; see also test_local.py."""

from __future__ import annotations

import contextlib

import pytest

from psync.errors import ConfigurationError, UsageError
from psync.launch.cluster import Host, TaskCluster
from psync.launch.local_tasks import TasksHere


class Refusing(TasksHere):
    """Starts no worker 2."""

    async def start(self, job: str, index: int) -> str:
        if (job, index) == ("worker", 2):
            raise ConfigurationError("there is no worker 2")
        return await super().start(job, index)


class RefusingCluster(TaskCluster):
    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        self.host = Refusing(None, resources)
        return self.host


async def test_a_cluster_without_one_of_its_tasks_does_not_start() -> None:
    cluster = RefusingCluster(1, 4, ())
    with pytest.raises(ConfigurationError, match="there is no worker 2"):
        await cluster.start()
    assert repr(cluster) == "<RefusingCluster, 1 ps, 4 workers, not running>"
    with pytest.raises(UsageError, match=r"use it inside `async with RefusingCluster\(…\)"):
        _ = cluster.resolver


async def test_workers_that_could_be_started_stay_when_another_cannot_be() -> None:
    async with RefusingCluster(1, 1, ()) as cluster:
        with pytest.raises(ConfigurationError, match="there is no worker 2"):
            await cluster.scale(4)
        assert cluster.resolver.cluster_spec().task_indices("worker") == [0, 1, 3]
        assert "in this process" in cluster._repr_html_()
