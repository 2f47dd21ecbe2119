"""Sizes that are others than usual in a run: legal ones, with which tasks behave badly.

Layer: L5. Imports: accumulator_image, backup_sender, blocks, closure_messages, committer, creation,
cuts, dispatching, long_work, ps_recovery, replica_host, wire.

Nothing depends on these sizes but speed. So small ones let a small cluster do what else a large
one does: work in pieces with others between them, messages in parts, queues that are full.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
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


@contextlib.contextmanager
def tightened(sizes: Mapping[str, int]) -> Iterator[None]:
    """Let sizes be others for a while, in each module that knows them."""
    changed: list[tuple[Any, str, Any]] = []
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("psync.")]
    try:
        for name, size in sizes.items():
            for owner, attribute in SIZES[name][0]:
                usual = vars(owner)[attribute]
                for module in modules:
                    if vars(module).get(attribute) is usual:
                        changed.append((module, attribute, usual))
                        setattr(module, attribute, size)
        yield
    finally:
        for module, attribute, usual in reversed(changed):
            setattr(module, attribute, usual)
