"""What a ps does, and when, if a backup must have it first."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from psync.ps.committer import AT_ONCE, Committer, Entry

from local_training import at_once
from psync.errors import ClosedError, FencedError, UsageError
from psync.net.peer import Reply
from psync.numerics.blocks import BlockPool
from psync.numerics.update_rule import SGD
from psync.specs import ShardSpec
from psync.store.commit_log import CommitLog
from psync.store.store import ShardStore
from psync.wire.codec import decode
from psync.wire.lock_messages import AssignLocked
from psync.wire.messages import Done
from psync.wire.ps_messages import Assign, DefineOptimizer, Fence
from turns import Turns

PS = "/job:ps/task:0"
CLIENT = ("/job:worker/task:0", 7)
DONE = Reply(Done())
NOTE = Fence("/job:worker/task:1", 5)


def committer_of() -> tuple[Committer, CommitLog[Entry], ShardStore]:
    store = ShardStore(PS, BlockPool())
    store.create(ShardSpec("w", 0, 0, 0, (2,), "float32", 0), fill=np.float32(0))
    log: CommitLog[Entry] = CommitLog(PS, 1 << 20)
    return Committer(PS, 100, store, log), log, store


def paired() -> tuple[Committer, CommitLog[Entry], ShardStore]:
    committer, log, store = committer_of()
    committer.begin_copy()
    log.pair()
    return committer, log, store


def shipped(log: CommitLog[Entry]) -> list[Any]:
    return [decode(each.entry.header) for each in log.to_ship(99, 1 << 20)]


@pytest.mark.usefixtures("turns")
def test_without_a_backup_it_is_done_at_once() -> None:
    committer, log, _ = committer_of()
    assert committer.commit(CLIENT, NOTE, (), lambda: DONE).result() is DONE
    assert log.last == 1
    assert committer.waiting == 0


@pytest.mark.usefixtures("turns")
def test_with_one_nothing_is_done_before_that_has_it() -> None:
    committer, log, _ = paired()
    done: list[int] = []
    answers = [
        committer.commit(CLIENT, NOTE, (), lambda number=number: done.append(number))
        for number in (1, 2, 3)
    ]
    assert shipped(log) == [NOTE] * 3
    assert done == []
    log.note_taken(2)
    committer.advance()
    assert done == [1, 2]
    assert not answers[2].done()
    log.note_taken(3)
    committer.advance()
    assert [answer.result() for answer in answers] == [None] * 3
    assert done == [1, 2, 3]


async def test_what_takes_long_holds_up_what_comes_after_it() -> None:
    committer, _, _ = committer_of()
    going_on = asyncio.Event()

    async def slow() -> Reply:
        await going_on.wait()
        return DONE

    first = committer.commit(CLIENT, NOTE, (), slow)
    second = committer.commit(CLIENT, NOTE, (), lambda: DONE)
    turn = committer.at_turn(lambda: DONE)
    await asyncio.sleep(0)
    assert not second.done()
    assert committer.waiting == 3
    going_on.set()
    await asyncio.gather(first, second, turn)


async def test_an_error_is_its_sender_s_and_the_next_is_done() -> None:
    committer, _, _ = committer_of()
    ended: list[str] = []

    def wrong() -> Reply:
        raise UsageError("no")

    async def wrong_later() -> Reply:
        raise UsageError("later")

    for act in (wrong, wrong_later):
        with pytest.raises(UsageError):
            await committer.commit(CLIENT, NOTE, (), act, ended=lambda: ended.append("ended"))
    assert await committer.commit(CLIENT, NOTE, (), lambda: DONE) is DONE
    assert ended == ["ended"] * 2


@pytest.mark.usefixtures("turns")
def test_what_an_entry_brings_with_it_is_done_when_that_has_been_done() -> None:
    committer, log, _ = paired()
    done: list[str] = []

    def fence() -> Reply:
        committer.at_turn(lambda: done.append("told"))
        done.append("fenced")
        return DONE

    committer.commit(CLIENT, NOTE, (), fence)
    committer.commit(CLIENT, NOTE, (), lambda: done.append("next"))
    shipped(log)
    log.note_taken(2)
    committer.advance()
    assert done == ["fenced", "next", "told"]


@pytest.mark.usefixtures("turns")
def test_a_caller_that_has_gone_does_not_stop_it() -> None:
    committer, log, _ = paired()
    done: list[int] = []
    committer.commit(CLIENT, NOTE, (), lambda: done.append(1)).cancel()
    log.to_ship(9, 999)
    log.note_taken(1)
    committer.advance()
    assert done == [1]


def test_many_at_once_leave_the_loop_its_turn(turns: Turns) -> None:
    committer, log, _ = paired()
    done: list[int] = []
    for number in range(2 * AT_ONCE):
        committer.commit(CLIENT, NOTE, (), lambda number=number: done.append(number))
    log.to_ship(999, 1 << 20)
    log.note_taken(2 * AT_ONCE)
    committer.advance()
    assert len(done) == AT_ONCE
    turns.turn()
    assert len(done) == 2 * AT_ONCE


@pytest.mark.usefixtures("turns")
def test_an_optimizer_that_was_defined_in_passing_is_known_to_the_backup_first() -> None:
    committer, log, store = paired()
    store.define_optimizer(4, SGD(0.5).to_config())
    committer.commit(CLIENT, NOTE, (), lambda: DONE)
    first, second = shipped(log)
    assert isinstance(first, DefineOptimizer)
    assert first.optimizer == 4
    assert second == NOTE


@pytest.mark.usefixtures("turns")
def test_sets_have_numbers_of_the_log_and_locks_are_behind_it() -> None:
    committer, log, _ = paired()
    keys = ((0, 0),)
    body = memoryview(bytes(8))
    for sequence in (1, 2):
        message = AssignLocked(sequence, 0, -1, 0, 33, None, "add", None, None, 5)
        committer.commit(CLIENT, message, (body,), lambda: DONE, keys=keys)
    assert shipped(log) == [
        Assign(1, 0, -1, 0, 0, [[0, 0]], "add"),  # type: ignore[list-item]
        Assign(2, 0, -1, 0, 0, None, "add"),
    ]


@pytest.mark.parametrize("deposed", [True, False])
@pytest.mark.usefixtures("turns")
def test_in_the_end_whoever_waits_is_told(deposed: bool) -> None:
    committer, _, _ = paired()
    waiting = committer.commit(CLIENT, NOTE, (), lambda: DONE)
    if deposed:
        committer.depose()
    else:
        committer.end()
    error = FencedError if deposed else ClosedError
    with pytest.raises(error):
        waiting.result()
    with pytest.raises(error):
        committer.commit(CLIENT, NOTE, (), lambda: DONE)
    with pytest.raises(error):
        committer.at_turn(lambda: DONE).result()
    at_once(committer.drain())
