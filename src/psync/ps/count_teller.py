"""What a ps tells the others of the pushes it has counted; see ``store.push_counts``.

Each ps tells ps 0, and ps 0 tells every other ps the sum: the number of messages grows with the
number of ps tasks, not with its square. One message is on its way to each, and the next one follows
``INTERVAL_S`` later if something has changed. Where a message says little that is news, because
clients bring it as well or because a few pushes are little beside thousands, the interval grows to
``MAX_INTERVAL_S``. Pushes with a part on a ps are not told there: where all pushes have a part on
every ps, nothing is told.

    lost message, lost connection    the link sends it again; counts only grow, so that is harmless
    fail-over of the receiver        its backup has the counts: they are entries of its log
    fail-over of the sender          its backup tells all counts again when it serves
    rollback, newer coordinator      the services end, and this with them. A message that is on its
                                     way is refused: it carries the incarnation of the timeline
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from psync.client.link import PsLink, ask
from psync.errors import PsyncError
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.shielding import end_all
from psync.numerics.memory import BlockPool
from psync.store.store import ShardStore
from psync.wire.messages import Number, TellCounts

logger = logging.getLogger(__name__)

INTERVAL_S = 0.005
"""Between two messages to the same ps."""

MAX_INTERVAL_S = 0.02
"""The same, where there is no hurry."""

NEWS_SHIFT = 9
"""There is a hurry if more than one push was news, and more than one in 512 of all."""

RETRY_S = 1.0
"""Until a ps that refuses them is told again: it may be going back to a snapshot just now."""


class CountTeller:
    """Tells other ps tasks, for one coordinator and timeline.

    Args:
        platform: Network, secret.
        index: Of this ps.
        incarnation: With which this ps speaks to the others.
        addresses: Of all ps tasks; none, if no coordinator is served.
        store: Has the counts.
        pool: Memory for what comes in.
    """

    def __init__(
        self,
        platform: Platform,
        index: int,
        incarnation: int,
        addresses: Sequence[str],
        store: ShardStore,
        pool: BlockPool,
    ) -> None:
        self._endpoint = Endpoint(platform, f"/job:ps/task:{index}", incarnation, {}, pool)
        self.others = [ps for ps in range(len(addresses)) if ps != index]
        self._links = [
            PsLink(self._endpoint, ps, addresses[ps], math.inf)
            for ps in (self.others[:1] if index else self.others)
        ]
        self._store = store
        self._changed = [asyncio.Event() for _ in self._links]
        self._telling: list[asyncio.Task[None]] = []

    def changed(self) -> None:
        """Tell the others soon: a count may have changed."""
        for event in self._changed:
            event.set()

    def begin(self) -> None:
        """Tell all of them from now on, and all counts first."""
        for task in self._telling:
            task.cancel()
        self.changed()
        each = zip(self._links, self._changed, strict=True)
        self._telling = [asyncio.get_running_loop().create_task(self._tell(*one)) for one in each]

    async def _tell(self, link: PsLink, changed: asyncio.Event) -> None:
        about = [link.index] if link.index else self.others
        told: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # (base, row) by optimizer
        pause_s = INTERVAL_S
        while True:
            await changed.wait()
            changed.clear()
            news = []
            for number, each in self._store.optimizers.items():
                count = each.count
                row = [(ps, pushes) for ps in about if (pushes := count.count_for(ps))]
                if (count.base, row) != told.get(number, (0, [])):
                    news.append((number, dict(each.config), count.base, row))
            if news:
                try:
                    heard, _ = await ask(link, TellCounts(news), Number)
                except PsyncError as exc:
                    logger.debug("%s was not told how many pushes there are: %s", link.task, exc)
                    await asyncio.sleep(RETRY_S)
                    changed.set()
                    continue
                told.update({number: (base, row) for number, _, base, row in news})
                pause_s = INTERVAL_S if heard.value else min(2 * pause_s, MAX_INTERVAL_S)
            await asyncio.sleep(pause_s)

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served now; ``begin`` again."""
        for link in self._links:
            if link.address != addresses[link.index] or link.lost is not None:
                link.revive()
                link.address = addresses[link.index]

    async def close(self) -> None:
        """Tell nothing more. Cancellation: links may be left open."""
        await end_all(self._telling)
        await end_all([task for link in self._links for task in link.close()])
        await self._endpoint.close()
