"""A client names plans on its connections, and drops those that it has forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Peer:
    def __init__(self) -> None:
        self.state: dict[str, set[int]] = {"plans": set()}
        self.is_asking = self.is_closed = False
        self.sent: list[object] = []

    def notify(self, message: object) -> None:
        self.sent.append(message)

    def ask(self, message: object, _: object, then: Callable[[None], object]) -> None:
        self.sent.append(message)
        self.is_asking, self.then = True, then

    def answer(self) -> None:
        self.is_asking = False
        self.then(None)

    def abort(self) -> None:
        self.is_closed = True


def two_lanes() -> tuple[Any, Peer, Peer]:
    made: Any = object.__new__(link.PsLink)
    control, bulk = Peer(), Peer()
    made._peers, made._dropped = {"control": control, "bulk": bulk}, set()
    made._dropping, made._dropper = set(), None
    return made, control, bulk


ONE, TWO, THREE, SEVEN = (DefinePlan(number, []) for number in (1, 2, 3, 7))


def test_while_a_request_is_under_way_nothing_is_dropped() -> None:
    made, control, bulk = two_lanes()
    made._dropped = {7}
    bulk.is_asking = True
    made.define(control, ONE)
    assert control.sent == [ONE]
    bulk.is_asking = False
    made.define(control, TWO)
    assert control.sent[1:] == [TWO, DropPlans([7])]
    made._dropped = set(range(9, 9 + 4 * link.MAX_DEFINED))
    made.define(control, THREE)
    assert control.is_closed
    assert bulk.is_closed


def test_a_definition_does_not_overtake_the_drop_of_its_plan_on_another_connection() -> None:
    made, control, bulk = two_lanes()
    made._dropped = {2, 7}
    made.define(control, ONE)
    assert control.sent == [ONE, DropPlans([2, 7])]
    made.define(control, TWO)
    made.define(bulk, THREE)
    assert not control.is_closed
    assert not bulk.is_closed
    made.define(bulk, SEVEN)
    assert bulk.is_closed
    bulk.is_closed = False
    control.answer()
    made.define(bulk, TWO)
    assert not bulk.is_closed


def test_what_one_message_names_is_not_dropped_in_front_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_DEFINED", 2)
    made, control, _ = two_lanes()
    made.define(control, ONE)
    made.define(control, TWO)
    made.define(control, TWO, THREE)
    assert control.sent == [ONE, TWO, TWO, THREE, DropPlans([1])]
