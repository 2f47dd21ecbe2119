"""Files are written and read in threads, on whose end a cancelled caller waits."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from psync.checkpoints import files
from psync.checkpoints.files import checkpoints_in
from psync.errors import CheckpointError
from psync.testing import settle
from psync.training import checkpoint as checkpoints


@pytest.mark.parametrize("method", ["add_snapshot", "commit"])
async def test_who_is_cancelled_while_files_are_written_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    original = getattr(files.Writer, method)

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return original(*arguments)

    monkeypatch.setattr(files.Writer, method, slow)
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.ones(3), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
        saving = asyncio.create_task(manager.save())
        await asyncio.to_thread(entered.wait, 60)
        saving.cancel()
        await settle()  # it hears of it, and waits for its thread
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await saving
        complete = manager.checkpoints
        assert list(tmp_path.glob("ckpt-*")) == complete
        assert len(complete) == (method == "commit")
        for path in complete:
            await w.assign(np.zeros(3))
            await psync.Checkpoint(w=w).restore(path)
            np.testing.assert_array_equal(await w.read(), np.ones(3))


async def test_the_directory_is_not_read_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return checkpoints_in(*arguments, **options)

    async with training():
        manager = psync.CheckpointManager(psync.Checkpoint(state=psync.SavedState(x=1)), tmp_path)
        monkeypatch.setattr(files, "checkpoints_in", noting)
        await manager.save(last=True)
        await manager.restore_or_initialize()
    assert len(threads) == 4
    assert threading.get_ident() not in threads


async def test_who_is_cancelled_again_and_again_waits_until_a_thread_has_ended() -> None:
    """One that fails meanwhile is heard by nobody; its files would be closed under it else."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: heard.append(said["message"]))
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait()
        has_ended.set()
        raise CheckpointError("the disk is full")

    waits = asyncio.create_task(checkpoints.in_thread(work))
    for _ in range(3):
        await asyncio.sleep(0)
        waits.cancel()
    await asyncio.sleep(0)
    is_over = waits.done()
    may_end.set()
    assert not is_over
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert has_ended.is_set()
    del waits
    gc.collect()
    assert not heard


async def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await checkpoints.in_thread(lambda: 1 // 0)
    assert await checkpoints.in_thread(len, "ab") == 2
