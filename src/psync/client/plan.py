"""Plans: what one task does with one set of variables, settled once and kept.

A ``Plan`` has the parts of a set on each ps, what the messages about them say, and the memory in
which their values land. From the second time on a pull costs one small request to each ps, and its
answer is read straight into the arrays that the caller gets: a ``Landing``.

A body that is lent (``net.shared``) need not be copied by who only reads it. A *lease* is an array
over a ps's own memory: it is read-only, stays as it is for as long as anybody sees it, and gives
that memory back when nobody does. A variable becomes one where all of it can be seen as one array:
it is one extent of a body, or its shards can be mapped side by side (``net.shared.regions``). All
else is copied into memory from a pool, by the connection while it comes in, or here.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from psync.net.shared.regions import Windows
from psync.numerics.compression import Compression, marker, narrowed
from psync.numerics.memory import BlockPool
from psync.numerics.rows import Empty, IndexedSlices, merged
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.store.push_counts import FIRST, FURTHER, HOME
from psync.wire.codec import encode, replace
from psync.wire.frames import LENT_ABOVE_BYTES, SMALL_BODY_BYTES, Frame, Segment, copies
from psync.wire.messages import DefinePlan, Read
from psync.wire.tensors import Joined, cut, to_bytes_view, to_bytes_views

ARENA_BYTES = 1 << 20
"""Small variables of one pull share memory up to this much: one read instead of many."""

MAX_DEFINITIONS = 256
"""What is done with a plan, of which the definitions are kept: which others it brings, too."""

MEMBERS_PER_REQUEST = 16_384
BODY_PER_REQUEST = 2 << 30
"""A larger set is split over several requests, well below ``wire.limits``."""


class Place(NamedTuple):
    """Where a variable lies in the receive buffers."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


Alike = tuple[Place, list[int]]
"""Variables of one shape and dtype that lie side by side, by their places in the plan, in this
order; or a single one. Before them, where the first one lies."""


@dataclass(slots=True)
class Request:
    """The part of a plan that one message to one ps carries."""

    ps: int
    part: int  # its number among the plan's requests to this ps
    place: int = FIRST  # of a push, see ``store.push_counts``
    members: list[tuple[int, int]] = field(default_factory=list)  # as the wire defines its set
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each shard: index of its variable in the plan, first byte in it, end."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of each shard: its first row in the variable, end."""
    lengths: tuple[int, ...] = ()  # of each shard, once all are there
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """Where the body lies: buffer, first byte in it, end. Adjacent pieces are merged."""
    large: set[int] = field(default_factory=set)  # variables of it that may be lent by themselves
    nbytes: int = 0
    values: DefinePlan = field(init=False)  # its shards, and nothing else
    read: Read = field(init=False)  # of their values

    def add(self, shard: ShardSpec, variable: int, start: int, place: Place) -> None:
        """Let the request carry one more shard, whose first byte is ``start`` of its variable."""
        stop = start + shard.nbytes
        self.members.append(shard.key)
        self.cuts.append((variable, start, stop))
        self.spans.append((shard.offset, shard.offset + shard.shape[0] if shard.shape else 0))
        self.nbytes += stop - start
        if start == stop:
            return
        first, end = place.offset + start, place.offset + stop
        if self.pieces and self.pieces[-1][::2] == (place.buffer, first):
            first = self.pieces.pop()[1]
        self.pieces.append((place.buffer, first, end))


@dataclass(slots=True, eq=False)
class Plan:
    """How a fixed set of variables is pulled and pushed."""

    variables: tuple[VariableSpec, ...]
    requests: list[Request]
    buffers: list[int]  # bytes of each receive buffer
    places: list[Place]  # of each variable
    alike: list[Alike]  # all of them, too
    large: dict[int, list[tuple[int, int, int]]]
    """Of each variable that may be lent by itself, by its index: of its shards but empty ones, in
    order, the first byte in it, the place of the request, and the place there."""
    digest: bytes  # of the set of shards, in whatever order: the same in every process
    nbytes: int
    spread: bool  # whether a variable lies on several ps tasks
    first: dict[int, int]  # by ps that it concerns: the place of its first request
    in_parts: bool  # whether one of these gets several requests
    defined: dict[Hashable, list[DefinePlan]] = field(default_factory=dict)
    """By what is done with it: how the ps task of each request is told."""

    def define(
        self,
        what: Hashable,
        said: Callable[[Request], Mapping[str, Any]] = lambda _: {},
        requests: Sequence[Request] = (),
        **same: Any,
    ) -> list[DefinePlan]:
        """Settle what its messages to do something mean, unless that is settled already.

        Args:
            what: That is done.
            said: Returns, for a request, further fields of its definition.
            requests: That are sent instead of the plan's own.
            same: Fields of all definitions.
        """
        if what not in self.defined:
            self.defined[what] = [
                numbered(DefinePlan(0, request.members, **same, **said(request)))
                for request in requests or self.requests
            ]
            if len(self.defined) > MAX_DEFINITIONS:
                del self.defined[next(iter(self.defined))]
        return self.defined[what]


def numbered(definition: DefinePlan) -> DefinePlan:
    """Return a definition with its number: a digest, so that it never means anything else."""
    digest = hashlib.blake2b(encode(definition), digest_size=6).digest()
    return replace(definition, plan=int.from_bytes(digest, "big"))


def make_plan(variables: Sequence[VariableSpec], compression: Compression | None = None) -> Plan:
    """Lay out the variables in receive buffers and their shards in requests.

    A variable of at least 64 KiB has a buffer of its own, so that keeping it alive keeps
    nothing else alive; smaller ones share arenas, in which those of one ps are adjacent.

    Args:
        variables: In the order in which the caller wants them.
        compression: How float32 travels: the plan is of variables of that dtype.
    """
    if compression is not None:
        variables = [narrowed(variable, compression) for variable in variables]
    buffers, places = _laid_out(variables)
    requests: dict[int, list[Request]] = {}
    for index, place in places.items():  # the small ones first
        variable = variables[index]
        row_bytes = variable.nbytes // max(1, variable.shape[0]) if variable.shape else 0
        for shard in variable.shards:
            mine = requests.setdefault(shard.ps, [])
            if (
                not mine
                or len(mine[-1].members) >= MEMBERS_PER_REQUEST
                or mine[-1].nbytes + shard.nbytes > BODY_PER_REQUEST
            ):
                mine.append(Request(shard.ps, len(mine)))
            mine[-1].add(shard, index, shard.offset * row_bytes, place)
    ordered = [request for of_ps in requests.values() for request in of_ps]
    for request in ordered:
        request.lengths = tuple([stop - start for _, start, stop in request.cuts])
        request.place = FURTHER if request.part else FIRST
        if compression is not None:
            request.members.insert(0, marker(compression))
        request.values = numbered(DefinePlan(0, request.members))
        request.read = Read(request.values.plan)
    if requests:
        requests[min(requests)][0].place = HOME
    keys = sorted(shard.key for variable in variables for shard in variable.shards)
    return Plan(
        tuple(variables), ordered, buffers, [places[index] for index in range(len(variables))],
        _alike_in(places), _large_in(ordered, variables),
        hashlib.blake2b(repr(keys).encode(), digest_size=16).digest(),
        sum(request.nbytes for request in ordered),
        any(len({shard.ps for shard in variable.shards}) > 1 for variable in variables),
        {of_ps[0].ps: ordered.index(of_ps[0]) for of_ps in requests.values()},
        len(ordered) > len(requests),
    )  # fmt: skip


def _laid_out(variables: Sequence[VariableSpec]) -> tuple[list[int], dict[int, Place]]:
    """Return the bytes of each receive buffer, and each variable's place: small ones first."""
    buffers: list[int] = []
    places: dict[int, Place] = {}
    dtypes = [dtype_of(variable.dtype) for variable in variables]

    # By ps, then wide elements first: packed without gaps, each is aligned to its elements.
    def order(index: int) -> tuple[bool, int, int]:
        if variables[index].nbytes >= SMALL_BODY_BYTES:
            return True, 0, 0
        return False, variables[index].shards[0].ps, -dtypes[index].itemsize

    arena_ps = -1  # of which the last buffer has small variables; -1: of none
    for index in sorted(range(len(variables)), key=order):
        variable, (is_large, ps, _) = variables[index], order(index)
        if is_large or ps != arena_ps or buffers[-1] + variable.nbytes > ARENA_BYTES:
            arena_ps = -1 if is_large else ps
            buffers.append(0)
        places[index] = Place(len(buffers) - 1, buffers[-1], variable.shape, dtypes[index])
        buffers[-1] += variable.nbytes
    return buffers, places


def _alike_in(places: Mapping[int, Place]) -> list[Alike]:
    """Return the variables in the order in which they lie, those that are alike together."""
    found: list[Alike] = []
    end: tuple[object, ...] = ()  # what the next one is that could join the last ones
    for index, (buffer, offset, shape, dtype) in places.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if shape and nbytes and (buffer, offset, shape, dtype) == end:
            found[-1][1].append(index)
        else:
            found.append((places[index], [index]))
        end = buffer, offset + nbytes, shape, dtype
    return found


def _large_in(
    requests: Sequence[Request], variables: Sequence[VariableSpec]
) -> dict[int, list[tuple[int, int, int]]]:
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, request in enumerate(requests):
        for place, (index, start, stop) in enumerate(request.cuts):
            if start < stop and variables[index].nbytes > LENT_ABOVE_BYTES:
                request.large.add(index)
                found.setdefault(index, []).append((start, number, place))
    return {index: sorted(shards) for index, shards in found.items()}


# What is sent.

Array = np.ndarray | IndexedSlices
"""What a push or assign has for a variable: all of it, or some rows."""

Body = tuple[Sequence[Segment], list[int] | None, int]
"""A segment for each shard; the number of rows in each one, -1 for all of it, or None where all of
them are whole; and the bytes of all."""


def bodies_of(plan: Plan, arrays: Sequence[Array], empty: Empty) -> list[Body]:
    """Return what each message of a push or assign carries.

    Nothing is copied but rows that do not ascend; those of one number are summed.

    Args:
        plan: Of the variables.
        arrays: For each of them; or none at all.
        empty: Makes arrays for such rows.
    """
    if not arrays:
        return [((), None, 0) for _ in plan.requests]
    if IndexedSlices in map(type, arrays):
        ordered = [_in_order(array, empty) for array in arrays]
        return [_body_with_rows(request, ordered) for request in plan.requests]
    views = to_bytes_views(arrays)  # type: ignore[arg-type]
    bodies: list[Body] = []
    for request in plan.requests:
        parts = []
        for index, start, stop in request.cuts:
            parts.append(views[index][start:stop])
        joined = Joined(parts)
        joined.lengths = request.lengths
        bodies.append((joined, None, request.nbytes))
    return bodies


def _in_order(array: Array, empty: Empty) -> Array:
    if not isinstance(array, IndexedSlices):
        return array
    rows, values = merged(array.indices, array.values, "add", empty)
    return IndexedSlices(values, rows)


def _body_with_rows(request: Request, arrays: Sequence[Array]) -> Body:
    segments: list[Segment] = []
    counts: list[int] = []
    nbytes = 0
    for (variable, start, stop), (first, last) in zip(request.cuts, request.spans, strict=True):
        value = arrays[variable]
        if isinstance(value, IndexedSlices):
            rows = slice(*value.indices.searchsorted((first, last)).tolist())
            parts = [value.indices[rows] - first, value.values[rows]]
            counts.append(len(parts[0]))
            segments.append([to_bytes_view(part) for part in parts])
            nbytes += sum(part.nbytes for part in parts)
        else:
            counts.append(-1)
            segments.append(to_bytes_view(value)[start:stop])
            nbytes += stop - start
    return segments, counts if max(counts, default=-1) >= 0 else None, nbytes


# Where answers land.


class Landing:
    """Room for the values of a plan's variables, which come in once.

    Args:
        plan: That is pulled.
        pool: Memory of arrays that are copied into, handed out again once they are gone.
        out: Arrays that take the values instead, or None for each.
        writable: Whether the others may be changed.
        windows: Make arrays of what is lent; None: all is copied.

    Attributes:
        arrays: The values, once they are here.
        steps: That these are of, as the answers of the ps tasks say it.
        kept: Bodies where they lie, by the places of their requests; ``settle`` looks at them.
    """

    __slots__ = (
        "_given", "_pool", "_roots", "_views", "_windows", "_writable", "arrays", "kept", "plan",
        "steps",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        pool: BlockPool,
        out: Sequence[np.ndarray | None] | None = None,
        writable: bool = False,
        windows: Windows | None = None,
    ) -> None:
        self.plan = plan
        self.arrays: list[np.ndarray] | None = None
        self.steps: list[Sequence[tuple[int, int]]] = []
        self.kept: dict[int, list[memoryview]] = {}
        self._pool = pool
        self._writable = writable
        self._windows = None if writable else windows
        self._given: Mapping[int, np.ndarray] = {}
        if out is not None:
            self._given = {at: array for at, array in enumerate(out) if array is not None}
        # The receive buffers, each once it is needed.
        self._roots: list[np.ndarray | None] = [None] * len(plan.buffers)
        self._views: list[memoryview | None] = [None] * len(plan.buffers)

    def buffer(self, number: int) -> memoryview:
        """Return a receive buffer: a good moment is one in which nothing else is to be done."""
        view = self._views[number]
        if view is None:
            memory = self._pool.lend(self.plan.buffers[number])
            view = self._views[number] = memory.data
            root = self._roots[number] = memory.view()
            root.flags.writeable = self._writable
        return view

    def into(self, at: int, answer: Frame) -> Sequence[memoryview] | None:
        """Return where the body of an answer belongs; or that body itself, to be read there.

        Args:
            at: Place of the request among the plan's.
            answer: What comes. A body of other segments than expected is thrown away.
        """
        request, lent = self.plan.requests[at], answer.borrowed
        if answer.lengths != request.lengths:
            return None
        if self.kept:
            self.kept.pop(at, None)  # of an answer that was asked for again
        if lent is not None and self._windows is not None and lent.may_keep:
            if not self._given.keys() >= request.large:
                kept = self.kept[at] = lent.keep()
                return kept
        targets = []
        if self._given:
            targets = [self._target(*cut) for cut in request.cuts if cut[1] < cut[2]]
        else:
            for number, start, stop in request.pieces:
                view = self._views[number] or self.buffer(number)
                targets.append(view[start:stop])
        return targets

    def _target(self, index: int, start: int, stop: int) -> memoryview:
        """Return where some bytes of a variable belong."""
        if index in self._given:
            return to_bytes_view(self._given[index])[start:stop]
        buffer, offset, *_ = self.plan.places[index]
        return self.buffer(buffer)[offset + start : offset + stop]

    async def copied(self) -> list[np.ndarray]:
        """Copy what is kept, and cannot be leased; then ``settle``. Cancellation: safe."""
        requests = self.plan.requests
        bodies = {at: cut(views, requests[at].lengths) for at, views in self.kept.items()}
        self.kept.clear()
        leased = self._leased(bodies)
        if len(leased) == len(self.plan.places):
            bodies.clear()  # nothing is left to copy
        while bodies:
            at, shards = bodies.popitem()
            targets: list[memoryview] = []
            sources: list[memoryview] = []
            for (index, start, stop), shard in zip(requests[at].cuts, shards, strict=True):
                if index not in leased:
                    targets.append(self._target(index, start, stop))
                    sources += shard
            for _ in copies(targets, sources):
                await asyncio.sleep(0)
        return self.settle(leased)

    def settle(self, leased: Mapping[int, np.ndarray] | None = None) -> list[np.ndarray]:
        """Return an array for each variable: all is there, some of them ``leased``."""
        there, made = {**self._given, **(leased or {})}, {}
        for (buffer, offset, shape, dtype), variables in self.plan.alike:
            if there and there.keys() >= {*variables}:
                continue
            if self._roots[buffer] is None:  # of an empty one nothing has come
                self.buffer(buffer)
            memory, count = self._roots[buffer], len(variables)
            if count == 1:
                made[variables[0]] = np.ndarray(shape, dtype, memory, offset)
            else:  # as rows of one array: it takes a fraction of the time
                block = np.ndarray((count, *shape), dtype, memory, offset)
                made.update(zip(variables, block, strict=True))
        made.update(there)
        self.arrays = list(map(made.__getitem__, range(len(self.plan.places))))
        return self.arrays

    def _leased(self, bodies: Mapping[int, list[list[memoryview]]]) -> dict[int, np.ndarray]:
        """Return an array of each variable that can be seen where it lies."""
        assert self._windows is not None, "something was kept"
        leased = {}
        for index, shards in self.plan.large.items():
            if index in self._given or any(number not in bodies for _, number, _ in shards):
                continue
            extents = [bodies[number][place] for _, number, place in shards]
            root = self._windows.joined([each[0] if len(each) == 1 else None for each in extents])
            if root is not None:
                array = np.ndarray(*self.plan.places[index][2:], root)
                if array.flags.aligned:
                    leased[index] = array
        return leased


def into_targets(
    expected: tuple[int, ...], targets: Sequence[memoryview], answer: Frame
) -> Sequence[memoryview] | None:
    """Return where a body of the expected lengths belongs; None: others are thrown away."""
    return targets if answer.lengths == expected else None
