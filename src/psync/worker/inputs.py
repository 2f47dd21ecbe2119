"""Inputs of a closure on its worker: function, arguments, iterators.

Functions are fetched once and kept, small arguments come with the closure, large ones are
fetched when its turn has come. A per-worker iterator is built where it is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.client.context import ClosureContext
from psync.client.prefetch import NEVER
from psync.errors import ClosureInputError, RemoteProtocolError, SerializationError
from psync.serialization.functions import is_coroutine_step, load_function
from psync.serialization.payloads import Payload, unpack_arguments
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import Arguments, FetchArguments, FetchFunction, Function
from psync.worker.dataset_functions import InputContext
from psync.worker.iterators import (
    IteratorHandle,
    IteratorTable,
    WorkerIterator,
    arriving,
)

MAX_STEPS = 256
"""Loaded functions that a worker keeps; the one loaded longest ago goes first."""


@dataclass(slots=True, eq=False)
class HeldClosure:
    """A closure that this worker holds."""

    id: int
    key: bytes  # of its function
    num_segments: int  # of its arguments; -1: they have to be fetched
    counts: Sequence[int]  # segments of each RemoteValue input
    segments: Sequence[memoryview]
    number: int = -1  # under which ps tasks know it; -1: its id
    arrival: int = NEVER  # see ``prefetch``; NEVER: of a gang, whose replicas meet
    replica: tuple[int, int] | None = None  # which one of how many, if it is of a gang
    context: ClosureContext | None = None  # once it runs
    began: float = 0.0  # loop time at which it did
    name: str = ""  # of its step, once that is here


@dataclass(slots=True, eq=False)
class LoadedStep:
    """A step function on this worker."""

    fn: Callable[..., Any]
    name: str
    handles: Sequence[IteratorHandle[Any]]  # per-worker iterators that it captured
    is_coroutine: bool
    seconds: float = math.inf  # that its last run took

    @property
    def is_new(self) -> bool:
        """Whether it has never been run to its end."""
        return self.seconds == math.inf


@dataclass(slots=True, eq=False)
class ClosureInputs:
    """Fetches, unpickles and builds inputs for the closures of one session."""

    fetch: Callable[[Message], Awaitable[Frame]]  # a request to the coordinator
    iterators: IteratorTable  # this worker's; new ones are added
    worker_index: int
    ahead: int  # batches that datasets load ahead in threads
    steps: dict[bytes, LoadedStep] = field(default_factory=dict)  # by key, as they were loaded

    async def load(self, key: bytes) -> LoadedStep:
        """Fetch the step function of that key, which is not among ``steps``.

        Raises:
            SerializationError: It cannot be loaded here.

        Cancellation: Safe.
        """
        handles: list[IteratorHandle[Any]] = []
        fn, name = await self._load(key, handles)
        if len(self.steps) >= MAX_STEPS:
            del self.steps[next(iter(self.steps))]
        step = self.steps[key] = LoadedStep(fn, name, handles, is_coroutine_step(fn))
        return step

    async def arguments(
        self, closure: HeldClosure, step: LoadedStep
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs, with every per-worker iterator built and its next batch there.

        Raises:
            ClosureInputError: A dataset could not be built.
            Exception: What the arguments raise when they are unpickled.

        Cancellation: Safe; no batch is lost.
        """
        handles: Sequence[IteratorHandle[Any]] = step.handles
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if closure.num_segments:
            segments, counts, own = closure.segments, closure.counts, closure.num_segments
            if own < 0:
                segments, counts, own = await self._fetch_arguments(closure.id)
            arrived: list[IteratorHandle[Any]] = []
            args, kwargs = _unpack(segments, counts, own, arrived)
            if arrived:
                handles = (*handles, *arrived)
        for handle in handles:
            await self._prepare(handle)
        return args, kwargs

    async def _fetch_arguments(
        self, closure_id: int
    ) -> tuple[Sequence[memoryview], Sequence[int], int]:
        received = await self.fetch(FetchArguments(closure_id))
        message = received.message
        if not isinstance(message, Arguments):
            raise RemoteProtocolError(
                f"expected the arguments of closure {closure_id}, got {type(message).__name__}"
            )
        return received.segments, message.remote_values, message.segments

    async def _load(
        self, key: bytes, handles: list[IteratorHandle[Any]]
    ) -> tuple[Callable[..., Any], str]:
        """Return a function and its name; iterators that it captured are added to ``handles``."""
        received = await self.fetch(FetchFunction(key))
        message = received.message
        if not isinstance(message, Function) or not received.segments:
            raise RemoteProtocolError(f"expected a function, got {type(message).__name__}")
        token = arriving.set(handles)
        try:
            segments = received.segments
            return load_function(segments[0], segments[1:], name=message.name), message.name
        finally:
            arriving.reset(token)

    async def _prepare(self, handle: IteratorHandle[Any]) -> None:
        """Build a per-worker iterator where it is first needed, and wait for its next batch."""
        iterator = self.iterators.get(handle.uid)
        if iterator is None:
            try:
                dataset_fn, _ = await self._load(handle.key, [])
            except SerializationError as exc:
                error = ClosureInputError(f"a dataset could not be built: {exc.message}")
                raise error from exc
            # A worker that was added after the dataset was made reads the share of another one.
            share = self.worker_index % handle.num_pipelines
            iterator = WorkerIterator(
                dataset_fn,
                InputContext(handle.num_pipelines, share, 1),
                ahead=self.ahead,
                position=handle.starts.get(self.worker_index, 0),
                worker_index=self.worker_index,
            )
            self.iterators.add(handle.uid, iterator)
        await iterator.ready()


def _unpack(
    segments: Sequence[memoryview],
    counts: Sequence[int],
    own: int,
    arrived: list[IteratorHandle[Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs; iterators among them are added to ``arrived``."""
    values, at = [], own
    for count in counts:
        values.append(Payload.from_segments(segments[at : at + count]))
        at += count
    token = arriving.set(arrived)
    try:
        return unpack_arguments(segments[0], segments[1:own], values)
    finally:
        arriving.reset(token)
