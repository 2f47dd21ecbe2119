"""Steps that are decided: closed once, whoever dies and whatever is paused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ps_by_hand import COORDINATOR, A, B, PsByHand, group_config
from psync.testing import settle
from psync.wire.messages import Contribute, FinishSteps, InitTokens, StagePush
from step_world import World, pair
from turns import Turns

GROUP = 9


@pytest.mark.parametrize("had", range(5))
@pytest.mark.parametrize("executed", [True, False])
def test_a_step_that_was_closing_when_ps_0_died_is_closed_once(
    turns: Turns, had: int, *, executed: bool
) -> None:
    """Whichever of its entries the backup had, and whether ps 0 knew that."""
    world = pair(turns)
    one, two = world.workers[:2]
    world.push(one)
    world.push(two)  # then: CountPush, CountPush, CloseStep, StepApplied
    if executed:
        world.ship(had)
        world.die()
    else:
        world.ship(max(had - 2, 0))
        world.die(ahead=min(had, 2))
    for worker in (one, two):
        if worker.request is not None:
            world.send(worker)
    assert (world.accepted, one.token, two.token) == (2, 1, 1)
    assert (world.counted(), world.ps.value(world.step)) == (2, 1)
    world.push(one)
    world.push(two)
    assert (world.counted(), world.ps.value(world.step)) == (4, 2)
    world.end()


def test_a_step_that_was_decided_in_a_pause_is_outgoing_on_a_backup_made_then(
    turns: Turns,
) -> None:
    world = World(turns)
    world.cut()
    for worker in world.workers[:2]:
        world.push(worker)
    world.back_up()
    world.die()
    assert (world.counted(), world.ps.value(world.step)) == (2, 1)
    for worker in world.workers[:2]:
        world.send(worker)
    assert world.accepted == 2
    world.end()


@pytest.mark.virtual_time
async def test_a_join_applies_what_is_counted_just_behind_it_in_the_log() -> None:
    ps = PsByHand(index=0, num_ps=1)
    w, step = ps.create("w", np.ones(3, np.float32)), ps.create("step", np.array(0))
    config = group_config(global_step=(0, *step))
    ps.services.closer.set_members({A[0]: A[1], B[0]: B[1]}, [])
    ps.ask(A, StagePush(GROUP, config, 1, -1, 1, [w]), np.ones(3, np.float32).tobytes())
    beginning = ps.begin(A, InitTokens(GROUP, config, -1))
    await settle()
    beginning.result()
    executor = ps.services.executor
    executor.begin_copy([GROUP])
    executor.log.pair()  # what follows waits for a backup
    joined = ps.begin(COORDINATOR, FinishSteps())
    await asyncio.sleep(0)
    ps.begin(A, Contribute(GROUP, None, 1, 0, -1, 0, b"", -1, 1.0, -1, None, -1, None))
    while not joined.done():
        executor.log.to_ship(99, 1 << 20)
        executor.log.note_taken(executor.log.last)
        executor.advance()
        await asyncio.sleep(0.01)
    assert ps.value(step) == 1
