"""Which strategy's ``scope()`` is open here.

Layer: L3. Imports: specs, runtime.

Apart from ``strategy`` so that variables can find the scope they are declared in without
importing the strategy, which knows variables.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from psync.runtime import Runtime
from psync.specs import VariableSpec


class Scope(Protocol):
    """What a variable needs of the strategy in whose scope it is declared."""

    origin: str
    runtime: Runtime | None  # the coordinator's; None while no coordinator runs
    created: bool  # a coordinator has run: variables may exist on ps tasks

    def declare(
        self,
        initial_value: Any,
        name: str,
        dtype: object,
        shape: tuple[int, ...] | None,
        trainable: bool,
        where: str,
    ) -> VariableSpec:
        """Place a new variable; it is created before anything needs it."""

    def add(self, variable: Any) -> None:
        """Note the handle of a variable that was declared."""


open_scope: ContextVar[Scope | None] = ContextVar("psync_scope", default=None)


def current_scope() -> Scope | None:
    """Return the strategy whose scope is open here, or None."""
    return open_scope.get()
