"""What a log says of synchronous steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack

from psync.ps.executor import Listed
from psync.ps.shard_sets import Body, ShardSet
from psync.store.commit_log import LogNames
from psync.store.ledger import Client
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet
from psync.sync.log_entries import (
    FROM_CLOSER,
    body_of,
    closing_entry,
    counted_entry,
    entries_of_snapshot,
    push_of,
    staged_entry,
)
from psync.sync.step_update import Part
from psync.sync.steps import SyncSteps
from psync.wire.codec import Message
from psync.wire.messages import (
    CloseStep,
    Contribute,
    CountPush,
    HoldPush,
    NormsMeasured,
    SetGroups,
    StagePush,
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


def contribute(**more: Any) -> Contribute:
    """A message of a worker, whose set has the number 77 over its connection."""
    message = Contribute(GROUP, None, 1, 1, 7, 2, b"set", 3, 0.5, 77, None, -1, None)
    return replace(message, **more)


def test_a_part_names_its_set_and_its_group_in_full_once() -> None:
    names = LogNames()
    message = StagePush(GROUP, None, 1, 3, 77, None, None)  # 77: of its connection
    build = staged_entry(staged(), message, RAW)
    first, second = build(names), build(names)
    assert first == replace(message, config=RAW, set_id=0, members=list(KEYS))
    assert second == replace(first, config=None, members=None)


def test_a_compressed_part_is_named_apart_and_held_as_it_came() -> None:
    names = LogNames()
    members = [(-1, 2), *KEYS]
    part = Part(ShardSet.of(members), (), (BODY,))
    message = StagePush(GROUP, None, 1, 3, 77, None, None)
    staged_entry(staged(), message, RAW)(names)
    assert staged_entry(part, message, RAW)(names) == replace(message, set_id=1, members=members)
    close = CloseStep(GROUP, None, 3, [(*REPLICA, 1, 1.0)])
    build, segments = closing_entry(close, RAW, [part])
    closed = build(LogNames())
    assert isinstance(closed, CloseStep)
    assert (closed.sets, segments) == ([(0, members)], [BODY])
    (_, build_held, body), _ = entries_of_snapshot({}, {}, (), [(GROUP, REPLICA, 1, 3, part)], None)
    held = build_held(LogNames()) if callable(build_held) else build_held
    assert isinstance(held, HoldPush)
    assert (held.members, body) == ([(0, -1, 2), *((0, *key) for key in KEYS)], (BODY,))


def test_a_push_that_came_whole_is_in_its_entry() -> None:
    part = whole()
    build = counted_entry(contribute(spread=True), part)
    assert build(LogNames()) == CountPush(
        GROUP, 1, 1, 7, 2, b"set", 3, 0.5, 0, MEMBERS, [4, 4], None, True
    )
    assert body_of(part) == (BODY,)


def test_of_one_whose_parts_were_staged_it_says_only_that_it_is_judged() -> None:
    for part in (None, staged()):
        build = counted_entry(contribute(closure=-1), part)
        assert build(LogNames()) == CountPush(
            GROUP, 1, 1, -1, 2, b"set", 3, 0.5, -1, None, [], None, False
        )
    assert body_of(None) == body_of(staged(())) == ()


def test_the_rule_is_told_the_same_of_a_push_and_of_its_entry() -> None:
    for closure in (7, -1):
        message = contribute(closure=closure)
        entry = counted_entry(message, None)(LogNames())
        assert isinstance(entry, CountPush)
        push = push_of(message, REPLICA)
        assert push_of(entry, REPLICA) == push
        assert push.closure == (None if closure < 0 else closure)


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


def test_one_that_decides_no_steps_has_no_rule_in_its_snapshot() -> None:
    assert read(entries_of_snapshot({}, {}, [], [], None)) == [(FROM_CLOSER, SetGroups([], []), ())]
