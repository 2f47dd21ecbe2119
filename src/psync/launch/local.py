"""LocalCluster: all tasks of a cluster on this machine, for first contact, notebooks and tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from psync.errors import ConfigurationError
from psync.launch.cluster import Host, TaskCluster
from psync.launch.gpus import GpuShares
from psync.launch.local_tasks import TasksHere, TasksInProcesses
from psync.launch.task_process import Process
from psync.testing import MemoryNetwork


class LocalCluster(TaskCluster):
    """ps and worker tasks on this machine; this process is the chief.

    An async context manager; inside, ``ParameterServerStrategy()`` uses this cluster.

    - With processes, each task is a real process. The cluster makes its own secret. A task that
      dies restarts, up to three times a minute; a ps comes back empty. Tasks can import modules
      next to this program's script, as the script can.
    - Without processes, all tasks run in this process and on this loop, connected by memory instead
      of sockets.

    Args:
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        processes: Whether tasks are separate processes.
        max_restarts: Number of restarts per minute of each worker and each ps. A task that dies
            once more is given up, and a ``ClusterCoordinator`` does not wait for it. When the last
            worker is given up, ``join`` raises WorkerLost; for a ps, ParameterServerLost.
        network: Network of the tasks of a cluster without processes, instead of one that delivers
            immediately: ``psync.testing.MemoryNetwork(seed=7, latency=(0.001, 0.01))`` delays, cuts
            and checks. With ``psync.testing.run_virtual`` such a test takes no real time.
        security: Whether connections between the processes use TLS, with certificates that are made
            for this cluster and removed with it (``pip install 'psync[tls]'``). If False, they use
            TLS if the environment names certificates.
        gpus_per_worker: Number of GPUs that each worker process sees, out of those that this
            process sees. Workers share no GPU, and ps tasks see none. 0: workers see none either.
            None: all tasks see the same GPUs as this process.
        plugins: Modules with custom rules, which this process and all tasks load; see
            ``psync.rules``.

    Raises:
        ConfigurationError: A number is too small; processes are given a network; tasks without
            processes are given security or GPUs; or plugins are not modules. From ``start``:
            certificates cannot be made or used, there are too few GPUs, or a plugin cannot be
            imported.

    Example:
        async with psync.LocalCluster(2, 2) as cluster:
            strategy = psync.ParameterServerStrategy()
            async with psync.ClusterCoordinator(strategy) as coordinator:
                ...
    """

    def __init__(
        self,
        num_ps: int,
        num_workers: int,
        processes: bool = True,
        *,
        max_restarts: int = 3,
        network: MemoryNetwork | None = None,
        security: bool = False,
        gpus_per_worker: int | None = None,
        plugins: Sequence[str] = (),
    ) -> None:
        super().__init__(num_ps, num_workers, plugins)
        if processes and network is not None:
            raise ConfigurationError(
                "network: only tasks in one process can use it",
                hint="LocalCluster(…, processes=False)",
            )
        if security and not processes:
            raise ConfigurationError("security: tasks in one process have nothing to hide")
        if gpus_per_worker is not None and not processes:
            raise ConfigurationError(
                "gpus_per_worker: tasks in one process see the same GPUs",
                hint="LocalCluster(…, processes=True)",
            )
        self._security = security
        self._gpus = GpuShares(gpus_per_worker, os.environ)
        self._processes = processes
        self._network = network
        self._max_restarts = max_restarts
        self.tasks: dict[str, Process] = {}  # the newest process of each, as "worker-0"

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        if not self._processes:
            return TasksHere(self._network, resources)
        host = TasksInProcesses(
            self._counts, {**os.environ, **self._plugins}, self._gpus, self._max_restarts,
            security=self._security, resources=resources,
        )  # fmt: skip
        self.tasks = host.processes
        return host

    def _check_now(self, num_workers: int) -> None:
        self._gpus.check(num_workers)
