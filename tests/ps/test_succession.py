"""Coordinators get their incarnations from ps 0, above all that its process has heard of."""

from __future__ import annotations

from typing import Any

import pytest

from backups import back_up, create, take_over
from ps_cluster import CHIEF, PsCluster
from psync.errors import FencedError
from psync.net.chief_presence import ChiefPresence
from psync.ps_task import PsTask
from psync.wire.messages import AttachPs, GrantCoordinator, Shutdown
from sync_cluster import ask

FIRST = 100  # incarnation of the coordinator that there is at first


async def test_a_process_counts_what_it_hosts_for_the_newest_coordinator() -> None:
    """Its own ps was started again, and serves nobody; the backups know better."""
    async with PsCluster(2) as cluster:
        await create(cluster)
        await cluster.ps[1].close()
        again = PsTask(cluster.platform(incarnation=8), 1, "ps1:1")
        await again.start()
        assert again.newest == 0
        cluster.chief.links[1].revive()
        await back_up(cluster)
        assert again.newest == FIRST
        older = cluster.client(CHIEF, FIRST - 1)
        with pytest.raises(FencedError):
            await ask(older, AttachPs(FIRST - 1, ["ps0:1", "ps1:1"], 15.0), ps=1)
        with pytest.raises(FencedError):
            await ask(older, Shutdown("it does not know that it was replaced"), ps=1)
        granted: Any = await ask(older, GrantCoordinator(0, 0), ps=1)
        assert granted.incarnation == FIRST
        await again.close()


async def test_a_chief_that_talks_to_a_backup_that_serves_is_a_chief_of_its_process() -> None:
    """Which grants nothing, in ps 0's place."""
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        presence: ChiefPresence = cluster.ps[1].chief
        before = presence._connections
        await take_over(cluster)
        for _ in range(2):
            granted: Any = await ask(cluster.chief, GrantCoordinator(0, 0))
            assert granted.incarnation == FIRST
        assert presence._connections > before
