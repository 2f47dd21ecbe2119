"""The life of a ps task: its states, and which event leads where.

EMPTY     no coordinator has attached it; workers are refused, and try again
SERVING   a coordinator has attached it, or it was promoted since its primary is lost
HOSTED    the backup of another ps, in this process: it does what the log of that one says
DEPOSED   its backup serves in its place; it holds nothing, until a coordinator attaches it
          or rolls back to a snapshot
CLOSED    its connections are closed
"""

from __future__ import annotations

from enum import Enum

from psync.errors import LocalProtocolError


class Life(Enum):
    """Where a ps task is in its life."""

    EMPTY = "empty"
    SERVING = "serving"
    HOSTED = "a backup"
    DEPOSED = "replaced by its backup"
    CLOSED = "closed"

    def after(self, event: LifeEvent, task: str) -> Life:
        """Return what a ps task is after an event.

        Raises:
            LocalProtocolError: That cannot happen to one that is this.
        """
        try:
            return MOVES[event][self]
        except KeyError:
            raise LocalProtocolError(f"{task} cannot {event.value}: it is {self.value}") from None


class LifeEvent(Enum):
    """What happens to a ps task."""

    ATTACH = "be attached by a newer coordinator"
    COPY = "become a backup"
    PROMOTE = "be promoted"
    ROLL_BACK = "roll back"
    DEPOSE = "be replaced by its backup"
    CLOSE = "close"


MOVES: dict[LifeEvent, dict[Life, Life]] = {
    LifeEvent.ATTACH: dict.fromkeys((Life.EMPTY, Life.SERVING, Life.DEPOSED), Life.SERVING),
    LifeEvent.COPY: {Life.EMPTY: Life.HOSTED},
    LifeEvent.PROMOTE: {Life.HOSTED: Life.SERVING},
    LifeEvent.ROLL_BACK: dict.fromkeys((Life.SERVING, Life.DEPOSED), Life.SERVING),
    # The coordinator, and the backup, say it each.
    LifeEvent.DEPOSE: {
        **dict.fromkeys((Life.SERVING, Life.DEPOSED), Life.DEPOSED), Life.CLOSED: Life.CLOSED
    },
    LifeEvent.CLOSE: dict.fromkeys(Life, Life.CLOSED),
}  # fmt: skip
"""By event: from which state it leads to which."""
