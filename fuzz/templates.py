"""Requests that a ps carries out, to be changed a little: what makes no sense at all is refused at
once, and says nothing about what comes behind.

They speak of three shards: 0/0, four float32; 1/0, the global step; 2/0, eight rows of two float32.
"""

from __future__ import annotations

from samples import Draw, changed, drawn, fields_of

from psync.numerics.rules import SGD, Adam
from psync.schedules import Constant
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message, replace
from psync.wire.messages import (
    BeginGroup,
    CreateShards,
    DefineAccumulator,
    DefinePlan,
    KeepPart,
    LockShards,
    MeasurePush,
    Post,
    Read,
    SetOptimizer,
    TakeGradient,
    TickClock,
    Update,
    UpdateAccumulator,
)

SHARDS = [
    ["v", 0, 0, 0, [4], "float32"], ["step", 1, 0, 0, [], "int64"],
    ["rows", 2, 0, 0, [8, 2], "float32"],
]  # fmt: skip
SHARD_BYTES = (16, 8, 64)

ADAM = Adam(Constant(0.1)).to_config()
GROUP = SyncConfig(
    name="sync", optimizer=SGD(0.5).to_config(), replicas_to_aggregate=1, total_num_replicas=1,
    global_step=(0, 1, 0), averages=(),
).to_config()  # fmt: skip
ROWS = (16, 16)  # two row numbers, two rows

TEMPLATES: list[tuple[Message, tuple[int, ...]]] = [
    (CreateShards(SHARDS, [None, b"\0" * 8, (0, 0)]), (16,)),
    (CreateShards([["w", 7, 0, 0, [4], "float32"]], [(0, 0)]), ()),
    (DefinePlan(1, [(0, 0), (2, 0)]), ()),
    (DefinePlan(2, [(2, 0)], 3, None, "m"), ()),
    (DefinePlan(3, [(0, 0), (2, 0)], 3, ADAM, pull=[(0, 0)], raised=(1, 0)), ()),
    (DefinePlan(4, [(0, 0)], 4, SGD(0.5, 0.9).to_config()), ()),
    (DefinePlan(5, [(0, 0)], op="add"), ()),
    (DefinePlan(6, [(2, 0)], op="min"), ()),
    (DefinePlan(7, [(0, 0)], follows=[2]), ()),
    (DefinePlan(8, [(0, 0)]), ()),
    (DefinePlan(9, [(0, 0)], 9, GROUP, pull=[(0, 0)], variable_set=b"set", others=[]), ()),
    (Read(1), ()),
    (Read(2), ()),
    (Read(1, 1), ()),
    (Read(1, rows=[(1, 2, 0, 0, 0), (0, 1, 1, 2, 1)]), (16,)),
    (Read(1, rows=[(1, 2, 1, 5, 2)]), ()),
    (Update(5, 0, 1, 0, 3), (16, 64)),
    (Update(6, 0, 1, 1, 3, rows=[-1, 2]), (16, *ROWS)),
    (Update(7, 0, -1, 0, 4, 3, factors=[2.0]), (16,)),
    (MeasurePush(4, 0), (16,)),
    (Update(8, 0, 1, 2, 5), (16,)),
    (Update(9, 0, -1, 0, 6, rows=[2]), ROWS),
    (Update(10, 0, -1, 0, 7, factors=[0.5]), ()),
    (LockShards(1, [(0, 0), (2, 0)], 5.0), ()),
    (Update(11, 0, -1, 0, 5, lock=1), (16,)),
    (SetOptimizer(3, ADAM), ()),
    (SetOptimizer(3, ADAM, 7, Constant(0.25).to_config()), ()),
    (DefinePlan(10, [(0, 0), (2, 0)], 3, ADAM, "v", "assign"), ()),
    (Update(12, 0, -1, 0, 10), (16, 64)),
    (DefineAccumulator("g", "dense", "float32", [2], "MEAN", "", False, 0), ()),
    (UpdateAccumulator(13, 0, -1, 0, "g", 0, [2]), (8,)),
    (DefineAccumulator("s", "sparse", "float32", None, "MEAN", "per_index", False, 0), ()),
    (UpdateAccumulator(14, 0, -1, 0, "s", 0, [2, 3]), (16, 24)),
    (UpdateAccumulator(15, 0, -1, 0, "s", 4), ()),
    (TakeGradient("g", 1, 0, 1), ()),
    (BeginGroup(9, GROUP, 0), ()),
    (Update(1, 0, -1, 0, 9), (16,)),
    (KeepPart(9, 1), ()),
    (TickClock(1, 2, 1), ()),
    (Post(-1, False), (8,)),
]  # fmt: skip


def request(draw: Draw) -> tuple[Message, list[bytes]]:
    """Return a template with none to two of its fields, or of its segments, changed."""
    message, lengths = draw.of(TEMPLATES)
    body = [bytes((draw.of((0, 1, 2, 127, 255)),)) * length for length in lengths]
    fields = fields_of(type(message))
    for _ in range(draw.of((0, 0, 0, 0, 1, 1, 1, 2))):
        which = draw.below(8)
        if which == 0 and body:
            at = draw.below(len(body))
            body[at] = bytes(draw.of((0, 1, 4, 8, 16, 24, 64, 4096)))
        elif which == 1:
            body = [*body, bytes(8)] if draw.below(2) else body[:-1]
        elif fields:
            name = draw.of(sorted(fields))
            old = getattr(message, name)
            value = drawn(fields[name], draw) if which < 6 else changed(old, draw)
            message = replace(message, **{name: value})
    return message, body
