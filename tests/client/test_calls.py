from __future__ import annotations

import asyncio
import functools

import pytest

from psync.client.calls import Answers, all_of, expect
from psync.client.ps_link import Question
from psync.errors import RemoteProtocolError
from psync.net.peer import Received
from psync.wire.messages import Done, Statistics

pytestmark = pytest.mark.asyncio


async def fail(error: Exception) -> int:
    raise error


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_all_calls_are_made_at_once_and_answered_in_order() -> None:
    assert await all_of([give(1), give(2), give(3)]) == [1, 2, 3]


async def test_the_first_error_is_raised_once_all_have_ended() -> None:
    ended: list[int] = []

    async def end_later() -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append(1)
        return 1

    with pytest.raises(ValueError, match="first"):
        await all_of([fail(ValueError("first")), end_later(), fail(ValueError("last"))])
    assert ended == [1]


async def test_who_is_cancelled_cancels_all() -> None:
    cancelled: list[int] = []

    async def wait(number: int) -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            cancelled.append(number)

    task = asyncio.ensure_future(all_of([wait(1), wait(2)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [1, 2]


class TestAnswers:
    @staticmethod
    def received(number: int) -> Received:
        return Received(Statistics({"number": number}), [])

    @pytest.mark.parametrize("before", [0, 1, 3])
    async def test_they_come_in_the_order_of_the_questions(self, before: int) -> None:
        """Also if some of them, or all, were there before somebody waits."""
        answers, order = Answers(3), [2, 0, 1]
        for number in order[:before]:
            answers.note(number, self.received(number))
        waiting = asyncio.create_task(answers.wait())
        for number in order[before:]:
            await asyncio.sleep(0)
            assert not waiting.done()
            answers.note(number, self.received(number))
        assert await waiting == [self.received(number) for number in range(3)]
        assert await Answers(0).wait() == []

    async def test_the_first_error_is_raised_once_all_have_ended(self) -> None:
        answers = Answers(3)
        waiting = asyncio.create_task(answers.wait())
        answers.note(2, ValueError("last"))
        answers.note(1, ValueError("first"))
        await asyncio.sleep(0)
        assert not waiting.done()
        answers.note(0, self.received(0))
        with pytest.raises(ValueError, match="first"):
            await waiting

    async def test_who_is_cancelled_gives_all_up(self) -> None:
        answers = Answers(2)
        given_up: list[int] = []
        for number in range(2):
            question = Question()
            question.end = functools.partial(given_up.append, number)
            answers.questions.append(question)
        waiting = asyncio.create_task(answers.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert given_up == [0, 1]
        for number in range(2):
            answers.note(number, self.received(number))  # too late, and harmless


async def test_an_answer_of_another_kind_is_named_with_who_gave_it() -> None:
    received = Received(Done(), [])
    assert expect(received, Done, "a ps", "a pull") is received.message
    with pytest.raises(RemoteProtocolError, match=r"^a ps answered a pull with Done"):
        expect(received, Statistics, "a ps", "a pull")
