"""Hooks that see each ``Variable(...)`` before it is declared, and may change it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from psync.client.context import forbid_in_step
from psync.client.scopes import current_elsewhere, current_scope, elsewhere
from psync.errors import UsageError

Creator = Callable[..., Any]

# Those in force here, the oldest first, each with whether a strategy's scope was open by then.
_creators: ContextVar[tuple[tuple[Creator, bool], ...]] = ContextVar("psync_creators", default=())


@contextmanager
def variable_creator_scope(variable_creator: Creator) -> Generator[None, None, None]:
    """Return a context manager in which ``variable_creator`` makes what ``Variable(...)`` returns.

    It is called with ``next_creator`` and all arguments of ``Variable`` by name, and returns a
    variable: as a rule ``next_creator(**kwargs)``, with other arguments if it likes. Of several
    the innermost is called first, and its ``next_creator`` calls the one around it.

    Where a variable lies is the strategy's decision, which falls between those that were entered
    inside ``strategy.scope()`` and those around it. So what a hook around the scope says with
    ``strategy.pinned`` or ``colocate_vars_with`` wins over the strategy, and takes nobody's turn;
    what one inside says about the place is overridden by what was in force where ``Variable(...)``
    was called.

    A hook sees a variable before it is cut into shards, and once. What psync declares by itself
    (global step, moving averages, slots of optimizers) it does not see.

    Args:
        variable_creator: ``creator(next_creator, **kwargs) -> variable``.

    Raises:
        UsageError: It cannot be called; or inside a step.

    Example:
        def frozen(next_creator, **kwargs):
            return next_creator(**{**kwargs, "trainable": False})

        with strategy.scope(), psync.variable_creator_scope(frozen):
            table = psync.Variable(pretrained)

    Source: ``tf.variable_creator_scope``; there a hook sees each shard, and ``tf.device`` says
        where. Under TensorFlow's parameter-server strategy the same hooks win and lose.
    """
    forbid_in_step("entering a variable creator scope")
    if not callable(variable_creator):
        raise UsageError(
            "variable_creator_scope: expected a callable (next_creator, **kwargs), got "
            f"{variable_creator!r}"
        )
    entered = (variable_creator, current_scope() is not None)
    token = _creators.set((*_creators.get(), entered))
    try:
        yield
    finally:
        _creators.reset(token)


def through_creators(make: Creator, **kwargs: Any) -> Any:
    """Return what ``make(**kwargs)`` does, or what the hooks in force here make of it."""
    creators = _creators.get()
    if not creators:
        return make(**kwargs)
    where = current_elsewhere()
    for creator, inside in creators:
        if not inside:
            make = partial(creator, make)
    outside = make

    def placed(**kwargs: Any) -> Any:
        with elsewhere(where):
            return outside(**kwargs)

    make = placed
    for creator, inside in creators:
        if inside:
            make = partial(creator, make)
    return make(**kwargs)
