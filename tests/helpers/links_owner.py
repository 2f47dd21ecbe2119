"""What links tell of workers and ps tasks, written down, for tests."""

from __future__ import annotations

from psync.chief.links import ClusterLinks, CoordinatorOptions
from psync.errors import ParameterServerLost

OPTIONS = CoordinatorOptions(
    origin="o", min_workers=1, connect_timeout_s=60.0, ps_timeout_s=15.0, closure_timeout_s=None,
    max_losses=3, max_flaps=3, watchdog_timeout_s=None, on_stall=None, attach=False,
    has_backups=False,
)  # fmt: skip


class Owner:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.lost: list[ParameterServerLost] = []

    def listen(self, links: ClusterLinks) -> None:
        links.workers.on_joined = lambda worker: self.events.append(f"+{worker[-1]}")
        links.workers.on_lost = self._worker_lost
        links.on_worker_given_up = lambda: self.events.append("given up")
        links.on_ps_lost = self.lost.append
        links.on_replaced = lambda _: self.events.append("replaced")

    def _worker_lost(self, worker: str, blame: bool) -> None:
        self.events.append(f"-{worker[-1]}" if blame else f"={worker[-1]}")
