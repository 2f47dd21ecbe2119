"""The runtime of variables and optimizers: the worker's in a step, else the coordinator's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from psync.client.accumulator_client import AccumulatorClient
from psync.client.context import current_closure
from psync.client.plans import Plan
from psync.client.prefetch import PulledAhead
from psync.client.ps_client import PsClient
from psync.client.pulled_steps import PulledSteps
from psync.client.sync_client import SyncClient


class Runtime:
    """One task's way to the ps tasks.

    Args:
        ps: Links to all ps tasks.
        origin: Token of the strategy whose variables it serves.
        program: Token of the process whose optimizers it serves.
        ensure_created: Creates what has been declared meanwhile; a worker has nothing to create.
        find_iterator: Returns a worker's per-worker iterator by its uid; None on the coordinator.
        in_session: Whether the program itself trains, outside of closures: a worker in a training
            session.
    """

    def __init__(
        self,
        ps: PsClient,
        origin: str,
        program: str = "",
        ensure_created: Callable[[], Awaitable[None]] | None = None,
        find_iterator: Callable[[str], Iterator[Any] | None] | None = None,
        *,
        in_session: bool = False,
    ) -> None:
        self.ps = ps
        self.origin = origin
        self.program = program
        self.find_iterator = find_iterator
        self.in_session = in_session
        self.steps: dict[int, int] = {}  # highest step known of each optimizer
        self.rounds: dict[int, int] = {}  # done through each optimizer that has a staleness bound
        self._ensure_created = ensure_created
        self._pulled = PulledSteps()  # by code outside of closures
        self._ordinal = 0

    async def ensure_created(self) -> None:
        """Wait until every declared variable exists. Cancellation: safe."""
        if self._ensure_created is not None:
            await self._ensure_created()

    @functools.cached_property
    def sync(self) -> SyncClient:
        """The way to the synchronous groups."""
        return self.ps.parts.of(SyncClient)(self.ps)

    @functools.cached_property
    def ahead(self) -> PulledAhead:
        """Values that came with a token."""
        return PulledAhead(self.ps.links)

    @functools.cached_property
    def accumulators(self) -> AccumulatorClient:
        """The way to the accumulators."""
        return AccumulatorClient(self.ps)

    @property
    def pulled(self) -> PulledSteps:
        """What the pulls of the step that runs here, or of the program, have seen."""
        closure = current_closure()
        return self._pulled if closure is None else closure.pulled

    def take_ahead(self, plan: Plan) -> list[np.ndarray] | None:
        """Return values that came with a token, if they are what a pull would bring now."""
        closure = current_closure()
        values = self.ahead.take(plan, 0 if closure is None else closure.arrival)
        if values is None:
            return None
        self.pulled.note([(values.group, values.step)])
        return values.arrays

    def begin_update(self, operation: str) -> tuple[int, int]:
        """Return the identity of a new push or assign: (closure id or -1, ordinal).

        Raises:
            UsageError, ClosureCancelled: As ``ClosureContext.check_open``.
        """
        closure = current_closure()
        if closure is None:
            self._ordinal += 1
            return -1, self._ordinal
        closure.check_open(operation)
        return closure.closure_id, closure.next_ordinal()


def current_runtime() -> Runtime | None:
    """Return the runtime of the step that runs here, or None outside a step."""
    closure = current_closure()
    runtime: Any = closure.runtime if closure is not None else None
    return runtime if isinstance(runtime, Runtime) else None
