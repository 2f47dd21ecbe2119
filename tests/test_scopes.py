from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.scopes import Scope, current_scope, open_scope


class AScope:
    origin = "here"
    runtime = None
    created = False
    variables = ()
    trainable_variables = ()

    def declare(self, *args: Any, **options: Any) -> Any:
        return args

    def declare_copy(self, *args: Any) -> Any:
        return args

    def add(self, variable: Any) -> None:
        self.added = variable


def test_no_scope_is_open_unless_somebody_opens_one() -> None:
    assert current_scope() is None
    scope: Scope = AScope()
    token = open_scope.set(scope)
    assert current_scope() is scope
    open_scope.reset(token)
    assert current_scope() is None


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
