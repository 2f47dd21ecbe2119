"""Replica, cross-replica and update context, and what holds in each."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once
from psync import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from psync.api.strategy import LocalRunWarning
from psync.client.context import ClosureContext, DatasetContext, inside
from psync.errors import SerializationError, UsageError
from psync.replicas.context import (
    cross_replica,
    current_gang,
    forbid_in_merge,
    in_turns,
    open_scope,
    replicas_in_sync,
    update_context,
)


class Member:
    """A replica whose others exist on paper."""

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id, self.num_replicas = replica_id, num_replicas


def strategy() -> psync.ParameterServerStrategy:
    addresses = {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]}
    return psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(psync.ClusterSpec(addresses), task_type="chief", task_id=0)
    )


def step(gang: Member | None = None) -> Any:
    return inside(ClosureContext(worker_index=0, closure_id=7, gang=gang))


# --- the contexts ----------------------------------------------------------------------------


def test_outside_of_everything_there_is_one_replica():
    context = get_replica_context()
    assert context is not None
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert repr(context) == "<ReplicaContext: replica 0 of 1>"
    assert context.strategy is get_strategy()
    assert not has_strategy()
    assert not in_cross_replica_context()


def test_a_scope_is_cross_replica_context_and_may_be_nested_in_itself():
    mine = strategy()
    with mine.scope(), mine.scope():
        assert get_replica_context() is None
        assert in_cross_replica_context()
        assert get_strategy() is mine
        assert has_strategy()
        assert replicas_in_sync() == 1
    assert get_replica_context() is not None


def test_a_step_is_a_replica_even_if_it_was_started_in_a_scope():
    with strategy().scope(), step():
        context = get_replica_context()
        assert context is not None
        assert context.num_replicas_in_sync == 1
        assert has_strategy()
        assert "one replica" in repr(get_strategy())
        assert current_gang() is None
    with cross_replica(strategy()), inside(DatasetContext(0)):
        assert get_replica_context() is not None


def test_a_member_of_a_gang_knows_which_replica_it_is():
    member = Member(1, 3)
    with step(member):
        context = get_replica_context()
        assert context is not None
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 3)
        assert current_gang() is member
        assert replicas_in_sync() == get_strategy().num_replicas_in_sync == 3
        with cross_replica(get_strategy()):
            assert current_gang() is None
            assert replicas_in_sync() == 3
    with step(Member(0, 1)):
        assert current_gang() is None, "there is nobody to merge with"


def test_update_context_is_neither_of_the_two():
    mine = strategy()
    with cross_replica(mine, num_replicas=4), update_context(mine):
        assert get_replica_context() is None
        assert not in_cross_replica_context()
        assert get_strategy() is mine
        assert replicas_in_sync() == 4


def test_contexts_left_in_the_wrong_order_are_named():
    outer, inner = cross_replica(strategy()), cross_replica(strategy())
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="exited before one"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert not in_cross_replica_context()


# --- the strategy for all that follows -------------------------------------------------------


async def test_a_strategy_that_is_set_holds_for_the_task_and_those_it_starts():
    async def program():
        mine, other = strategy(), strategy()
        experimental_set_strategy(other)
        experimental_set_strategy(mine)
        assert get_strategy() is open_scope.get() is mine
        assert in_cross_replica_context()

        async def started():
            return get_strategy()

        assert await asyncio.create_task(started()) is mine
        with mine.scope():
            assert get_strategy() is mine
        with pytest.raises(UsageError, match="mixing different strategies"), other.scope():
            pass
        experimental_set_strategy(None)
        assert not has_strategy()
        assert open_scope.get() is None

    await asyncio.create_task(program())
    assert not has_strategy()


def test_a_strategy_cannot_be_set_in_a_scope_or_a_step():
    mine = strategy()
    with mine.scope(), pytest.raises(RuntimeError, match="inside a strategy's scope"):
        experimental_set_strategy(mine)
    with step(), pytest.raises(UsageError, match="inside a step"):
        experimental_set_strategy(mine)


# --- collectives -----------------------------------------------------------------------------


async def test_one_replica_merges_at_once_with_its_own_values_and_gets_what_is_raised():
    with step():
        context = get_replica_context()
        assert context is not None

        def merge_fn(strategy, a, *, b):
            assert in_cross_replica_context()
            assert get_strategy() is strategy
            return strategy.experimental_local_results(a), b

        async def later(strategy):
            await asyncio.sleep(0)
            return get_replica_context()

        assert await context.merge_call(merge_fn, args=(1,), kwargs={"b": 2}) == ((1,), 2)

        def raises(strategy):
            raise ValueError("no")

        assert await context.merge_call(later) is None
        with pytest.raises(ValueError, match="no"):
            await context.merge_call(raises)
        assert get_replica_context() is context
        assert await context.all_reduce("sum", {"x": 2.0}) == {"x": 2.0}
        assert await context.all_reduce(psync.ReduceOp.MEAN, 5) == 5
        gathered = await context.all_gather(np.ones((1, 2)), axis=0)
        assert gathered.shape == (1, 2)


def test_a_collective_in_cross_replica_context_is_an_error():
    context = get_replica_context()
    with cross_replica(strategy()):
        for call in (context.merge_call(print), context.all_reduce("sum", 1)):
            with pytest.raises(RuntimeError, match="in cross-replica context"):
                at_once(call)


@pytest.mark.parametrize("name", ["merge_call", "all_reduce", "replica_id_in_sync_group"])
def test_the_missing_replica_context_of_others_is_named(name):
    mine = strategy()
    contexts = {"cross-replica": mine.scope, "update": lambda: update_context(mine)}
    for kind, enter in contexts.items():
        with pytest.raises(RuntimeError) as caught, enter():
            getattr(get_replica_context(), name)
        assert str(caught.value) == (
            f"{name} in {kind} context, which has no replicas to wait for\n"
            "hint: call it in the function given to strategy.run, not in a merge function"
        )
        assert isinstance(caught.value.__cause__, AttributeError)  # it has the line
        assert not in_cross_replica_context()


def test_other_attributes_that_are_missing_in_cross_replica_context_are_as_ever():
    for thing, name in ((None, "shape"), (object(), "merge_call")):
        with pytest.raises(AttributeError), strategy().scope():
            getattr(thing, name)


# --- the strategy of one replica -------------------------------------------------------------


def test_a_member_cannot_run_others_or_reduce_what_it_does_not_know():
    with step(Member(0, 2)):
        with pytest.raises(UsageError, match="one of several"):
            at_once(get_strategy().experimental_run_v2(print))
        with pytest.raises(UsageError, match="all_reduce"):
            at_once(get_strategy().reduce("SUM", 1))


def test_what_would_wait_for_the_gang_is_refused_in_a_merge_function():
    forbid_in_merge("join")
    with cross_replica(strategy()):
        forbid_in_merge("join")
    with (
        cross_replica(strategy(), num_replicas=2, merging=True),
        pytest.raises(UsageError, match="join in a merge function"),
    ):
        forbid_in_merge("join")


async def test_work_in_pieces_that_is_cancelled_ends_where_it_is():
    def endless():
        while True:
            yield

    task = asyncio.create_task(in_turns(endless()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- run, where no coordinator is ---------------------------------------------------------------


async def ids(x: int) -> tuple[int, int, int]:
    context = psync.get_replica_context()
    return context.replica_id_in_sync_group, context.num_replicas_in_sync, x


def test_without_a_coordinator_one_replica_runs_here_with_a_warning():
    mine = strategy()
    with pytest.warns(LocalRunWarning, match="one replica runs in this process"):
        assert at_once(mine.run(ids, (5,))) == (0, 1, 5)
    with mine.scope(), pytest.warns(LocalRunWarning):
        assert at_once(mine.run(lambda x: psync.get_strategy() is mine, kwargs={"x": 1}))


def test_in_a_training_session_the_program_is_the_replica():
    mine = strategy()
    mine._runtime = object()  # that of a session; nothing is asked of it here
    assert at_once(mine.run(ids, [5])) == (0, 1, 5)


def test_what_is_no_call_is_refused():
    mine = strategy()
    with pytest.raises(SerializationError, match="args: expected a tuple, got int"):
        at_once(mine.run(ids, 5))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="args: expected a tuple, got PerReplica"):
        at_once(mine.run(ids, psync.PerReplica((1, 2))))  # type: ignore[arg-type]
    with inside(DatasetContext(0)), pytest.raises(UsageError, match="in dataset code"):
        at_once(mine.run(ids, (5,)))
