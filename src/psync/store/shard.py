"""One shard, and how work on it is done: piece by piece, to the end.

Work on a large shard takes milliseconds, which would delay every peer of an event loop. So
it is a generator that does one block per ``next()``; the caller lets the loop run in
between. From the call until its end the shard is busy: reading or updating it raises BusyError
(the caller queues such requests), so nobody sees a shard half of which is new. The caller
runs the generator to its end. It cannot be abandoned by accident: closing it, or dropping
it, does the remaining blocks at once. Only an exception inside a block (no memory left)
leaves the shard busy for good, as its value is torn: the task must end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from psync.numerics.blocks import BlockArray
from psync.specs import ShardSpec

Work = Generator[None, None, None]
"""Work under way on one shard: one block per ``next()``; run it to its end."""


@dataclass(slots=True)
class Shard:
    """One shard, and what optimizers keep beside it."""

    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)  # by optimizer, name
    pushes: dict[int, int] = field(default_factory=dict)  # by optimizer, if it accumulates them
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


def started(
    shard: Shard,
    one_piece: Callable[[int], None],
    finished: Callable[[], None],
    count: int | None = None,
    *,
    changes: bool = True,
) -> Work:
    """Begin work on a shard in ``count`` pieces; default: one for each block."""
    work = _work(
        shard, one_piece, finished, shard.values.num_blocks if count is None else count, changes
    )
    next(work)  # a generator that has not begun could be dropped without a trace
    return work


def _work(
    shard: Shard,
    one_piece: Callable[[int], None],
    finished: Callable[[], None],
    count: int,
    changes: bool,
) -> Work:
    done = 0
    shard.busy = True
    with suppress(GeneratorExit):  # closed or dropped early: the rest follows at once
        yield
        while done < count - 1:
            one_piece(done)
            done += 1
            yield
    for i in range(done, count):
        one_piece(i)
    shard.version += changes
    shard.busy = False
    finished()
