"""What a ps has of synchronous steps beside what is in an image, for its backup.

Source: docs/design.md, section 20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from psync.ps.committer import Build
from psync.store.ledger import Client
from psync.sync.log_entries import entries_of_image
from psync.sync.ps_sync import PsSync
from psync.sync.step_closer import StepCloser


class SyncImage:
    """The synchronous groups of one ps; see ``backup_service.SyncState``.

    Args:
        sync: Its groups.
        closer: Returns what decides steps; None: not on ps 0, or not yet.
    """

    def __init__(self, sync: PsSync, closer: Callable[[], StepCloser | None]) -> None:
        self._sync = sync
        self._closer = closer

    async def pause(self, why: str) -> None:
        """Close no step from now on; wait for what is being closed."""
        if (closer := self._closer()) is not None:
            await closer.pause(why)

    def resume(self, why: str) -> None:
        """Go on."""
        if (closer := self._closer()) is not None:
            closer.resume(why)

    def groups(self) -> Iterable[int]:
        """Return all groups that are known."""
        return self._sync.raw_configs()

    def entries(self) -> list[tuple[Client, Build, Sequence[memoryview]]]:
        """Return (client, message, segments) of entries that give a backup all of it."""
        closer, sync = self._closer(), self._sync
        return entries_of_image(
            sync.raw_configs(), dict(sync.steps()), sync.global_steps.raised, sync.held(),
            () if closer is None else closer.steps.pending(),
            () if closer is None else closer.spread,
        )  # fmt: skip
