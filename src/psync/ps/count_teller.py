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
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

from psync.client.link import Call, PsLink, always
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.store.store import ShardStore
from psync.wire.frames import Frame
from psync.wire.messages import CountsHeard, TellCounts

logger = logging.getLogger(__name__)

INTERVAL_S = 0.005
"""Between two messages to the same ps."""

MAX_INTERVAL_S = 0.02
"""The same, where there is no hurry."""

NEWS_SHIFT = 9
"""There is a hurry if more than one push was news, and more than one in 512 of all."""

RETRY_S = 1.0
"""Until a ps that refuses them is told again: it may be going back to a snapshot just now."""


News = tuple[int, list[tuple[int, int]]]
"""(base, row) as of ``PushCount.hear``."""


class CountTeller:
    """Tells other ps tasks, for one coordinator and timeline.

    Args:
        platform: Network, secret.
        index: Of this ps.
        incarnation: With which this ps speaks to the others.
        addresses: Of all ps tasks.
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
        self._links = {
            ps: PsLink(self._endpoint, ps, addresses[ps], math.inf)
            for ps in ([0] if index else range(1, len(addresses)))
        }
        self._store = store
        self.others = [ps for ps in range(len(addresses)) if ps != index]
        self._told: dict[tuple[int, int], News] = {}  # acknowledged, by ps and optimizer
        # By ps, what has to end before it is told more: a message, or the wait after a refusal.
        self._busy: dict[int, Call | asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = 0.0  # when the next messages may be sent
        self._interval_s = INTERVAL_S
        self._closed = False

    def changed(self) -> None:
        """Tell the others soon: a count may have changed."""
        if self._timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._earliest), self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._earliest = asyncio.get_running_loop().time() + self._interval_s
        optimizers = self._store.optimizers
        for ps in self._links.keys() - self._busy.keys():
            news = []
            for number, each in optimizers.items():
                count, about = each.count, [ps] if ps else self.others
                row = [(other, told) for other in about if (told := count.count_for(other))]
                if (count.base, row) != self._told.get((ps, number), (0, [])):
                    news.append((number, dict(each.config), count.base, row))
            if news:
                then = functools.partial(self._told_to, ps, news)
                link, build = self._links[ps], always(TellCounts(news))
                self._busy[ps] = link.ask(Call(link, build), then)

    def _told_to(
        self,
        ps: int,
        news: Sequence[tuple[int, dict[str, Any], int, list[tuple[int, int]]]],
        outcome: Frame | Exception,
    ) -> None:
        if isinstance(outcome, Exception):
            logger.debug("/job:ps/task:%d was not told how many pushes there are: %s", ps, outcome)
            if not self._closed:
                loop = asyncio.get_running_loop()
                self._busy[ps] = loop.call_later(RETRY_S, self._again, ps)
            return
        for number, _, base, row in news:
            self._told[ps, number] = base, row
        if isinstance(outcome.message, CountsHeard) and not outcome.message.is_news:
            self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)
        else:
            self._interval_s = INTERVAL_S
        self._again(ps)

    def _again(self, ps: int) -> None:
        self._busy.pop(ps, None)
        self.changed()

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served now."""
        for ps, link in self._links.items():
            if link.address != addresses[ps] or link.lost is not None:
                link.revive()
                link.address = addresses[ps]
        for ps, busy in list(self._busy.items()):
            if isinstance(busy, asyncio.TimerHandle):
                busy.cancel()
                del self._busy[ps]
        self.changed()

    async def close(self) -> None:
        """Tell nothing more. Cancellation: links may be left open."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for busy in self._busy.values():
            if isinstance(busy, Call):
                busy.give_up()
            else:
                busy.cancel()
        for link in self._links.values():
            await link.close()
        await self._endpoint.close()
