"""Sizes and times that are others than usual in a run: legal ones, with which tasks behave badly.

Nothing depends on these sizes but speed. So small ones let a small cluster do what else a large
one does: work in pieces with others between them, messages in parts, queues that are full. Nobody
may count on an acknowledgement's coming at once, so some come late.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

from psync import partitioners
from psync.backups import host, primary
from psync.checkpoints import files
from psync.chief import consistent_cut, declarations, gangs
from psync.client import plan
from psync.client.link import Outgoing
from psync.closures import dispatcher
from psync.coordinator import FinalClosures
from psync.net.connection import OwnRequest, Request
from psync.net.shared import bodies, regions
from psync.numerics import memory
from psync.ps import accumulators, cooperative_work, executor
from psync.wire import frames

LATE_S = (0.003, 0.05, 0.5)
"""Seconds by which acknowledgements are late; a backup may be silent for longer."""


def _instead(size: float, usual: Any) -> Any:
    return size


def _answer(number: float, usual: Callable[[], int]) -> Any:
    return lambda: int(number)


def _done_late(seconds: float, usual: Callable[..., None]) -> Any:
    return lambda *args: asyncio.get_running_loop().call_later(seconds, usual, *args)


def _answered_late(seconds: float, usual: Callable[..., Any]) -> Any:
    def serve(self: Any, request: Request[Any]) -> None:
        def answer(outcome: Any) -> None:
            if isinstance(outcome, BaseException):
                request.fail(outcome)
            else:
                request.answer(*outcome)

        def later(outcome: Any) -> None:
            asyncio.get_running_loop().call_later(seconds, answer, outcome)

        # What is asked is done in its turn.
        usual(self, OwnRequest(request.peer, request.message, request.segments, later))

    return serve


class Size(NamedTuple):
    """One of them: where it is, what it may be, and how that takes the place of what is there.

    One without values is drawn by itself.
    """

    places: Sequence[tuple[Any, str]]
    values: Sequence[float]
    make: Callable[[float, Any], Any] = _instead


SIZES: Mapping[str, Size] = {
    "packed": Size(((partitioners, "PACKED_BYTES"),), ()),
    "blocks": Size(((memory, "BLOCK_BYTES"),), (8, 64, 128)),
    "turns": Size(((cooperative_work, "INLINE_BYTES"),), (0, 40_000)),
    "slow pieces": Size(((cooperative_work, "PIECE_S"),), (0.0005, 0.01)),
    "cores": Size(((cooperative_work, "usable_cores"),), (2, 4), _answer),
    "small bodies": Size(((frames, "SMALL_BODY_BYTES"),), (0, 100)),
    "lent": Size(
        ((frames, "LENT_ABOVE_BYTES"), (bodies, "PIECE_BYTES"), (memory, "ABOVE_BYTES")),
        (0, 100),
    ),
    "members of a request": Size(((plan, "MEMBERS_PER_REQUEST"),), ()),
    "kept": Size(((bodies, "KEPT_BYTES"),), (0, 1_000)),
    "runs": Size(((memory, "MAX_RUNS"), (memory, "UNUSED_AFTER")), (1, 2)),
    "used again": Size(((memory, "_MIN_POOLED_BYTES"),), (16,)),
    "copied at once": Size(((frames, "COPY_BYTES"),), (8, 64)),
    "slabs": Size(((regions, "SLAB_BYTES"), (regions, "ARENA_BYTES")), (256, 4096)),
    "creation": Size(((declarations, "MESSAGE_BYTES"),), (1,)),
    "closures ahead": Size(((dispatcher, "MAX_AHEAD"),), (1,)),
    "values in results": Size(((gangs, "INLINE_BYTES"),), (0,)),
    "entries at once": Size(((executor, "AT_ONCE"),), (1, 2)),
    "entries shipped": Size(((primary, "MAX_ENTRIES"), (primary, "MAX_UNDER_WAY")), (1,)),
    "entries pending": Size(((host, "MAX_PENDING_BYTES"),), (1,)),
    "copies": Size(((primary, "PIECE_BYTES"), (accumulators, "PIECE_BYTES")), (8, 64)),
    "snapshots": Size(((consistent_cut, "PIECE_BYTES"), (files, "READ_BYTES")), (8, 64)),
    "acknowledged by a backup": Size(((host.BackupHost, "_log"),), LATE_S, _answered_late),
    "acknowledged by clients": Size(((Outgoing, "answered"),), LATE_S, _done_late),
    "final closures": Size(((FinalClosures, "tell_again"),), LATE_S, _done_late),
}
"""By name."""


def tightened(sizes: Mapping[str, float]) -> AbstractContextManager[None]:
    """Let sizes be others for a while."""
    return replaced(
        (*place, functools.partial(SIZES[name].make, size))
        for name, size in sizes.items()
        for place in SIZES[name].places
    )


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Let names stand for something else for a while.

    Args:
        changes: Class or module, the name there, and what makes of its value another one. What
            others have imported from a module is replaced there, too.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("psync.")]
    changed: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, make in changes:
            usual = vars(owner)[name]
            other = make(usual)
            owners = [owner]
            if isinstance(owner, ModuleType):
                owners = [module for module in modules if vars(module).get(name) is usual]
            for each in owners:
                changed.append((each, name, usual))
                setattr(each, name, other)
        yield
    finally:
        for owner, name, usual in reversed(changed):
            setattr(owner, name, usual)
