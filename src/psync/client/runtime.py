"""What variables and optimizers talk through: a worker in a step, else the coordinator."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from psync.client.accumulator_client import AccumulatorClient
from psync.client.context import current_closure
from psync.client.plans import Plan
from psync.client.prefetch import PulledAhead
from psync.client.ps_client import PsClient
from psync.client.pulled_steps import PulledSteps
from psync.client.sync_client import SyncClient
from psync.errors import UnsupportedError, UsageError
from psync.worker.iterators import IteratorTable


class Runtime:
    """One task's way to the ps tasks.

    Args:
        ps: Links to all ps tasks.
        origin: Token of the strategy whose variables it serves.
        program: Token of the process whose optimizers it serves.
        ensure_created: Creates what has been declared meanwhile; a worker has nothing to create.
        iterators: A worker's per-worker iterators; None on the coordinator.
        in_session: Whether the program itself trains, outside of closures: a worker in a training
            session.
    """

    def __init__(
        self,
        ps: PsClient,
        origin: str,
        program: str = "",
        ensure_created: Callable[[], Awaitable[None]] | None = None,
        iterators: IteratorTable | None = None,
        *,
        in_session: bool = False,
    ) -> None:
        self.ps = ps
        self.origin = origin
        self.program = program
        self.iterators = iterators
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
        return SyncClient(self.ps)

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

    def check_open(self, operation: str) -> None:
        """Refuse ``operation`` in a step that has ended.

        Raises:
            UsageError, ClosureCancelled: As ``ClosureContext.check_open``.
        """
        closure = current_closure()
        if closure is not None:
            closure.check_open(operation)

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


NOWHERE: Mapping[int, int] = {}
"""The positions of iterators that start from the beginning."""


class IteratorHandle:
    """A per-worker iterator as steps see it: on each worker it stands for that worker's own.

    Args:
        uid: Unique in the cluster.
        key: Of the dataset function.
        num_pipelines: Number of workers that the data is meant for.
        starts: By worker index, how many batches come before the first; 0 where there is none.
    """

    def __init__(
        self, uid: str, key: bytes, num_pipelines: int, starts: Mapping[int, int] = NOWHERE
    ) -> None:
        self.uid = uid
        self.key = key
        self.num_pipelines = num_pipelines
        self.starts = starts

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrived, (self.uid, self.key, self.num_pipelines, dict(self.starts)))

    def __iter__(self) -> IteratorHandle:
        return self

    def __next__(self) -> Any:
        """Return this worker's next element.

        Raises:
            EndOfData: There is none; a step that lets it through ends with it.
            UnsupportedError: Outside a step.
        """
        runtime = current_runtime()
        if runtime is None or runtime.iterators is None:
            raise UnsupportedError(
                "next() on a per-worker iterator outside a step: each worker has its own data",
                hint="pass the iterator to a step: schedule(step, args=(iterator,))",
            )
        iterator = runtime.iterators.get(self.uid)
        if iterator is None:
            raise UsageError(
                "a per-worker iterator reached the step in a way that psync cannot see",
                hint="pass it as an argument of the step, or let the step capture it",
            )
        return next(iterator)


arriving: ContextVar[list[IteratorHandle] | None] = ContextVar("psync_arriving", default=None)
"""Where iterators are noted that come in with a function or its arguments."""


def _arrived(uid: str, key: bytes, num_pipelines: int, starts: Mapping[int, int]) -> IteratorHandle:
    handle = IteratorHandle(uid, key, num_pipelines, starts)
    noted = arriving.get()
    if noted is not None:
        noted.append(handle)
    return handle
