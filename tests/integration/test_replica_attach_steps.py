"""The chief dies in synchronous training with backups: a step is applied everywhere or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import psync
from attach_cluster import at, backing_one_another_up, fail_over, life, silence
from psync.net.process_state import fresh_process
from psync.wire.recovery_messages import Promote

pytestmark = pytest.mark.virtual_time

SMALL, LARGE = 64, 10_000  # columns: pushes come whole to ps 0, or in parts to every ps


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


async def step(v: Any, optimizer: Any, global_step: Any) -> str:
    await psync.pull(v)
    result = await optimizer.apply_gradients([(np.ones(v.shape, np.float32), v)], global_step)
    return str(result.outcome.value)


class Training:
    """A variable from which each step takes two, on both ps tasks."""

    def __init__(self, coordinator: psync.ClusterCoordinator, size: int, step_ps: int) -> None:
        self.coordinator = coordinator
        with coordinator.strategy.scope():
            self.v = psync.Variable(np.zeros((2, size), np.float32), name="v")
            self.global_step = psync.get_or_create_global_step()  # on ps 0
            if step_ps:
                for name in ("on ps 0", "on ps 1"):  # in turn
                    self.global_step = psync.Variable(np.zeros((), np.int64), name=name)
        self.optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), 2, 2, reduction="sum"
        )

    def schedule(self, count: int) -> None:
        for _ in range(count):
            self.coordinator.schedule(step, args=(self.v, self.optimizer, self.global_step))

    async def check(self) -> int:
        """Each step is there once, everywhere, and counted; return how many there were."""
        value, steps = await self.v.read(), int(await self.global_step.read())
        np.testing.assert_array_equal(value, np.full(value.shape, -2.0 * steps))
        return steps

    async def check_pushes(self, begun: int) -> int:
        """As ``check``, where some steps had one push, since another one was a duplicate."""
        value, steps = await self.v.read(), int(await self.global_step.read())
        pushes = int(-value[0, 0])
        np.testing.assert_array_equal(value, np.full(value.shape, -float(pushes)))
        assert steps <= pushes <= min(2 * steps, begun)
        return pushes


@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_steps_go_on_where_backups_serve(lost: str, size: int, step_ps: int) -> None:
    async with backing_one_another_up() as cluster:
        pushes = 0
        for lives in range(3):
            async with life(cluster) as coordinator:
                training = Training(coordinator, size, step_ps)
                assert await training.check_pushes(12 * lives) == pushes
                training.schedule(6)
                await coordinator.join()
                if lives < 2:
                    await fail_over(cluster, lost)
                training.schedule(6)
                await coordinator.join()
                pushes = await training.check_pushes(12 * (lives + 1))
                assert pushes >= 6 * (lives + 1)
                lost = "ps-1" if lost == "ps-0" else "ps-0"


AT_PS_0 = ["ps.backup.sending", "ps.backup.taken", "ps0.step.decided", "ps.step.applied",
           "ps0.step.applied"]  # fmt: skip
PLACES = [("ps-0", place) for place in AT_PS_0] + [
    ("ps-1", "ps.backup.sending"), ("ps-1", "ps.backup.taken"), ("ps-1", "ps.step.applied"),
]  # fmt: skip


@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("where", "place"), PLACES)
async def test_wherever_a_step_is_when_the_chief_dies(
    where: str, place: str, count: int, size: int, step_ps: int
) -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            training = Training(first, size, step_ps)
            training.schedule(6)
            await first.join()
            reached = asyncio.Event()

            def die() -> None:
                silence(cluster, first)
                reached.set()

            cluster.ps(where)._platform.failpoints.arm(place, die, count)
            training.schedule(40)
            await reached.wait()
        async with life(cluster) as second:
            training = Training(second, size, step_ps)
            before = await training.check()
            training.schedule(6)
            await second.join()
            assert await training.check() == before + 3


@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("where", "place"), PLACES)
async def test_a_ps_dies_in_a_step_and_the_chief_when_its_backup_has_been_told_to_serve(
    where: str, place: str, count: int, size: int, step_ps: int
) -> None:
    """So nobody has told the backup where the others are, but the next chief."""
    other = "ps-1" if where == "ps-0" else "ps-0"
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            training = Training(first, size, step_ps)
            training.schedule(6)
            await first.join()
            with at(cluster, other, Promote, lambda: silence(cluster, first)) as reached:
                died = cluster.kill_at(where, place, count)
                training.schedule(40)
                await died.wait()
                await cluster.bury(where)
                await reached.wait()
        await cluster.revive(where)
        async with life(cluster) as second:
            training = Training(second, size, step_ps)
            before = await training.check()
            training.schedule(6)
            await second.join()
            assert await training.check() == before + 3
