"""The client of all ps tasks: pulls, pushes and assigns of sets of variables.

Every push and assign carries (sequence) and (closure, ordinal), so it may be sent again; see
``client.outgoing``.

A layer-wise rule (Lamb) needs norms of whole variables before a push: ``MeasurePush`` carries the
gradients to the ps tasks, which answer with sums of squares and change nothing, and the ``Push``
that follows carries one ratio for each variable. Nothing is remembered between the two.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from psync.client.landing import Landing
from psync.client.outgoing import Outgoing
from psync.client.plans import Plan, Request, body_of, given_of, make_plan
from psync.client.prefetch import Landed, Wanted
from psync.client.ps_link import Body, Call, PsLink, Where, always, together
from psync.client.pulled_steps import PulledSteps
from psync.client.rows import PsRows, check_exist
from psync.client.work_meter import WorkMeter
from psync.errors import RemoteProtocolError
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.numerics.compression import Compression
from psync.numerics.memory import BlockPool
from psync.numerics.rows import IndexedSlices, check_scatter, merged
from psync.numerics.rules import Lamb, Sums
from psync.specs import ShardSpec, VariableSpec
from psync.wire.closure_numbers import PART_BITS
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import (
    Assign,
    AssignLocked,
    AverageShards,
    DefineOptimizer,
    Done,
    Measured,
    MeasurePush,
    Pull,
    Pulled,
    PullLocked,
    Push,
    Pushed,
)
from psync.wire.tensors import to_bytes_view

MAX_PLANS = 1024
"""Sets of variables whose plans are kept, the least recently used go first."""

_KEY = operator.attrgetter("key")


class Part(NamedTuple):
    """What one message of an update says, whatever its kind."""

    request: Request
    # sequence, that below which all are answered, closure, call
    identity: tuple[int, int, int, int]
    members: list[tuple[int, int]] | None
    rows: list[int] | None  # as ``body_of`` returns them
    spread: list[tuple[int, int]] | None
    """(ps, sequence there) of the other messages, so that a cut finds all or none; None: it is the
    only one."""
    pull: int = -1  # the set whose values the answer brings
    pull_members: list[tuple[int, int]] | None = None


class PsClient(PsRows):
    """All ps tasks as seen by one worker or by the coordinator.

    Args:
        endpoint: Bears the client's name and incarnation.
        addresses: Of the ps tasks, in order.
        pool: Memory of pulled arrays, recycled once nobody holds them.
        lost_after_s: A ps that cannot be reached for this many seconds is lost.

    Attributes:
        loop: The event loop to which its connections belong.
        memory: Of this task, which ps tasks of its host can read.
        work: What the time of this task goes to.
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
        self.parts, self.now = endpoint.platform.parts, endpoint.platform.now
        self.memory = endpoint.platform.memory
        self.outgoing = self.parts.of(Outgoing)()
        self._pool = pool
        self._windows = self.memory.windows
        self.loop = asyncio.get_running_loop()
        self.work = WorkMeter(self.loop.time)
        # By compression; of each variable its id, for which shards it stands, dtype. The last used
        # is at the end.
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self._set_ids = itertools.count(1)
        self._optimizers: list[set[int]] = [set() for _ in addresses]  # that each ps knows

    async def close(self, patience_s: float = 0.0) -> None:
        """Stop updates that have not ended after so long, close all links. Cancellation: safe."""
        await self.outgoing.close(patience_s)
        for link in self.links:
            await link.close()

    @property
    def timeline(self) -> int:
        """How often all ps tasks have rolled back to a snapshot."""
        return self.outgoing.timeline

    def begin_timeline(self, timeline: int) -> None:
        """All ps tasks have rolled back to a snapshot: they know what was in that, and no more."""
        self.outgoing.timeline = timeline
        for known in self._optimizers:
            known.clear()

    def plan(
        self, variables: Sequence[VariableSpec], compression: Compression | None = None
    ) -> Plan:
        """Return the plan for these variables, in this order; as they are, or compressed."""
        key = (compression, *map(_KEY, variables))
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        if len(self._plans) >= MAX_PLANS:
            self._plans.popitem(last=False)
        plan = self._plans[key] = make_plan(variables, self._set_ids, compression)
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
        landing = Landing(plan, self._pool, out or (), writable, self._windows)
        timeline = -1
        with self.work.pull:
            while self.outgoing.timeline != timeline:  # again, if ps tasks rolled back meanwhile
                timeline = self.outgoing.timeline
                calls = [
                    self._pull(request, functools.partial(landing.place, at), optimizer, slot, lock)
                    for at, request in enumerate(plan.requests)
                ]
                for pulled in await together(calls):
                    if seen is not None:
                        seen.note(pulled.steps)
            return await landing.values()

    def _pull(
        self, request: Request, where: Where, optimizer: int, slot: str, lock: int
    ) -> Call[Pulled]:
        def build(peer: Connection) -> Pull:
            what = request.set_id, members_for(peer, request), optimizer, slot
            return PullLocked(*what, lock) if lock else Pull(*what)

        return Call(
            self.links[request.ps], build, Pulled, "a pull", (), request.nbytes > SMALL_BODY_BYTES,
            Body(request.lengths, where, "the shards"), (request.set_id,), lock > 0,
        )  # fmt: skip

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray | IndexedSlices],
        *,
        optimizer: int,
        config: dict[str, Any],
        elsewhere: Mapping[int, int],
        closure: int,
        ordinal: int,
        layerwise: bool = False,
        wanted: Wanted | None = None,
        raised: ShardSpec | None = None,
    ) -> list[Pushed]:
        """Push a gradient for each of a plan's variables.

        Args:
            plan: From ``plan``.
            gradients: Of the variables' shapes and dtypes, C-contiguous. Not copied. Of some rows
                only: IndexedSlices of the variable's dtype, with int64 as indices; rows that occur
                more than once are summed.
            optimizer: Id of the optimizer that applies them.
            config: Defines it, for a ps that does not know it yet.
            elsewhere: By ps, the pushes of it without a part there that this client knows of,
                marked.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
            layerwise: Whether the rule takes norms of whole variables: then the shards are measured
                first, so that all of a variable get the same trust ratio.
            wanted: Gets its values with the answers if all of them lie on ps tasks that are pushed
                to, each read once the push is applied there, and none is busy then.
            raised: A shard of one number, on a ps that is pushed to, that becomes one more.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun is shielded: it ends in the background.
        """
        ratios: list[float] | None = None
        if layerwise:
            ratios = await self._trust_ratios(plan, gradients, optimizer, config, elsewhere)

        def build(part: Part, timeline: int = self.outgoing.timeline) -> Push:
            request = part.request
            return Push(
                *part.identity, request.set_id, part.members, optimizer,
                None if optimizer in self._optimizers[request.ps] else config,
                # What was known on another timeline ps tasks have undone.
                elsewhere.get(request.ps, 0) if timeline == self.outgoing.timeline else 0,
                part.rows,
                None if ratios is None else [ratios[variable] for variable, *_ in request.cuts],
                part.spread, part.pull, part.pull_members,
                raised.key if raised and (request.ps, request.part) == (raised.ps, 0) else None,
                request.place,
            )  # fmt: skip

        landings = None if wanted is None else wanted.landings(plan, self._pool, self._windows)
        answers = await self._mutate(
            plan, self.in_order(gradients), build, closure, ordinal, landings=landings
        )
        for request in plan.requests:
            self._optimizers[request.ps].add(optimizer)
        if wanted is not None:
            await wanted.came([answer.steps for answer in answers if answer.steps is not None])
        return answers

    async def _trust_ratios(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray | IndexedSlices],
        optimizer: int,
        config: dict[str, Any],
        elsewhere: Mapping[int, int],
    ) -> list[float] | None:
        """Return what the learning rate is multiplied by for each of a plan's variables.

        None if there is nothing to ask for: each variable lies on one ps, which finds the ratio
        itself; or there are gradients of rows, which such a rule refuses.
        """
        if all(len(v.shards) == 1 for v in plan.variables):
            return None
        given = [to_bytes_view(each) for each in gradients if isinstance(each, np.ndarray)]
        if len(given) < len(gradients):
            return None

        def call(request: Request) -> Call[Measured]:
            def build(peer: Connection) -> MeasurePush:
                members = members_for(peer, request)
                known = elsewhere.get(request.ps, 0)
                return MeasurePush(request.set_id, members, optimizer, config, known)

            segments, _, nbytes = body_of(request, given)
            return Call(
                self.links[request.ps], build, Measured, "a measurement", segments,
                bulk=nbytes > SMALL_BODY_BYTES, set_ids=(request.set_id,),
            )  # fmt: skip

        sums: list[list[Sums]] = [[] for _ in plan.variables]  # what its shards add to its norms
        calls = [call(request) for request in plan.requests]
        for request, answer in zip(plan.requests, await together(calls), strict=True):
            if len(answer.sums) != len(request.cuts):
                raise RemoteProtocolError(
                    f"/job:ps/task:{request.ps} measured {len(answer.sums)} shards, expected "
                    f"{len(request.cuts)}"
                )
            for (variable, *_), of_shard in zip(request.cuts, answer.sums, strict=True):
                sums[variable].append((of_shard[0], of_shard[1]))
        return [Lamb.trust_ratio(of_variable) for of_variable in sums]

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
            op: "assign", "add", "sub" or "max"; where all values are rows, any of
                ``numerics.scatter``.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
            lock: Under which this client holds the shards; 0: none.

        Raises:
            ParameterServerLost, LockLost: A ps is gone; the lock has ended too soon.

        Cancellation: As ``push``.
        """

        def build(part: Part) -> Assign:
            common = (
                *part.identity, part.request.set_id, part.members, op, part.rows, part.spread,
            )  # fmt: skip
            return AssignLocked(*common, lock) if lock else Assign(*common)

        return await self._mutate(plan, values, build, closure, ordinal, locked=lock > 0)

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
            ValueMismatchError: The operation is none for the variable's dtype.
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

        def build(part: Part) -> AverageShards:
            shards = [(number, originals[number], index) for number, index in part.request.members]
            return AverageShards(*part.identity, shards, decay, part.spread)

        return await self._mutate(plan, (), build, closure, ordinal)

    async def define_optimizer(self, optimizer: int, config: dict[str, Any]) -> None:
        """Make an optimizer known to all ps tasks, so that its slots can be read.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        message = DefineOptimizer(optimizer, config)
        await together([Call(link, always(message), Done, "an optimizer") for link in self.links])

    async def _mutate(
        self,
        plan: Plan,
        arrays: Sequence[np.ndarray | IndexedSlices],
        build: Callable[[Part], Message],
        closure: int,
        ordinal: int,
        *,
        locked: bool = False,
        landings: Mapping[int, Landed] | None = None,
    ) -> list[Pushed]:
        """Deliver an update of a plan's variables: one for each of ``arrays``, or without any."""
        if IndexedSlices in map(type, arrays):
            for spec, array in zip(plan.variables, arrays, strict=True):
                if isinstance(array, IndexedSlices):
                    check_exist(
                        spec, array.indices[[0, -1]] if len(array.indices) else array.indices
                    )
        given = given_of(arrays)
        links = [self.links[request.ps] for request in plan.requests]

        def update(at: int, request: Request, drawn: Sequence[tuple[int, int]]) -> Call[Pushed]:
            """Return the call of one request; ``drawn``: (ps, sequence) of all messages."""
            link = links[at]
            landing = landings.get(request.ps) if landings and not request.part else None
            segments, rows, nbytes = body_of(request, given) if given else ([], None, 0)
            set_ids = [request.set_id] if given else []
            body: Body | None = None
            if landing is not None:
                pulled, where = landing
                body = Body(pulled.lengths, where, "the shards", may_lack=True)
                nbytes = max(nbytes, pulled.nbytes)
                set_ids.append(pulled.set_id)
            spread = [*drawn[:at], *drawn[at + 1 :]] if len(drawn) > 1 else None
            call = ordinal << PART_BITS | request.part

            def message(peer: Connection) -> Message:
                identity = drawn[at][1], link.updates.acked_below, closure, call
                own = request, identity, members_for(peer, request), rows, spread
                if landing is None:
                    return build(Part(*own))
                # What the push itself defines is defined when the rest is read.
                known = None if pulled.set_id == request.set_id else members_for(peer, pulled)
                return build(Part(*own, pulled.set_id, known))

            return Call(
                link, message, Pushed, "an update", segments, nbytes > SMALL_BODY_BYTES,
                body, set_ids, locked,
            )  # fmt: skip

        def calls_of(sequences: Sequence[int]) -> list[Call[Pushed]]:
            drawn = [(link.index, own) for link, own in zip(links, sequences, strict=True)]
            return [update(at, request, drawn) for at, request in enumerate(plan.requests)]

        with self.work.push:
            return await self.outgoing.deliver([link.updates for link in links], calls_of)


def members_for(peer: Connection, request: Request) -> list[tuple[int, int]] | None:
    """Return the shards of a request's set, or None where the ps knows them by its number."""
    return None if request.set_id in peer.state["sets"] else request.members
