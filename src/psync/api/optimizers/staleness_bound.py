"""The ``max_staleness`` option of an optimizer: bounded staleness of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from psync.client.runtime import Runtime
from psync.specs import checked_integer
from psync.wire.sync_messages import TickClock

MAX_STALENESS = 1 << 31
"""More rounds than anybody is ever ahead: no bound at all is ``staleness_bound=None``."""


@dataclass(frozen=True)
class StalenessBound:
    """How far a worker may run ahead of the others.

    A round is a step's push through the optimizer that was accepted. After it, ``apply_gradients``
    returns once the worker is at most ``max_staleness`` rounds ahead of the slowest worker that
    has work; workers that are idle, dead or out of data are not waited for, nor those that wait
    themselves, for another optimizer's bound or step: they may fall behind by more. Updates are
    applied one by one all the same: 0 is lock-step, not the mean of ``SyncReplicasOptimizer``.

    Pushes by the coordinator's own program, outside of a step, are not counted. Each optimizer
    counts for itself: a step that does not push through it does no round.

    Args:
        max_staleness: Rounds, at least 0.

    Raises:
        ConfigurationError: It is no such number.

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
        """Tell ps 0 that a round is done; return when this worker may go on.

        Args:
            runtime: Of the step.
            optimizer: Its number: each one has clocks of its own.

        Raises:
            ConfigurationError: The same optimizer has another bound elsewhere.
            ParameterServerLost: ps 0 is gone.

        Cancellation: Safe; the round stays done.
        """
        number = runtime.rounds[optimizer] = runtime.rounds.get(optimizer, 0) + 1
        message = TickClock(optimizer, self.max_staleness, number)
        with runtime.ps.work.wait:
            await runtime.ps.links[0].call(lambda _: message)
