"""What is done to the arrays of a shard is done in the order of the log, by whatever entry."""

from __future__ import annotations

import numpy as np
import pytest

from asked import Reply
from psync.numerics.rules import SGD
from psync.schedules import PolynomialDecay
from psync.store.push_counts import FURTHER, HOME
from psync.store.store import Key
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


@pytest.mark.virtual_time
async def test_all_messages_of_a_push_have_one_rate_whichever_comes_first() -> None:
    """The one that counts may have waited for a lock."""
    stage = Stage()
    await stage.begin()
    for key in (W, COPY):
        stage.create(key, f"v{key[0]}", np.zeros(1, np.float32))
    rates = PolynomialDecay(1.0, 4, 0.0)  # 1, 0.75, 0.5
    stage.serving.services.store.define_optimizer(1, SGD(rates).to_config())
    gradient = np.full(1, -1, np.float32).tobytes()
    said: list[Reply | Exception] = []

    def push(worker: str, sequence: int, key: Key, place: int, other: int = 0) -> None:
        plan = planned(DefinePlan(0, [key], 1)).plan
        spread = [(0, other)] if other else None
        message = Update(sequence, 0, -1, 0, plan, 0, place, spread)
        stage.ask((f"/job:worker/task:{worker}", 1000), message, [gradient], said.append)

    push("1", 1, W, HOME)
    push("0", 2, W, FURTHER, 1)
    push("0", 1, COPY, HOME, 2)
    push("0", 3, COPY, HOME, 4)
    push("0", 4, W, FURTHER, 3)
    await settle()
    found = [float(stage.value(key)[0]) for key in (W, COPY)]
    await stage.close()
    assert len(said) == 5
    assert found == [1 + 0.75 + 0.5, 0.75 + 0.5]
