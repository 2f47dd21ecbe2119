"""The report names every task, and the lines at which it waits."""

from __future__ import annotations

import asyncio
import pickle

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


def test_a_run_without_tasks_says_what_would_have_ended_it() -> None:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        loop = runner.get_loop()
        with pytest.raises(Deadlock, match=r"no task is pending: only stop\(\) could"):
            loop.run_forever()


def test_it_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Deadlock("text", ("a", "b"))))
    assert (str(error), error.tasks) == ("text", ("a", "b"))
    assert isinstance(error, AssertionError)
