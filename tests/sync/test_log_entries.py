"""What a log says of synchronous steps."""

from __future__ import annotations

from dataclasses import replace

from psync.ps.update import ShardSet
from psync.store.commit_log import LogNames
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet
from psync.sync.group import Contribution
from psync.sync.log_entries import (
    FROM_CLOSER,
    closing_entry,
    counted_entry,
    entries_of_snapshot,
    staged_entry,
)
from psync.sync.step_update import Part
from psync.wire.recovery_messages import CountPush, SetSteps
from psync.wire.sync_messages import CloseStep, StagePush

GROUP = 9
RAW = {"name": "sync"}
REPLICA = ("/job:worker/task:0", 5)
KEYS = ((3, 0), (4, 0))
BODY = memoryview(b"gradient")
MEMBERS = [(0, 3, 0), (1, 3, 1)]


def staged(body: memoryview = BODY) -> Part:
    return Part(ShardSet(KEYS), (), body)


def whole() -> Part:
    known = WholeSet(MEMBERS, ShareNumbers(2, "/job:ps/task:0"))
    known.lengths = (4, 4)
    return Part(known.own, (), BODY, None, known)


def push(number: int = 1, closure: int | None = 7) -> Contribution:
    return Contribution(REPLICA, number, 0, closure, 2, b"set", 3, 0.5)


def test_a_part_names_its_set_and_its_group_in_full_once() -> None:
    names = LogNames()
    message = StagePush(GROUP, None, 1, 3, 77, None, None)  # 77: of its connection
    build = staged_entry(staged(), message, RAW)
    first, second = build(names), build(names)
    assert first == replace(message, config=RAW, set_id=0, members=list(KEYS))
    assert second == replace(first, config=None, members=None)


def test_a_push_that_came_whole_is_in_its_entry() -> None:
    build, segments = counted_entry(GROUP, 3, push(), whole(), RAW, spread=True)
    assert build(LogNames()) == CountPush(
        GROUP, RAW, 3, 1, 7, 2, b"set", 3, 0.5, 0, MEMBERS, [4, 4], None, True
    )
    assert segments == (BODY,)


def test_of_one_whose_parts_were_staged_it_says_only_that_it_counts() -> None:
    for part in (None, staged()):
        build, segments = counted_entry(GROUP, 3, push(1, None), part, RAW, spread=False)
        assert build(LogNames()) == CountPush(
            GROUP, RAW, 3, 1, -1, 2, b"set", 3, 0.5, -1, None, [], None, False
        )
        assert segments == ()


def test_a_closing_has_the_parts_that_ps_0_handed_on_and_no_values_are_wanted() -> None:
    message = CloseStep(GROUP, RAW, 3, [(*REPLICA, 1, 1.0)] * 4, [9], [], [8], [(3, 0.5)], None)
    names = LogNames()
    along = [None, staged(), staged(memoryview(b"")), staged()]
    build, segments = closing_entry(message, RAW, along)
    entry = build(names)
    assert entry == replace(
        message, along=[-1, 0, -1, 0], sets=[(0, list(KEYS))], ahead=[], config=RAW
    )
    assert segments == [BODY, BODY]
    again, _ = closing_entry(message, RAW, along[:2])
    assert again(names) == replace(entry, config=None, along=[-1, 0], sets=[])


def test_an_snapshot_is_followed_by_what_it_does_not_have() -> None:
    entries = entries_of_snapshot(
        {GROUP: RAW, 10: RAW}, {GROUP: 4}, {GROUP: 3}.get,  # type: ignore[arg-type]
        [
            (GROUP, REPLICA, 1, 4, staged()), (GROUP, REPLICA, 2, 4, whole()),
            (GROUP, REPLICA, 3, 4, whole()),  # refused: it came, and counts nowhere
        ],
        [(GROUP, 4, push(1)), (GROUP, 4, push(2))], {GROUP},
    )  # fmt: skip
    names = LogNames()
    clients = [client for client, _, _ in entries]
    messages = [build(names) for _, build, _ in entries]
    assert clients == [FROM_CLOSER, REPLICA, REPLICA, REPLICA]
    state, part, first, second = messages
    assert isinstance(state, SetSteps)
    assert [(group, step) for group, _, step, _ in state.groups] == [(GROUP, 4), (10, -1)]
    assert isinstance(part, StagePush)
    assert isinstance(first, CountPush)
    assert isinstance(second, CountPush)
    assert (first.push, first.set_id) == (1, -1)
    assert (second.push, second.members, second.spread) == (2, MEMBERS, True)
    assert [segments for *_, segments in entries] == [(), (BODY,), (), (BODY,)]
