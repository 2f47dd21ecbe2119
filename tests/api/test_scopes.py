from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.api.scopes import (
    Elsewhere,
    Scope,
    current_elsewhere,
    current_scope,
    elsewhere,
    running_scopes,
)
from psync.cluster import ClusterSpec
from psync.partitioners import Pinned
from psync.replicas.states import open_scope


def a_scope() -> Any:
    return Scope(ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}), None, None, "round_robin")


def test_no_scope_is_open_unless_somebody_opens_one() -> None:
    assert current_scope() is None
    scope = a_scope()
    token = open_scope.set(scope)
    assert current_scope() is scope
    open_scope.reset(token)
    assert current_scope() is None


def test_strategies_run_as_long_as_there_is_a_way_to_their_variables() -> None:
    one, two = a_scope(), a_scope()
    assert running_scopes() == []
    two._runtime = "a way"
    assert running_scopes() == [two]
    del two
    assert running_scopes() == []
    del one


def test_the_innermost_place_is_in_force_until_it_is_left() -> None:
    outer, inner = Elsewhere(a_scope(), Pinned(0)), Elsewhere(a_scope(), Pinned(1))
    assert current_elsewhere() is None
    with elsewhere(outer):
        with elsewhere(inner):
            assert current_elsewhere() is inner
        assert current_elsewhere() is outer
        with elsewhere(None):
            assert current_elsewhere() is None
    assert current_elsewhere() is None


@pytest.mark.asyncio
async def test_a_scope_is_open_in_its_own_task_and_in_those_it_starts() -> None:
    scope = a_scope()

    async def seen() -> Scope | None:
        return current_scope()

    async def opens() -> Scope | None:
        open_scope.set(scope)
        return await asyncio.create_task(seen())

    assert await asyncio.create_task(opens()) is scope
    assert current_scope() is None
