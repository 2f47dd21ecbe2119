"""What changes a ps is done in the order of its log, when the backup has it, and then answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asked import Asked, Reply, peer_of
from local_training import at_once
from psync.errors import ClosedError, FencedError, UsageError
from psync.net.connection import Handler, Request
from psync.numerics.memory import BlockPool
from psync.numerics.rules import SGD
from psync.ps.computes import Compute
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.ps.executor import AT_ONCE, Entry, Executor
from psync.specs import ShardSpec
from psync.store.commit_log import CommitLog
from psync.store.store import ShardStore
from psync.testing import settle
from psync.wire.codec import decode
from psync.wire.messages import CheckState, Done, Fence
from turns import Turns

PS = "/job:ps/task:0"
CLIENT = ("/job:worker/task:0", 7)
DONE = Reply(Done())
NOTE = Fence("/job:worker/task:1", 5)
KEY = (0, 0)


class Ps:
    """An executor with one shard; ``done``: what its entries did, in order."""

    def __init__(self, *, paired: bool = False) -> None:
        self.stopped = False
        self.done: list[Any] = []
        self.store = ShardStore(PS, BlockPool())
        self.store.create(ShardSpec("w", *KEY, 0, (2,), "float32", 0), fill=np.float32(0))
        self.work = LongWork(PS, self._stop)
        self.log: CommitLog[Entry] = CommitLog(PS, 1 << 20)
        self.executor = Executor(PS, 100, self.store, self.work, self.log)
        if paired:
            self.executor.begin_copy()
            self.log.pair()

    def _stop(self) -> None:
        self.stopped = True

    def submit(self, act: Callable[[], Any], **options: Any) -> Asked:
        asked = Asked(peer_of(CLIENT), NOTE)
        self.executor.submit(asked, NOTE, (), act, **options)
        return asked

    def note(self, what: Any) -> Asked:
        """An entry that is noted when it is executed, and answered at once."""
        return self.submit(lambda: self.done.append(what))

    def between(self, act: Callable[[], Any]) -> Asked:
        """Something that is done between two entries."""
        asked = Asked(peer_of(CLIENT), NOTE)
        self.executor.in_turn(act, asked)
        return asked

    def shipped(self) -> list[Any]:
        """The messages of entries that the backup is to have."""
        return [decode(each.entry.header) for each in self.log.to_ship(9999, 1 << 20)]

    def taken(self, number: int) -> None:
        """The backup has all entries up to this one."""
        self.log.to_ship(9999, 1 << 20)
        self.log.note_taken(number)
        self.executor.advance()


def nothing() -> None:
    """An act that has nothing to do, or a compute that has nothing to say."""


def refuses() -> None:
    raise UsageError("no")


# Alone.


def test_alone_no_message_of_an_entry_is_made() -> None:
    def nobody_reads_it(_: object) -> Any:
        raise AssertionError("there is no backup that will read it")

    asked = Asked(peer_of(CLIENT), NOTE)
    Ps().executor.submit(asked, nobody_reads_it, (), nothing)
    assert asked.outcome == DONE


def test_alone_small_work_on_arrays_is_done_before_the_answer_is_returned() -> None:
    ps = Ps()
    claimed: list[str] = []

    def apply() -> None:
        ps.done.append("applied")

    compute = Compute([KEY], nothing, 8, apply)
    claim: Any = lambda: claimed.append("began")  # noqa: E731
    assert ps.submit(lambda: compute, claim=claim).outcome == DONE
    assert ps.done == ["applied"]
    assert claimed == []  # it is over already


def test_alone_a_refusal_is_the_answer_and_the_next_entry_is_executed() -> None:
    ps = Ps()
    with pytest.raises(UsageError, match="no"):
        ps.submit(refuses).result()
    assert ps.submit(nothing).outcome == DONE
    assert ps.log.last == 2
    assert not ps.stopped


# With a backup.


def test_something_may_be_shipped_as_soon_as_there_is_an_entry() -> None:
    ps = Ps(paired=True)
    seen: list[int] = []
    ps.executor.on_entry = lambda: seen.append(ps.log.last)
    ps.note(1)
    ps.note(2)
    assert seen == [1, 2]


@pytest.mark.usefixtures("turns")
def test_a_refusal_is_the_answer_and_the_next_entry_is_executed() -> None:
    ps = Ps(paired=True)
    refused, after = ps.submit(refuses), ps.note("next")
    ps.taken(2)
    assert isinstance(refused.outcome, UsageError)
    assert after.outcome == DONE
    assert not ps.stopped


def test_what_waits_is_claimed_from_its_number_to_its_answer(turns: Turns) -> None:
    ps = Ps(paired=True)
    claims: list[str] = []

    def claim(name: str) -> Callable[[], Callable[[], None]]:
        def begun() -> Callable[[], None]:
            claims.append(f"{name} began")
            return lambda: claims.append(f"{name} ended")

        return begun

    ps.submit(nothing, claim=claim("one"))
    ps.submit(refuses, claim=claim("two"))
    ps.submit(nothing, claim=claim("three"))
    assert claims == ["one began", "two began", "three began"]
    ps.taken(2)
    assert claims[3:] == ["one ended", "two ended"]
    ps.executor.end()
    assert claims[5:] == ["three ended"]
    turns.settle()


def test_a_caller_that_has_gone_does_not_stop_it() -> None:
    ps = Ps(paired=True)
    answer = ps.note(1)
    answer.give_up()
    ps.taken(1)
    assert ps.done == [1]


def test_many_at_once_leave_the_loop_its_turn(turns: Turns) -> None:
    ps = Ps(paired=True)
    for number in range(2 * AT_ONCE):
        ps.note(number)
    ps.taken(2 * AT_ONCE)
    assert len(ps.done) == AT_ONCE
    ps.executor.advance()  # it has more: nothing comes sooner for that
    assert len(ps.done) == AT_ONCE
    turns.turn()
    assert ps.done == list(range(2 * AT_ONCE))


# Entries that bring others with them.


def test_alone_what_an_entry_brings_with_it_is_executed_after_it() -> None:
    ps = Ps()

    def fence() -> None:
        assert not ps.note("brought").done()  # it has to wait
        ps.done.append("fenced")

    assert ps.submit(fence).outcome == DONE
    assert ps.done == ["fenced", "brought"]


def test_what_an_entry_brings_with_it_has_its_own_number() -> None:
    ps = Ps(paired=True)

    def fence() -> None:
        ps.note("brought")
        ps.done.append("fenced")

    ps.submit(fence)
    ps.note("next")
    ps.taken(2)
    assert ps.done == ["fenced", "next"]
    assert ps.log.last == 3
    ps.taken(3)
    assert ps.done == ["fenced", "next", "brought"]


def test_a_refused_entry_does_not_leave_what_it_has_brought_with_it(turns: Turns) -> None:
    ps = Ps()

    def wrong() -> None:
        ps.note("brought")
        raise UsageError("no")

    assert isinstance(ps.submit(wrong).outcome, UsageError)
    turns.settle()
    assert ps.done == ["brought"]


# What is awaited, and what is done between two entries.


@pytest.mark.parametrize("fails", [False, True])
async def test_an_entry_that_is_awaited_holds_up_what_comes_after_it(fails: bool) -> None:
    ps = Ps()
    going_on = asyncio.Event()
    ended: list[str] = []

    async def slow() -> None:
        await going_on.wait()
        if fails:
            raise UsageError("later")
        ps.done.append("slow")

    first = ps.submit(slow, claim=lambda: lambda: ended.append("slow"))
    second = ps.note("second")
    between = ps.between(lambda: ps.done.append("between"))
    third = ps.note("third")
    await asyncio.sleep(0)
    assert ps.done == []
    assert ps.executor.waiting == 4
    going_on.set()
    await ps.executor.drain()
    if fails:
        with pytest.raises(UsageError, match="later"):
            first.result()
    else:
        assert first.outcome == DONE
    assert ended == ["slow"]
    assert ps.done[-3:] == ["second", "between", "third"]
    assert [each.outcome for each in (second, between, third)] == [DONE] * 3
    assert not ps.stopped


def test_between_two_entries_all_before_are_executed_and_none_after() -> None:
    ps = Ps(paired=True)
    ps.note(1)
    between = ps.between(lambda: ps.done.append("between"))
    ps.note(2)
    assert ps.log.last == 2  # it is no entry
    ps.taken(1)
    assert ps.done == [1, "between"]
    assert between.outcome == DONE
    assert ps.executor.waiting == 1


def test_where_nothing_waits_what_comes_between_is_done_at_once() -> None:
    ps = Ps(paired=True)
    assert ps.between(nothing).outcome == DONE
    assert isinstance(ps.between(refuses).outcome, UsageError)


# Work on arrays.


async def test_the_answer_leaves_when_the_arrays_are_as_it_says() -> None:
    ps = Ps()
    going_on = asyncio.Event()
    claims: list[str] = []

    async def in_pieces() -> None:
        await going_on.wait()
        ps.done.append("applied")

    def claim() -> Callable[[], None]:
        claims.append("began")
        return lambda: claims.append("ended")

    large = Compute([KEY], nothing, INLINE_BYTES + 1, in_pieces=in_pieces)
    first = ps.submit(lambda: large, claim=claim)
    again = ps.submit(lambda: Compute([KEY], nothing))  # a repetition
    ps.note("judged")  # later entries are: only arrays wait for arrays
    assert ps.done == ["judged"]
    assert ps.executor.waiting == 0
    assert first.outcome is again.outcome is None
    assert claims == ["began"]
    going_on.set()
    await ps.executor.computes.settled()
    assert [first.outcome, again.outcome] == [DONE, DONE]
    assert ps.done == ["judged", "applied"]
    assert claims == ["began", "ended"]
    ps.executor.computes.check_idle()


@pytest.mark.virtual_time
async def test_with_a_backup_arrays_are_changed_when_that_has_the_entry() -> None:
    ps = Ps(paired=True)

    async def in_pieces() -> None:
        ps.done.append("applied")

    compute = Compute([KEY], nothing, INLINE_BYTES + 1, in_pieces=in_pieces)
    answer = ps.submit(lambda: compute)
    await settle()
    assert ps.done == []
    ps.taken(1)
    await settle()
    assert answer.outcome == DONE
    assert ps.done == ["applied"]


def test_work_that_fails_ends_the_task_and_its_sender_hears_of_it() -> None:
    def fails() -> None:
        raise MemoryError("no memory")

    compute = Compute([KEY], nothing, 8, fails)
    ps = Ps()
    assert isinstance(ps.submit(lambda: compute).outcome, MemoryError)
    assert ps.stopped
    ps = Ps(paired=True)
    answer = ps.submit(lambda: compute)
    ps.taken(1)
    assert isinstance(answer.outcome, MemoryError)
    assert ps.stopped


# Errors that no entry may have.


@pytest.mark.parametrize("paired", [False, True])
def test_an_unexpected_error_in_judging_ends_the_task(paired: bool) -> None:
    def wrong() -> None:
        raise ValueError("a bug")

    ps = Ps(paired=paired)
    answer = ps.submit(wrong)
    if paired:
        ps.taken(1)
    assert isinstance(answer.outcome, ValueError)
    assert ps.stopped


# What the backup is told.


def test_a_new_backup_knows_the_optimizers_that_are_in_its_snapshot() -> None:
    ps = Ps()
    ps.store.define_optimizer(4, SGD(0.5).to_config())
    ps.executor.begin_copy()
    ps.note(1)
    assert ps.shipped() == [NOTE]


def test_a_logged_handler_gets_its_message_in_its_turn() -> None:
    ps = Ps(paired=True)
    got: list[Any] = []

    def run(request: Request[Any]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        got.append((peer.task, message, body))

    answer = Asked(peer_of(CLIENT), NOTE, [])
    ps.executor.logged(Handler(run)).run(answer)
    assert got == []
    ps.taken(1)
    assert got == [(CLIENT[0], NOTE, [])]
    assert answer.outcome == DONE


@pytest.mark.parametrize("paired", [False, True])
def test_nobody_hears_of_the_error_of_a_notification(paired: bool) -> None:
    ps = Ps(paired=paired)
    notified = ps.executor.logged(Handler(lambda _: refuses()))
    asked = Asked(peer_of(CLIENT), NOTE)
    asked.request_id = 0  # as of a notification
    notified.serve(asked)
    if paired:
        ps.taken(1)
    assert ps.executor.waiting == 0
    ps.executor.end()
    notified.serve(asked)
    assert not asked.done()
    assert ps.log.last == 1


# A backup that is not what it should be.


@pytest.mark.virtual_time
async def test_a_new_backup_is_not_compared_with_what_the_one_before_was_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psync.ps.comparison.CHECK_EVERY", 1)
    ps = Ps(paired=True)
    ps.executor.digest = lambda: repr(ps.done).encode()
    ps.note("that the backup does not have when it is lost")  # and a check
    ps.log.give_up()
    ps.executor.begin_copy()
    frozen = asyncio.Event()
    ps.executor.in_turn(frozen.wait)  # type: ignore[arg-type]  # the entries before are executed by then
    for number in range(2):
        ps.note(number)
    checks = [message for message in ps.shipped() if isinstance(message, CheckState)]
    frozen.set()
    await settle()
    assert [(check.number, check.last) for check in checks] == [(1, b"")]
    ps.note(2)
    (check,) = [message for message in ps.shipped() if isinstance(message, CheckState)]
    assert check.number == 2
    assert check.last == repr(ps.done[:1]).encode()


# Ends.


@pytest.mark.parametrize("deposed", [True, False])
def test_in_the_end_whoever_waits_is_told(deposed: bool) -> None:
    ps = Ps(paired=True)
    waiting = ps.note(1)
    between = ps.between(nothing)
    if deposed:
        ps.executor.depose()
    else:
        ps.executor.end()
    error = FencedError if deposed else ClosedError
    assert isinstance(waiting.outcome, error)
    assert isinstance(between.outcome, error)
    assert isinstance(ps.note(2).outcome, error)
    assert isinstance(ps.between(nothing).outcome, error)
    at_once(ps.executor.drain())
    assert ps.done == []


def test_a_log_that_finds_itself_deposed_executes_nothing_more() -> None:
    ps = Ps(paired=True)
    waiting = ps.note(1)
    ps.log.depose()
    ps.executor.advance()
    assert isinstance(waiting.outcome, FencedError)
    assert isinstance(ps.note(2).outcome, FencedError)


# All of it, in any order.

STEPS = st.one_of(
    st.tuples(st.sampled_from(["entry", "refused", "brings", "between"]), st.just(0)),
    st.tuples(st.just("taken"), st.integers(1, 5)),
)


@given(st.booleans(), st.lists(STEPS, max_size=40))
def test_entries_are_executed_in_their_order_and_not_before_the_backup_has_them(
    paired: bool, steps: list[tuple[str, int]]
) -> None:
    ps = Ps(paired=paired)
    executed: list[int] = []
    answered: list[int] = []
    refused: list[int] = []
    turns = Turns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: turns)

        def submit(step: str) -> None:
            number = ps.log.last + 1

            def act() -> None:
                assert not paired or number <= ps.log.taken
                executed.append(number)
                if step == "brings":
                    submit("entry")
                if step == "refused":
                    raise UsageError("no")

            def got(outcome: object) -> None:
                assert number in executed
                (answered if isinstance(outcome, Reply) else refused).append(number)

            ps.executor.submit(Asked(peer_of(CLIENT), NOTE, then=got), NOTE, (), act)

        def between() -> None:
            last = ps.log.last

            def look() -> None:
                assert executed == list(range(1, last + 1))

            ps.executor.in_turn(look)

        for step, count in steps:
            if step == "between":
                between()
            elif step == "taken":
                if paired:
                    ps.taken(min(ps.log.taken + count, ps.log.last))
            else:
                submit(step)
            turns.settle()
            assert executed == list(range(1, (ps.log.taken if paired else ps.log.last) + 1))
        while paired and ps.log.taken < ps.log.last:
            ps.taken(ps.log.last)
            turns.settle()
    assert executed == list(range(1, ps.log.last + 1))
    assert sorted(answered + refused) == executed
    assert ps.executor.waiting == 0
