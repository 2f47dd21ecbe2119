"""All ps tasks as ps 0 sees them: itself, and the others over the network.

Layer: L3. Imports: errors, specs, blocks, sync_config, platform, endpoint, rpc, ps_client,
long_work, ps_sync, wire.

``StepCloser`` says which step is to be closed; this carries it to every ps, and keeps the
global step, wherever that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from psync.blocks import BlockPool, bytes_of
from psync.endpoint import Endpoint
from psync.errors import ClosedError, ConfigurationError
from psync.long_work import LongWork
from psync.platform import Platform
from psync.ps_client import PsClient
from psync.ps_sync import CLOSER, PsSync
from psync.rpc import Received
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.sync_config import SyncConfig
from psync.wire.messages import AttachPs, CloseStep, Message

GLOBAL_STEP_DTYPE = "int64"


class AllPs:
    """The ps tasks of one coordinator's cluster.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        work: Waits for shards that are busy.
        pool: Memory for what comes in.
    """

    def __init__(
        self, platform: Platform, attach: AttachPs, sync: PsSync, work: LongWork, pool: BlockPool
    ) -> None:
        self._platform = platform
        self._attach = attach
        self._sync = sync
        self._work = work
        self._pool = pool
        self._endpoint: Endpoint | None = None  # made when another ps is first needed
        self._client: PsClient | None = None
        self._closed = False

    def ask_others(self, message: Message) -> list[asyncio.Task[Received]]:
        """Begin to ask all other ps tasks the same; all at once.

        Returns:
            One task each, which raises what ``PsLink.call`` does.
        """
        if len(self._attach.ps_addresses) == 1:
            return []
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(link.call(lambda peer: message)) for link in self._links().links[1:]
        ]

    async def apply(self, message: CloseStep, calls: Sequence[asyncio.Task[Received]]) -> None:
        """Apply a step here, and wait for the others, of whom ``ask_others`` has asked it.

        Raises:
            ParameterServerLost: A ps is gone.
            PsyncError: The step cannot be applied.

        Cancellation: What was begun is carried to its end.
        """
        failed: Exception | None = None
        try:
            under_way = self._sync.close_step(message)
            if under_way is not None:
                await under_way
        except Exception as exc:
            failed = exc
        for call in calls:  # all are waited for: the step is carried as far as it goes
            try:
                await call
            except Exception as exc:
                failed = failed or exc
        if failed is not None:
            raise failed

    async def read_global_step(self, config: SyncConfig) -> int:
        """Return the present value of a group's global step.

        Raises:
            ConfigurationError: It is no single integer, or on a ps that there is not.
            UnknownVariableError: It is not on the ps that it should be on.
            ParameterServerLost: Its ps is gone.

        Cancellation: Safe.
        """
        ps, variable, index = config.global_step
        if not 0 <= ps < len(self._attach.ps_addresses):
            raise ConfigurationError(
                f"{config.name}: its global step is on ps {ps}, and there are "
                f"{len(self._attach.ps_addresses)} ps tasks"
            )
        if ps:
            client = self._links()
            (value,) = await client.pull(client.plan((_step_variable(config),)))
            return int(value)
        spec = self._sync.store.spec((variable, index))
        if spec.size != 1 or spec.dtype != GLOBAL_STEP_DTYPE:
            raise ConfigurationError(
                f"{config.name}: its global step {spec} has shape {spec.shape} {spec.dtype}, "
                f"expected one element of {GLOBAL_STEP_DTYPE}"
            )
        (block,) = await self._work.when_idle(self._sync.store.read, spec.key)
        return int(bytes_of(block).view(dtype_of(spec.dtype))[0])

    async def raise_global_step(self, config: SyncConfig) -> None:
        """Add one to a group's global step.

        Raises:
            ParameterServerLost: Its ps is gone.

        Cancellation: It may have been raised, or be raised later.
        """
        ps, variable, index = config.global_step
        one: np.ndarray = np.ones((), dtype_of(GLOBAL_STEP_DTYPE))
        if ps:
            client = self._links()
            plan = client.plan((_step_variable(config),))
            await client.assign(plan, [one], op="add", closure=-1, ordinal=0)
            return
        store, key = self._sync.store, (variable, index)
        operand = store.check_assign(key, "add", one.reshape(store.spec(key).shape))
        self._work.finish_now(await self._work.when_idle(store.assign_checked, key, "add", operand))

    async def close(self) -> None:
        """Close the links; what is under way on them fails. Cancellation: they may be left open."""
        self._closed = True
        if self._client is not None and self._endpoint is not None:
            await self._client.close()
            await self._endpoint.close()

    def _links(self) -> PsClient:
        """Return the links to the other ps tasks.

        Their incarnation is the coordinator's: a ps that serves a newer one refuses it.
        """
        if self._closed:
            raise ClosedError(f"{CLOSER} has closed its links to the other ps tasks")
        if self._client is None:
            attach = self._attach
            self._endpoint = Endpoint(self._platform, CLOSER, attach.coordinator, {}, self._pool)
            self._client = PsClient(
                self._endpoint, attach.ps_addresses, self._pool, attach.ps_timeout_s
            )
        return self._client


def _step_variable(config: SyncConfig) -> VariableSpec:
    """Describe the shard of the global step, on another ps, as a variable of its own."""
    ps, variable, index = config.global_step
    name = f"{config.name}: global step"
    shard = ShardSpec(name, variable, index, 0, (), GLOBAL_STEP_DTYPE, ps)
    return VariableSpec(name, variable, (), GLOBAL_STEP_DTYPE, False, (shard,), "")
