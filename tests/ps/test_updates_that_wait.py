"""An update that waits for a lock is answered when it may begin, whatever becomes of it then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psync.numerics.rules import SGD
from psync.ps.updates import PsUpdates
from psync.testing import settle
from psync.wire.messages import LockShards, Push, UnlockShards
from stage import Stage

W = (0, 0)
HOLDER, WORKER = ("/job:worker/task:1", 1001), ("/job:worker/task:0", 1000)


@pytest.mark.virtual_time
async def test_one_for_which_there_is_no_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(1)
    stage.traced = False
    await stage.begin()
    stage.create(0, W, "w", np.zeros(2, np.float32))
    stage.serving[0].services.store.define_optimizer(1, SGD(1.0).to_config())
    await stage.request(HOLDER, 0, LockShards(1, [W], 10.0))
    said: list[Any] = []
    gradient = np.ones(2, np.float32).tobytes()
    stage.ask(WORKER, 0, Push(1, 0, -1, 0, 1, [W], 1, None, 0), [gradient], said.append)
    await settle()
    assert said == []

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PsUpdates, "_submit", no_memory)
    await stage.request(HOLDER, 0, UnlockShards(1))
    await settle()
    await stage.close()
    assert [type(each) for each in said] == [MemoryError]
