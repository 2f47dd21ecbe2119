"""The board on ps 0: what the tasks of a training session tell one another.

Workers of a session have no connection to the chief. With one request a task posts a value, which
replaces its last one, and asks for news: the chief for that of the others, and these for that of
the chief. A task is there as long as the connection over which it has posted; its post stays. ps 0
decides nothing, and does not look at the values: ``training_sessions`` does.
"""

from __future__ import annotations

from psync.cluster import CHIEF
from psync.net.connection import Connection, Request
from psync.wire.messages import Post, Posted


class Board:
    """The last post of each task; of those under an earlier chief, if they are gone.

    Args:
        coordinator: Incarnation of that chief; 0: none has come yet.
    """

    def __init__(self, coordinator: int) -> None:
        self._coordinator = coordinator
        self._posted: dict[str, tuple[Connection, bytes]] = {}  # by task
        self._versions = {True: 0, False: 0}  # of what the chief has posted, and the others
        self._is_over = False  # nothing is posted until the next chief comes
        self._waiting: dict[Request[Post], None] = {}

    def begin(self, coordinator: int) -> None:
        """Forget the earlier chief, and tasks that are still there: they hear of it, and end."""
        self._coordinator, self._is_over = coordinator, False
        gone = [item for item in self._posted.items() if item[1][0].is_closed]
        self._posted = {task: posted for task, posted in gone if task != CHIEF}
        self._changed(by_chief=True)
        self._changed(by_chief=False)

    def post(self, request: Request[Post]) -> None:
        """Take a value, if there is one, and answer once there is something new."""
        peer, value = request.peer, b"".join(request.segments)
        request.rest()
        by_chief, posted = peer.task == CHIEF, self._posted.get(peer.task, (None, b""))
        if request.message.forget:
            self._is_over = True
            self._posted = {CHIEF: self._posted[CHIEF]} if CHIEF in self._posted else {}
        elif value and not self._is_over and posted != (peer, value):
            if posted[0] is not peer:
                peer.on_closed.append(self._closed)
            self._posted[peer.task] = peer, value
            self._changed(by_chief=by_chief)
        if request.message.seen < self._versions[not by_chief]:
            self._answer(request)
        else:
            self._waiting[request] = None
            request.on_given_up = lambda _: self._waiting.pop(request, None)

    def _closed(self, peer: Connection) -> None:
        if peer.task in self._posted and self._posted[peer.task][0] is peer:
            self._changed(by_chief=peer.task == CHIEF)

    def _changed(self, *, by_chief: bool) -> None:
        self._versions[by_chief] += 1
        for request in list(self._waiting):
            if (request.peer.task == CHIEF) is not by_chief:
                del self._waiting[request]
                self._answer(request)

    def _answer(self, request: Request[Post]) -> None:
        to_chief = request.peer.task == CHIEF
        others = [task for task in self._posted if (task == CHIEF) is not to_chief]
        tasks = [(task, not self._posted[task][0].is_closed) for task in others]
        message = Posted(self._coordinator, self._versions[not to_chief], tasks)
        request.answer(message, [self._posted[task][1] for task in others])
