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

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.store.sync_config import SyncConfig
from psync.sync.tokens import Replica

BUDGET_VARIABLE = "PSYNC_LIMIT_STAGING_BYTES"
"""What sets the budget (``wire.limits``)."""


@dataclass(slots=True)
class _Part:
    local_step: int
    nbytes: int
    update: Any = None


Key = tuple[Replica, int]
"""Who pushes, and the number of the push."""


@dataclass(slots=True)
class _Group:
    step: int | None = None  # None: no step was closed here yet
    fits: int = 0  # the largest part of which a step's worth is known to fit the budget
    parts: dict[Key, _Part] = field(default_factory=dict)
    coming: dict[Key, _Part] = field(default_factory=dict)  # for which memory is reserved


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
        self._groups: dict[int, _Group] = {}
        self.steps: list[tuple[int, int]] = []
        self._bytes = 0
        self._peak = 0
        self._staged = 0
        self._stale = 0

    def reserve(
        self, group: int, replica: Replica, push: int, local_step: int, nbytes: int,
        config: SyncConfig,
    ) -> None:  # fmt: skip
        """Reserve memory for a part that is about to arrive, if it is wanted.

        Args:
            group: Of the push.
            replica: Who sends it.
            push: Its number, of the replica in the group.
            local_step: Of the values that its gradients were computed from.
            nbytes: Of this part.
            config: Of the group.

        Raises:
            RemoteProtocolError: The peer makes no sense: a push of another size than before, or
                of a step that is far ahead.
            ConfigurationError: The budget is too small for a step of such parts, or exhausted.
        """
        known = self._groups.get(group) or self._groups.setdefault(group, _Group())
        if known.step is not None and local_step < known.step:
            return
        if known.step is not None and local_step > known.step + 1:
            raise RemoteProtocolError(
                f"{config.name} on {self._task}: {replica[0]} pushes gradients of step "
                f"{local_step}, and the step is {known.step}"
            )
        part = known.parts.get((replica, push))
        if part is not None:
            if part.nbytes != nbytes:  # perhaps it is counted already
                raise RemoteProtocolError(
                    f"{config.name} on {self._task}: push {push} of {replica[0]} has come with "
                    f"{part.nbytes} bytes, and is announced again with {nbytes}"
                )
            return  # the same again, after a lost connection
        if nbytes > known.fits:
            self._check_fits(nbytes, config)
            known.fits = nbytes
        coming = known.coming.get((replica, push))
        freed = 0 if coming is None else coming.nbytes
        if self._bytes - freed + nbytes > self._budget:
            raise self._exhausted(nbytes, config)
        known.coming[replica, push] = _Part(local_step, nbytes)
        self._bytes += nbytes - freed
        self._peak = max(self._peak, self._bytes)

    def stage(
        self, group: int, replica: Replica, push: int, local_step: int, nbytes: int, update: object
    ) -> bool:
        """Keep a part that has arrived.

        Args:
            group: As for ``reserve``.
            replica: As for ``reserve``.
            push: As for ``reserve``.
            local_step: As for ``reserve``.
            nbytes: As for ``reserve``.
            update: The part. Opaque here.

        Returns:
            Whether it is kept. False: its step was closed while it was coming in.
        """
        known = self._groups.get(group) or self._groups.setdefault(group, _Group())
        coming = known.coming.pop((replica, push), None)
        freed = 0 if coming is None else coming.nbytes
        if known.step is not None and local_step < known.step:
            self._count(-freed)
            self._stale += 1
            return False
        if (replica, push) in known.parts:
            self._count(-freed)
            return True
        if nbytes != freed:
            self._count(nbytes - freed)
        known.parts[replica, push] = _Part(local_step, nbytes, update)
        self._staged += 1
        return True

    def held(self) -> list[tuple[int, Replica, int, int, Any]]:
        """Return (group, replica, push, local step, part) of all parts that have come in whole."""
        return [
            (group, replica, push, part.local_step, part.update)
            for group, known in self._groups.items()
            for (replica, push), part in known.parts.items()
        ]

    def local_steps(self) -> list[tuple[int, int]]:
        """Return (group, local step) of all parts, those still coming in included."""
        return [
            (group, part.local_step)
            for group, known in self._groups.items()
            for part in (*known.parts.values(), *known.coming.values())
        ]

    def staged(self, group: int, replica: Replica, push: int) -> Any:
        """Return the part that is held of a push, or None."""
        known = self._groups.get(group)
        part = None if known is None else known.parts.get((replica, push))
        return None if part is None else part.update

    def replace(self, group: int, replica: Replica, push: int, update: object) -> None:
        """Hold the same part in other memory."""
        self._groups[group].parts[replica, push].update = update

    def check_here(
        self, group: int, step: int, pushes: Iterable[tuple[str, int, int, float]]
    ) -> None:
        """Check that no part of a step that is to be closed is still coming in.

        Raises:
            RemoteProtocolError: One is, so its push cannot have been counted.
        """
        known = self._groups.get(group)
        if known is None or not known.coming:
            return
        for task, incarnation, push, _ in pushes:
            key = (task, incarnation), push
            if key in known.coming and key not in known.parts:
                raise RemoteProtocolError(
                    f"{self._task}: step {step} of group {group} is to be closed with push {push} "
                    f"of {task} (incarnation {incarnation}), which has not come in yet"
                )

    def parts(
        self, group: int, pushes: Iterable[tuple[str, int, int, float]]
    ) -> list[tuple[Any, float]]:
        """Return the parts of a step.

        Args:
            group: Whose step it is.
            pushes: (task, incarnation, push, weight) of each push of the step.

        Returns:
            The parts and their weights, in the order of ``pushes``. A push of which no part was
            sent here has none: its variables are elsewhere.
        """
        known = self._groups.get(group)
        held = {} if known is None else known.parts
        found: list[tuple[Any, float]] = []
        for task, incarnation, push, weight in pushes:
            part = held.get(((task, incarnation), push))
            if part is not None:
                found.append((part.update, weight))
        return found

    def close(
        self, group: int, step: int, pushes: Iterable[tuple[str, int, int, float]] = ()
    ) -> int:
        """Raise the group's step above ``step`` and drop what cannot count any more.

        Returns:
            How many bytes that was; they stay within the budget until ``applied``.
        """
        known = self._groups.get(group) or self._groups.setdefault(group, _Group())
        known.step = step + 1
        named = {((task, incarnation), push) for task, incarnation, push, _ in pushes}
        for key in [k for k, p in known.coming.items() if p.local_step <= step]:
            self._count(-known.coming.pop(key).nbytes)
        dropped = 0
        for key in [k for k, p in known.parts.items() if p.local_step <= step or k in named]:
            dropped += known.parts.pop(key).nbytes
        return dropped

    def applied(self, group: int, step: int, nbytes: int = 0) -> None:
        """A step that was closed is applied: pulls say so, and the memory of its parts is free."""
        self._bytes -= nbytes
        former = dict(self.steps).get(group, 0)  # computes without a shard in common meet nowhere
        others = [each for each in self.steps if each[0] != group]
        self.steps = [*others, (group, max(former, step + 1))]

    def fence(self, task: str, below: int) -> None:
        """Take no parts any more of incarnations of ``task`` below ``below``.

        Those whose bytes have not arrived go: nobody can count on them. The others stay until
        their step is closed.
        """
        for known in self._groups.values():
            for key in [k for k in known.coming if k[0][0] == task and k[0][1] < below]:
                self._count(-known.coming.pop(key).nbytes)

    def step(self, group: int) -> int | None:
        """Return the step that the group has here; None if none was closed yet."""
        known = self._groups.get(group)
        return None if known is None else known.step

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

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._peak = max(self._peak, self._bytes)

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

    def _exhausted(self, nbytes: int, config: SyncConfig) -> ConfigurationError:
        return ConfigurationError(
            f"{config.name} on {self._task}: pushes of open steps use {self._bytes} of "
            f"{self._budget} bytes, and {nbytes} more are needed",
            hint=f"set {BUDGET_VARIABLE}={self._bytes + nbytes} or more on the ps tasks",
        )
