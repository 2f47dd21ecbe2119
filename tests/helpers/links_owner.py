"""An owner of links that writes down what it is told, for tests."""

from __future__ import annotations

from psync.errors import FencedError, ParameterServerLost
from psync.net.peer import Peer


class Owner:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.lost: list[ParameterServerLost] = []

    def worker_joined(self, worker: str, control: Peer, bulk: Peer) -> None:
        assert (control.lane, bulk.lane) == ("control", "bulk")
        assert control.is_open
        assert bulk.is_open
        self.events.append(f"+{worker[-1]}")

    def worker_lost(self, worker: str, *, blame: bool) -> None:
        self.events.append(f"-{worker[-1]}" if blame else f"={worker[-1]}")

    def worker_given_up(self) -> None:
        self.events.append("given up")

    def ps_lost(self, error: ParameterServerLost) -> None:
        self.lost.append(error)

    def replaced(self, error: FencedError) -> None:
        self.events.append("replaced")
