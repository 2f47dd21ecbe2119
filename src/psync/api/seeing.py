"""What is seen of a coordinator's run: its status, dashboard and run log."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING

from psync.status.model import ShardStatus
from psync.status.sampling import StatusSource
from psync.status.serving import ServedStatus

if TYPE_CHECKING:
    from psync.api.strategy import ParameterServerStrategy
    from psync.coordinator import Coordinator
    from psync.net.platform import Platform
    from psync.status.dashboard.attached import Attached


class SeenRun:
    """The status of one coordinator, and who is shown it.

    Args:
        coordinator: Not started yet.
        platform: Of it.
        strategy: Whose variables it serves.
        metrics, dashboard, run_log: As the arguments of ``ClusterCoordinator``.

    Attributes:
        source: Of the status.

    Raises:
        ConfigurationError: As ``ServedStatus``.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        platform: Platform,
        strategy: ParameterServerStrategy,
        *,
        metrics: str | None,
        dashboard: str | None,
        run_log: str | os.PathLike[str] | None,
    ) -> None:
        self.source = StatusSource(coordinator, functools.partial(placed, strategy))
        self.source.variables = lambda: {
            variable.spec.variable_id: variable.spec.name for variable in strategy.variables
        }
        self._served = ServedStatus(self.source, platform, metrics)
        self._shown: Attached | None = None  # None: there is no dashboard, and no run log
        asked = (dashboard, "PSYNC_DASHBOARD"), (run_log, "PSYNC_RUN_LOG")
        if any(os.environ.get(name) if given is None else given for given, name in asked):
            from psync.status.dashboard.attached import Attached, wanted

            self._shown = Attached(wanted(dashboard, run_log), self.source)

    @property
    def url(self) -> str:
        """Of the dashboard; "": there is none."""
        return "" if self._shown is None else self._shown.url

    async def start(self) -> None:
        """Begin. Raises ConfigurationError. Cancellation: ``close`` still has to be called."""
        await self._served.start()
        if self._shown is not None:
            await self._shown.start()

    async def close(self) -> None:
        """Show it to nobody any more. Cancellation: a connection may still be closing."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._served.close)
            if self._shown is not None:
                await self._shown.close()


def placed(
    strategy: ParameterServerStrategy, known: tuple[ShardStatus, ...]
) -> tuple[ShardStatus, ...]:
    """Return where the shards of all variables lie, which changes when more are declared."""
    count = sum(len(variable.spec.shards) for variable in strategy.variables)
    if count == len(known):
        return known
    return tuple(
        ShardStatus(row.variable, row.shard, row.shape, row.dtype, row.nbytes, row.ps)
        for row in strategy.placement().rows
    )
