"""The report names every task, and the lines at which it waits."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Generator

import pytest

from psync.testing import Deadlock, VirtualClockLoop, run_virtual


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def call_it() -> None:
    await wait_for_ever()


def test_each_task_is_listed_with_the_lines_at_which_it_waits() -> None:
    async def main() -> None:
        task = asyncio.create_task(call_it(), name="reader")
        await task

    with pytest.raises(Deadlock) as caught:
        run_virtual(main)
    first, *rest = str(caught.value).splitlines()
    assert first == ("nothing is ready and no timer is set, at virtual time 0 s; 2 pending tasks:")
    names = [line for line in rest if not line.startswith("    ")]
    assert names[0].startswith("  Task-") or names[1].startswith("  Task-")
    assert "  reader (call_it) waits for a Future" in names
    assert any(line.endswith(".<locals>.main) waits for reader") for line in names)
    places = [line for line in rest if line.startswith("    ")]
    lines = {name: code.__code__.co_firstlineno + 1 for name, code in CODE.items()}
    assert f"    {__file__}:{lines['call_it']} in call_it: await wait_for_ever()" in places
    assert (
        f"    {__file__}:{lines['wait_for_ever']} in wait_for_ever: await asyncio.Event().wait()"
        in (places)
    )
    assert set(caught.value.tasks) > {"reader"}


CODE = {"call_it": call_it, "wait_for_ever": wait_for_ever}


def test_tasks_are_listed_in_the_order_of_their_names() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(wait_for_ever(), name=f"t-{number}")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main)
    listed = [name for name in caught.value.tasks if name.startswith("t-")]
    assert listed == [f"t-{number}" for number in range(12)]


def test_a_generator_that_awaits_is_followed() -> None:
    class Awaitable:
        def __await__(self) -> Generator[None, None, None]:
            yield from wait_for_ever().__await__()

    async def main() -> None:
        await Awaitable()

    with pytest.raises(Deadlock, match=r"in .*Awaitable\.__await__: yield from") as caught:
        run_virtual(main)
    assert "1 pending task:" in str(caught.value)


def test_an_asynchronous_generator_shows_the_line_that_iterates() -> None:
    async def generate() -> AsyncIterator[int]:
        await wait_for_ever()
        yield 1

    async def main() -> None:
        async for _ in generate():
            pass

    with pytest.raises(Deadlock, match=r"in .*main: async for _ in generate\(\):"):
        run_virtual(main)


def test_a_gathering_task_says_so() -> None:
    async def main() -> None:
        await asyncio.gather(wait_for_ever(), wait_for_ever())

    with pytest.raises(Deadlock, match=r"main\) waits for a GatheringFuture"):
        run_virtual(main)


def test_a_run_without_tasks_says_what_would_have_ended_it() -> None:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        loop = runner.get_loop()
        with pytest.raises(Deadlock, match=r"no task is pending: only stop\(\) could"):
            loop.run_forever()


def test_it_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Deadlock("text", ("a", "b"))))
    assert (str(error), error.tasks) == ("text", ("a", "b"))
    assert isinstance(error, AssertionError)
