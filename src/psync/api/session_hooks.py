"""Classes of TensorFlow 1 that synchronous optimizers and training sessions share.

Session hooks are code that a training session calls at its stages. The chief's queue runner only
waits for the end of training here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from psync.api.reads import runtime_of
from psync.api.variables import Variable
from psync.client.ps_client import PsClient
from psync.errors import ClosedError, ConnectionLost, RemoteProtocolError
from psync.wire.messages import AwaitEnd, TrainingOver

logger = logging.getLogger(__name__)


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


class ChiefQueueRunner:
    """A stand-in for TensorFlow's queue runner on the chief; ps 0 closes the steps instead.

    Args:
        global_step: The global step of the training.
    """

    def __init__(self, global_step: Variable) -> None:
        self._global_step = global_step

    async def run(self) -> None:
        """Return when training has ended, or when this task's connections are closed.

        Raises:
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe.
        """
        runtime = await runtime_of("the chief's queue runner", self._global_step)
        with contextlib.suppress(ClosedError):
            await wait_over(runtime.ps, "the chief's queue runner")


async def wait_over(ps: PsClient, who: str) -> TrainingOver:
    """Wait until training has ended.

    Args:
        ps: Links to all ps tasks.
        who: Waits; for the log.

    Raises:
        ParameterServerLost: A ps is gone.
        FencedError: A newer chief has taken the cluster over.
        ClosedError: This task has closed its links.

    Cancellation: Safe.
    """
    while True:
        try:
            received = await ps.links[0].call(lambda _: AwaitEnd())
            break
        except ConnectionLost as exc:
            # It may wait for days, and outlive more connections than a request is allowed.
            logger.info("%s still waits for the end of training: %s", who, exc.message)
    if not isinstance(received.message, TrainingOver):
        raise RemoteProtocolError("ps 0 sent a wrong answer to AwaitEnd")
    return received.message
