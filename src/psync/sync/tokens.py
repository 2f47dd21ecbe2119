"""The token channel of a synchronous group: the tokens of each step, and the replicas that wait.

A token is the number of a step. After each push a replica takes one and waits if there is none.
Tokens and waiting replicas are first in, first out; the channel has no bound.

**Free** tokens go to the first that asks, as in TensorFlow: a fast replica may take what was meant
for a slow one. **Bound** ones are counted instead of queued: each replica may take so many of
each step, less what it contributed to the step without one of these (``charge``). A new step's
tokens void those of earlier steps, unless the channel is to keep them.

With N replicas and R gradients a step, each step publishes max(N, R) tokens. A replica's first push
needs none, so there are no initial tokens where N ≥ R, and R - N where N < R: no step is wasted.
``strict`` binds ⌈R/N⌉ tokens of each step to every replica; ``tensorflow_compat`` puts R initial
tokens and keeps old ones, as TensorFlow does.

A push that is counted in a step may get its token when the step is decided (``reserve``): its
answer leaves with the values of the step. What it does not want any more is free again
(``give_back``).

Source: the ``sync_token_q`` of TensorFlow's ``SyncReplicasOptimizer``. Different there: tokens
are never bound, never void, and a waiting replica is never told that training has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

Replica: TypeAlias = tuple[str, int]
"""Task name and incarnation."""

Taker: TypeAlias = tuple[Replica, int]
"""Who asks: a replica, and the number of its push."""


class TokenChannel(msgspec.Struct, eq=False):
    """Tokens of one group; all of it is state. Single owner; never blocks.

    Args:
        allowance: None: free tokens. Else how many of each step a replica may take.
        keeps_old: Whether a new step leaves older tokens in the channel.
    """

    allowance: int | None = None
    keeps_old: bool = False
    step: int = 0  # of the newest tokens
    free: list[int] = msgspec.field(default_factory=list)
    valid_from: int = 0  # the lowest step of which there may be tokens
    used: dict[Taker, int] = msgspec.field(default_factory=dict)  # bound ones, by replica and step
    waiting: dict[Taker, None] = msgspec.field(default_factory=dict)  # in order of arrival
    reserved: int = 0  # free tokens of the next ``put`` that are taken
    published: int = 0
    taken: int = 0
    void: int = 0

    def put(self, step: int, count: int) -> list[tuple[Taker, int]]:
        """Publish ``count`` tokens of ``step``; return who gets which.

        Bound tokens need no count: every replica gets its allowance.
        """
        if step > self.step:
            self.step = step
            if not self.keeps_old and step > self.valid_from:
                self.void_below(step)
        if self.allowance is None:
            left = max(0, count - self.reserved)
            self.reserved = 0
            self.free.extend([step] * left)
            self.published += left
        else:
            self.used = {key: n for key, n in self.used.items() if key[1] >= step}
        grants: list[tuple[Taker, int]] = []
        for taker in list(self.waiting):
            token = self._token_for(taker[0])
            if token is not None:
                del self.waiting[taker]
                grants.append((taker, token))
            elif self.allowance is None:
                break
        return grants

    def void_below(self, step: int) -> None:
        """Let there be no tokens of earlier steps: none at all, until ``put`` brings newer ones."""
        self.valid_from = step
        while self.free and self.free[0] < step:
            del self.free[0]
            self.void += 1

    def take(self, taker: Taker) -> int | None:
        """Return a token, or None: ``taker`` waits. Whoever waits already keeps its place."""
        token = None if taker in self.waiting else self._token_for(taker[0])
        if token is None:
            self.waiting[taker] = None
        return token

    def reserve(self, takers: Sequence[Taker], step: int) -> None:
        """Let each of ``takers`` have a token of ``step``, which is published later."""
        for taker in takers:
            self.waiting.pop(taker, None)
            if self.allowance is None:
                self.reserved += 1
            else:
                self.used[taker[0], step] = self.used.get((taker[0], step), 0) + 1
        self.published += len(takers)
        self.taken += len(takers)

    def give_back(self, taker: Taker, step: int) -> None:
        """``taker`` does not want its token of ``step``, which is not published so far."""
        if self.allowance is None:
            self.reserved -= 1
        else:
            self.used[taker[0], step] -= 1
        self.published -= 1
        self.taken -= 1

    def charge(self, replica: Replica, step: int) -> None:
        """Count a bound token of ``step`` as used, by who contributed to it without having one.

        Such a replica began, or it has used an older token for values that it pulled since.
        """
        if self.allowance is not None:
            self.used[replica, step] = self.used.get((replica, step), 0) + 1

    def release(self, step: int) -> list[tuple[Taker, int]]:
        """Give everyone who waits a token of ``step`` beyond what was published."""
        grants = [(taker, step) for taker in self.waiting]
        self.waiting.clear()
        self.published += len(grants)
        self.taken += len(grants)
        return grants

    def close(self, but: Sequence[Taker] = ()) -> list[Taker]:
        """Nobody will get a token any more, but some of those who wait; return who waited."""
        takers = [taker for taker in self.waiting if taker not in but]
        self.waiting = {taker: None for taker in self.waiting if taker in but}
        return takers

    def statistics(self) -> dict[str, int]:
        """Return counters as of now: ``published == taken + void + left``."""
        return {
            "published": self.published, "taken": self.taken, "void": self.void,
            "left": len(self.free),
        }  # fmt: skip

    def _token_for(self, replica: Replica) -> int | None:
        if self.allowance is None:
            if not self.free:
                return None
            token = self.free.pop(0)
        else:
            used = self.used.get((replica, self.step), 0)
            if self.step < self.valid_from or used >= self.allowance:
                return None
            self.used[replica, self.step] = used + 1
            self.published += 1
            token = self.step
        self.taken += 1
        return token
