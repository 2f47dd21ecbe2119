"""The chief dies after fail-overs: the next one finds the ps tasks wherever they are served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from chief_lives import backing_one_another_up, fail_over, life, life_of, silence
from memory_cluster import MemoryCluster
from psync import FailoverEvent
from psync.errors import AttachError
from psync.testing.seams import fresh_process
from psync.wire.messages import Promote
from replica_training import add, check, declared, run

pytestmark = [pytest.mark.virtual_time, pytest.mark.promise("failures.chief-after-failover")]


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
@pytest.mark.parametrize("backed_up", [True, False], ids=["backups", "no backups yet"])
async def test_the_next_chief_goes_on_with_what_backups_serve(lost: str, backed_up: bool) -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            assert not first.attached
            variables = declared(first)
            await run(first, 5, *variables)
            await fail_over(cluster, lost)
            await run(first, 4, *variables)
            if backed_up:
                await first.backed_up()
        async with life(cluster) as second:
            assert second.attached
            variables = declared(second)
            await check(variables, 9)
            await run(second, 3, *variables)
            await check(variables, 12)
            await second.backed_up()
            await cluster.kill("ps-1" if lost == "ps-0" else "ps-0")  # which served both
            await run(second, 3, *variables)
            await check(variables, 15)


# Who dies when.


@pytest.mark.promise("failures.chief-unfinished-restore")
@pytest.mark.parametrize("trained", [False, True])
async def test_a_backup_knows_whether_there_was_more_than_a_restore(
    trained: bool, tmp_path: Path
) -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            variables = declared(first)
            manager = psync.CheckpointManager(psync.Checkpoint(v=list(variables)), tmp_path)
            await manager.save()
            if trained:
                await run(first, 2, *variables)
            await manager.restore_or_initialize()
            await fail_over(cluster, "ps-0")
        async with life(cluster) as second:
            assert second.attached is trained


@pytest.mark.promise("failures.chief-during-failover")
async def test_the_chief_dies_before_it_has_told_a_backup_to_serve() -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            variables = declared(first)
            await run(first, 3, *variables)
            with cluster.tap("ps-1").at(Promote, lambda: False) as reached:
                await cluster.kill("ps-0")
                await reached.wait()
                silence(cluster, first)
        await cluster.revive("ps-0")
        for _ in range(2):
            with pytest.raises(AttachError, match="nobody serves /job:ps/task:0"):
                async with life(cluster):
                    pass
        async with life(cluster, attach=False) as second:
            variables = declared(second)
            await check(variables, 0)
            await run(second, 2, *variables)
        async with life(cluster) as third:
            await check(declared(third), 2)


@pytest.mark.promise("failures.chief-during-failover")
async def test_the_chief_dies_when_a_backup_serves_and_it_has_not_heard_of_it() -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            variables = declared(first)
            await run(first, 3, *variables)
            with cluster.tap("ps-1").at(
                Promote, lambda: lambda: silence(cluster, first)
            ) as reached:
                await cluster.kill("ps-0")
                await reached.wait()
        await cluster.revive("ps-0")
        async with life(cluster) as second:
            assert second.attached
            variables = declared(second)
            await check(variables, 3)
            await run(second, 2, *variables)
            await check(variables, 5)


@pytest.mark.promise("failures.chief-and-ps")
async def test_the_chief_dies_and_the_process_in_which_a_backup_serves() -> None:
    async with backing_one_another_up(3) as cluster:
        async with life(cluster) as first:
            variables = declared(first)
            await run(first, 3, *variables)
            await fail_over(cluster, "ps-0")
        await cluster.kill("ps-1")
        await cluster.revive("ps-1")
        with pytest.raises(AttachError, match="nobody serves /job:ps/task:1"):
            async with life(cluster):
                pass


# Who was replaced, and does not know it.


async def cut_off_from_the_chief(cluster: MemoryCluster, name: str, other: str) -> None:
    """A ps is taken for dead, and lives; it and its backup's process do not notice."""
    cluster.network.refuse(name)
    for link in cluster.network.links(name):
        if other not in str(link.ends):
            link.cut()
    assert isinstance(await anext(cluster.chief.events()), FailoverEvent)


@pytest.mark.promise("failures.chief-newest-ps")
@pytest.mark.promise("failures.chief-and-ps")
async def test_one_that_was_replaced_does_not_stand_in_for_a_newer_one_that_is_lost() -> None:
    """ps 0 serves in process 1, and what was ps 0 knows only that it waits for its backup."""
    async with backing_one_another_up(3) as cluster:
        async with life(cluster) as first:
            variables = declared(first)
            await run(first, 2, *variables)
            await cut_off_from_the_chief(cluster, "ps-0", "ps-1")
            await run(first, 2, *variables)
        cluster.network.admit("ps-0")
        await cluster.kill("ps-1")
        await cluster.revive("ps-1")
        with pytest.raises(AttachError, match=r"/job:ps/task:0 may have been replaced"):
            async with life(cluster):
                pass


# Who is the coordinator.


async def test_attaching_without_backups_is_refused_where_a_backup_serves() -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster) as first:
            await run(first, 3, *declared(first))
            await fail_over(cluster, "ps-0")
        with pytest.raises(AttachError, match="ps/task:0 has been replaced by its backup") as told:
            async with life_of(cluster.strategy(), attach=True):
                pass
        assert told.value.hint is not None
        assert 'ps_recovery="backup"' in told.value.hint
        async with life(cluster) as second:
            await check(declared(second), 3)


# A program that begins anew.


@pytest.mark.promise("failures.chief-without-attach")
async def test_without_attaching_a_checkpoint_is_restored_wherever_ps_tasks_were_served(
    tmp_path: Path,
) -> None:
    async with backing_one_another_up() as cluster:
        async with life(cluster, attach=False) as first:
            variables = declared(first)
            await run(first, 3, *variables)
            await fail_over(cluster, "ps-1")
            manager = psync.CheckpointManager(
                psync.Checkpoint(wide=variables[0], small=variables[1]), tmp_path, max_to_keep=2
            )
            await manager.save()
            await run(first, 2, *variables)
        async with life(cluster, attach=False) as second:
            variables = declared(second)
            manager = psync.CheckpointManager(
                psync.Checkpoint(wide=variables[0], small=variables[1]), tmp_path, max_to_keep=2
            )
            assert await manager.restore_or_initialize() is not None
            await check(variables, 3)
            await run(second, 2, *variables)
            await fail_over(cluster, "ps-0")
            await check(variables, 5)


# Whatever happens, in any order.


class Counts:
    """What the program knows of a counter: each of its elements is between these."""

    def __init__(self) -> None:
        self.answered = self.begun = 0

    async def check(self, variables: tuple[Any, Any]) -> None:
        wide, small = variables
        values = [*(await wide.read()).ravel().tolist(), *(await small.read()).tolist()]
        assert all(self.answered <= value <= self.begun for value in values), (
            f"{self.answered} to {self.begun}: {values}"
        )
        # From now on it is known, and the same everywhere.
        await wide.assign(np.full((2, 3), self.answered, np.float32))
        await small.assign(np.full(1, self.answered, np.int64))
        self.begun = self.answered

    async def train(
        self, coordinator: psync.ClusterCoordinator, variables: tuple[Any, Any], until: int
    ) -> None:
        """Schedule closures; return when so many are done, with the others under way."""
        closures = [coordinator.schedule(add, args=variables) for _ in range(20)]
        self.begun += len(closures)

        async def note(closure: psync.RemoteValue) -> None:
            await closure
            self.answered += 1

        notes = [asyncio.create_task(note(closure)) for closure in closures]
        try:
            for done in itertools.islice(asyncio.as_completed(notes), until):
                await done
        finally:
            for each in notes:
                each.cancel()
            await asyncio.gather(*notes, return_exceptions=True)


async def noticed(coordinator: psync.ClusterCoordinator, victim: str) -> None:
    """Wait until the chief has done what there was to do since a process died."""
    with contextlib.suppress(TimeoutError):  # it had backups only
        async with asyncio.timeout(30):
            await anext(coordinator.events())


@pytest.mark.promise("failures.any-order")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
async def test_whoever_dies_in_whatever_order_each_answered_update_is_there_once(seed: int) -> None:
    """An error is only where a ps process and the chief die at one time."""
    draw = random.Random(seed)
    num_ps = draw.choice([2, 3])
    async with backing_one_another_up(num_ps) as cluster:
        counts, may_be_lost = Counts(), False
        for _ in range(6):
            victim = f"ps-{draw.randrange(num_ps)}"
            try:
                async with life(cluster) as coordinator:
                    variables = declared(coordinator)
                    if counts.begun and not coordinator.attached:  # all processes have died
                        assert may_be_lost
                        counts = Counts()
                    await counts.check(variables)
                    may_be_lost = False
                    await counts.train(coordinator, variables, draw.randrange(21))
                    what = draw.choice(["chief", "ps, chief", "ps, run, chief", "both"])
                    if what != "chief":
                        await coordinator.backed_up()
                        await cluster.kill(victim)
                        may_be_lost = what == "both"
                    if what.startswith("ps"):
                        await noticed(coordinator, victim)
                        if "run" in what:
                            await counts.train(coordinator, variables, draw.randrange(21))
                    else:
                        await asyncio.sleep(draw.choice([0, 0.29, 0.3, 0.31, 1]))
                    silence(cluster, coordinator)
                if what != "chief":
                    await cluster.revive(victim)
            except AttachError:
                assert may_be_lost
                async with life(cluster, attach=False):
                    counts, may_be_lost = Counts(), False
