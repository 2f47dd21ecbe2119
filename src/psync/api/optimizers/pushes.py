"""One asynchronous push through an optimizer, and its outcome.

Synchronous pushes are in ``client.sync_client``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.api.optimizers.state import PushResult
from psync.client.optimizer_client import trust_ratios
from psync.client.runtime import Runtime
from psync.numerics.indexed_slices import IndexedSlices
from psync.numerics.update_rule import UpdateRule
from psync.specs import Outcome, VariableSpec
from psync.wire.ps_messages import Pushed


async def push_gradients(
    runtime: Runtime,
    variables: Sequence[VariableSpec],
    gradients: Sequence[np.ndarray | IndexedSlices],
    *,
    optimizer: int,
    config: dict[str, Any],
    rule: UpdateRule,
    closure: int,
    ordinal: int,
) -> PushResult:
    """Push a gradient for each variable; each ps applies what it gets at once.

    The highest step of the optimizer that this task knows goes along, and is updated by the
    answers: the updates of others in between are the staleness.

    Args:
        runtime: The way to the ps tasks.
        variables: In some order.
        gradients: One for each, checked; not copied.
        optimizer: Its number.
        config: Defines it.
        rule: What it computes.
        closure: Id of the closure, or -1.
        ordinal: Of the call within the closure.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: A push once begun ends in the background.
    """
    plan = runtime.ps.plan(tuple(variables))
    known = runtime.steps.get(optimizer, 0)
    ratios = await trust_ratios(
        runtime.ps, rule, plan, gradients, optimizer=optimizer, config=config, step=known
    )
    answers = await runtime.ps.push(
        plan,
        gradients,
        optimizer=optimizer,
        config=config,
        step=known,
        closure=closure,
        ordinal=ordinal,
        ratios=ratios,
    )
    result = result_of(answers, known)
    runtime.steps[optimizer] = max(result.step, runtime.steps.get(optimizer, 0))
    return result


def result_of(answers: Sequence[Pushed], known: int) -> PushResult:
    """Return what became of a push.

    Args:
        answers: Of each ps.
        known: The step that went along.
    """
    step = max(known, *(answer.step for answer in answers))  # a duplicate's is 0
    refused = [answer.outcome for answer in answers if answer.outcome != "accepted"]
    outcome = Outcome(refused[0]) if refused else Outcome.ACCEPTED
    return PushResult(outcome, step, max(0, step - known - 1))
