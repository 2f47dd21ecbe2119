"""Session hooks: code that a training session calls at its stages.

And the global step that is meant where a program for TensorFlow names none: ``known_step``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from psync.api.global_step import global_step_of
from psync.api.scopes import running_scopes
from psync.api.sync_replicas import SyncReplicasOptimizer
from psync.api.variables import Variable
from psync.errors import ConfigurationError, UsageError


class SessionHook:
    """Base class of hooks of a ``MonitoredTrainingSession``; its methods do nothing.

    Source: ``tf.compat.v1.train.SessionRunHook``, without the methods for its graph.
    """

    def begin(self) -> None:
        """Called before the session connects. Its exceptions go to the program."""

    async def after_create_session(self, session: Any) -> None:
        """Called when the variables exist; on the chief, before any other task may enter."""

    async def after_run(self, session: Any, result: Any) -> None:
        """Called after each ``session.run`` except the last one, with its result."""

    async def end(self, session: Any) -> None:
        """Called when the loop has ended without an error, before the session leaves."""


class SyncReplicasHook(SessionHook):
    """Hook that prepares synchronous steps.

    Made by ``SyncReplicasOptimizer.make_session_run_hook``. The chief puts the initial tokens, once
    each time it attaches the ps tasks. A chief that restarts begins with empty ps tasks, so it does
    not add tokens to existing ones. There is no local step to set: a replica's first pull tells it
    the step at which it begins.

    Args:
        put_tokens: Function that puts the initial tokens; idempotent.
        is_chief: Whether this process is the chief.

    Source: ``_SyncReplicasOptimizerHook``; there, a restarted chief adds tokens to those left.
    """

    def __init__(self, put_tokens: Callable[[], Awaitable[Any]], is_chief: bool) -> None:
        self._put_tokens = put_tokens
        self._is_chief = is_chief

    async def after_create_session(self, session: Any) -> None:
        """Put the initial tokens, on the chief."""
        if self._is_chief:
            await self._put_tokens()


def hook_of(
    optimizer: SyncReplicasOptimizer,
    last_step: Callable[[], Variable | None],
    is_chief: bool,
    num_tokens: int,
) -> SyncReplicasHook:
    """Return the hook of an optimizer.

    Args:
        optimizer: Puts the tokens.
        last_step: Returns the global step of its last push in this process; None: of no push.
        is_chief: Whether this process is the chief.
        num_tokens: How many, if not as many as ps 0 puts by itself: -1.
    """

    async def put_tokens() -> None:
        if num_tokens == -1:
            return
        step = known_step(last_step())
        if step is None:
            raise UsageError(
                f"{optimizer.get_name()}: {num_tokens} initial tokens for an unknown global step",
                hint="create it with psync.get_or_create_global_step() before the session begins",
            )
        await optimizer.init_tokens(step, num_tokens)

    return SyncReplicasHook(put_tokens, is_chief)


# The global step that is meant.


def known_step(last: Variable | None) -> Variable | None:
    """Return the global step of the last push; else that of the strategy that is running.

    Args:
        last: That of the last push; None: nothing was pushed in this process.
    """
    if last is not None:
        return last
    steps = [global_step_of(scope) for scope in running_scopes()]
    return steps[0] if len(steps) == 1 else None


def step_meant(operation: str, name: str, last: Variable | None) -> Variable:
    """Return the global step that an operation needs.

    Args:
        operation: For the message.
        name: Of the optimizer.
        last: As for ``known_step``.

    Raises:
        ConfigurationError: It is not known.
    """
    step = known_step(last)
    if step is None:
        raise ConfigurationError(
            f"{operation} before apply_gradients of {name} was called in this process, "
            "and there is no other global step",
            hint="call it while a coordinator or session is running, with "
            "psync.get_or_create_global_step(). ps 0 puts the tokens and closes the steps "
            "automatically; to put a different number of tokens: `await "
            "optimizer.init_tokens(global_step, num_tokens)`",
        )
    return step
