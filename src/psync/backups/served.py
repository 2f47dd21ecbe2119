"""What one ps process says of itself to the next coordinator.

    AskServed   no backup of earlier coordinators is made or promoted from then on; one that is
                being promoted finishes first; then the answer: the ps tasks that are served here,
                the backups that are here
    EndFormer   the rest of what earlier coordinators have left here ends

Only the task at the process's own address is asked: a backup that serves speaks for itself alone.

Source: docs/design.md, "Attach".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from psync.backups.host import BackupHost
from psync.backups.locate_ps import Primary
from psync.net.connection import Handler, Request
from psync.ps.succession import check_newest
from psync.wire.codec import Message
from psync.wire.messages import AskServed, Done, EndFormer, ServedHere


class ServedService:
    """What one process says of itself to the next coordinator.

    Args:
        task: Name of the ps whose process it is.
        host: The backups in this process.
        newest: Returns the incarnation of the newest coordinator that was heard of in it.
        primary: Returns what a newer coordinator has to know of the ps; None: it serves nobody.
        end_below: Lets the ps hold nothing, if a coordinator that is served is an earlier one.
    """

    def __init__(
        self,
        task: str,
        host: BackupHost,
        newest: Callable[[], int],
        primary: Callable[[str, int], Primary | None],
        end_below: Callable[[int], None],
    ) -> None:
        self._task = task
        self._host = host
        self._newest = newest
        self._primary = primary
        self._end_below = end_below

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {AskServed: Handler(self._ask), EndFormer: Handler(self._end)}

    async def _ask(self, request: Request[AskServed]) -> None:
        peer = request.peer
        check_newest(peer, self._task, self._newest())
        self._host.fence(peer.incarnation)
        primaries, copies = await self._host.found()
        own = self._primary("", 0)
        if own is not None:
            primaries.append(own)
        request.answer(ServedHere([dataclasses.astuple(each) for each in primaries], copies))

    def _end(self, request: Request[EndFormer]) -> None:
        peer = request.peer
        check_newest(peer, self._task, self._newest())
        self._host.end_below(peer.incarnation)
        self._end_below(peer.incarnation)
        request.answer(Done())
