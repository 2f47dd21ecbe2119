"""Setting slots, steps and learning rates of optimizers on the ps tasks."""

from __future__ import annotations

from typing import Any

import numpy as np

from psync.client.calls import PsCalls, all_of
from psync.client.ps_link import PsLink
from psync.errors import RemoteProtocolError
from psync.specs import VariableSpec
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.ps_messages import AskOptimizer, OptimizerState, SetOptimizer, SetSlots
from psync.wire.tensors import to_bytes_view


async def set_slot(
    ps: PsCalls,
    variable: VariableSpec,
    value: np.ndarray,
    *,
    optimizer: int,
    config: dict[str, Any],
    slot: str,
) -> None:
    """Set one slot of all shards of a variable.

    Args:
        ps: All ps tasks.
        variable: Whose slot it is.
        value: Of the variable's shape and of the slot's dtype, C-contiguous. Not copied.
        optimizer: Number of the optimizer.
        config: Defines it.
        slot: Its name.

    Raises:
        UsageError: The optimizer has no such slot.
        ParameterServerLost: A ps is gone.

    Cancellation: Some shards are set, others are not.
    """

    async def set_one(position: int) -> None:
        shard = variable.shards[position]
        message = SetSlots(optimizer, config, [(*shard.key, slot)])
        rows = value[shard.offset : shard.offset + shard.shape[0]] if shard.shape else value
        await ps.links[shard.ps].call(
            lambda peer: message, [to_bytes_view(rows)], bulk=rows.nbytes > SMALL_BODY_BYTES
        )

    await all_of([set_one(position) for position in range(len(variable.shards))])


async def set_optimizer(
    ps: PsCalls,
    optimizer: int,
    config: dict[str, Any],
    *,
    step: int = -1,
    learning_rate: dict[str, Any] | None = None,
) -> None:
    """Let an optimizer go on with another step or learning rate, on all ps tasks.

    Args:
        ps: All ps tasks.
        optimizer: Its number.
        config: Defines it.
        step: That its next push has; -1: as it is.
        learning_rate: Config of a schedule; None: as it is.

    Raises:
        ConfigurationError: The learning rate is none.
        ParameterServerLost: A ps is gone.

    Cancellation: Some ps tasks have heard of it, others have not.
    """
    message = SetOptimizer(optimizer, config, step, learning_rate)
    await all_of([link.call(lambda peer: message) for link in ps.links])


async def optimizer_step(ps: PsCalls, optimizer: int, config: dict[str, Any]) -> int:
    """Return the highest step that a ps has given a push of an optimizer, plus 1.

    Args:
        ps: All ps tasks.
        optimizer: Its number.
        config: Defines it.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """

    async def ask(link: PsLink) -> int:
        received = await link.call(lambda peer: AskOptimizer(optimizer, config))
        if not isinstance(received.message, OptimizerState):
            raise RemoteProtocolError(
                f"{link.task} answered with {type(received.message).__name__}, expected "
                "OptimizerState"
            )
        return received.message.step

    return max(await all_of([ask(link) for link in ps.links]))
