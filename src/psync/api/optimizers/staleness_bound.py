"""The ``max_staleness`` option of an optimizer: bounded staleness of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from psync.client.runtime import Runtime
from psync.errors import ConfigurationError
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
        rounds = self.max_staleness
        if isinstance(rounds, bool) or not isinstance(rounds, Integral):
            raise ConfigurationError(
                f"StalenessBound: expected a number of rounds as max_staleness, got {rounds!r}"
            )
        if not 0 <= rounds <= MAX_STALENESS:
            raise ConfigurationError(
                f"StalenessBound: expected max_staleness from 0 to {MAX_STALENESS}, got {rounds}",
                hint="without a bound workers never wait for each other",
            )
        object.__setattr__(self, "max_staleness", int(rounds))

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
        await runtime.ps.links[0].call(lambda _: message)
