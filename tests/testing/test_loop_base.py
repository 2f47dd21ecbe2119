"""Tasks, generators and error reports of the loop; and the fence round the real world."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator

import pytest

from psync.testing import RealWorldError, VirtualClockLoop, run_virtual, settle
from psync.testing.clock import Fence

FENCED = [name for name, value in vars(Fence).items() if type(value).__name__ == "_Fenced"]


@pytest.mark.parametrize("name", FENCED)
def test_what_reaches_the_real_world_is_refused(name: str) -> None:
    async def main() -> None:
        message = rf"{name}\(\) reaches out of a loop with a virtual clock"
        with pytest.raises(RealWorldError, match=message):
            getattr(asyncio.get_running_loop(), name)("an", argument=1)

    run_virtual(main)


def test_every_method_of_a_loop_is_there_or_fenced() -> None:
    methods = dict(inspect.getmembers(asyncio.AbstractEventLoop, inspect.isfunction))
    missing = [
        name for name, method in methods.items() if getattr(VirtualClockLoop, name) is method
    ]
    assert missing == []


async def count(ended: list[str], name: str) -> AsyncIterator[int]:
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(1.0)
        ended.append(name)


def test_generators_that_are_still_open_are_closed_at_the_end() -> None:
    ended: list[str] = []
    held = []

    async def main() -> None:
        for name in ("a", "b"):
            held.append(count(ended, name))
            await anext(held[-1])

    run_virtual(main)
    assert sorted(ended) == ["a", "b"]


def test_an_error_while_closing_a_generator_is_reported() -> None:
    async def fail() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise ZeroDivisionError

    held, reports = [], []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        held.append(fail())
        await anext(held[0])

    run_virtual(main)
    assert reports[0]["message"].startswith("an error occurred while closing <async_generator")
    assert isinstance(reports[0]["exception"], ZeroDivisionError)


def test_errors_that_nobody_awaits_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert loop.get_exception_handler() is None
        loop.call_soon(lambda: 1 // 0)
        await settle()
        loop.call_exception_handler({"protocol": "p"})

    with caplog.at_level(logging.ERROR, "asyncio"):
        run_virtual(main)
    first, second = caplog.records
    assert first.getMessage().startswith("Exception in callback")
    assert first.exc_info is not None
    assert first.exc_info[0] is ZeroDivisionError
    assert second.getMessage() == "unhandled exception in the event loop\nprotocol: 'p'"


def test_a_handler_gets_the_errors_instead(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, reports = asyncio.get_running_loop(), []

        def handle(loop, report) -> None:
            reports.append(report["message"])
            if len(reports) == 2:
                raise ZeroDivisionError

        loop.set_exception_handler(handle)
        assert loop.get_exception_handler() is handle
        loop.call_exception_handler({"message": "one"})
        loop.call_exception_handler({"message": "two"})
        assert reports == ["one", "two"]

    run_virtual(main)
    (record,) = caplog.records
    assert record.getMessage() == "the exception handler failed\ncontext: {'message': 'two'}"
