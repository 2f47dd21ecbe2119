"""Staging: parts of synchronous pushes, kept on a ps until their step is decided.

A worker sends each ps its part of a push and only then, when all are there, tells ps 0, which
counts the push. So a part on this ps is of no consequence until a closing of ps 0 names it.

    the part, or its group                              then
    check: local step below the group's step here       stale: nothing is kept
    check: an incarnation that has been replaced        FencedError
    check: more bytes than the budget has left          ConfigurationError
    check: else                                         its bytes are reserved, before they arrive
    stage: what check reserved                          kept; the same push again replaces it
    take: named by the closing of a step                handed out, and kept while it is applied
    closed: its local step is the closed one or before  dropped, with whatever was taken
    fence: reserved, and its bytes have not arrived     dropped

**A part that is complete stays until its step is closed here**, whatever else its replica pushes,
and whether it lives or not: ps 0 may have counted it, and only ps 0 knows. A worker that waits
for its token when it dies is the usual case. So what a lost worker leaves behind costs memory
until the end of the step, and no longer.

Memory is reserved when a part is announced, so the parts that are here and those that are coming
in never exceed the budget. A part goes at the latest with its step: what a step may need
is compared with the budget at the first push, not found out in the middle of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from psync.errors import ConfigurationError, FencedError, RemoteProtocolError
from psync.store.sync_config import SyncConfig
from psync.sync.tokens import Replica

BUDGET_VARIABLE = "PSYNC_LIMIT_STAGING_BYTES"
"""What sets the budget (``wire.limits``)."""


@dataclass(frozen=True, slots=True)
class StagingStatistics:
    """A snapshot of what is staged."""

    parts: int  # held, those included that are still coming in
    bytes: int  # their size
    peak_bytes: int  # the largest that it has been
    budget_bytes: int
    staged: int  # parts that came in whole
    stale: int  # parts that came too late for their step


@dataclass(slots=True)
class _Part:
    local_step: int
    nbytes: int
    update: Any = None
    complete: bool = False  # its bytes are here
    taken: bool = False  # a closing has named it


@dataclass(slots=True)
class _Group:
    step: int | None = None  # None: no step was closed here yet
    fits: int = 0  # the largest part of which a step's worth is known to fit the budget
    parts: dict[tuple[Replica, int], _Part] = field(default_factory=dict)


class Staging:
    """The staged parts of one ps. Single owner; never blocks.

    Invariant: the bytes of all parts, those still coming in included, are within the budget.

    Args:
        budget_bytes: ``Limits.staging_bytes``.
        task: Name of the ps, for messages: ``/job:ps/task:1``.
    """

    def __init__(self, budget_bytes: int, task: str = "this ps") -> None:
        self._budget = budget_bytes
        self._task = task
        self._groups: dict[int, _Group] = {}
        self._served: dict[str, int] = {}  # by task: the lowest incarnation
        self._steps: list[tuple[int, int]] = []
        self._bytes = 0
        self._peak = 0
        self._staged = 0
        self._stale = 0

    def check(
        self, group: int, replica: Replica, push: int, local_step: int, nbytes: int,
        config: SyncConfig,
    ) -> bool:  # fmt: skip
        """Reserve memory for a part that is about to arrive.

        Args:
            group: Of the push.
            replica: Who sends it.
            push: Its number, of the replica in the group.
            local_step: Of the values that its gradients were computed from.
            nbytes: Of this part.
            config: Of the group.

        Returns:
            Whether it is wanted. False: its step is over, nothing was reserved.

        Raises:
            FencedError: A newer incarnation has replaced the replica.
            RemoteProtocolError: The peer makes no sense: a push of another size than before, or
                of a step that is far ahead.
            ConfigurationError: The budget is too small for a step of such parts, or exhausted.
        """
        self._check_served(replica)
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group()
        if known.step is not None and local_step < known.step:
            return False
        if known.step is not None and local_step > known.step + 1:
            raise RemoteProtocolError(
                f"{config.name} on {self._task}: {replica[0]} pushes gradients of step "
                f"{local_step}, and the step is {known.step}"
            )
        part = known.parts.get((replica, push))
        if part is not None and (part.nbytes == nbytes or part.taken):
            return True  # the same again, after a lost connection
        if part is not None and part.complete:  # perhaps it is counted already
            raise RemoteProtocolError(
                f"{config.name} on {self._task}: push {push} of {replica[0]} has come with "
                f"{part.nbytes} bytes, and is announced again with {nbytes}"
            )
        if nbytes > known.fits:
            self._check_fits(nbytes, config)
            known.fits = nbytes
        freed = 0 if part is None else part.nbytes
        if self._bytes - freed + nbytes > self._budget:
            raise self._exhausted(nbytes, config)
        known.parts[replica, push] = _Part(local_step, nbytes)
        self._bytes += nbytes - freed
        self._peak = max(self._peak, self._bytes)
        return True

    def stage(
        self, group: int, replica: Replica, push: int, local_step: int, update: object
    ) -> bool:
        """Keep a part that has arrived, of which ``check`` has returned True.

        Args:
            group: As for ``check``.
            replica: As for ``check``.
            push: As for ``check``.
            local_step: As for ``check``.
            update: The part. Opaque here.

        Returns:
            Whether it is kept. False: its step was closed, or the ps emptied for a new
            coordinator, while it was coming in.

        Raises:
            FencedError: A newer incarnation has replaced the replica meanwhile.
        """
        self._check_served(replica)
        known = self._groups.get(group)
        part = None if known is None else known.parts.get((replica, push))
        if part is None:
            self._stale += 1
            return False
        if not part.taken:  # else this is a repetition that was overtaken
            part.local_step, part.update, part.complete = local_step, update, True
            self._staged += 1
        return True

    def keep(
        self, group: int, replica: Replica, push: int, local_step: int, nbytes: int, update: object
    ) -> None:
        """Keep a part that has come to another ps, whose backup this is, if it is wanted.

        It is not if its step was closed before: what its ps refused is in the log, too.
        """
        known = self._groups.setdefault(group, _Group())
        if known.step is not None and local_step < known.step:
            return
        former = known.parts.get((replica, push))
        self._bytes += nbytes - (0 if former is None else former.nbytes)
        self._peak = max(self._peak, self._bytes)
        known.parts[replica, push] = _Part(local_step, nbytes, update, complete=True)

    def held(self) -> list[tuple[int, Replica, int, int, Any]]:
        """Return (group, replica, push, local step, part) of all parts that have come in whole."""
        return [
            (group, replica, push, part.local_step, part.update)
            for group, known in self._groups.items()
            for (replica, push), part in known.parts.items()
            if part.complete
        ]

    def staged(self, group: int, replica: Replica, push: int) -> Any:
        """Return the part that is kept of a push, or None."""
        known = self._groups.get(group)
        part = None if known is None else known.parts.get((replica, push))
        return None if part is None else part.update

    def take(
        self,
        group: int,
        step: int,
        pushes: Sequence[tuple[str, int, int, float]],
        along: Sequence[Any] = (),
    ) -> list[tuple[Any, float]]:
        """Return the parts of a step that is being closed. They count until it is ``closed``.

        Args:
            group: Whose step it is.
            step: The one that is closed; its number serves for messages.
            pushes: (task, incarnation, push, weight) of each push of the step.
            along: Of each push the part that has come with the closing, or None. () is all None.

        Returns:
            The parts and their weights, in the order of ``pushes``. A push of which no part was
            sent here has none: its variables are elsewhere.

        Raises:
            RemoteProtocolError: A part is still coming in, so its push cannot have been counted.
        """
        known = self._groups.get(group)
        held = {} if known is None else known.parts
        named: list[_Part] = []
        taken: list[tuple[Any, float]] = []
        for (task, incarnation, push, weight), came in zip_longest(pushes, along):
            if came is not None:
                taken.append((came, weight))
                continue
            part = held.get(((task, incarnation), push))
            if part is None:
                continue
            if not part.complete:
                raise RemoteProtocolError(
                    f"{self._task}: step {step} of group {group} is to be closed with push {push} "
                    f"of {task} (incarnation {incarnation}), which has not come in yet"
                )
            named.append(part)
            taken.append((part.update, weight))
        for part in named:
            part.taken = True
        return taken

    def closed(self, group: int, step: int) -> None:
        """Raise the group's step above ``step`` and drop what cannot count any more."""
        known = self._groups.setdefault(group, _Group())
        if known.step is not None and step < known.step:
            return
        known.step = step + 1
        self._drop(known, [k for k, p in known.parts.items() if p.taken or p.local_step <= step])
        self._steps = [(g, k.step) for g, k in self._groups.items() if k.step is not None]

    def fence(self, task: str, below: int) -> None:
        """Take no more parts of ``task`` under an incarnation below ``below``.

        Those whose bytes have not arrived go: nobody can count on them. The others stay until
        their step is closed.
        """
        if below <= self._served.get(task, 0):
            return
        self._served[task] = below
        for known in self._groups.values():
            self._drop(
                known,
                [
                    ((name, incarnation), push)
                    for ((name, incarnation), push), part in known.parts.items()
                    if name == task and incarnation < below and not part.complete
                ],
            )

    def steps(self) -> list[tuple[int, int]]:
        """Return (group, step) of each group of which a step was closed here.

        The same list until a step is closed; not to be changed.
        """
        return self._steps

    def step(self, group: int) -> int | None:
        """Return the step that the group has here; None if none was closed yet."""
        known = self._groups.get(group)
        return None if known is None else known.step

    def statistics(self) -> StagingStatistics:
        """Return sizes and counters as of now."""
        return StagingStatistics(
            parts=sum(len(group.parts) for group in self._groups.values()),
            bytes=self._bytes,
            peak_bytes=self._peak,
            budget_bytes=self._budget,
            staged=self._staged,
            stale=self._stale,
        )

    def _drop(self, group: _Group, keys: Sequence[tuple[Replica, int]]) -> None:
        for key in keys:
            self._bytes -= group.parts.pop(key).nbytes

    def _check_served(self, replica: Replica) -> None:
        task, incarnation = replica
        served = self._served.get(task, 0)
        if incarnation < served:
            raise FencedError(f"incarnation {incarnation} of {task} has been replaced by {served}")

    def _check_fits(self, nbytes: int, config: SyncConfig) -> None:
        """Compare what a step may need with the budget.

        That is one part for each token of a step, and one of a worker that was started anew
        in its midst, whose first push needs no token.
        """
        count = config.tokens_per_step + 1
        if count * nbytes > self._budget:
            raise ConfigurationError(
                f"{config.name} on {self._task}: a step may need {count} pushes of {nbytes} bytes "
                f"({count * nbytes} bytes) at once, and the budget is {self._budget} bytes",
                hint=f"set {BUDGET_VARIABLE}={count * nbytes} or more on the ps tasks, or spread "
                "the variables over more of them",
            )

    def _exhausted(self, nbytes: int, config: SyncConfig) -> ConfigurationError:
        return ConfigurationError(
            f"{config.name} on {self._task}: {self._bytes} of {self._budget} bytes for pushes of "
            f"steps that are not closed yet are taken, and {nbytes} more are needed",
            hint=f"set {BUDGET_VARIABLE}={self._bytes + nbytes} or more on the ps tasks",
        )
