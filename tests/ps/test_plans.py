"""What clients call by numbers on a ps: defined once, and kept within bounds."""

from __future__ import annotations

import pytest

from asked import Asked, peer_of
from psync.client.plan import numbered
from psync.errors import FencedError, PlanForgotten, RemoteProtocolError
from psync.ps.plans import Plans, ShardSet
from psync.specs import ShardSpec
from psync.store.store import ShardStore
from psync.wire.codec import encode
from psync.wire.messages import DefinePlan

PS = "/job:ps/task:0"
WORKER, NEXT = ("/job:worker/task:0", 1000), ("/job:worker/task:0", 1001)
W, V = (0, 0), (1, 0)
PULLED, PUSHED = numbered(DefinePlan(0, [W, V])), numbered(DefinePlan(0, [W, V], 1, {"a": 1}))


def table() -> Plans[ShardSet]:
    return Plans(PS)


def define(known: Plans[ShardSet], client: tuple[str, int], plan: DefinePlan) -> bool:
    """Whether it is an entry."""
    noted: list[object] = []
    known.note = lambda *entry: noted.append(entry)
    known.serve(Asked(peer_of(client), plan))
    return noted == [(client, plan)]


def store_of(*sizes: int) -> ShardStore:
    store = ShardStore(PS)
    for number, size in enumerate(sizes):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (size,), "float32", 0), bytes(4 * size))
    return store


def test_the_same_definition_has_the_same_number_and_another_one_has_another() -> None:
    assert numbered(DefinePlan(0, [W, V])) == PULLED
    assert len({PULLED.plan, PUSHED.plan, numbered(DefinePlan(0, [V, W])).plan}) == 3


def test_a_plan_is_new_once_and_stays_what_it_is() -> None:
    known = table()
    assert define(known, WORKER, PULLED)
    plan = known.plan(WORKER, PULLED.plan)
    assert not define(known, WORKER, PULLED)
    assert known.plan(WORKER, PULLED.plan) is plan
    assert plan.keys == (W, V)
    with pytest.raises(RemoteProtocolError, match="is another one"):
        define(known, WORKER, DefinePlan(PULLED.plan, [V]))


def test_a_plan_that_nobody_has_defined_is_not_defined() -> None:
    known = table()
    define(known, WORKER, PULLED)
    assert known.plan(WORKER, PULLED.plan).keys == (W, V)
    for client, plan in ((WORKER, PUSHED), (NEXT, PULLED)):
        with pytest.raises(PlanForgotten, match=f"plan {plan.plan} of {client[0]} is not defined"):
            known.plan(client, plan.plan)


def test_the_plans_of_a_client_go_when_its_next_incarnation_defines_one() -> None:
    known = table()
    define(known, WORKER, PULLED)
    define(known, NEXT, PUSHED)
    assert [*known.of] == [NEXT]
    with pytest.raises(FencedError, match="has been replaced by 1001"):
        known.plan(WORKER, PULLED.plan)


def test_an_update_that_has_waited_brings_its_plan_again_if_that_has_gone() -> None:
    known = table()
    define(known, WORKER, PULLED)
    plan = known.plan(WORKER, PULLED.plan)
    noted: list[bytes] = []
    known.note = lambda _, message: noted.append(encode(message))
    known.keep(WORKER, plan)
    assert noted == []
    define(known, NEXT, PUSHED)
    known.note = lambda _, message: noted.append(encode(message))
    known.keep(WORKER, plan)
    assert noted == [plan.header]
    assert sorted(known.of) == [WORKER, NEXT]


def test_a_newer_coordinator_keeps_the_plans_of_its_own_clients() -> None:
    known = table()
    define(known, ("/job:worker/task:1", 2000), PULLED)
    define(known, WORKER, PULLED)
    assert [*known.since(1500).of] == [("/job:worker/task:1", 2000)]
    assert len(known.of) == 2


def test_after_a_rollback_plans_hold_nothing_of_the_store_before() -> None:
    """An update in pieces goes on there, by its own plan, while the same number is read anew."""
    known, store = table(), store_of(2, 3)
    define(known, WORKER, PULLED)
    before = known.plan(WORKER, PULLED.plan).look_up(store)
    after = known.since(0)
    assert after.plan(WORKER, PULLED.plan).store is None
    assert after.plan(WORKER, PULLED.plan).look_up(store_of(2, 3)).plan is not before.plan
    assert not define(after, WORKER, PULLED)
    assert known.plan(WORKER, PULLED.plan) is before


def test_a_plan_of_synchronous_pushes_reads_nothing_before_its_group_is_known() -> None:
    plan = numbered(DefinePlan(0, [W], 1, {"a": 1}, variable_set=b"set"))
    with pytest.raises(RemoteProtocolError, match=f"plan {plan.plan} is of synchronous pushes"):
        ShardSet(plan).look_up(store_of(2))


def test_averages_follow_a_variable_each() -> None:
    with pytest.raises(RemoteProtocolError, match="1 variables for 2 averages"):
        ShardSet(DefinePlan(1, [W, V], follows=[3]))
