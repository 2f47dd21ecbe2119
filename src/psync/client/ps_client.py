"""The client of all ps tasks: pulls, pushes and assigns of sets of variables.

Every push and assign carries (sequence) and (closure, ordinal), so it may be sent again
after a lost connection: the ps answers a repetition from memory.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from psync.client.calls import Answers, Spread, UpdatePart
from psync.client.known_sets import knows_set
from psync.client.plans import Given, Plan, Request, body_of, make_plan, size_of, targets_of
from psync.client.ps_link import Question
from psync.client.pulled_steps import PulledSteps
from psync.client.rows import PsRows, check_exist
from psync.errors import RemoteProtocolError
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer, Received
from psync.numerics.blocks import BlockPool
from psync.numerics.indexed_slices import IndexedSlices
from psync.numerics.scatter import check_scatter, merged
from psync.specs import VariableSpec
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.lock_messages import AssignLocked, PullLocked
from psync.wire.ps_messages import Assign, AverageShards, Pull, Pulled, Push, Pushed
from psync.wire.tensors import to_bytes_view

MAX_PLANS = 1024
"""Sets of variables whose plans are kept, the least recently used go first."""

BuildUpdate = Callable[[Peer, Request, int, list[int] | None, Spread], Message]
"""Makes the message of one request: of its sequence, numbers of rows, and its update's spread."""

PART_BITS = 16
"""A call's number and that of its message to one ps share an integer on the wire."""


class _Body:
    """Where the body of an answer to a pull belongs."""

    __slots__ = ("_got", "_targets", "request")

    def __init__(self, request: Request, targets: list[memoryview]) -> None:
        self.request = request
        self._targets = targets
        self._got: tuple[int, ...] = ()  # lengths of what came

    def place(self, message: Message, lengths: tuple[int, ...]) -> list[memoryview]:
        """As ``Into``."""
        self._got = lengths
        if lengths == self.request.lengths:
            return self._targets
        return [to_bytes_view(np.empty(sum(lengths), np.uint8))]  # thrown away

    def check(self, received: Received, seen: PulledSteps | None) -> None:
        """Check that it is what was asked for, and note which steps it is of.

        Raises:
            RemoteProtocolError: It is something else.
        """
        request, message = self.request, received.message
        if not isinstance(message, Pulled):
            raise RemoteProtocolError(
                f"/job:ps/task:{request.ps} answered a pull with {type(message).__name__}"
            )
        if seen is not None:
            seen.note(message.steps)
        if self._got != request.lengths:
            raise RemoteProtocolError(
                f"/job:ps/task:{request.ps} sent other sizes than the shards have: "
                f"expected {request.nbytes} bytes, got {sum(self._got)}"
            )


class PsClient(PsRows):
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
        super().__init__(endpoint, addresses, pool, lost_after_s)
        # By each variable's id, which shards it stands for, dtype; the last used at the end.
        self._plans: OrderedDict[tuple[tuple[int, int, int, str], ...], Plan] = OrderedDict()
        self._set_ids = itertools.count(1)
        self._optimizers: list[set[int]] = [set() for _ in addresses]  # that each ps knows

    def begin_timeline(self, timeline: int) -> None:
        """All ps tasks have rolled back to a snapshot: they know what was in that, and no more."""
        self.timeline = timeline
        for known in self._optimizers:
            known.clear()

    def plan(self, variables: Sequence[VariableSpec]) -> Plan:
        """Return the plan for these variables, in this order."""
        # A shard that is asked for as a variable of its own bears the whole variable's id.
        # One that stands for a slot has the slot's dtype.
        key = tuple([(v.variable_id, v.shards[0].index, len(v.shards), v.dtype) for v in variables])
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
        lock: int = 0,
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
            lock: Under which this client holds the shards; 0: none.

        Raises:
            ParameterServerLost: A ps is gone.
            LockLost: The lock has ended before all shards were read.

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
        timeline = -1
        while self.timeline != timeline:  # again, if ps tasks rolled back to a snapshot meanwhile
            timeline = self.timeline
            answers = Answers(len(plan.requests))
            bodies = []
            for position, request in enumerate(plan.requests):
                body = _Body(request, targets_of(plan, request, views, given))
                bodies.append(body)
                note = functools.partial(answers.note, position)
                answers.questions.append(self._ask_for(body, optimizer, slot, lock, note))
            for body, received in zip(bodies, await answers.wait(), strict=True):
                body.check(received, seen)
        for root in roots.values():
            self._pool.give(root)  # handed out again once the caller's arrays are gone
        return arrays

    def _ask_for(
        self,
        body: _Body,
        optimizer: int,
        slot: str,
        lock: int,
        then: Callable[[Received | Exception], None],
    ) -> Question:
        request = body.request

        def build(peer: Peer) -> Pull:
            members = members_for(peer, request)
            if lock:
                return PullLocked(request.set_id, members, optimizer, slot, lock)
            return Pull(request.set_id, members, optimizer, slot)

        return self.links[request.ps].ask(
            build, (), then, bulk=request.nbytes > SMALL_BODY_BYTES, into=body.place,
            set_ids=(request.set_id,), locked=lock > 0,
        )  # fmt: skip

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray | IndexedSlices],
        *,
        optimizer: int,
        config: dict[str, Any],
        step: int,
        closure: int,
        ordinal: int,
        ratios: Sequence[float] | None = None,
    ) -> list[Pushed]:
        """Push a gradient for each of a plan's variables.

        Args:
            plan: From ``plan``.
            gradients: Of the variables' shapes and dtypes, C-contiguous. Not copied. Of some rows
                only: IndexedSlices of the variable's dtype, with int64 as indices; rows that occur
                more than once are summed.
            optimizer: Id of the optimizer that applies them.
            config: Defines it, for a ps that does not know it yet.
            step: Highest step of it that this client knows.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
            ratios: Of layerwise optimizers: for each variable what its learning rate is multiplied
                by. None: each ps takes each of its shards for a whole variable.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun is shielded: it ends in the background.
        """

        def build(
            peer: Peer, request: Request, sequence: int, rows: list[int] | None, spread: Spread
        ) -> Push:
            defines = None if optimizer in self._optimizers[request.ps] else config
            return Push(
                sequence, self.links[request.ps].updates.acked_below, closure,
                ordinal << PART_BITS | request.part, request.set_id, members_for(peer, request),
                optimizer, defines, step, rows,
                None if ratios is None else [ratios[variable] for variable, *_ in request.cuts],
                spread,
            )  # fmt: skip

        gradients = [
            self.in_order(gradient) if isinstance(gradient, IndexedSlices) else gradient
            for gradient in gradients
        ]
        answers = await self._mutate(plan, gradients, build)
        for request in plan.requests:
            self._optimizers[request.ps].add(optimizer)
        return answers

    def in_order(self, slices: IndexedSlices) -> IndexedSlices:
        """Return the same gradient with ascending indices, each once."""
        rows, values = merged(slices.indices, slices.values, "add", self.empty)
        return slices if rows is slices.indices else IndexedSlices(values, rows)

    async def assign(
        self,
        plan: Plan,
        values: Sequence[np.ndarray | IndexedSlices],
        *,
        op: str,
        closure: int,
        ordinal: int,
        lock: int = 0,
    ) -> list[Pushed]:
        """Assign, add or subtract a value for each of a plan's variables; else as ``push``.

        Args:
            plan: From ``plan``.
            values: As ``gradients`` of ``push``.
            op: "assign", "add" or "sub"; where all values are rows, any of ``numerics.scatter``.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
            lock: Under which this client holds the shards; 0: none.

        Raises:
            ParameterServerLost, LockLost: A ps is gone; the lock has ended too soon.

        Cancellation: As ``push``.
        """

        def build(
            peer: Peer, request: Request, sequence: int, rows: list[int] | None, spread: Spread
        ) -> Assign:
            common = (
                sequence, self.links[request.ps].updates.acked_below, closure,
                ordinal << PART_BITS | request.part, request.set_id, members_for(peer, request), op,
                rows, spread,
            )  # fmt: skip
            return AssignLocked(*common, lock) if lock else Assign(*common)

        return await self._mutate(plan, values, build, locked=lock > 0)

    async def scatter(
        self,
        spec: VariableSpec,
        rows: np.ndarray,
        values: np.ndarray,
        *,
        op: str,
        closure: int,
        ordinal: int,
    ) -> list[Pushed]:
        """Change some rows of a variable; else as ``assign``.

        Args:
            spec: Of the variable.
            rows: int64, each in [0, number of rows), in any order.
            values: A row for each, C-contiguous, of the variable's dtype. Of several for one row
                all count ("assign": the last), see ``scatter_ops.merged``.
            op: One of ``scatter_ops.SCATTER_OPS``.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.

        Raises:
            GradientError: The operation is none for the variable's dtype.
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """
        check_scatter(op, spec.dtype, f'variable "{spec.name}"')
        check_exist(spec, rows)
        rows, values = merged(rows, values, op, self.empty)
        slices = IndexedSlices(values, rows)
        return await self.assign(
            self.plan((spec,)), [slices], op=op, closure=closure, ordinal=ordinal
        )

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

        def part(request: Request) -> UpdatePart:
            link = self.links[request.ps]
            shards = [(number, originals[number], index) for number, index in request.members]
            return UpdatePart(
                link,
                lambda peer, sequence, spread: AverageShards(
                    sequence, link.updates.acked_below, closure,
                    ordinal << PART_BITS | request.part, shards, decay, spread,
                ),
            )  # fmt: skip

        return await self.update([part(request) for request in plan.requests])

    async def _mutate(
        self,
        plan: Plan,
        arrays: Sequence[np.ndarray | IndexedSlices],
        build: BuildUpdate,
        *,
        locked: bool = False,
    ) -> list[Pushed]:
        for spec, array in zip(plan.variables, arrays, strict=True):
            if isinstance(array, IndexedSlices):
                check_exist(spec, array.indices[[0, -1]] if len(array.indices) else array.indices)
        given = [
            array if isinstance(array, IndexedSlices) else to_bytes_view(array) for array in arrays
        ]
        return await self.update(
            [self._part(request, given, build, locked) for request in plan.requests]
        )

    def _part(
        self, request: Request, given: Sequence[Given], build: BuildUpdate, locked: bool
    ) -> UpdatePart:
        segments, rows = body_of(request, given)
        nbytes = request.nbytes if rows is None else sum(map(size_of, segments))
        return UpdatePart(
            self.links[request.ps],
            lambda peer, sequence, spread: build(peer, request, sequence, rows, spread),
            segments,
            bulk=nbytes > SMALL_BODY_BYTES,
            set_id=request.set_id,
            locked=locked,
        )


def members_for(peer: Peer, request: Request) -> list[tuple[int, int]] | None:
    """Return the shards of a request's set, or None where the ps knows them by its number."""
    return None if knows_set(peer, request.set_id) else request.members
