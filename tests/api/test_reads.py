"""Reads that are kept: in a scope the first one of a variable answers the later ones."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, training_of


async def test_rows_are_not_kept_and_consistent_reads_neither() -> None:
    async with training_of(v=[1.0, 2.0]) as (_, v):
        with psync.cache_variable_reads():
            await v.read()
            await v.assign([5.0, 6.0])
            assert await v[1] == 6
            assert await v.sparse_read([0]) == [5]
            assert (await v.read(consistent=True)).tolist() == [5, 6]
            assert (await v.read()).tolist() == [1, 2]


async def test_what_is_kept_is_copied_for_those_who_change_it() -> None:
    async with training_of(v=[1.0, 2.0]) as (_, v):
        with psync.cache_variable_reads():
            mine = await v.read(copy=True)
            mine[:] = 0
            out = np.zeros(2, np.float32)
            assert (await v.read(out=out)) is out
            assert out.tolist() == [1, 2]
            kept = await v.read()
            assert kept.tolist() == [1, 2]
            with pytest.raises(ValueError, match="read-only"):
                kept[0] = 7


async def test_of_two_reads_at_once_one_is_kept() -> None:
    async with training_of(v=1.0) as (_, v):
        with psync.cache_variable_reads():
            first, second = await asyncio.gather(v.read(), v.read())
            third = await v.read()
        assert first is second or second is third
        assert first == second == third == 1


async def test_nested_scopes_are_an_error_and_change_nothing() -> None:
    async with training_of(v=1.0) as (_, v):
        with psync.cache_variable_reads():
            await v.read()
            with pytest.raises(ValueError, match="cannot be nested"):
                with psync.cache_variable_reads():
                    pass
            await v.assign(2.0)
            assert await v.read() == 1  # the outer one is still open
        assert await v.read() == 2
        with psync.cache_variable_reads():
            assert await v.read() == 2


def test_a_scope_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), psync.cache_variable_reads():
        raise ZeroDivisionError
    with psync.cache_variable_reads():
        pass


async def test_other_tasks_have_scopes_of_their_own() -> None:
    async with training_of(v=1.0) as (_, v):
        opened, assigned = asyncio.Event(), asyncio.Event()

        async def reader() -> tuple[float, float]:
            with psync.cache_variable_reads():
                first = float(await v.read())
                opened.set()
                await assigned.wait()
                return first, float(await v.read())

        reading = asyncio.create_task(reader())
        await opened.wait()
        await v.assign(2.0)
        with psync.cache_variable_reads():
            assert await v.read() == 2
        assigned.set()
        assert await reading == (1, 1)


async def test_a_step_has_its_own_scope_and_not_that_in_which_it_was_scheduled() -> None:
    async with training_of(v=1.0) as (coordinator, v):

        async def step() -> Any:
            await v.assign(2.0)
            seen = [float(await v.read())]
            with psync.cache_variable_reads():
                seen.append(float(await v.read()))
                await v.assign(3.0)
                seen.append(float(await v.read()))
            return [*seen, float(await v.read())]

        with psync.cache_variable_reads():
            await v.read()
            assert await in_step(coordinator, step) == [2, 2, 2, 3]
            assert await v.read() == 1


async def test_a_plain_step_keeps_reads_too() -> None:
    async with training_of(v=1.0) as (coordinator, v):

        def step() -> Any:
            with psync.cache_variable_reads():
                first = float(psync.wait(v.read()))
                psync.wait(v.assign(2.0))
                return first, float(psync.wait(v.read()))

        assert await in_step(coordinator, step) == (1, 1)
