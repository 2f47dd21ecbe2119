"""All ps tasks as one task sees them: pulls of variables and rows, updates, optimizers' state.

An update changes each ps at most once, whatever is lost. It is one message or several: to each ps,
and more to one that gets much. Each bears a number of the link that it goes over, and says which
smaller ones are answered (``counters.Numbers``); the ledger of a ps answers a repetition from
memory. Besides, it bears (closure, ordinal), by which ps tasks know a second run of a closure.

    state       meaning                               leaves it by
    drawn       it has its numbers                    the first message → under way
    under way   on a connection, or waiting for one   every answer → answered; an error, or its
                                                      caller's cancellation → given up
    answered    the caller has the answers            its numbers are acknowledged
    given up    nobody waits for an answer; it may    its numbers are acknowledged
                have been served

    dies, or is lost                    what follows
    a connection, a message, an answer  ``PsLink`` sends the message again, under the same number
    a ps that has a backup              the coordinator's link waits for the failover, then sends it
                                        to that. A worker's session ends, see ``client.link``
    a ps, before a rollback             the link waits; all messages of an update are sent again
                                        under the same numbers, also those that were answered: what
                                        one ps has undone no other may keep. A worker's session ends
    a ps, for good                      ParameterServerLost to the caller, when all messages have
                                        ended; those to other ps tasks may have been served
    the caller (cancelled)              shielded: it goes on, its error is logged; ``drain`` waits
                                        for it. Otherwise it is given up
    this task                           ps tasks fence it. Its closure runs again elsewhere and
                                        sends the same (closure, ordinal): answered "duplicate"

A layer-wise rule (Lamb) needs norms of whole variables before a push: ``MeasurePush`` carries the
gradients to the ps tasks, which answer with sums of squares and change nothing, and the ``Update``
that follows carries one ratio for each variable. Nothing is remembered between the two.

A row that is requested many times travels once. Rows of several shards travel in ascending order,
so those of one shard lie side by side, and a lookup costs one small request to each ps that has
some of them; one pass brings the rows into the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import logging
import math
import operator
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from psync.client.counters import Numbers, PulledSteps, WorkMeter
from psync.client.link import Answers, Call, Outgoing, PsLink, ask, expect
from psync.client.plan import Array, Landing, Plan, Request, bodies_of, into_targets, make_plan
from psync.errors import (
    ConfigurationError,
    RemoteProtocolError,
    UnknownVariableError,
)
from psync.net.endpoint import Endpoint
from psync.net.shielding import end_all
from psync.numerics.compression import Compression
from psync.numerics.memory import BlockPool, roomy
from psync.numerics.rows import IndexedSlices, check_scatter, distinct, merged
from psync.numerics.rules import Lamb, Sums, UpdateRule, registered_in
from psync.specs import ShardSpec, VariableSpec, count_of, dtype_of, marked_after
from psync.store.push_counts import total_of
from psync.wire import messages
from psync.wire.closure_numbers import PART_BITS
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

MAX_PLANS = 1024
"""Sets of variables whose plans are kept, by their handles and by their keys; the least recently
used go first."""

ROWS_PER_REQUEST_BYTES = 32 << 20
"""More rows of one ps are asked for in several messages, each of which may see another version."""

PARTS_PER_REQUEST = 4096

_KEY = operator.attrgetter("key")
_SPEC = operator.attrgetter("spec")


class PlanUpdate(Answers[messages.Pushed]):
    """An update of a plan's variables: a message for each of the plan's requests.

    Args:
        client: Whose update it is.
        plan: Of the variables.
        arrays: For each of them; or none at all.
        definitions: For each request.
        identity: Id of the closure, or -1; and the ordinal of the call within it.
        elsewhere: By ps, the pushes without a part there that are known; None: it is no push.
        factors: For each request; or none at all.
        lock: Under which this client holds the shards; 0: none.
        landing: Gets values that come with the answers; None: none are wanted.
    """

    def __init__(
        self,
        client: PsClient,
        plan: Plan,
        arrays: Sequence[Array],
        definitions: Sequence[messages.DefinePlan],
        identity: tuple[int, int],
        *,
        elsewhere: Mapping[int, int] | None = None,
        factors: Sequence[list[float]] = (),
        lock: int = 0,
        landing: Landing | None = None,
    ) -> None:
        self._plan, self._definitions, self._identity = plan, definitions, identity
        self._elsewhere, self._known_on = elsewhere, client.outgoing.timeline
        self._factors, self._lock, self._client = factors, lock, client
        self._rows: list[list[int] | None] = []  # that the messages name
        calls = []
        for at, (segments, rows, nbytes) in enumerate(bodies_of(plan, arrays, client.empty)):
            build, link = functools.partial(self.message, at), client.links[plan.requests[at].ps]
            self._rows.append(rows)
            # Under a lock nothing may be in front of it that waits for that.
            lane = "control" if lock else ""
            call = Call(link, segments=segments, nbytes=nbytes, lane=lane, build=build)
            call.definition = definitions[at]
            calls.append(call)
        super().__init__(
            messages.Pushed, "an update", calls, "the shards", landing, client.outgoing
        )

    def message(self, at: int) -> messages.Update:
        """Return the message of a request, as it is sent now."""
        request, sent, drawn = self._plan.requests[at], self.calls[at], self.drawn
        place = known = 0
        if self._elsewhere is not None:
            place = request.place
            # What was known on another timeline ps tasks have undone.
            if self._known_on == self._client.outgoing.timeline:
                known = self._elsewhere.get(request.ps, 0)
        return messages.Update(
            sent.number, sent.link.updates.acked_below, self._identity[0],
            self._identity[1] << PART_BITS | request.part, self._definitions[at].plan, known, place,
            # The other messages, so that a cut finds all of them or none.
            [*drawn[:at], *drawn[at + 1 :]] if len(drawn) > 1 else None, self._rows[at],
            self._factors[at] if self._factors else None, self._lock,
        )  # fmt: skip


def brought(pulled: Plan | None, ps: int) -> list[tuple[int, int]] | None:
    """Return the shards on a ps whose values an answer brings, as the wire has them."""
    if pulled is None or ps not in pulled.first:
        return None
    return pulled.requests[pulled.first[ps]].members


class PsClient:
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
        self.parts, self.now = endpoint.platform.parts, endpoint.platform.now
        self.outgoing = self.parts.of(Outgoing)()
        self.links = [
            PsLink(endpoint, index, address, lost_after_s, self.outgoing)
            for index, address in enumerate(addresses)
        ]
        self.memory = endpoint.platform.memory
        self._plan_update = self.parts.of(PlanUpdate)
        self._pool = pool
        self.loop = asyncio.get_running_loop()
        self.work = WorkMeter(self.loop.time)
        # By compression and keys of variables. The last used is at the end.
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        # As ``plan``, by the variables' handles: one look-up, as these hash by identity.
        self.plan_of: Callable[..., Plan] = functools.lru_cache(MAX_PLANS)(self._plan_of)

    async def close(self, patience_s: float = 0.0) -> None:
        """Stop updates that have not ended after so long, close all links. Cancellation: safe."""
        try:
            await self.outgoing.close(patience_s)
        finally:
            self.plan_of = self._plan_of  # it would refer to itself
            await end_all([task for link in self.links for task in link.close()])

    @property
    def timeline(self) -> int:
        """How often all ps tasks have rolled back to a snapshot."""
        return self.outgoing.timeline

    def plan(
        self, variables: Sequence[VariableSpec], compression: Compression | None = None
    ) -> Plan:
        """Return the plan for these variables, in this order; as they are, or compressed."""
        key = (compression, *map(_KEY, variables))
        plan = self._plans[key] = self._plans.get(key) or make_plan(variables, compression)
        self._plans.move_to_end(key)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _plan_of(self, handles: tuple[Any, ...]) -> Plan:
        return self.plan(tuple(map(_SPEC, handles)))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with any contents, whose memory is used again once nobody holds it."""
        nbytes = math.prod(shape) * dtype.itemsize
        array: np.ndarray = np.ndarray(shape, dtype, self._pool.lend(roomy(nbytes)))
        return array

    # What is read.

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
        landing = Landing(plan, self._pool, out, writable, self.memory.windows)
        # Under a lock nothing may be in front of it that waits for a lock, and keeps it unread.
        lane = "control" if lock else ""
        slots = slot and plan.define((optimizer, slot), optimizer=optimizer, slot=slot)
        calls = []
        for at, request in enumerate(plan.requests):
            read, definition = request.read, slots[at] if slots else request.values
            if slots or lock:
                read = messages.Read(definition.plan, lock)
            into = functools.partial(landing.into, at)
            call = Call(self.links[request.ps], read, (), request.nbytes, lane, into)
            call.lengths, call.definition = request.lengths, definition
            calls.append(call)
        pull = Answers(messages.Pulled, "a pull", calls, "the shards", outgoing=self.outgoing)
        with self.work.pull:
            for pulled in await pull.send().all():
                landing.steps += [pulled.steps]
            if seen is not None:
                seen.note(landing.steps)
            return await landing.copied() if landing.kept else landing.settle()

    async def read_rows(
        self,
        spec: VariableSpec,
        rows: np.ndarray | range,
        *,
        seen: PulledSteps | None = None,
    ) -> np.ndarray:
        """Return some rows of a variable. Each row is one version of itself, never a torn one.

        Rows of one shard are of one version as long as they are not more than 32 MiB.

        Args:
            spec: Of the variable.
            rows: int64, 1-D, in any order; duplicates travel once. Checked: there is each.
                Or evenly spaced ones as a range, of which only the bounds travel.
            seen: Notes which steps of synchronous groups the values are of.

        Returns:
            Shape (number of rows asked for, *shape of a row); writable, the caller's own.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        dtype, row, inverse, each = dtype_of(spec.dtype), spec.shape[1:], None, rows
        if not isinstance(rows, range):
            # A ps gathers in any order; rows of several are cut at the shards, so they must ascend.
            each, inverse = distinct(rows, sort=len(spec.shards) > 1)
        landed = self.empty((len(each), *row), dtype)
        calls = list(self._row_calls(self.plan((spec,)), each, landed))
        answers = Answers(messages.Pulled, "a pull of rows", calls, "the rows")
        if calls:
            with self.work.pull:
                pulled = await answers.send().all()
                if seen is not None:
                    seen.note([each.steps for each in pulled])
        if inverse is None:
            return landed
        return landed.take(inverse, 0, self.empty((len(rows), *row), dtype), "clip")

    def _row_calls(self, plan: Plan, rows: np.ndarray | range, made: np.ndarray) -> Iterator[Call]:
        """Yield what asks for rows of a variable: of one ps each, and for not too much.

        Args:
            plan: Of the variable.
            rows: Each once; of more than one shard: ascending, or evenly spaced.
            made: Where they belong.
        """
        (spec,), target = plan.variables, to_bytes_view(made)
        row_bytes = math.prod(spec.shape[1:]) * made.dtype.itemsize
        most = max(1, ROWS_PER_REQUEST_BYTES // max(1, row_bytes))
        for request in plan.requests:
            parts: list[_Rows] = []
            size = 0
            for place, (offset, beyond) in enumerate(request.spans):
                begin, end = 0, len(rows)
                if len(spec.shards) > 1:
                    begin, end = _within(rows, offset, beyond)
                for start in range(begin, end, most):
                    stop = min(start + most, end)
                    size += (stop - start) * row_bytes
                    if parts and (size > ROWS_PER_REQUEST_BYTES or len(parts) == PARTS_PER_REQUEST):
                        yield self._rows_call(request, parts)
                        parts, size = [], (stop - start) * row_bytes
                    lies = target[start * row_bytes : stop * row_bytes]
                    parts.append(_Rows.of(place, rows[start:stop], offset, lies))
            if parts:
                yield self._rows_call(request, parts)

    def _rows_call(self, request: Request, parts: Sequence[_Rows]) -> Call:
        read = messages.Read(request.values.plan, 0, [each.on_wire for each in parts])
        numbers = [each.numbers for each in parts if each.numbers is not None]
        targets = [each.target for each in parts]
        lengths = tuple(map(len, targets))
        into = functools.partial(into_targets, lengths, [*filter(len, targets)])
        nbytes = max(sum(lengths), sum(map(len, numbers)))
        return Call(
            self.links[request.ps], read, numbers, nbytes, into=into, lengths=lengths,
            definition=request.values,
        )  # fmt: skip

    # What is changed.

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[Array],
        *,
        optimizer: int,
        config: dict[str, Any],
        elsewhere: Mapping[int, int],
        call: tuple[int, int],
        layerwise: bool = False,
        landing: Landing | None = None,
        raised: ShardSpec | None = None,
    ) -> list[messages.Pushed]:
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
            call: Id of the closure, or -1; and the ordinal of the call within it.
            layerwise: Whether the rule takes norms of whole variables: then the shards are measured
                first, so that all of a variable get the same trust ratio.
            landing: From ``landing``; gets its values with the answers, each read once the push is
                applied there. It has none if a shard was busy then.
            raised: A shard of one number, on a ps that is pushed to, that becomes one more.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun is shielded: it ends in the background.
        """
        factors: list[list[float]] = []
        if layerwise:
            factors = await self._trust_ratios(plan, gradients, optimizer, config, elsewhere)
        what = optimizer, None if landing is None else landing.plan, raised and raised.key
        definitions = plan.defined.get(what) or self._pushes_of(plan, what, config, raised)
        update = self._plan_update(
            self, plan, gradients, definitions, call,
            elsewhere=elsewhere, factors=factors, landing=landing,
        )  # fmt: skip
        with self.work.push:
            answers = await self.outgoing.deliver(update)
        if landing is not None and len(landing.steps) == len(landing.plan.requests):
            await landing.copied() if landing.kept else landing.settle()
        return answers

    def _pushes_of(
        self, plan: Plan, what: tuple[Any, ...], config: dict[str, Any], raised: ShardSpec | None
    ) -> list[messages.DefinePlan]:
        """Settle what pushes through an optimizer mean that bring these values, and raise that."""
        optimizer, pulled, _ = what

        def said(request: Request) -> dict[str, Any]:
            is_raised = raised is not None and (request.ps, request.part) == (raised.ps, 0)
            return {
                "pull": brought(pulled, request.ps),
                "raised": raised.key if raised is not None and is_raised else None,
            }

        return plan.define(what, said, optimizer=optimizer, config=config)

    def landing(self, plan: Plan, push: Plan) -> Landing | None:
        """Return room for values that come with a push; None: they lie where nothing is pushed."""
        # Of a push in several messages a ps would read before it is applied whole.
        if plan.in_parts or push.in_parts or not plan.first.keys() <= push.first.keys():
            return None
        return Landing(plan, self._pool, windows=self.memory.windows)

    async def _trust_ratios(
        self,
        plan: Plan,
        gradients: Sequence[Array],
        optimizer: int,
        config: dict[str, Any],
        elsewhere: Mapping[int, int],
    ) -> list[list[float]]:
        """Return what the learning rate is multiplied by for the shards of each request.

        Nothing if there is nothing to ask for: each variable lies on one ps, which finds the ratio
        itself; or there are gradients of rows, which such a rule refuses.
        """
        if all(len(v.shards) == 1 for v in plan.variables) or IndexedSlices in map(type, gradients):
            return []

        definitions = self._pushes_of(plan, (optimizer, None, None), config, None)
        calls = []
        for at, (segments, _, nbytes) in enumerate(bodies_of(plan, gradients, self.empty)):
            ps = plan.requests[at].ps
            message = messages.MeasurePush(definitions[at].plan, elsewhere.get(ps, 0))
            call = Call(self.links[ps], message, segments, nbytes, definition=definitions[at])
            calls.append(call)
        answers = await Answers(messages.Measured, "a measurement", calls).send().all()
        sums: list[list[Sums]] = [[] for _ in plan.variables]  # what its shards add to its norms
        for request, answer in zip(plan.requests, answers, strict=True):
            if len(answer.sums) != len(request.cuts):
                raise RemoteProtocolError(
                    f"/job:ps/task:{request.ps} measured {len(answer.sums)} shards, expected "
                    f"{len(request.cuts)}"
                )
            for (variable, *_), of_shard in zip(request.cuts, answer.sums, strict=True):
                sums[variable].append((of_shard[2], of_shard[3]))
        ratios = [Lamb.trust_ratio(of_variable) for of_variable in sums]
        return [[ratios[variable] for variable, *_ in request.cuts] for request in plan.requests]

    async def assign(
        self,
        plan: Plan,
        values: Sequence[Array],
        *,
        op: str,
        call: tuple[int, int],
        lock: int = 0,
    ) -> list[messages.Pushed]:
        """Assign, add or subtract a value for each of a plan's variables; else as ``push``.

        Args:
            plan: From ``plan``.
            values: As ``gradients`` of ``push``.
            op: "assign", "add", "sub" or "max"; where all values are rows, any of
                ``numerics.rows``.
            call: Id of the closure, or -1; and the ordinal of the call within it.
            lock: Under which this client holds the shards; 0: none.

        Raises:
            ParameterServerLost, LockLost: A ps is gone; the lock has ended too soon.

        Cancellation: As ``push``.
        """
        definitions = plan.define(op, op=op)
        return await self._update(plan, values, definitions, call, lock=lock)

    async def _update(self, *given: Any, **options: Any) -> list[messages.Pushed]:
        """Deliver what changes variables; arguments as of ``PlanUpdate``."""
        update = self._plan_update(self, *given, **options)
        with self.work.push:
            return await self.outgoing.deliver(update)

    async def scatter(
        self,
        spec: VariableSpec,
        rows: np.ndarray,
        values: np.ndarray,
        *,
        op: str,
        call: tuple[int, int],
    ) -> list[messages.Pushed]:
        """Change some rows of a variable; else as ``assign``.

        Args:
            spec: Of the variable.
            rows: int64, in any order. Checked: there is each.
            values: A row for each, C-contiguous, of the variable's dtype. Of several for one row
                all count ("assign": the last), see ``scatter_ops.merged``.
            op: One of ``scatter_ops.SCATTER_OPS``.
            call: Id of the closure, or -1; and the ordinal of the call within it.

        Raises:
            ValueMismatchError: The operation is none for the variable's dtype.
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """
        check_scatter(op, spec.dtype, f'variable "{spec.name}"')
        rows, values = merged(rows, values, op, self.empty)
        slices = IndexedSlices(values, rows)
        return await self.assign(self.plan((spec,)), [slices], op=op, call=call)

    async def average(
        self,
        plan: Plan,
        originals: Mapping[int, int],
        *,
        decay: float,
        call: tuple[int, int],
    ) -> list[messages.Pushed]:
        """Let the ps tasks update moving averages: ``s -= (1 - decay) * (s - v)``.

        Args:
            plan: Of the averages.
            originals: Id of each average → id of the variable beside which it lies.
            decay: In [0, 1).
            call: Id of the closure, or -1; and the ordinal of the call within it.

        Returns:
            Each request's answer.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """

        def said(request: Request) -> dict[str, Any]:
            return {"follows": [originals[number] for number, _ in request.members]}

        definitions = plan.define(("average", *sorted(originals.items())), said)
        factors = [[decay]] * len(plan.requests)
        return await self._update(plan, (), definitions, call, factors=factors)

    # Optimizers.

    async def set_slot(
        self,
        variable: VariableSpec,
        value: np.ndarray,
        *,
        optimizer: int,
        config: dict[str, Any],
        slot: str,
    ) -> None:
        """Set one slot of all shards of a variable.

        Args:
            variable: Whose slot it is, as if it were the slot: of its dtype.
            value: Of that shape and dtype, C-contiguous. Not copied.
            optimizer: Number of the optimizer.
            config: Defines it.
            slot: Its name.

        Raises:
            UsageError: The optimizer has no such slot.
            ParameterServerLost: A ps is gone.

        Cancellation: As ``push``.
        """
        plan = self.plan((variable,))
        definitions = plan.define(
            ("assign", optimizer, slot), optimizer=optimizer, config=config, slot=slot, op="assign"
        )
        await self._update(plan, (value,), definitions, (-1, 0))

    async def set_optimizer(
        self,
        optimizer: int,
        config: dict[str, Any],
        *,
        step: int = -1,
        learning_rate: dict[str, Any] | None = None,
    ) -> int:
        """Make an optimizer known to all ps tasks; let it go on with another step or rate.

        Args:
            optimizer: Its number.
            config: Defines it.
            step: Pushes that it has applied; -1: as they are.
            learning_rate: Config of a schedule; None: as it is.

        Returns:
            How many pushes of it were applied, or synchronous steps: never less than have
            returned, and exact while none is under way.

        Raises:
            ConfigurationError: The learning rate is none.
            ParameterServerLost: A ps is gone.

        Cancellation: Some ps tasks have heard of it, others have not.
        """
        if step >= 0:  # one mark for all, whoever of them hears of it once more
            step = marked_after(await self._set_optimizer(optimizer, config), step)
        return count_of(await self._set_optimizer(optimizer, config, step, learning_rate))

    async def _set_optimizer(self, *fields: Any) -> int:
        """Return how many pushes were applied, marked; again, if ps tasks rolled back meanwhile."""
        calls = [Call(link, messages.SetOptimizer(*fields)) for link in self.links]
        answers = (
            await Answers(messages.OptimizerState, "SetOptimizer", calls, outgoing=self.outgoing)
            .send()
            .all()
        )
        return total_of((answer.base, answer.own, answer.steps) for answer in answers)


def check_plugins(links: Sequence[PsLink], name: str, rule: UpdateRule) -> None:
    """Check that all ps tasks know the rule and the schedules of an optimizer.

    Args:
        links: To all ps tasks; those that were never attached from here are not asked.
        name: Of the optimizer.
        rule: That it has.

    Raises:
        ConfigurationError: One does not, or in another version.
    """
    there = {
        link.task: {(kind, name): version for kind, name, version in link.plugins}
        for link in links
        if link.plugins is not None
    }
    for kind, needed, version in registered_in(rule):
        what = f"{kind} {needed!r}"
        lacking = [task for task, known in there.items() if (kind, needed) not in known]
        if lacking:
            raise ConfigurationError(
                f"optimizer {name!r}: the {what} is unknown to {', '.join(lacking)}",
                hint="start all tasks with the plugin that registers it: psync run --plugin MODULE,"
                " psync task --plugin MODULE, LocalCluster(…, plugins=[MODULE])",
            )
        for task, known in there.items():
            if known[kind, needed] != version:
                raise ConfigurationError(
                    f"optimizer {name!r}: {task} has version {known[kind, needed]} of the {what}, "
                    f"this process has version {version}",
                    hint="install one version of the plugin for all tasks",
                )


# Rows.


class _Rows(NamedTuple):
    """Rows of one shard, and where they belong."""

    on_wire: tuple[int, int, int, int, int]  # as a message names them
    numbers: memoryview | None  # in the shard; None: they are evenly spaced
    target: memoryview

    @staticmethod
    def of(place: int, rows: np.ndarray | range, offset: int, target: memoryview) -> _Rows:
        """Return some rows of a variable, at least one.

        Args:
            place: Of the shard in its request.
            rows: Their numbers.
            offset: First row of the shard.
            target: Where they belong.
        """
        if not isinstance(rows, range):
            return _Rows((place, len(rows), 0, 0, 0), to_bytes_view(rows - offset), target)
        step = rows.step if len(rows) > 1 else 1  # of one row any number would do for numpy
        first, last = rows[0] - offset, rows[-1] - offset
        return _Rows((place, len(rows), first, last + step, step), None, target)


def _within(rows: np.ndarray | range, low: int, high: int) -> tuple[int, int]:
    """Return which positions of ``rows`` have numbers from ``low`` to below ``high``."""
    if isinstance(rows, range) and rows.step < 0:
        begin, end = _within(rows[::-1], low, high)
        return len(rows) - end, len(rows) - begin
    return bisect.bisect_left(rows, low), bisect.bisect_left(rows, high)


# Conditional accumulators. What changes one is an update of its ps, and bears the identities of a
# push. A take is numbered separately for each accumulator.


class Place(NamedTuple):
    """An accumulator, and the ps where it is."""

    definition: messages.DefineAccumulator
    ps: int


class AccumulatorClient:
    """All accumulators as one task sees them.

    Every coroutine raises ParameterServerLost if the ps is gone, ConfigurationError if it has
    another accumulator of that name, and FencedError if this task was replaced.

    Args:
        ps: All ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        # By name: in which timeline its ps has it, as one that goes back may have been without it.
        self._timelines: dict[str, int] = {}
        self._takes: dict[str, Numbers] = {}

    async def update(
        self,
        place: Place,
        said: Sequence[Any],
        call: tuple[int, int],
        segments: Sequence[memoryview] = (),
    ) -> messages.AccumulatorState:
        """Add a gradient, or set the step.

        Args:
            place: Of the accumulator.
            said: Fields of UpdateAccumulator behind the name.
            call: Id of the closure, or -1; and the ordinal of the call within it.
            segments: Not copied.

        Raises:
            ValueMismatchError: It does not fit.

        Cancellation: Once begun, it ends in the background.
        """
        link, name = self._ps.links[place.ps], place.definition.name

        def deliver() -> Awaitable[list[messages.AccumulatorState]]:
            def build() -> Message:
                numbers = asked.number, link.updates.acked_below, call[0], call[1] << PART_BITS
                return messages.UpdateAccumulator(*numbers, name, *said)

            asked = Call(link, segments=segments, nbytes=sum(map(len, segments)), build=build)
            outgoing = self._ps.outgoing
            update = Answers(messages.AccumulatorState, "a gradient", [asked], outgoing=outgoing)
            return outgoing.deliver(update)

        (answer,) = await self._of_defined(place, deliver)
        return answer

    async def take(self, place: Place, num_required: int) -> Frame:
        """Wait for gradients, and take what they amount to.

        Returns:
            AccumulatorState, and its segments: memory that is the caller's.

        Raises:
            ConfigurationError: ``num_required`` is not above 0.

        Cancellation: A take that waits consumes nothing. One whose value is on its way is lost.
        """
        link, name = self._ps.links[place.ps], place.definition.name
        takes = self._takes.setdefault(name, Numbers())

        async def call() -> Frame:
            number = takes.draw()
            take = messages.TakeGradient(name, number, takes.acked_below, num_required)
            try:
                with self._ps.work.wait:
                    return await link.call(take, bulk=True)  # the answer may be large
            finally:
                takes.answered(number)

        try:
            received = await self._of_defined(place, call)
        finally:
            # If this is lost, the next take says so.
            link.notify(messages.EndTakes(name, takes.acked_below, []))
        expect(received, messages.AccumulatorState, link.task, "a take")
        return received

    async def state(self, place: Place) -> messages.AccumulatorState:
        """Define an accumulator; return how far it is. Cancellation: safe."""
        link, timeline = self._ps.links[place.ps], self._ps.timeline
        state, _ = await ask(link, place.definition, messages.AccumulatorState)
        self._timelines[place.definition.name] = timeline
        return state

    async def _of_defined(self, place: Place, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with an accumulator once its ps has it.

        What waits while ps tasks go back to a snapshot of before it was defined is done again.
        """
        name = place.definition.name
        while True:
            timeline = self._ps.timeline
            if self._timelines.get(name) != timeline:
                await self.state(place)
            try:
                return await work()
            except UnknownVariableError:
                if self._ps.timeline == timeline:
                    raise
