"""Staging: parts of synchronous pushes, held on a ps until their step is decided.

A worker sends each ps its part of a push, and ps 0, which is told of the parts of the others,
counts the push when all are there. So a part on this ps is of no consequence until a closing of
ps 0 names it.

    the part, or its group                                   then
    reserve: local step below the group's step here          stale: nothing is kept
    reserve: more bytes than the budget has left             ConfigurationError
    reserve: else                                            its bytes are reserved, and arrive
    stage: an entry of the log: it has arrived               kept, but for the same push again
    close: named by the closing of a step                    handed out
    close: its local step is the closed one or before        dropped
    fence: reserved, and its bytes have not arrived          dropped

**A part that is complete stays until its step is closed here**, whatever else its replica pushes,
and whether it lives or not: ps 0 may have counted it, and only ps 0 knows. A worker that waits
for its token when it dies is the usual case. So what a lost worker leaves behind costs memory
until the end of the step, and no longer; what a cancelled push has reserved or sent does, too.

Memory is reserved when a part is announced, so the parts that are here and those that are coming
in never exceed the budget. A part goes at the latest with its step: what a step may need is
compared with the budget at the first push, not found out in the middle of the training. Budget and
reservations are admission's, on the ps that serves: they decide nothing of what is in the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.store.rows import RowValues
from psync.store.store import Adjacent
from psync.store.sync_config import SyncConfig
from psync.sync.steps import Replica

if TYPE_CHECKING:
    from psync.ps.plans import Body, ShardSet

BUDGET_VARIABLE = "PSYNC_LIMIT_STAGING_BYTES"
"""What sets the budget (``wire.limits``)."""

PushKey = tuple[int, Replica, int]
"""Group, who pushes, and the number of the push."""

Named = Iterable[tuple[str, int, int, float]]
"""(task, incarnation, push, weight) of each push of a step, as ``CloseStep`` has them."""

Gradient: TypeAlias = np.ndarray | RowValues


class Part(msgspec.Struct, eq=False):
    """What a push brings to the shards of one ps."""

    key: PushKey
    local_step: int  # of the values that its gradients were computed from
    known: ShardSet
    gradients: Sequence[Gradient] | Adjacent  # views of the memory in which they came
    body: Body  # that memory
    nbytes: int
    rows: Sequence[int] | None  # as in Update


@dataclass(slots=True)
class _Group:
    step: int | None = None  # None: no step was closed here yet
    fits: int = 0  # the largest part of which a step's worth is known to fit the budget
    parts: dict[PushKey, Part] = field(default_factory=dict)
    coming: dict[PushKey, tuple[int, int]] = field(default_factory=dict)  # local step, bytes


class Staging:
    """The staged parts of one ps. Single owner; never blocks.

    Invariant: the bytes of all parts, those still coming in included, are within the budget.

    Attributes:
        steps: (group, step) of each group of which a step was applied here. The same list until
            one is; not to be changed.

    Args:
        budget_bytes: ``Limits.staging_bytes``.
        task: Name of the ps, for messages: ``/job:ps/task:1``.
    """

    def __init__(self, budget_bytes: int, task: str = "this ps") -> None:
        self._budget = budget_bytes
        self._task = task
        self._groups: defaultdict[int, _Group] = defaultdict(_Group)
        self.steps: list[tuple[int, int]] = []
        self._bytes = 0
        self._peak = 0
        self._staged = 0
        self._stale = 0

    def reserve(self, key: PushKey, local_step: int, nbytes: int, config: SyncConfig) -> None:
        """Reserve memory for a part that is about to arrive, if it is wanted.

        Args:
            key: Of the push.
            local_step: Of the part.
            nbytes: Of the part.
            config: Of the group.

        Raises:
            RemoteProtocolError: The peer makes no sense: a push of another size than before, or
                of a step that is far ahead.
            ConfigurationError: The budget is too small for a step of such parts, or exhausted.
        """
        known = self._groups[key[0]]
        if known.step is not None and not known.step <= local_step <= known.step + 1:
            if local_step < known.step:
                return
            raise RemoteProtocolError(
                f"{config.name} on {self._task}: {key[1][0]} pushes gradients of step "
                f"{local_step}, and the step is {known.step}"
            )
        part = known.parts.get(key)
        if part is not None:
            if part.nbytes != nbytes:  # perhaps it is counted already
                raise RemoteProtocolError(
                    f"{config.name} on {self._task}: push {key[2]} of {key[1][0]} has come with "
                    f"{part.nbytes} bytes, and is announced again with {nbytes}"
                )
            return  # the same again, after a lost connection
        if nbytes > known.fits:
            self._check_fits(nbytes, config)
            known.fits = nbytes
        _, freed = known.coming.get(key, (0, 0))
        used = self._bytes + nbytes - freed
        if used > self._budget:
            raise ConfigurationError(
                f"{config.name} on {self._task}: pushes of open steps use {self._bytes} of "
                f"{self._budget} bytes, and {nbytes} more are needed",
                hint=f"set {BUDGET_VARIABLE}={self._bytes + nbytes} or more on the ps tasks",
            )
        known.coming[key] = local_step, nbytes
        self._bytes = used
        if used > self._peak:
            self._peak = used

    def stage(self, part: Part) -> bool:
        """Keep a part that has arrived.

        Returns:
            Whether it is kept. False: its step was closed while it was coming in.
        """
        key, nbytes = part.key, part.nbytes
        known = self._groups[key[0]]
        _, freed = known.coming.pop(key, (0, 0))
        if known.step is not None and part.local_step < known.step:
            self._bytes -= freed
            self._stale += 1
            return False
        if key in known.parts:
            self._bytes -= freed
            return True
        if nbytes != freed:
            self._bytes += nbytes - freed
            self._peak = max(self._peak, self._bytes)
        known.parts[key] = part
        self._staged += 1
        return True

    def give_back(self, key: PushKey) -> None:
        """A part that was announced, and has come, is refused."""
        self._bytes -= self._groups[key[0]].coming.pop(key, (0, 0))[1]

    def drop(self, group: int) -> None:
        """No step of a group will be applied any more: its parts go."""
        parts = self._groups[group].parts
        self._bytes -= sum(part.nbytes for part in parts.values())
        parts.clear()

    def held(self) -> list[Part]:
        """Return all parts that have come in whole."""
        return [part for known in self._groups.values() for part in known.parts.values()]

    def replace(self, key: PushKey, owned: Callable[[Part], Part]) -> None:
        """Hold the part of a push in other memory, if it is held."""
        known = self._groups.get(key[0])
        if known is not None and key in known.parts:
            known.parts[key] = owned(known.parts[key])

    def parts(self, group: int, pushes: Named) -> list[tuple[Part, float]]:
        """Return the parts of a step.

        Args:
            group: Whose step it is.
            pushes: Of the step.

        Returns:
            The parts that are here and their weights, in the order of ``pushes``.
        """
        held = self._groups[group].parts
        found: list[tuple[Part, float]] = []
        for task, incarnation, push, weight in pushes:
            part = held.get((group, (task, incarnation), push))
            if part is not None:
                found.append((part, weight))
        return found

    def close(self, group: int, step: int, pushes: Named = ()) -> int:
        """Raise the group's step above ``step`` and drop what cannot count any more.

        Returns:
            How many bytes that was; they stay within the budget until ``applied``.
        """
        known = self._groups[group]
        known.step = step + 1
        for key, (local_step, nbytes) in list(known.coming.items()):
            if local_step <= step:
                del known.coming[key]
                self._bytes -= nbytes
        parts, dropped = known.parts, 0
        for task, incarnation, push, _ in pushes:
            named = parts.pop((group, (task, incarnation), push), None)
            if named is not None:
                dropped += named.nbytes
        for key, part in list(parts.items()):
            if part.local_step <= step:
                dropped += part.nbytes
                del parts[key]
        return dropped

    def applied(self, group: int, step: int, nbytes: int = 0) -> None:
        """A step that was closed is applied: pulls say so, and the memory of its parts is free."""
        self._bytes -= nbytes
        steps = dict(self.steps)
        former = steps.pop(group, 0)  # computes without a shard in common meet nowhere
        self.steps = [*steps.items(), (group, max(former, step + 1))]

    def fence(self, task: str, below: int) -> None:
        """Take no parts any more of incarnations of ``task`` below ``below``.

        Those whose bytes have not arrived go: nobody can count on them. The others stay until
        their step is closed.
        """
        for known in self._groups.values():
            for key in [k for k in known.coming if k[1][0] == task and k[1][1] < below]:
                self._bytes -= known.coming.pop(key)[1]

    def step(self, group: int) -> int | None:
        """Return the step that the group has here; None if none was closed yet."""
        return self._groups[group].step

    def is_closed(self, group: int, step: int) -> bool:
        """Return whether a step was closed here."""
        present = self._groups[group].step
        return present is not None and step < present

    def statistics(self) -> dict[str, int]:
        """Return sizes and counters as of now.

        ``parts`` are held, including those that are still coming in; ``staged`` came in whole,
        ``stale`` came too late for their step.
        """
        return {
            "parts": sum(len(group.parts) + len(group.coming) for group in self._groups.values()),
            "bytes": self._bytes,
            "peak_bytes": self._peak,
            "budget_bytes": self._budget,
            "staged": self._staged,
            "stale": self._stale,
        }

    def _check_fits(self, nbytes: int, config: SyncConfig) -> None:
        """Compare what a step may need with the budget.

        That is one part for each token of a step, and one of a worker that was started anew
        in its midst, whose first push needs no token.
        """
        count = config.tokens_per_step + 1
        if count * nbytes > self._budget:
            raise ConfigurationError(
                f"{config.name} on {self._task}: a step may need {count} pushes of {nbytes} bytes "
                f"({count * nbytes} bytes) at the same time, but the budget is {self._budget} "
                "bytes",
                hint=f"set {BUDGET_VARIABLE}={count * nbytes} or more on the ps tasks, or spread "
                "the variables over more of them",
            )
