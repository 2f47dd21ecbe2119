"""What is done to the arrays of a shard is done in the order of the log, by whatever entry."""

from __future__ import annotations

import numpy as np
import pytest

from asked import Reply
from psync.numerics.rules import SGD
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.messages import CreateShards, DefinePlan, Update
from stage import CHIEF, Stage, planned

W, COPY = (0, 0), (1, 0)
SIZE = 1 << 20  # elements: more than is done within a turn
WORKER = ("/job:worker/task:0", 1000)
RULE = SGD(1.0, momentum=0.5).to_config()


async def after_two_pushes(message: Message, body: np.ndarray | None = None) -> Stage:
    """Update to w twice, and in the same turn say something that takes its turn after that."""
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros(SIZE, np.float32))
    stage.serving.services.store.define_optimizer(1, RULE)
    said: list[Reply | Exception] = []
    gradient = np.full(SIZE, -1, np.float32).tobytes()
    for number in (1, 2):
        push = Update(number, 0, -1, 0, planned(DefinePlan(0, [W], 1)).plan)
        stage.ask(WORKER, push, [gradient], said.append)
    stage.ask(CHIEF, message, () if body is None else [body.tobytes()], said.append)
    waiting = stage.serving.services.statistics()["waiting"]
    assert waiting == {"gate": 0, "lock": 0, "backup": 0, "compute": 3}  # there is no backup
    await settle()
    assert all(isinstance(each, Reply) for each in said)
    assert len(said) == 3
    return stage


@pytest.mark.virtual_time
async def test_a_copy_of_a_variable_is_made_at_its_place_in_the_log() -> None:
    shards = [("copy", *COPY, 0, [SIZE], "float32")]
    stage = await after_two_pushes(CreateShards(shards, [W]))
    value, copy = (float(stage.value(key)[0]) for key in (W, COPY))
    await stage.close()
    assert copy == value == 1 + 1.5


@pytest.mark.virtual_time
async def test_a_slot_is_set_at_its_place_in_the_log() -> None:
    plan = planned(DefinePlan(0, [W], 1, RULE, "momentum", "assign")).plan
    message = Update(1, 0, -1, 0, plan)
    stage = await after_two_pushes(message, np.full(SIZE, 8, np.float32))
    value = float(stage.value(W)[0])
    await stage.close()
    assert value == 1 + 1.5
