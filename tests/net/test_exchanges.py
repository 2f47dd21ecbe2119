"""Requests and answers while they are under way: what is given once, what is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asked import Reply
from endpoints import connected
from psync.errors import ConnectionLost, ValueMismatchError
from psync.net.connection import Handler, Request
from psync.testing import settle
from psync.wire.frames import Frame
from psync.wire.messages import AskStatistics, Done, Statistics
from turns import Turns, peered

REPLY = Reply(Done())


def later() -> tuple[Later, list[Later]]:
    given_up: list[Later] = []
    return Later(given_up.append), given_up


class TestLater:
    def test_an_answer_is_delivered_once_whenever_it_is_given(self) -> None:
        for before in (True, False):
            waiter, given_up = later()
            got: list[Any] = []
            if before:
                waiter.give(REPLY)
            waiter.deliver_to(got.append)
            waiter.give(REPLY)
            waiter.give(REPLY)
            waiter.give_up()
            assert got == [REPLY]
            assert given_up == []

    def test_who_gives_up_is_told_of_once_and_gets_no_answer(self) -> None:
        waiter, given_up = later()
        got: list[Any] = []
        waiter.deliver_to(got.append)
        waiter.give_up()
        waiter.give_up()
        waiter.give(REPLY)
        assert given_up == [waiter]
        assert got == []


class Waiting:
    """A handler that answers when it is told to."""

    def __init__(self, *, slowly: bool = False) -> None:
        self.waiters: list[Later] = []
        self.given_up: list[Later] = []
        self._slowly = slowly

    def __call__(self, request: Request[Any]) -> None:
        waiter = Later(self.given_up.append)
        self.waiters.append(waiter)
        return self._later(waiter) if self._slowly else waiter

    async def _later(self, waiter: Later) -> Later:
        return waiter


def test_the_answer_comes_when_it_is_given_and_leaves_at_once(turns: Turns) -> None:
    handler = Waiting()
    pair = peered(turns, {AskStatistics: Handler(handler)})
    got: list[Any] = []
    for _ in range(2):
        pair.peer.ask(AskStatistics(), (), got.append)
    turns.settle()
    assert got == []
    before = pair.back.bytes_sent
    handler.waiters[1].give(Reply(Statistics({"n": 1})))
    assert pair.back.bytes_sent > before
    handler.waiters[0].give(ValueMismatchError("no"))
    turns.settle()
    assert got[0] == Frame(Statistics({"n": 1}), [])
    assert isinstance(got[1], ValueMismatchError)
    assert handler.given_up == []


@pytest.mark.virtual_time
async def test_the_answer_of_a_handler_that_took_time_comes_when_it_is_given() -> None:
    handler = Waiting(slowly=True)
    async with connected(server={AskStatistics: Handler(handler)}) as pair:
        got: list[Any] = []
        for _ in range(2):
            pair.peer.ask(AskStatistics(), (), got.append)
        await settle()
        assert got == []
        before = pair.back.bytes_sent
        handler.waiters[1].give(Reply(Statistics({"n": 1})))
        assert pair.back.bytes_sent > before
        handler.waiters[0].give(ValueMismatchError("no"))
        await settle()
        assert got[0] == Frame(Statistics({"n": 1}), [])
        assert isinstance(got[1], ValueMismatchError)
        assert handler.given_up == []


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("with_the_connection", [False, True])
async def test_it_is_given_up_with_the_connection_or_by_the_caller(
    slowly: bool, with_the_connection: bool
) -> None:
    handler = Waiting(slowly=slowly)
    async with connected(server={AskStatistics: Handler(handler)}) as pair:
        if with_the_connection:
            got: list[Any] = []
            pair.peer.ask(AskStatistics(), (), got.append)
            await settle()
            pair.peer.abort()
            await settle()
            assert handler.given_up == handler.waiters
            assert [type(outcome) for outcome in got] == [ConnectionLost]
            handler.waiters[0].give(REPLY)
            with pytest.raises(ConnectionLost):
                pair.peer.ask(AskStatistics(), (), got.append)
        else:
            deadline = asyncio.get_running_loop().time() + 1
            with pytest.raises(TimeoutError):
                await pair.peer.call(AskStatistics(), deadline=deadline)
            await settle()
            assert handler.given_up == handler.waiters
