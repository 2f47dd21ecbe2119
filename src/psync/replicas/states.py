"""The context variable behind replica, cross-replica and update context.

It holds for the code that entered it and for the tasks and threads that this starts with its
context; but only in the step, or outside of steps, in which it was entered.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from psync.client.context import Running, here
from psync.errors import ContextError


@dataclass(frozen=True, slots=True, eq=False)
class CrossReplica:
    """All replicas are meant."""

    strategy: Any  # whose replicas
    num_replicas: int  # how many there are
    is_default: bool = False  # it was set for all that follows; no block ends it
    merging: bool = False  # a gang waits for what is done here: the function of a collective


@dataclass(frozen=True, slots=True, eq=False)
class Updating:
    """A variable is being updated where it lives."""

    strategy: Any  # whose variable
    num_replicas: int


REPLICAS_ONLY = ("merge_call", "all_reduce", "all_gather", "replica_id_in_sync_group")
"""Attributes of a replica context that nothing else has."""


def no_replica(what: str, state: CrossReplica | Updating) -> ContextError:
    """Return the error for what needs a replica and is done where there is none."""
    kind = "update" if isinstance(state, Updating) else "cross-replica"
    return ContextError(
        f"{what} in {kind} context, which has no replicas to wait for",
        hint="call it in the function given to strategy.run, not in a merge function",
    )


open_scope: contextvars.ContextVar[Any] = contextvars.ContextVar("psync_scope", default=None)
"""The strategy whose scope is open; None: none is."""

_entered: contextvars.ContextVar[tuple[Running, Any] | None] = contextvars.ContextVar(
    "psync_replica_state", default=None
)
"""What was entered last, and in which step or dataset code."""


def entered() -> Any:
    """Return what was entered last and holds here; None: nothing."""
    entry = _entered.get()
    return entry[1] if entry is not None and entry[0] is here.get() else None


def enter_for_good(state: Any) -> None:
    """Enter a state that no block ends; None: nothing is entered any more."""
    _entered.set(None if state is None else (here.get(), state))


class Enter:
    """Context manager of one state. Blocks are left in the order in which they were entered.

    Args:
        state: What holds inside.
        value: What ``as`` gives.

    Raises:
        ContextError: On leaving, if another one was entered in it and not left; or if code in it
            used the replica context, which is None in it, as if there were one.
    """

    __slots__ = ("_entry", "_token", "_value")

    def __init__(self, state: Any, value: Any = None) -> None:
        self._entry = (here.get(), state)
        self._value = value
        self._token: contextvars.Token[Any]

    def __enter__(self) -> Any:
        self._token = _entered.set(self._entry)
        return self._value

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _entered.get() is not self._entry and exc is None:
            raise ContextError(
                "a replica context was exited before one that was entered inside it",
                hint="use `with` blocks, which exit in the right order",
            )
        _entered.reset(self._token)
        state = self._entry[1]
        if isinstance(exc, AttributeError) and exc.obj is None and exc.name in REPLICAS_ONLY:
            if isinstance(state, CrossReplica | Updating):
                raise no_replica(exc.name, state) from exc
