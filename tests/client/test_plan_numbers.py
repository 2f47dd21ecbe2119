"""A client names plans on its connections, and again what a ps has forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from ps_cluster import RATE, WORKER, PsCluster, pull, push
from psync.client import link
from psync.client.ps import PsClient
from psync.ps import plans


def named(cluster: PsCluster, client: PsClient) -> int:
    """How many plans of a client a ps knows."""
    endpoint = client.links[0]._endpoint
    of = cluster.ps[0].services.plans.of
    return len(of.get((WORKER, endpoint.incarnation), {}))


@pytest.mark.virtual_time
async def test_a_plan_is_defined_once_on_a_connection_and_again_on_the_next_one() -> None:
    async with PsCluster() as cluster:
        worker = cluster.client()
        w = await cluster.create("w", np.zeros(2, np.float32))
        for _ in range(3):
            await pull(worker, w)
        (peer,) = worker.links[0]._peers.values()
        assert len(peer.state["plans"]) == named(cluster, worker) == 1
        peer.abort()
        await pull(worker, w)
        (peer,) = worker.links[0]._peers.values()
        assert len(peer.state["plans"]) == named(cluster, worker) == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("most", [1, 3])
async def test_a_plan_that_a_ps_has_forgotten_is_defined_again(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", most)
    async with PsCluster() as cluster:
        worker = cluster.client()
        variables = [await cluster.create(f"v{n}", np.full(2, n, np.float32)) for n in range(8)]
        for count in (1, 2):
            for number, variable in enumerate(variables):
                await push(worker, [variable], [1.0])
                (value,) = await pull(worker, variable)
                assert value.tolist() == [number - count * RATE] * 2
                assert named(cluster, worker) <= most


@pytest.mark.virtual_time
async def test_a_connection_that_has_named_many_plans_names_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_DEFINED", 3)
    async with PsCluster() as cluster:
        worker = cluster.client()
        variables = [await cluster.create(f"v{n}", np.full(2, n, np.float32)) for n in range(8)]
        for _ in range(2):
            for number, variable in enumerate(variables):
                (value,) = await pull(worker, variable)
                assert value.tolist() == [number, number]
        (peer,) = worker.links[0]._peers.values()
        assert len(peer.state["plans"]) <= 3
        assert named(cluster, worker) == 8
