"""Declaring a variable beside another one: on the same ps, and not partitioned by itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from psync.api.variables import Handle
from psync.client.context import forbid_in_step
from psync.client.scopes import Elsewhere, Scope, current_scope, elsewhere
from psync.errors import UsageError
from psync.placement import Pinned


def colocate_vars_with(strategy: Scope, variable: Any) -> AbstractContextManager[None]:
    """Return a context manager in which variables are declared on the ps of another one.

    They take nobody's turn, and no partitioner is asked: beside a variable with one shard, or a
    single shard of another, they have one shard; beside one with several they must have its shape,
    and each of their shards is on the ps of the other's. The innermost of several scopes counts,
    ``strategy.pinned`` among them.

    Args:
        strategy: In whose ``scope()`` this is.
        variable: Of that strategy.

    Raises:
        UsageError: Outside of the strategy's scope, in a step, or the variable is none, or of
            another strategy.

    Source: ``tf.distribute.StrategyExtended.colocate_vars_with``.
    """
    forbid_in_step("colocating variables")
    if current_scope() is not strategy:
        raise UsageError(
            "colocate_vars_with: the strategy's scope is not open here",
            hint="with strategy.scope(), strategy.colocate_vars_with(v): …",
        )
    if not isinstance(variable, Handle):
        raise UsageError(
            f"colocate_vars_with: expected a variable, got {type(variable).__name__}",
            hint="to name a ps: with strategy.pinned(index): …",
        )
    if variable.origin != strategy.origin:
        raise UsageError(
            f'colocate_vars_with: variable "{variable.name}" belongs to another strategy'
        )
    spec = variable.spec
    if len(spec.shards) > 1:
        return elsewhere(Elsewhere(strategy, beside=spec))
    return elsewhere(Elsewhere(strategy, Pinned(spec.shards[0].ps)))
