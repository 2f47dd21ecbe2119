"""The ``max_staleness`` option of an optimizer: bounded staleness of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from psync.client.runtime import Runtime
from psync.specs import checked_integer
from psync.wire.messages import TickClock

MAX_STALENESS = 1 << 31
"""More rounds than anybody is ever ahead: no bound at all is ``staleness_bound=None``."""


@dataclass(frozen=True)
class StalenessBound:
    """A bound on how far a worker may run ahead of the others.

    A round is one accepted push of a step through the optimizer. After it, ``apply_gradients``
    returns once the worker is at most ``max_staleness`` rounds ahead of the slowest worker that has
    work. Workers that are idle, dead or out of data do not count, nor do workers that wait for
    another optimizer's bound or step; they may fall behind by more. Updates are still applied one
    by one: 0 is lock-step, not the mean of ``SyncReplicasOptimizer``.

    Pushes by the coordinator's own program, outside a step, are not counted. Each optimizer counts
    separately: a step that does not push through it makes no round.

    Args:
        max_staleness: Rounds, at least 0.

    Raises:
        ConfigurationError: ``max_staleness`` is not such a number.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server".

    Example:
        optimizer = psync.optimizers.SGD(0.5, staleness_bound=psync.StalenessBound(2))
    """

    max_staleness: int

    def __post_init__(self) -> None:
        expected = "StalenessBound: expected a number of rounds as max_staleness"
        rounds = checked_integer(expected, self.max_staleness, -(1 << 63))
        checked_integer(
            f"StalenessBound: expected max_staleness from 0 to {MAX_STALENESS}",
            rounds, 0, MAX_STALENESS, hint="without a bound workers never wait for each other",
        )  # fmt: skip
        object.__setattr__(self, "max_staleness", rounds)

    async def end_round(self, runtime: Runtime, optimizer: int) -> None:
        """Report a completed round to ps 0, and return when this worker may continue.

        Args:
            runtime: Runtime of the step.
            optimizer: Number of the optimizer, which has its own clocks.

        Raises:
            ConfigurationError: The same optimizer has another bound elsewhere.
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe; the round stays completed.
        """
        number = runtime.rounds[optimizer] = runtime.rounds.get(optimizer, 0) + 1
        message = TickClock(optimizer, self.max_staleness, number)
        with runtime.ps.work.wait:
            await runtime.ps.links[0].call(lambda _: message)
