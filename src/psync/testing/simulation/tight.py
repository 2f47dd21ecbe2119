"""Sizes that are others than usual in a run: legal ones, with which tasks behave badly.

Layer: L5. Imports: accumulator_image, backup_sender, blocks, closure_messages, committer, creation,
cuts, dispatching, long_work, ps_recovery, replica_host, wire.

Nothing depends on these sizes but speed. So small ones let a small cluster do what else a large
one does: work in pieces with others between them, messages in parts, queues that are full.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from psync import (
    accumulator_image,
    backup_sender,
    blocks,
    closure_messages,
    committer,
    creation,
    cuts,
    dispatching,
    long_work,
    ps_recovery,
    replica_host,
)
from psync.wire import frames

SIZES: Mapping[str, tuple[Sequence[tuple[ModuleType, str]], Sequence[int]]] = {
    "blocks": (((blocks, "BLOCK_BYTES"),), (8, 64, 128)),
    "turns": (((long_work, "INLINE_BYTES"),), (0, 40_000)),
    "whole pushes": (((frames, "SMALL_BODY_BYTES"),), (0, 100)),
    "creation": (((creation, "MESSAGE_BYTES"),), (1,)),
    "closures ahead": (((dispatching, "MAX_AHEAD"),), (1,)),
    "values in results": (((closure_messages, "INLINE_BYTES"),), (0,)),
    "entries at once": (((committer, "AT_ONCE"),), (1, 2)),
    "entries shipped": (((backup_sender, "MAX_ENTRIES"), (backup_sender, "MAX_UNDER_WAY")), (1,)),
    "entries pending": (((replica_host, "MAX_PENDING_BYTES"),), (1,)),
    "copies": (((backup_sender, "PIECE_BYTES"), (accumulator_image, "PIECE_BYTES")), (8, 64)),
    "answers in copies": (((accumulator_image, "MAX_LISTED"),), (1,)),
    "images": (((cuts, "PIECE_BYTES"), (ps_recovery, "PIECE_BYTES")), (8, 64)),
}
"""By name: where they are, and what they may be."""


def tightened(sizes: Mapping[str, int]) -> AbstractContextManager[None]:
    """Let sizes be others for a while."""
    return replaced(
        (*place, functools.partial(_instead, size))
        for name, size in sizes.items()
        for place in SIZES[name][0]
    )


def _instead(size: int, usual: int) -> int:
    return size


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
