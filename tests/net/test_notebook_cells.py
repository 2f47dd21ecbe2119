"""Cells: what is begun in the background inherits no cell; all else of the context stays."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from types import ModuleType

import pytest

from psync.net.shielding import of_no_cell

cell: contextvars.ContextVar[int] = contextvars.ContextVar("parent_header")  # as ipykernel's
other: contextvars.ContextVar[int] = contextvars.ContextVar("other")


async def seen() -> tuple[int | None, int | None]:
    async def later() -> tuple[int | None, int | None]:
        return cell.get(None), other.get(None)

    return await asyncio.get_running_loop().create_task(later())


async def test_in_a_notebook_it_belongs_to_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    cell.set(1)
    other.set(2)
    assert await of_no_cell(seen()) == (None, 2)
    assert cell.get() == 1


async def test_elsewhere_nothing_changes() -> None:
    cell.set(1)
    other.set(2)
    assert await of_no_cell(seen()) == (1, 2)


async def test_cancelling_it_cancels_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(of_no_cell(work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
