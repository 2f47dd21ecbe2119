"""A ps that writes down what it applies, and may serve whoever trained before a rollback."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from psync.net.platform import Parts
from psync.net.transport import Listener
from psync.ps_task import PsTask
from psync.store.snapshot import Loaded
from psync.testing.sabotage.apply_log import ApplyLog
from psync.testing.sabotage.weakened_rules import WeakLedger
from psync.wire.messages import AttachPs, RestoreSnapshot


class SabotagedPs(PsTask):
    """A ps task for tests.

    A backup in the same process has failpoints of its own: see ``Failpoints.of_backup``.
    """

    apply_log: str  # directory in which it writes down what it applies; "": none
    of_backup: Callable[[], Parts]

    def __post_init__(self) -> None:
        self._log = ApplyLog(self.apply_log, self.index)
        if self.is_hosted:
            self.platform = dataclasses.replace(self.platform, parts=self.of_backup())
        super().__post_init__()

    async def promote(self, fences: Sequence[tuple[str, int]]) -> Listener:
        """Serve what was a backup until now."""
        self._log.serves(promoted=True)
        return await super().promote(fences)

    async def close(self) -> None:
        """Finish the updates that have begun, then close all connections, and the log."""
        await super().close()
        self._log.close()

    def take(self, loaded: Loaded, message: RestoreSnapshot) -> None:
        """Serve what a snapshot holds from now on."""
        if isinstance(loaded.ledger, WeakLedger):
            loaded.ledger.went_back(message.fences)
        self._log.adopt(loaded.store)
        super().take(loaded, message)
        self._log.serves()

    def _begin(self, attach: AttachPs) -> None:
        plans = self.services.plans.of
        super()._begin(attach)
        ledger = self.services.ledger
        if isinstance(ledger, WeakLedger) and "fencing" in ledger.without:
            self.services.plans.of.update(plans)  # whoever was replaced is served on
        self._log.serves()

    def _nothing(self, floor: int) -> Loaded:
        contents = super()._nothing(floor)
        self._log.adopt(contents.store)
        return contents

    def take_over(self, attach: AttachPs, loaded: Loaded, timeline: int, lineage: int) -> Any:
        """Hold what a snapshot of another one holds."""
        self._log.adopt(loaded.store)
        return super().take_over(attach, loaded, timeline, lineage)
