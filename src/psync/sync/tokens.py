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

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, TypeAlias

Replica: TypeAlias = tuple[str, int]
"""Task name and incarnation."""

Taker: TypeAlias = tuple[Replica, int]
"""Who asks: a replica, and the number of its push."""


class TokenChannel:
    """Tokens of one group. Single owner; never blocks.

    Args:
        allowance: None: free tokens. Else how many of each step a replica may take.
        keeps_old: Whether a new step leaves older tokens in the channel.
    """

    def __init__(self, allowance: int | None = None, *, keeps_old: bool = False) -> None:
        self._allowance = allowance
        self._keeps_old = keeps_old
        self._step = 0  # of the newest tokens
        self._free: deque[int] = deque()
        self._valid_from = 0  # the lowest step of which there may be tokens
        self._used: Counter[tuple[int, Replica]] = Counter()  # bound tokens of each step
        self.waiting: dict[Taker, None] = {}  # in order of arrival
        self._reserved = 0  # free tokens of the next ``put`` that are taken
        self._published = self._taken = self._void = 0

    def put(self, step: int, count: int) -> list[tuple[Taker, int]]:
        """Publish ``count`` tokens of ``step``; return who gets which.

        Bound tokens need no count: every replica gets its allowance.
        """
        if step > self._step:
            self._step = step
            if not self._keeps_old and step > self._valid_from:
                self.void_below(step)
        if self._allowance is None:
            left = max(0, count - self._reserved)
            self._reserved = 0
            self._free.extend([step] * left)
            self._published += left
        else:
            self._used = Counter({key: n for key, n in self._used.items() if key[0] >= step})
        grants: list[tuple[Taker, int]] = []
        for taker in list(self.waiting):
            token = self._token_for(taker[0])
            if token is not None:
                del self.waiting[taker]
                grants.append((taker, token))
            elif self._allowance is None:
                break
        return grants

    def void_below(self, step: int) -> None:
        """Let there be no tokens of earlier steps: none at all, until ``put`` brings newer ones."""
        self._valid_from = step
        while self._free and self._free[0] < step:
            self._free.popleft()
            self._void += 1

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
            if self._allowance is None:
                self._reserved += 1
            else:
                self._used[step, taker[0]] += 1
        self._published += len(takers)
        self._taken += len(takers)

    def give_back(self, taker: Taker, step: int) -> None:
        """``taker`` does not want its token of ``step``, which is not published so far."""
        if self._allowance is None:
            self._reserved -= 1
        else:
            self._used[step, taker[0]] -= 1
        self._published -= 1
        self._taken -= 1

    def charge(self, replica: Replica, step: int) -> None:
        """Count a bound token of ``step`` as used, by who contributed to it without having one.

        Such a replica began, or it has used an older token for values that it pulled since.
        """
        if self._allowance is not None:
            self._used[step, replica] += 1

    def release(self, step: int) -> list[tuple[Taker, int]]:
        """Give everyone who waits a token of ``step`` beyond what was published."""
        grants = [(taker, step) for taker in self.waiting]
        self.waiting.clear()
        self._published += len(grants)
        self._taken += len(grants)
        return grants

    def close(self, but: Sequence[Taker] = ()) -> list[Taker]:
        """Nobody will get a token any more, but some of those who wait; return who waited."""
        takers = [taker for taker in self.waiting if taker not in but]
        self.waiting = {taker: None for taker in self.waiting if taker in but}
        return takers

    def snapshot(self) -> list[Any]:
        """Return its state as plain data."""
        return [
            self._step, list(self._free), self._valid_from,
            [[step, *replica, count] for (step, replica), count in self._used.items()],
            [[*replica, number] for replica, number in self.waiting], self._reserved,
            self._published, self._taken, self._void,
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        """Take the state that another channel, of the same configuration, has returned."""
        self._step, free, self._valid_from, used, waiting, *rest = state
        self._free = deque(free)
        self._used = Counter({(step, (task, born)): count for step, task, born, count in used})
        self.waiting = {((task, born), number): None for task, born, number in waiting}
        self._reserved, self._published, self._taken, self._void = rest

    def statistics(self) -> dict[str, int]:
        """Return counters as of now: ``published == taken + void + left``."""
        return {
            "published": self._published, "taken": self._taken, "void": self._void,
            "left": len(self._free),
        }  # fmt: skip

    def _token_for(self, replica: Replica) -> int | None:
        if self._allowance is None:
            if not self._free:
                return None
            token = self._free.popleft()
        else:
            if self._step < self._valid_from or self._used[self._step, replica] >= self._allowance:
                return None
            self._used[self._step, replica] += 1
            self._published += 1
            token = self._step
        self._taken += 1
        return token
