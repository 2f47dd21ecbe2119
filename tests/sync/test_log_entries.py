"""What a log says of synchronous steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgpack

from psync.ps.executor import Listed
from psync.ps.shard_sets import Body, ShardSet
from psync.store.commit_log import LogNames
from psync.store.ledger import Client
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet
from psync.sync.log_entries import (
    FROM_CLOSER,
    closing_entry,
    entries_of_snapshot,
)
from psync.sync.step_update import Part
from psync.sync.steps import SyncSteps
from psync.wire.codec import Message
from psync.wire.messages import (
    CloseStep,
    HoldPush,
    NormsMeasured,
    SetGroups,
)

GROUP = 9
RAW = {"name": "sync"}
REPLICA = ("/job:worker/task:0", 5)
KEYS = ((3, 0), (4, 0))
BODY = memoryview(b"gradient")
MEMBERS = [(0, 3, 0), (1, 3, 1)]


def staged(body: Body = (BODY,)) -> Part:
    return Part(ShardSet(KEYS), (), body)


def whole() -> Part:
    known = WholeSet(MEMBERS, ShareNumbers(2, "/job:ps/task:0"))
    known.lengths = (4, 4)
    return Part(known.own, (), (BODY,), None, known)


def test_a_closing_has_the_parts_that_ps_0_handed_on_and_no_values_are_wanted() -> None:
    message = CloseStep(GROUP, RAW, 3, [(*REPLICA, 1, 1.0)] * 4, [9], [], [8], [(3, 0.5)], None)
    names = LogNames()
    along = [None, staged(), staged(()), staged()]
    build, segments = closing_entry(message, RAW, along)
    entry = build(names)
    assert entry == replace(
        message, along=[-1, 0, -1, 0], sets=[(0, list(KEYS))], ahead=[], config=RAW
    )
    assert segments == [BODY, BODY]
    again, _ = closing_entry(message, RAW, along[:2])
    assert again(names) == replace(entry, config=None, along=[-1, 0], sets=[])


def read(entries: list[Listed]) -> list[tuple[Client, Message, Sequence[memoryview]]]:
    """Entries with their messages, which name everything in full."""
    names = LogNames()
    return [
        (client, each if isinstance(each, Message) else each(names), segments)
        for client, each, segments in entries
    ]


def test_a_snapshot_is_followed_by_what_it_does_not_have() -> None:
    rule = SyncSteps().snapshot()
    held = [(GROUP, REPLICA, 1, 4, staged()), (GROUP, REPLICA, 2, 4, whole())]
    measured = NormsMeasured(GROUP, 3, [(3, 0.5)], None)
    entries = read(
        entries_of_snapshot({GROUP: RAW, 10: RAW}, {GROUP: 4}, [10], held, rule, [measured])
    )
    assert [client for client, _, _ in entries] == [REPLICA, REPLICA, FROM_CLOSER, FROM_CLOSER]
    assert [message for _, message, _ in entries] == [
        HoldPush(GROUP, 1, 4, 0, [(0, *key) for key in KEYS], False, [], None),
        HoldPush(GROUP, 2, 4, 0, MEMBERS, True, [4, 4], None),
        SetGroups([(GROUP, RAW, 4), (10, RAW, -1)], [10]),
        measured,
    ]
    *bodies, (state,), nothing = (segments for *_, segments in entries)
    assert msgpack.unpackb(state) == rule
    assert (bodies, nothing) == ([(BODY,), (BODY,)], ())
