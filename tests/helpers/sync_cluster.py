"""A synchronous group on ps tasks in one process, and replicas that push to it, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inside import store_of, sync_of
from ps_cluster import CONFIG, PsCluster, pull
from psync.client.ps_client import PsClient
from psync.client.sync_client import SyncClient
from psync.net.platform import Platform
from psync.specs import VariableSpec
from psync.store.sync_config import SyncConfig
from psync.testing.sabotage import Failpoints
from psync.wire.codec import Message
from psync.wire.limits import Limits
from psync.wire.messages import Contributed, ReportSchedule

GROUP = 9


class SyncCluster(PsCluster):
    """Ps tasks with a global step; a group is configured by ``configure``.

    The incarnation of the chief is 100, those of workers begin at 1000.

    Args:
        num_ps: Number of ps tasks.
        step_ps: Which one has the global step.
        first: Its first value.
        staging_bytes: Of each ps.
    """

    def __init__(
        self,
        num_ps: int = 1,
        *,
        step_ps: int = 0,
        first: int = 0,
        staging_bytes: int = Limits().staging_bytes,
        failpoints: Failpoints | None = None,
        **options: Any,
    ) -> None:
        self._of_tasks = failpoints
        super().__init__(num_ps, limits=Limits(staging_bytes=staging_bytes), **options)
        self._step_ps = step_ps
        self._first = first
        self.config: dict[str, Any] = {}

    def platform(self, failpoints: Failpoints | None = None, incarnation: int = 7) -> Platform:
        return super().platform(failpoints or self._of_tasks, incarnation)

    async def __aenter__(self) -> SyncCluster:
        await super().__aenter__()
        for ps in range(self._step_ps):
            await self.create(f"filler{ps}", np.zeros((), np.int64))  # has its turn on that ps
        self.step = await self.create("step", np.array(self._first))
        self.configure()
        return self

    def configure(self, needed: int = 2, total: int | None = None, **more: Any) -> None:
        """Let the group of replicas that are made from now on be this one."""
        shard = self.step.shards[0]
        values: dict[str, Any] = {
            "name": "sync",
            "optimizer": CONFIG,
            "replicas_to_aggregate": needed,
            "total_num_replicas": total or needed,
            "global_step": (shard.ps, *shard.key),
        }
        self.config = SyncConfig(**(values | more)).to_config()

    def replica(self, index: int = 0, incarnation: int | None = None) -> SyncReplica:
        client = self.client(f"/job:worker/task:{index}", incarnation, host=f"worker{index}")
        return SyncReplica(client, self.config)

    async def report(
        self,
        version: int,
        alive: dict[int, int],
        *,
        missing: Sequence[str] = (),
        queued: bool = True,
        in_flight: Sequence[tuple[int, int]] = (),
        chief: PsClient | None = None,
    ) -> None:
        """Tell ps 0 who lives (index → incarnation) and what is left to do."""
        message = ReportSchedule(
            version, list(alive.items()), list(missing), queued, list(in_flight)
        )
        await ask(chief or self.chief, message)

    async def global_step(self) -> int:
        (value,) = await pull(self.chief, self.step)
        return int(value)

    def staged_bytes(self) -> list[int]:
        """On each ps."""
        return [sync_of(task).statistics()["bytes"] for task in self.ps]

    def versions(self, *variables: VariableSpec) -> list[int]:
        """Of each shard."""
        return [
            store_of(self.ps[shard.ps]).version(shard.key)
            for variable in variables
            for shard in variable.shards
        ]

    def group(self) -> dict[str, Any]:
        """What ps 0 counts of the group."""
        counters: dict[str, Any] = self.ps[0].statistics()["sync"][f"sync/{GROUP}"]
        return counters


class SyncReplica:
    """A worker's part in the group."""

    def __init__(self, client: PsClient, config: dict[str, Any]) -> None:
        self.client = client
        self.sync = client.parts.of(SyncClient)(client)
        self.config = config

    async def push(
        self,
        variables: Sequence[VariableSpec],
        gradients: Sequence[Any],
        local_step: int = -1,
        *,
        closure: int = -1,
        ordinal: int = 0,
        weight: float = 1.0,
    ) -> Contributed:
        """Push gradients, each an array or a number for all elements."""
        arrays = [
            gradient
            if isinstance(gradient, np.ndarray)
            else np.full(variable.shape, gradient, variable.dtype)
            for variable, gradient in zip(variables, gradients, strict=True)
        ]
        return await self.sync.contribute(
            self.client.plan(variables), arrays, group=GROUP, config=self.config,
            local_step=local_step, closure=closure, ordinal=ordinal, weight=weight,
        )  # fmt: skip


async def ask(
    client: PsClient, message: Message, segments: Sequence[memoryview] = (), ps: int = 0
) -> Message:
    """Send a message to a ps as it is."""
    received = await client.links[ps].call(lambda peer: message, segments)
    return received.message
