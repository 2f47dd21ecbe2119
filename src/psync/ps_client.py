"""All ps tasks as one task sees them: pulls, pushes and assigns of whole sets of variables.

Layer: L3. Imports: errors, specs, blocks, endpoint, plans, ps_link, pulled_steps, rpc, wire.

Every push and assign carries (sequence) and (closure, ordinal), so it may be sent again
after a lost connection: the ps answers a repetition from memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from psync.blocks import BlockPool
from psync.endpoint import Endpoint
from psync.errors import RemoteProtocolError
from psync.plans import Plan, Request, make_plan, targets_of
from psync.ps_link import PsLink, knows_set
from psync.pulled_steps import PulledSteps
from psync.rpc import Peer
from psync.specs import VariableSpec
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import (
    Assign,
    AverageShards,
    DefineOptimizer,
    Message,
    Pull,
    Pulled,
    Push,
    Pushed,
)
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PLANS = 1024
"""Sets of variables whose plans are kept, the least recently used go first."""

PART_BITS = 16
"""A call's number and that of its message to one ps share an integer on the wire."""


class PsClient:
    """All ps tasks as seen by one worker or by the coordinator.

    Args:
        endpoint: Bears the client's name and incarnation.
        addresses: Of the ps tasks, in order.
        pool: Memory of pulled arrays, recycled once nobody holds them.
        lost_after_s: A ps that cannot be reached for this many seconds is lost.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Sequence[str],
        pool: BlockPool,
        lost_after_s: float = 15.0,
    ) -> None:
        self.links = [
            PsLink(endpoint, index, address, lost_after_s)
            for index, address in enumerate(addresses)
        ]
        self._pool = pool
        self.failpoints = endpoint.platform.failpoints
        # By each variable's id and which shards it stands for; the last used at the end.
        self._plans: OrderedDict[tuple[tuple[int, int, int], ...], Plan] = OrderedDict()
        self._set_ids = itertools.count(1)
        self._optimizers: list[set[int]] = [set() for _ in addresses]  # that each ps knows
        self._pushes: set[asyncio.Future[Any]] = set()  # begun, shielded from cancellation

    def plan(self, variables: Sequence[VariableSpec]) -> Plan:
        """Return the plan for these variables, in this order."""
        # A shard that is asked for as a variable of its own bears the whole variable's id.
        key = tuple([(v.variable_id, v.shards[0].index, len(v.shards)) for v in variables])
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        if len(self._plans) >= MAX_PLANS:
            self._plans.popitem(last=False)
        plan = self._plans[key] = make_plan(variables, self._set_ids)
        return plan

    async def pull(
        self,
        plan: Plan,
        *,
        writable: bool = False,
        out: Sequence[np.ndarray | None] | None = None,
        optimizer: int = -1,
        slot: str = "",
        seen: PulledSteps | None = None,
    ) -> list[np.ndarray]:
        """Return the values of a plan's variables, one consistent version of each shard.

        Args:
            plan: From ``plan``.
            writable: Whether the caller may change the arrays.
            out: Arrays to read into instead (C-contiguous, of the variable's shape and
                dtype), or None for each.
            optimizer: With ``slot``: that optimizer's slot instead of the values.
            slot: Its name.
            seen: Notes which steps of synchronous groups the values are of.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; ``out`` then holds anything.
        """
        given = {
            index: to_bytes_view(array)
            for index, array in enumerate(out or ())
            if array is not None
        }
        places = plan.places
        needed = {place.buffer for index, place in enumerate(places) if index not in given}
        roots = {
            buffer: self._pool.take(nbytes)
            for buffer, nbytes in enumerate(plan.buffers)
            if buffer in needed
        }
        arrays: list[np.ndarray] = []
        for index, (buffer, offset, shape, dtype) in enumerate(places):
            if out is not None and index in given:
                arrays.append(cast(np.ndarray, out[index]))
                continue
            array: np.ndarray = np.ndarray(shape, dtype, roots[buffer], offset)
            array.setflags(write=writable)
            arrays.append(array)
        views = {buffer: to_bytes_view(root) for buffer, root in roots.items()}
        calls = []
        for request in plan.requests:
            targets = targets_of(plan, request, views, given)
            calls.append(self._pull_one(request, targets, optimizer, slot, seen))
        await _all(calls)
        for root in roots.values():
            self._pool.give(root)  # handed out again once the caller's arrays are gone
        return arrays

    async def _pull_one(
        self,
        request: Request,
        targets: list[memoryview],
        optimizer: int,
        slot: str,
        seen: PulledSteps | None,
    ) -> None:
        got: tuple[int, ...] = ()

        def into(message: Message, lengths: tuple[int, ...]) -> list[memoryview]:
            nonlocal got
            got = lengths
            if lengths == request.lengths:
                return targets
            return [to_bytes_view(np.empty(sum(lengths), np.uint8))]  # thrown away

        def build(peer: Peer) -> Pull:
            return Pull(request.set_id, members_for(peer, request), optimizer, slot)

        received = await self.links[request.ps].call(
            build, bulk=request.nbytes > SMALL_BODY_BYTES, into=into, set_id=request.set_id
        )
        if not isinstance(received.message, Pulled):
            raise RemoteProtocolError(
                f"/job:ps/task:{request.ps} answered a pull with {type(received.message).__name__}"
            )
        if seen is not None:
            seen.note(received.message.steps)
        if got != request.lengths:
            raise RemoteProtocolError(
                f"/job:ps/task:{request.ps} sent other sizes than the shards have: "
                f"expected {request.nbytes} bytes, got {sum(got)}"
            )

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray],
        *,
        optimizer: int,
        config: dict[str, Any],
        step: int,
        closure: int,
        ordinal: int,
    ) -> list[Pushed]:
        """Push a gradient for each of a plan's variables.

        Args:
            plan: From ``plan``.
            gradients: Of the variables' shapes and dtypes, C-contiguous. Not copied.
            optimizer: Id of the optimizer that applies them.
            config: Defines it, for a ps that does not know it yet.
            step: Highest step of it that this client knows.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun is shielded: it ends in the background.
        """

        def build(peer: Peer, request: Request, sequence: int) -> Push:
            defines = None if optimizer in self._optimizers[request.ps] else config
            return Push(
                sequence, self.links[request.ps].acked_below, closure,
                ordinal << PART_BITS | request.part, request.set_id, members_for(peer, request),
                optimizer, defines, step,
            )  # fmt: skip

        answers = await self._mutate(plan, gradients, build)
        for request in plan.requests:
            self._optimizers[request.ps].add(optimizer)
        return answers

    async def assign(
        self, plan: Plan, values: Sequence[np.ndarray], *, op: str, closure: int, ordinal: int
    ) -> list[Pushed]:
        """Assign, add or subtract a value for each of a plan's variables; else as ``push``.

        Args:
            plan: From ``plan``.
            values: As ``gradients`` of ``push``.
            op: "assign", "add" or "sub".
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """

        def build(peer: Peer, request: Request, sequence: int) -> Assign:
            return Assign(
                sequence, self.links[request.ps].acked_below, closure,
                ordinal << PART_BITS | request.part, request.set_id, members_for(peer, request), op,
            )  # fmt: skip

        return await self._mutate(plan, values, build)

    async def average(
        self,
        plan: Plan,
        originals: Mapping[int, int],
        *,
        decay: float,
        closure: int,
        ordinal: int,
    ) -> list[Pushed]:
        """Let the ps tasks update moving averages: ``s -= (1 - decay) * (s - v)``.

        Args:
            plan: Of the averages.
            originals: Id of each average → id of the variable beside which it lies.
            decay: In [0, 1).
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """

        async def average(request: Request) -> Pushed:
            link = self.links[request.ps]
            shards = [(number, originals[number], index) for number, index in request.members]
            return await self._update_one(
                link,
                lambda peer, sequence: AverageShards(
                    sequence, link.acked_below, closure, ordinal << PART_BITS | request.part,
                    shards, decay,
                ),
            )  # fmt: skip

        return await self.shielded(lambda: [average(request) for request in plan.requests])

    async def define_optimizer(self, optimizer: int, config: dict[str, Any]) -> None:
        """Make an optimizer known to all ps tasks, so that its slots can be read.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        message = DefineOptimizer(optimizer, config)
        await _all([link.call(lambda peer: message) for link in self.links])

    async def _mutate(
        self,
        plan: Plan,
        arrays: Sequence[np.ndarray],
        build: Callable[[Peer, Request, int], Message],
    ) -> list[Pushed]:
        self.failpoints.hit("worker.push.begun")
        views = [to_bytes_view(array) for array in arrays]

        answers = await self.shielded(
            lambda: [self._mutate_one(request, views, build) for request in plan.requests]
        )
        self.failpoints.hit("worker.push.answered")
        return answers

    async def shielded(self, calls: Callable[[], Sequence[Coroutine[Any, Any, T]]]) -> list[T]:
        """Make all ``calls`` at once and return what they return.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: They go on in the background, see ``drain``; an error is logged then.
        """

        async def send() -> list[T]:
            return await self.together(calls())

        work = asyncio.ensure_future(send())
        self._pushes.add(work)
        work.add_done_callback(self._pushes.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_note_result)
            raise

    async def together(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Make all ``calls`` at once and return what they return.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: All are cancelled.
        """
        if self.failpoints.armed("worker.push.between_ps"):
            return await self._one_by_one(calls)
        return await _all(calls)

    async def _one_by_one(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        answers: list[T] = []
        try:
            for call in calls:
                if answers:
                    self.failpoints.hit("worker.push.between_ps")
                answers.append(await call)
        finally:
            for call in calls:
                call.close()
        return answers

    async def _mutate_one(
        self,
        request: Request,
        views: Sequence[memoryview],
        build: Callable[[Peer, Request, int], Message],
    ) -> Pushed:
        return await self._update_one(
            self.links[request.ps],
            lambda peer, sequence: build(peer, request, sequence),
            [views[index][start:end] for index, start, end in request.cuts],
            bulk=request.nbytes > SMALL_BODY_BYTES,
            set_id=request.set_id,
        )

    async def _update_one(
        self,
        link: PsLink,
        build: Callable[[Peer, int], Message],
        segments: Sequence[memoryview] = (),
        *,
        bulk: bool = False,
        set_id: int | None = None,
    ) -> Pushed:
        """Send what changes shards under a sequence of its own; return the answer to it."""
        sequence = link.draw_sequence()
        try:
            received = await link.call(
                lambda peer: build(peer, sequence), segments, bulk=bulk, set_id=set_id
            )
        finally:
            link.answered(sequence)
        if not isinstance(received.message, Pushed):
            raise RemoteProtocolError(
                f"{link.task} answered an update with {type(received.message).__name__}"
            )
        return received.message

    async def drain(self) -> None:
        """Wait for pushes that were begun and whose callers were cancelled.

        Cancellation: Safe.
        """
        while self._pushes:
            await asyncio.wait(list(self._pushes))

    async def close(self) -> None:
        """Stop pushes that were begun, close all links. Cancellation: safe."""
        for work in self._pushes:
            work.cancel()
        await asyncio.gather(*self._pushes, return_exceptions=True)
        for link in self.links:
            await link.close()


def members_for(peer: Peer, request: Request) -> list[tuple[int, int]] | None:
    """Return the shards of a request's set, or None where the ps knows them by its number."""
    return None if knows_set(peer, request.set_id) else request.members


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first error wins once all have ended, so nothing is left running.

    Like ``asyncio.gather``, but the last one needs no task: every pull and push comes through here.
    """
    others = [asyncio.ensure_future(call) for call in calls[:-1]]
    try:
        outcomes = [await _outcome(call) for call in (calls[-1], *reversed(others))]
    except BaseException:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        raise
    results: list[T] = []
    for outcome in reversed(outcomes):
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


async def _outcome(call: Awaitable[T]) -> T | Exception:
    try:
        return await call
    except Exception as exc:
        return exc


def _note_result(work: asyncio.Future[Any]) -> None:
    """Log how a push ended whose caller was cancelled."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.info("a push whose step was cancelled failed: %s", error)
