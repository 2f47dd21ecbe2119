"""How ``fit`` calls its callbacks, and who is told of closures as they end: those, and the bar."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psync.errors import EndOfData
from psync.serialization.failures import text_of
from psync.serialization.remote_value import RemoteValue
from psync.status.progress import Progress
from psync.training.evaluation import awaited

if TYPE_CHECKING:
    from psync.callbacks import Callback

SHOW_EVERY_S = 0.1


async def call_back(
    trainer: Any, callbacks: Iterable[Callback], method: str, *arguments: Any
) -> None:
    """Call one method of each callback, which sees its trainer."""
    for callback in callbacks:
        callback.trainer = trainer
        await awaited(getattr(callback, method)(*arguments))


async def call_ends(
    trainer: Any,
    callbacks: Iterable[Callback],
    logs: Mapping[str, float],
    error: BaseException | None = None,
) -> None:
    """Tell every callback that training has ended, also if one before it raises.

    Raises:
        Exception: The first one of theirs, if ``error`` is None; others become notes of it, and all
            become notes of ``error``.
    """
    first: Exception | None = None
    for callback in callbacks:
        try:
            await call_back(trainer, (callback,), "on_train_end", logs)
        except Exception as exc:
            first = first or exc
            if (before := error or first) is not exc:
                name = f"{type(callback).__name__}.on_train_end"
                before.add_note(f"{name}: {type(exc).__name__}: {text_of(exc)}")
    if error is None and first is not None:
        raise first


async def follow(
    closures: Sequence[RemoteValue[Any]],
    counts: Sequence[int],
    tell: Callable[[int, Any], Awaitable[None]],
    stopped: Callable[[], bool],
    first: int = 0,
) -> None:
    """Call ``tell(step, result)`` for each closure that has a result, in the order of the epoch.

    What closures return is (steps that are missing, result).

    Where that raises, or ``stopped()`` becomes true, the closures that have not ended are
    cancelled. An error of a closure is left to whoever joins.

    Args:
        closures: Of an epoch.
        counts: How many steps each has.
        tell: Gets the last step of the closure, from 0, and its result.
        stopped: Asked after each.
        first: Number of the first step.

    Raises:
        Exception: What ``tell`` raised.

    Cancellation: Safe; closures go on.
    """
    steps = first
    for place, (closure, count) in enumerate(zip(closures, counts, strict=True)):
        steps += count
        try:
            missing, result = await closure
        except EndOfData:
            steps -= count
            continue
        except Exception:
            return
        steps -= missing
        try:
            await tell(steps - 1, result)
            if not stopped():
                continue
        except Exception:
            _cancel(closures[place:])
            raise
        _cancel(closures[place:])
        return


def _cancel(closures: Sequence[RemoteValue[Any]]) -> None:
    for closure in closures:
        closure.cancel()


async def show_steps(
    closures: Sequence[RemoteValue[Any]], counts: Sequence[int], show: Progress, done: int = 0
) -> None:
    """Move the bar while the closures run; they are done about in order.

    Args:
        closures: That run.
        counts: How many steps each has.
        show: The bar.
        done: Steps that are done before.
    """
    first = 0
    while True:
        while first < len(closures) and closures[first].done():
            done += counts[first]
            first += 1
        show.at(done)
        await asyncio.sleep(SHOW_EVERY_S)
