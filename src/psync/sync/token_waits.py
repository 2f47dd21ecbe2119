"""Requests on ps 0 that wait for a token, and the values that go with it.

``SyncSteps`` decides what becomes of a push, and gives tokens when every ps has applied a step;
here are the requests that wait for that. The same push may have two, after a lost connection that
ps 0 has not noticed yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from psync.errors import PsyncError
from psync.net.connection import Request
from psync.sync.cross_ps_sets import Share, Values, WholeSet
from psync.sync.ps_sync import PsSync
from psync.sync.pushes import Answer, Refuse
from psync.sync.tokens import Replica
from psync.wire.messages import Contribute, Contributed

PushKey = tuple[int, Replica, int]
"""Group, replica, number of the push."""


class TokenWaits:
    """The requests of one coordinator's replicas that are not answered yet.

    Args:
        sync: The part of ps 0 itself.
        left: Told of a push for which nobody waits any more.
    """

    def __init__(self, sync: PsSync, left: Callable[[PushKey], None]) -> None:
        self._sync = sync
        self._on_left = left
        self._waiting: dict[PushKey, list[Request[Contribute]]] = {}
        self._wanted: dict[PushKey, WholeSet] = {}  # with the token
        self._brought: Values | None = None  # by other ps tasks, while tokens are given

    def add(self, request: Request[Contribute], key: PushKey, wanted: WholeSet | None) -> None:
        """Let a request wait.

        Args:
            request: Who waits.
            key: Of the push.
            wanted: Whose values are to go with the token of a new step; None: nothing's.
        """
        request.on_given_up = functools.partial(self._left, key)
        self._waiting.setdefault(key, []).append(request)
        if wanted is not None:
            self._wanted[key] = wanted

    def _left(self, key: PushKey, waiter: Request[Contribute]) -> None:
        """Somebody waits no more; perhaps nobody waits for this push now."""
        waiters = self._waiting.get(key, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
                self._wanted.pop(key, None)
                self._on_left(key)

    def refuse_all(self, error: PsyncError) -> None:
        """Nobody waits any more: all are told why."""
        waiting, self._waiting = self._waiting, {}
        self._wanted.clear()
        for waiters in waiting.values():
            for waiter in waiters:
                waiter.fail(error)

    def answer(self, action: Answer | Refuse) -> None:
        """Tell whoever waits for a push what has become of it."""
        key = (action.group, action.replica, action.number)
        waiters = self._waiting.pop(key, ())
        wanted = self._wanted.pop(key, None)
        if isinstance(action, Refuse):
            for waiter in waiters:
                waiter.fail(action.error)
            return
        answer = Contributed(
            action.outcome, action.staleness, action.token, action.partial, action.count
        )
        values = () if wanted is None else self._values_of(wanted)
        for waiter in waiters:
            waiter.answer(answer, values)

    # Values that go with tokens.

    def wanted_shares(self) -> Collection[Share]:
        """Return what is wanted of other ps tasks with the tokens of the next step.

        Nothing where there are several groups: only an answer to a pull says how far each is.
        """
        if not self._wanted or not self._sync.has_one_group:
            return ()
        shares = (share for known in self._wanted.values() for share in known.shares)
        return {share.number: share for share in shares}.values()

    def bring(self, values: Values) -> None:
        """Until ``done`` these values of other ps tasks go with tokens: those of a new step."""
        self._brought = values if self._sync.has_one_group else None

    def done(self) -> None:
        """The tokens of the new step are given."""
        self._brought = None

    def _values_of(self, wanted: WholeSet) -> Sequence[list[memoryview]]:
        if self._brought is None:
            return ()
        return wanted.joined(self._sync.values_of((wanted.own,)), self._brought)
