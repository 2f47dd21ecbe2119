"""When a step that ps 0 has decided is applied on one ps; what it does there: test_ps_sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from psync.ps.committer import Committer

from inside import sync_of
from ps_by_hand import PsByHand, group_config
from ps_cluster import until
from psync.errors import FencedError
from psync.wire.sync_messages import CloseStep
from sync_cluster import GROUP, SyncCluster


def closing(cluster: SyncCluster, step: int = 0) -> CloseStep:
    return CloseStep(GROUP, cluster.config, step, [])


@asynccontextmanager
async def with_backup() -> AsyncIterator[tuple[SyncCluster, Committer]]:
    """A ps whose log is read by a backup that has nothing yet; a test says what it has."""
    async with SyncCluster() as cluster:
        committer = sync_of(cluster.ps[0]).committer
        committer.is_begun = True
        committer.begin_copy()
        committer.log.pair()
        yield cluster, committer
        committer.end()


def test_without_a_backup_a_small_step_is_applied_at_once() -> None:
    ps = PsByHand()
    told: list[int] = []
    message = CloseStep(GROUP, group_config(), 0, [])
    assert ps.sync.applier.close(message, (), lambda: told.append(1)) is None
    assert (told, ps.sync.steps()) == ([1], [(GROUP, 1)])


async def test_with_a_backup_nobody_hears_of_a_step_before_the_backup_has_it() -> None:
    async with with_backup() as (cluster, committer):
        told: list[int] = []
        sync = sync_of(cluster.ps[0])
        under_way = sync.applier.close(closing(cluster), (), lambda: told.append(1))
        assert under_way is not None
        await until(lambda: len(committer.log.to_ship(9, 1 << 20)))
        assert (told, sync.steps()) == ([], [])
        committer.log.note_taken(committer.log.last)
        committer.advance()
        await under_way
        assert (told, sync.steps()) == ([1], [(GROUP, 1)])


async def test_a_repetition_waits_for_the_same_end() -> None:
    async with with_backup() as (cluster, committer):
        applier = sync_of(cluster.ps[0]).applier
        first = applier.close(closing(cluster))
        again = applier.close(closing(cluster))
        assert first is not None
        assert again is not None
        await until(lambda: len(committer.log.to_ship(9, 1 << 20)))
        assert committer.log.last == 2  # the optimizer, and the step
        committer.log.note_taken(committer.log.last)
        committer.advance()
        await first
        await again
        assert applier.close(closing(cluster)) is None


async def test_whoever_was_replaced_closes_no_step_and_tells_nobody() -> None:
    async with with_backup() as (cluster, committer):
        told: list[int] = []
        sync = sync_of(cluster.ps[0])
        under_way = sync.applier.close(closing(cluster), (), lambda: told.append(1))
        assert under_way is not None
        committer.depose()
        with pytest.raises(FencedError, match="replaced by its backup"):
            await under_way
        assert (told, sync.steps()) == ([], [])


async def test_a_repetition_hears_as_well_that_whoever_was_replaced_closed_nothing() -> None:
    """Else ps 0 would take the step for closed, of which the one that serves has not heard."""
    async with with_backup() as (cluster, committer):
        applier = sync_of(cluster.ps[0]).applier
        first = applier.close(closing(cluster))
        again = applier.close(closing(cluster))
        assert first is not None
        assert again is not None
        waiting = asyncio.gather(first, again, return_exceptions=True)
        await until(lambda: len(committer.log.to_ship(9, 1 << 20)))
        committer.depose()
        assert [type(outcome) for outcome in await waiting] == [FencedError, FencedError]
