"""Pull and push plans: the parts of a set of variables on each ps, and the memory they land in.

A *plan* is made once for a set of variables and kept. From the second time on a pull costs
one small request to each ps, and its reply is read straight into the arrays that the caller
gets (``client.landing``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from psync.numerics.compression import Compression, marker, narrowed
from psync.numerics.rows import IndexedSlices
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.store.push_counts import FIRST, FURTHER, HOME
from psync.wire.frames import SMALL_BODY_BYTES, Segment
from psync.wire.lent import LENT_ABOVE_BYTES
from psync.wire.tensors import Joined, to_bytes_view

ARENA_BYTES = 1 << 20
"""Small variables of one pull share memory up to this much: one read instead of many."""

MEMBERS_PER_REQUEST = 16_384
BODY_PER_REQUEST = 2 << 30
"""A larger set is split over several requests, well below ``wire.limits``."""


class Piece(NamedTuple):
    """Where a run of bytes of a request's body lies."""

    buffer: int
    offset: int
    nbytes: int


class Part(NamedTuple):
    """Where a shard lies in the bodies of a plan's requests."""

    request: int  # its place in the plan
    offset: int  # in the body
    nbytes: int


class Place(NamedTuple):
    """Where a variable lies in the receive buffers."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(slots=True)
class Request:
    """The part of a plan that one message to one ps carries."""

    ps: int
    set_id: int
    part: int  # its number among the plan's requests to this ps
    place: int = FIRST  # of a push, see ``store.push_counts``
    members: list[tuple[int, int]] = field(default_factory=list)  # as the wire defines its set
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each shard: index of its variable in the plan, first byte in it, end."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of each shard: its first row in the variable, end."""
    lengths: tuple[int, ...] = ()  # of each shard, once all are there
    pieces: list[Piece] = field(default_factory=list)  # adjacent ones are merged
    nbytes: int = 0

    def add(self, shard: ShardSpec, variable: int, start: int, nbytes: int, place: Place) -> None:
        """Let the request carry one more shard."""
        self.members.append(shard.key)
        self.cuts.append((variable, start, start + nbytes))
        self.spans.append((shard.offset, shard.offset + shard.shape[0] if shard.shape else 0))
        self.nbytes += nbytes
        if not nbytes:
            return
        offset = place.offset + start
        last = self.pieces[-1] if self.pieces else Piece(-1, 0, 0)
        if last.buffer == place.buffer and last.offset + last.nbytes == offset:
            self.pieces[-1] = Piece(last.buffer, last.offset, last.nbytes + nbytes)
        else:
            self.pieces.append(Piece(place.buffer, offset, nbytes))


@dataclass(frozen=True, slots=True)
class Whole:
    """A plan, or requests of it, in one message to ps 0, which hands on what belongs to others."""

    set_id: int  # numbered apart from those of requests
    members: list[tuple[int, int, int]]  # (ps, variable id, index) of each shard, ps by ps
    cuts: list[tuple[int, int, int]]  # as those of a request
    lengths: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Plan:
    """How a fixed set of variables is pulled and pushed."""

    variables: tuple[VariableSpec, ...]
    requests: list[Request]
    buffers: list[int]  # bytes of each receive buffer
    places: list[Place]  # of each variable
    large: dict[int, list[Part]]
    """Of each variable that may be lent by itself, by its index: its shards but empty ones, in
    order."""
    digest: bytes  # of the set of shards, in whatever order: the same in every process
    whole: Whole
    spread: bool  # whether a variable lies on several ps tasks
    ps: frozenset[int]  # that it concerns
    in_parts: bool  # whether one of these gets several requests


def make_plan(
    variables: Sequence[VariableSpec],
    set_ids: Iterator[int],
    compression: Compression | None = None,
) -> Plan:
    """Lay out the variables in receive buffers and their shards in requests.

    A variable of at least 64 KiB has a buffer of its own, so that keeping it alive keeps
    nothing else alive; smaller ones share arenas, in which those of one ps are adjacent.

    Args:
        variables: In the order in which the caller wants them.
        set_ids: Numbers for the requests' sets.
        compression: How float32 travels: the plan is of variables of that dtype.
    """
    if compression is not None:
        variables = [narrowed(variable, compression) for variable in variables]
    buffers: list[int] = []
    places: dict[int, Place] = {}
    sizes = [variable.nbytes for variable in variables]
    dtypes = [dtype_of(variable.dtype) for variable in variables]
    # By ps, then wide elements first: packed without gaps, each is aligned to its elements.
    small = sorted(
        (index for index, nbytes in enumerate(sizes) if nbytes < SMALL_BODY_BYTES),
        key=lambda index: (variables[index].shards[0].ps, -dtypes[index].itemsize),
    )
    arena_ps = used = -1
    for index in small:
        ps = variables[index].shards[0].ps
        if ps != arena_ps or used + sizes[index] > ARENA_BYTES:
            arena_ps, used = ps, 0
            buffers.append(0)
        places[index] = Place(len(buffers) - 1, used, variables[index].shape, dtypes[index])
        used += sizes[index]
        buffers[-1] = used
    for index, nbytes in enumerate(sizes):
        if index not in places:
            places[index] = Place(len(buffers), 0, variables[index].shape, dtypes[index])
            buffers.append(nbytes)
    requests: dict[int, list[Request]] = {}
    for index, place in places.items():  # the small ones first
        variable = variables[index]
        row_bytes = sizes[index] // max(1, variable.shape[0]) if variable.shape else 0
        for shard in variable.shards:
            nbytes = shard.nbytes
            mine = requests.setdefault(shard.ps, [])
            if (
                not mine
                or len(mine[-1].members) >= MEMBERS_PER_REQUEST
                or mine[-1].nbytes + nbytes > BODY_PER_REQUEST
            ):
                mine.append(Request(shard.ps, next(set_ids), len(mine)))
            mine[-1].add(shard, index, shard.offset * row_bytes, nbytes, place)
    ordered = [request for group in requests.values() for request in group]
    for request in ordered:
        if request.part:
            request.place = FURTHER
    if requests:
        requests[min(requests)][0].place = HOME
    for request in ordered:
        request.lengths = tuple([end - start for _, start, end in request.cuts])
        if compression is not None:
            request.members.insert(0, marker(compression))
    return Plan(
        tuple(variables),
        ordered,
        buffers,
        [places[index] for index in range(len(variables))],
        _large_in(ordered, sizes),
        _digest_of(variables),
        whole_of(ordered),
        any(len({shard.ps for shard in variable.shards}) > 1 for variable in variables),
        frozenset(requests),
        len(ordered) > len(requests),
    )


def _large_in(requests: Sequence[Request], sizes: Sequence[int]) -> dict[int, list[Part]]:
    found: dict[int, list[tuple[int, Part]]] = {}
    for number, request in enumerate(requests):
        offset = 0
        for (index, start, _), nbytes in zip(request.cuts, request.lengths, strict=True):
            if nbytes and sizes[index] > LENT_ABOVE_BYTES:
                found.setdefault(index, []).append((start, Part(number, offset, nbytes)))
            offset += nbytes
    return {index: [part for _, part in sorted(parts)] for index, parts in found.items()}


def whole_of(requests: Sequence[Request]) -> Whole:
    """Return these requests in one."""
    own = requests[0].set_id if requests else 0
    return Whole(
        # ps 0 is also told of its own part alone, which has the number of that request.
        next((request.set_id for request in requests if request.ps), own),
        [(request.ps, *member) for request in requests for member in request.members],
        [cut for request in requests for cut in request.cuts],
        tuple(length for request in requests for length in request.lengths),
        sum(request.nbytes for request in requests),
    )


def _digest_of(variables: Sequence[VariableSpec]) -> bytes:
    keys = sorted(shard.key for variable in variables for shard in variable.shards)
    return hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()


def targets_of(
    plan: Plan,
    request: Request,
    buffers: Mapping[int, memoryview],
    given: Mapping[int, memoryview],
) -> list[memoryview]:
    """Return where the body of the answer to a pull belongs, in order.

    Args:
        plan: That ``request`` is part of.
        request: The pull.
        buffers: The plan's receive buffers, by number.
        given: By variable: memory of the caller's that takes its value instead.
    """
    if not given:
        return [buffers[number][at : at + nbytes] for number, at, nbytes in request.pieces]
    targets = []
    for index, start, end in request.cuts:
        if index in given:
            targets.append(given[index][start:end])
        else:
            buffer, offset, *_ = plan.places[index]
            targets.append(buffers[buffer][offset + start : offset + end])
    return [target for target in targets if len(target)]


Given = memoryview | IndexedSlices
"""What a push or assign has for a variable: all its bytes, or some rows in ascending order."""


def given_of(arrays: Iterable[np.ndarray | IndexedSlices]) -> list[Given]:
    """Return what a push or assign has for each variable. Nothing is copied."""
    return [each if isinstance(each, IndexedSlices) else to_bytes_view(each) for each in arrays]


def body_of(
    request: Request, given: Sequence[Given]
) -> tuple[Sequence[Segment], list[int] | None, int]:
    """Return the body of a push or assign, and what the message says of the rows in it.

    Args:
        request: Whose shards are updated.
        given: For each variable of the plan. Nothing is copied.

    Returns:
        A segment for each shard; and the number of rows in each one, -1 for all of it, or None
        where all of them are whole; and the bytes of all.
    """
    if IndexedSlices not in map(type, given):
        wholes: Sequence[memoryview] = given  # type: ignore[assignment]
        parts = [wholes[index][start:end] for index, start, end in request.cuts]
        return Joined.of(parts, list(map(len, parts))), None, request.nbytes
    segments: list[Segment] = []
    counts: list[int] = []
    for (variable, start, end), (first, last) in zip(request.cuts, request.spans, strict=True):
        value = given[variable]
        if isinstance(value, IndexedSlices):
            begin, stop = value.indices.searchsorted((first, last)).tolist()
            counts.append(stop - begin)
            segments.append(
                [
                    to_bytes_view(value.indices[begin:stop] - first),
                    to_bytes_view(value.values[begin:stop]),
                ]
            )
        else:
            counts.append(-1)
            segments.append(value[start:end])
    nbytes = sum(sum(map(len, s)) if isinstance(s, list) else len(s) for s in segments)
    return segments, counts if max(counts, default=-1) >= 0 else None, nbytes
