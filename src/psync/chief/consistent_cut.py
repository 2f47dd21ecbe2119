"""Consistent cuts: one position on all ps tasks, taken while training goes on.

    coordinator              every ps
    Gate(cut)            →   begins no update that has not begun, closes no step (ps 0); waits for
                             those under way
                         ←   parts, on other ps tasks, of the updates that have begun here
    Freeze(cut, parts)   →   lets these through; when each is settled, holds references to its
                             blocks                              ←   the snapshot's state
    OpenGate(cut)        →   goes on
    WriteFrozen, ReadFrozen  …                                       as long as the save takes
    OpenGate(cut)        →   releases them

Every update that any ps has answered is in the cut with all parts; of every other one all parts or
none. Workers are not asked, one of which may compute on its loop for minutes: the parts of an
update name, in ``spread``, the messages to other ps tasks that belong to it, and a client numbers
all of them before it sends the first. A message counts as answered only when the whole update is.
So what one ps has forgotten is settled everywhere.

The gate is shut for the longest update under way and two round trips; updates that wait at it are
not judged. If an admitted part waits for a lock whose holder may itself be waiting at a gate, the
cut is given up after a second, the gates open, and another one is taken. Gates open and snapshots
are dropped when the connection of this coordinator is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.checkpoints.manifest import WrittenFile
from psync.client.link import PsLink, all_of, ask
from psync.client.ps import PsClient
from psync.closures.membership import backoff
from psync.errors import ConnectionLost, CutLost, RemoteProtocolError
from psync.net.shielding import begin, end_all
from psync.specs import dtype_of
from psync.store.snapshot_state import SnapshotState
from psync.store.untrusted_json import Text, Whole, read_json, to_json
from psync.wire import messages
from psync.wire.codec import Message
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

TRIES = 3
"""A cut is taken anew when a connection to a ps is lost meanwhile, or a lock is in its way."""

PATIENCE_S = 50.0
"""How long the updates under way may take to end, less than a gate stays shut by itself; and how
long it is tried again."""

OPENED_WITHIN_S = 5.0
"""So long it is waited for gates to open before the next one is shut."""

PIECE_BYTES = 16 << 20
"""Read at once."""


@dataclass(eq=False)
class Cut:
    """What all ps tasks held at one instant; they hold it until the cut is over."""

    ps: PsClient
    timeline: int  # in which it was taken
    number: int  # of the cut, from 1
    snapshots: Sequence[SnapshotState]  # the state of each ps
    is_over: bool = False

    async def write(
        self, ps: int, path: str, nonce: str, items: Sequence[tuple[int, str]]
    ) -> WrittenFile | None:
        """Let a ps write some of its items to a new file, under names of their own.

        Args:
            ps: Its index.
            path: Of the file.
            nonce: What a file says that lies beside it: see ``checkpoints.files``.
            items: (place in the state, name in the file) of each.

        Returns:
            What it wrote; None: it does not see the directory.

        Raises:
            CheckpointError: The disk is full, or fails.
            CutLost: The ps does not hold the cut any more.
            ParameterServerLost: It is gone.

        Cancellation: The file may be written.
        """
        link, order = self._link(ps), messages.WriteFrozen(self.number, path, nonce)
        _, segments = await ask(link, order, messages.Done, [to_json(items)])
        if not segments:
            return None
        written = read_json(b"".join(segments), WrittenFile, link.task)
        if len(written.places) != len(items):
            raise RemoteProtocolError(
                f"{link.task} wrote {len(written.places)} items, expected {len(items)}"
            )
        return written

    async def pieces(self, ps: int, item: int) -> AsyncIterator[memoryview]:
        """Yield the bytes of an item, at most 16 MiB at once.

        Raises:
            CutLost: The ps does not hold the cut any more.
            ParameterServerLost: It is gone.
        """
        link, nbytes = self._link(ps), self.snapshots[ps].items[item].nbytes
        for start in range(0, nbytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, nbytes)
            order = messages.ReadFrozen(self.number, item, start, stop)
            received = await link.call(order, bulk=True)
            if (got := sum(map(len, received.segments))) != stop - start:
                raise RemoteProtocolError(
                    f"{link.task}: expected {stop - start} bytes of item {item}, got {got}"
                )
            for segment in received.segments:
                yield segment

    def check_present(self) -> None:
        """Check that no ps has gone back to an earlier instant since, or is about to.

        Raises:
            CutLost: What the cut holds is undone, and has been told so.
        """
        if self.ps.timeline != self.timeline or any(link.is_held for link in self.ps.links):
            raise CutLost(f"ps tasks have gone back to an earlier instant than cut {self.number}")

    def _link(self, ps: int) -> PsLink:
        if self.is_over:
            raise CutLost(f"cut {self.number} is over")
        return self.ps.links[ps]

    async def read(self, ps: int, item: int) -> np.ndarray:
        """Return an item, of its shape and dtype; else as ``pieces``. Cancellation: safe."""
        known = self.snapshots[ps].items[item]
        array = np.empty(known.shape, dtype_of(known.dtype))
        target, at = to_bytes_view(array), 0
        async for piece in self.pieces(ps, item):
            target[at : at + len(piece)] = piece
            at += len(piece)
        return array


class Cuts:
    """Takes the cuts of one coordinator.

    Args:
        ps: Links to all ps tasks.
        ensure_created: Creates what is declared; nothing is created while a cut is taken.
    """

    def __init__(
        self, ps: PsClient, ensure_created: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self.taken = 0
        self._ps = ps
        self._links = ps.links
        self._ensure_created = ensure_created
        self._lock = asyncio.Lock()
        self._ending: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def take(self, at_instant: Callable[[], None] | None = None) -> AsyncIterator[Cut]:
        """Take a cut; it is held until the block ends. One at a time: others wait.

        Args:
            at_instant: Called while all ps tasks hold the cut and updates are still held up: for
                what the program itself has to say of this instant.

        Raises:
            CutLost: It could not be taken; says on whom it waited.
            Exception: What ``at_instant`` raises.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; ps tasks go on.
        """
        async with self._lock:
            cut = await self._take(at_instant)
            try:
                yield cut
            finally:
                cut.is_over = True
                self._tell_all(messages.OpenGate(cut.number))

    async def _take(self, at_instant: Callable[[], None] | None) -> Cut:
        loop = asyncio.get_running_loop()
        began = loop.time()
        attempt = 0
        while True:
            await self._ensure_created()
            self.taken += 1
            attempt += 1
            try:
                return await self._try(self.taken, at_instant)
            except (CutLost, ConnectionLost) as exc:
                if attempt >= TRIES and loop.time() - began >= PATIENCE_S:
                    raise
                logger.info("cut %d is retried: %s", self.taken, exc.message)
                if self._ending:  # what waits at the gates goes on first
                    await asyncio.wait(list(self._ending), timeout=OPENED_WITHIN_S)
                await asyncio.sleep(backoff(attempt, 0.5))

    async def _try(self, number: int, at_instant: Callable[[], None] | None) -> Cut:
        loop = asyncio.get_running_loop()
        began, doing = loop.time(), "updates under way have not ended"
        timeline, links = self._ps.timeline, self._links
        try:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    gate = messages.Gate(number)
                    gated = await all_of([ask(link, gate, messages.Done) for link in links])
                    wanted: list[list[tuple[str, int, int]]] = [[] for _ in links]
                    for link, (_, said) in zip(links, gated, strict=True):
                        begun = read_json(
                            b"".join(said), list[tuple[Whole, Text, Whole, Whole]], link.task
                        )
                        for ps, task, incarnation, sequence in begun:
                            if not 0 <= ps < len(links):
                                raise RemoteProtocolError(
                                    f"an update has a part on ps {ps}, which does not exist"
                                )
                            wanted[ps].append((task, incarnation, sequence))
                    doing = _described(wanted)
                    frozen = await all_of(
                        [
                            ask(link, messages.Freeze(number, parts), messages.Done)
                            for link, parts in zip(links, wanted, strict=True)
                        ]
                    )
            except TimeoutError as exc:
                raise CutLost(
                    f"no cut over all ps tasks within {PATIENCE_S:g} s: {doing}",
                    hint="save again; check that every worker reaches every ps",
                ) from exc
            if at_instant is not None:
                at_instant()
            await asyncio.wait((self._tell_all(messages.OpenGate(number, True)),))
            logger.debug("cut %d held updates up for %.1f ms", number, (loop.time() - began) * 1e3)
            snapshots = [  # read only now: that holds nobody up
                SnapshotState.from_bytes(b"".join(state), link.task)
                for link, (_, state) in zip(links, frozen, strict=True)
            ]
        except BaseException:
            self._tell_all(messages.OpenGate(number))
            raise
        return Cut(self._ps, timeline, number, snapshots)

    def _tell_all(self, message: Message) -> asyncio.Task[Any]:
        """Tell all ps tasks to let go, whatever becomes of the one who asked for it."""

        async def tell() -> None:
            calls = (link.call(message) for link in self._links)
            await asyncio.gather(*calls, return_exceptions=True)  # who is gone has let go

        return begin(tell(), self._ending)

    async def close(self) -> None:
        """Stop telling. Cancellation: safe."""
        await end_all(self._ending)


def _described(wanted: list[list[tuple[str, int, int]]]) -> str:
    """Say whose updates are waited for, where."""
    said = [
        f"/job:ps/task:{ps} waits for updates of {', '.join(sorted({task for task, *_ in parts}))}"
        for ps, parts in enumerate(wanted)
        if parts
    ]
    return "; ".join(said) or "the ps tasks do not answer"
