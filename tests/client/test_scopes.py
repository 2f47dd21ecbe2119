from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from psync.client.scopes import (
    Elsewhere,
    Scope,
    add_strategy,
    current_elsewhere,
    current_scope,
    elsewhere,
    open_scope,
    running_scopes,
)
from psync.partitioners import Pinned


class AScope:
    _origin = "here"
    _runtime: Any = None
    _created = False
    variables = ()
    trainable_variables = ()
    _accumulators: ClassVar[dict[str, Any]] = {}
    _accumulator_placement = Pinned(0)

    def _declare(self, *args: Any, **options: Any) -> Any:
        return args

    def _declare_copy(self, *args: Any) -> Any:
        return args

    def _add(self, variable: Any) -> None:
        self.added = variable


def test_no_scope_is_open_unless_somebody_opens_one() -> None:
    assert current_scope() is None
    scope: Scope = AScope()
    token = open_scope.set(scope)
    assert current_scope() is scope
    open_scope.reset(token)
    assert current_scope() is None


def test_strategies_run_as_long_as_there_is_a_way_to_their_variables() -> None:
    one, two = AScope(), AScope()
    add_strategy(one)
    add_strategy(two)
    assert running_scopes() == []
    two._runtime = "a way"
    assert running_scopes() == [two]
    del two
    assert running_scopes() == []


def test_the_innermost_place_is_in_force_until_it_is_left() -> None:
    outer, inner = Elsewhere(AScope(), Pinned(0)), Elsewhere(AScope(), Pinned(1))
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
    scope = AScope()

    async def seen() -> Scope | None:
        return current_scope()

    async def opens() -> Scope | None:
        open_scope.set(scope)
        return await asyncio.create_task(seen())

    assert await asyncio.create_task(opens()) is scope
    assert current_scope() is None
