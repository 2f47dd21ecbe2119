"""The chief dies in synchronous training with backups: a step is applied everywhere or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chief_lives import backing_one_another_up, life, silence
from psync.testing.seams import fresh_process
from psync.wire.messages import Promote
from replica_training import LARGE, SMALL, StepsTraining

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


AT_PS_0 = ["ps.backup.sending", "ps.backup.taken", "ps0.step.decided", "ps.step.applied",
           "ps0.step.applied"]  # fmt: skip
PLACES = [("ps-0", place) for place in AT_PS_0] + [
    ("ps-1", "ps.backup.sending"), ("ps-1", "ps.backup.taken"), ("ps-1", "ps.step.applied"),
]  # fmt: skip


@pytest.mark.promise("failures.chief-in-step")
@pytest.mark.slow
@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("where", "place"), PLACES)
async def test_wherever_a_step_is_when_the_chief_dies(
    where: str, place: str, count: int, size: int, step_ps: int
) -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            training = StepsTraining(first, size, step_ps)
            training.schedule(6)
            await first.join()
            reached = asyncio.Event()

            def die() -> None:
                silence(cluster, first)
                reached.set()

            cluster.points(where).arm(place, die, count)
            training.schedule(40)
            await reached.wait()
        async with life(cluster) as second:
            training = StepsTraining(second, size, step_ps)
            before = await training.check()
            training.schedule(6)
            await second.join()
            assert await training.check() == before + 3


@pytest.mark.promise("failures.chief-in-step")
@pytest.mark.slow
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
            training = StepsTraining(first, size, step_ps)
            training.schedule(6)
            await first.join()
            with cluster.tap(other).at(Promote, lambda: lambda: silence(cluster, first)) as reached:
                died = cluster.kill_at(where, place, count)
                training.schedule(40)
                await died.wait()
                await cluster.stop(where)
                await reached.wait()
        await cluster.revive(where)
        async with life(cluster) as second:
            training = StepsTraining(second, size, step_ps)
            before = await training.check()
            training.schedule(6)
            await second.join()
            assert await training.check() == before + 3
