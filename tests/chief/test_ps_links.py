"""Connections to ps tasks are made again when they break; a ps that stays away is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from links_owner import OPTIONS, Owner
from memory_cluster import MemoryCluster, cluster_of
from psync.chief.links import ClusterLinks

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def cluster(clean_loop: None) -> AsyncIterator[MemoryCluster]:
    async with cluster_of(2, 2) as cluster:
        yield cluster


@pytest.fixture
async def owner() -> Owner:
    return Owner()


@pytest.fixture
async def links(cluster: MemoryCluster, owner: Owner) -> AsyncIterator[ClusterLinks]:
    links = ClusterLinks(cluster.platform(), cluster.strategy().cluster, OPTIONS, "p")
    owner.listen(links)
    yield links
    await links.close()


@pytest.mark.promise("failures.connection")
async def test_a_connection_to_a_ps_that_breaks_is_made_again(links, owner, cluster, caplog):
    await links.start(2, 60)
    with caplog.at_level(logging.INFO):
        cluster.network.cut("ps-0:1")
        await asyncio.sleep(5)
    assert "/job:ps/task:0 is unreachable; waiting for it" in caplog.text
    assert "/job:ps/task:0 is reachable again" in caplog.text
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []
    assert owner.lost == []
