"""A client names plans on its connections, and drops those that it has forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from ps_cluster import WORKER, PsCluster, pull
from psync.client import link
from psync.client.ps import PsClient
from psync.wire.messages import DefinePlan, DropPlans


def named(cluster: PsCluster, client: PsClient) -> int:
    """How many plans of a client a ps knows."""
    endpoint = client.links[0]._endpoint
    plans = cluster.ps[0].services.plans.of
    return len(plans.get((WORKER, endpoint.incarnation), {}))


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
async def test_a_client_that_names_many_sets_drops_the_first_ones(
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
                assert named(cluster, worker) <= 4


def test_while_a_request_is_under_way_nothing_is_dropped() -> None:
    class Peer:
        def __init__(self) -> None:
            self.state: dict[str, set[int]] = {"plans": set()}
            self.is_asking = self.is_closed = False
            self.sent: list[object] = []

        def notify(self, message: object) -> None:
            self.sent.append(message)

        def close(self) -> None:
            self.is_closed = True

    made = object.__new__(link.PsLink)
    control, bulk = Peer(), Peer()
    made._peers, made._dropped = {"control": control, "bulk": bulk}, {7}  # type: ignore[dict-item]
    bulk.is_asking = True
    made.define(control, DefinePlan(1, []))  # type: ignore[arg-type]
    assert control.sent == [DefinePlan(1, [])]
    bulk.is_asking = False
    made.define(control, DefinePlan(2, []))  # type: ignore[arg-type]
    assert control.sent[1:] == [DefinePlan(2, []), DropPlans([7])]
    made._dropped = set(range(9, 9 + 4 * link.MAX_DEFINED))
    bulk.is_asking = True
    made.define(control, DefinePlan(3, []))  # type: ignore[arg-type]
    assert control.is_closed
    assert bulk.is_closed
