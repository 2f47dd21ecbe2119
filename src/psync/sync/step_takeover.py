"""A backup of ps 0 that serves goes on with the steps of the one that it has replaced.

Of each group: the last step that the log has closed is closed once more, on every ps, since nobody
knows how far that had come; then what counted beyond it counts again. A step that was decided, and
not in the log, nobody has heard of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from psync.sync.cross_ps_sets import Values
from psync.sync.followed_steps import LastStep
from psync.sync.group import Contribution
from psync.sync.ps_sync import PsSync
from psync.sync.step_rounds import ClosedStep, StepRounds


async def go_on(
    group: int,
    last: LastStep[ClosedStep] | None,
    left: Sequence[tuple[int, Contribution]],
    sync: PsSync,
    rounds: StepRounds,
) -> int:
    """Close the last step of a group once more; return the step that is the present one then.

    Args:
        group: Its number. It is defined, and has a step.
        last: The last step that was closed since the image.
        left: (step, push) of what counts beyond it.
        sync: The part of ps 0 itself.
        rounds: Carries steps to every ps.

    Raises:
        PsyncError: It cannot be closed.

    Cancellation: It may have been closed, or be closed later.
    """
    if last is not None:
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def then(_: Values, failed: Exception | None) -> None:
            if not ended.done():
                ended.set_result(failed)

        rounds.carry_again(last.closing, then)
        failed = await ended
        if failed is not None:
            raise failed
    closed = dict(sync.steps()).get(group)
    return left[0][0] if closed is None else closed
