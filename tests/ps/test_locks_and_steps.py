"""Locks of variables beside synchronous steps that take long."""

from __future__ import annotations

import numpy as np
import pytest

from psync.numerics.rules import SGD
from psync.store.sync_config import SyncConfig
from psync.testing import settle
from psync.wire.messages import DefinePlan, LockShards, Update
from stage import Stage, planned

pytestmark = pytest.mark.virtual_time

W, STEP, GROUP = (0, 0), (9, 0), 6
HOLDER, WORKER = ("/job:worker/task:1", 1001), ("/job:worker/task:0", 1000)
CONFIG = SyncConfig(
    name="group", optimizer=SGD(1.0).to_config(), replicas_to_aggregate=1, total_num_replicas=1,
    global_step=(0, *STEP),
).to_config()  # fmt: skip
ELEMENTS = 4 << 20


async def test_a_lock_waits_for_the_step_that_is_being_applied() -> None:
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros(ELEMENTS, np.float32))
    stage.create(STEP, "step", np.zeros((), np.int64))
    plan = planned(DefinePlan(0, [W], GROUP, CONFIG, variable_set=b"w"))
    gradients = [np.ones(ELEMENTS, np.float32).tobytes()]
    happened: list[str] = []
    for number in (1, 2):
        update = Update(number, number - 1, -1, 0, plan.plan, local_step=number - 1)
        stage.ask(WORKER, update, gradients, lambda _: happened.append("applied"))
        if number == 1:
            await settle()
    stage.ask(HOLDER, LockShards(1, [W], 10.0), (), lambda _: happened.append("locked"))
    await settle()
    assert happened == ["applied", "applied", "locked"]
    await stage.close()
