"""Data shards distributed over workers, each visited exactly once in each epoch.

``Visitation`` decides; this schedules a closure for each shard and reads off the closures what
became of them. A shard is an argument of its closure. So if its worker is lost it is run again
elsewhere like any other closure, and its updates are applied once. For the same reason a shard that
is not done when its closure has ended comes again in another closure with the same ``Identity``.
"""

from __future__ import annotations

import asyncio
import hashlib
import pathlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from psync.closures.closure import Identity, State
from psync.closures.shard_epochs import EpochAccount, Visitation
from psync.errors import ClosureError, ConfigurationError, UsageError
from psync.net.shielding import first_of
from psync.serialization.captures import type_name
from psync.serialization.payloads import pack
from psync.serialization.remote_value import RemoteValue
from psync.status.progress import showing

MAX_SHARDS = 1 << 20
"""In one epoch; their closures are queued all at once, at about 1 KiB each."""


SHOW_EVERY_S = 0.2

_Key = tuple[int, int]
"""Epoch and shard."""


class Visits:
    """The shards of one list, and the progress of each epoch over them.

    ``ClusterCoordinator.distribute_once`` returns it. Run all epochs with
    ``await visits.run(step)``, or go epoch by epoch:

        for epoch in visits:
            values = visits.schedule(step, args=(…))   # step(shard, …), for each shard
            await coordinator.join()

    An epoch ends when all of its shards are done, and only then does the next one begin. If the
    step of a shard raises or is cancelled because another step raised, the next ``schedule`` hands
    the shard out again. Updates that it repeats are applied once, provided that the step makes the
    same calls in the same order. A shard that a rollback undoes is also handed out again, even if
    its epoch had ended.

    Attributes:
        shards: List of shards as given; all other methods and attributes use their indices.
    """

    __psync_capture_error__ = "it lives on the coordinator; its shards are arguments of steps"
    __psync_capture_hint__ = "visits.schedule(step) calls step(shard) for each shard"

    def __init__(
        self,
        schedule: Callable[[Callable[..., Any], Any, Any, Identity], RemoteValue[Any]],
        join: Callable[[], Coroutine[Any, Any, None]],
        shards: Sequence[Any],
        num_epochs: int,
        shuffle_seed: int | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.shards = _checked(shards)
        self._schedule, self._join = schedule, join  # of the coordinator
        self._digest = _digest(self.shards)
        self._num_epochs, self._shuffle_seed = num_epochs, shuffle_seed
        # Of the shards that are handed out: the result, and how many losses are noted.
        self._running: dict[_Key, tuple[RemoteValue[Any], int]] = {}
        self._num_scheduled = 0
        self._begin(state)

    def __repr__(self) -> str:
        visitation = self._look()
        running = f", {len(self._running)} running" if self._running else ""
        return f"<visits{repr(visitation)[len('<visitation') : -1]}{running}>"

    def __iter__(self) -> Iterator[int]:
        """Yield each epoch that is not complete, from the present one on.

        Raises:
            UsageError: At the end of the loop's body shards are still running, or nothing was
                scheduled.
        """
        while not self.done():
            epoch, scheduled = self._visitation.epoch, self._num_scheduled
            yield epoch
            if self.epoch > epoch:
                continue
            if self._running:
                raise UsageError(
                    f"epoch {epoch}: {len(self._running)} shards are not done yet",
                    hint="await coordinator.join() at the end of the loop's body",
                )
            if self._num_scheduled == scheduled:
                raise UsageError(
                    f"epoch {epoch}: nothing was scheduled",
                    hint="call visits.schedule(step) in the loop's body",
                )
            # The program has caught an error of join: the rest of the epoch comes again.

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[RemoteValue[Any]]:
        """Schedule ``fn(shard, *args, **kwargs)`` for each pending shard; never blocks.

        Returns:
            The handles, in the order in which the shards are handed out. The list is empty if the
            remaining shards of this epoch are running, or if all epochs are done.

        Raises:
            SerializationError, ClosedError: See ``ClusterCoordinator.schedule``; closures scheduled
                earlier continue.
        """
        visitation, values = self._look(), []
        for shard in visitation.pending(self._running):
            key = (visitation.epoch, shard)
            identity = self._identities.get(key) or Identity(key, self._undone)
            value = self._schedule(fn, (self.shards[shard], *args), kwargs, identity)
            self._running[key], self._identities[key] = (value, 0), identity
            self._num_scheduled += 1
            values.append(value)
        return values

    async def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        verbose: bool | str = False,
    ) -> None:
        """Run ``fn(shard, *args, **kwargs)`` for all remaining shards of all epochs.

        Args:
            fn, args, kwargs: See ``schedule``.
            verbose: Whether to show progress: False, "lines", "bar"; "auto" or True: a bar on a
                terminal, a changing line in a notebook, lines every ten seconds elsewhere.

        Raises:
            ConfigurationError: ``verbose`` is invalid.
            Exception: See ``ClusterCoordinator.join``. Completed shards stay completed, and another
                call continues with the rest. Updates that the rest has already made count once.

        Cancellation: Safe; scheduled closures continue.
        """
        for epoch in self:
            with showing(
                verbose, f"epoch {epoch + 1}/{self._num_epochs}", len(self.shards), "shards"
            ) as show:
                self.schedule(fn, args, kwargs)
                await (self._shown(show, self._join()) if verbose else self._join())

    async def _shown(self, show: Callable[[int], None], work: Coroutine[Any, Any, None]) -> None:
        """Wait for work, and show meanwhile how many shards are done."""

        async def look() -> None:
            while True:
                self._look()
                show(len(self.shards) - len(self._running))
                # A look at a million shards takes a second.
                await asyncio.sleep(max(SHOW_EVERY_S, len(self._running) * 1e-4))

        await first_of(work, look())

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; the number of epochs when all are done."""
        return self._look().epoch

    def done(self) -> bool:
        """Return whether every shard of every epoch is done."""
        return self._look().is_over

    def account(self) -> list[EpochAccount]:
        """Return the state of the shards, for each epoch that has begun.

        ``restarted`` lists the shards that took more than one run, with the largest possible number
        of runs. Their batches may have been seen more than once, but their updates count once. If a
        lost worker held a shard, that counts as a run, even if the shard was not started. A run
        that a rollback has undone also counts; its shard is in ``undone`` until it is done again.
        """
        return self._look().account()

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, from which ``distribute_once(…, state=…)`` continues.

        Shards that are running now are pending there.
        """
        return {**self._look().state(self._running), "digest": self._digest}

    checkpoint_state = state  # so that a ``Checkpoint`` may hold visits

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Continue from a state, as ``distribute_once(…, state=…)`` does.

        Raises:
            UsageError: Shards are running.
            ConfigurationError: The state is invalid or belongs to other shards.
        """
        self._look()
        if self._running:
            raise UsageError(
                f"visits: {len(self._running)} shards are running and would be done twice",
                hint="await coordinator.join() before you restore a checkpoint",
            )
        self._begin(state)

    def _begin(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state; None: begin. What shards have done before is of another history."""
        visitation = Visitation(
            len(self.shards), self._num_epochs, shuffle_seed=self._shuffle_seed, state=state
        )
        if state is not None and state.get("digest") not in (None, self._digest):
            raise ConfigurationError(
                "state: saved for other shards, or for another order",
                hint="pass the same shards in the same order as before, or start without the state",
            )
        self._visitation, self._known_epoch = visitation, visitation.epoch
        self._identities: dict[_Key, Identity] = {}  # of shards that may come again
        self._undone: list[Identity] = []  # by rollbacks, and not noted yet

    def _look(self) -> Visitation:
        """Note what became of the shards that are running, and what was undone."""
        for key, (value, noted) in list(self._running.items()):
            (epoch, shard), closure = key, value._closure
            for _ in range(closure.times_back - noted):
                self._visitation.lose(shard, epoch)
            self._running[key] = value, closure.times_back
            if not value.done():
                continue
            del self._running[key]
            if closure.state is State.FINISHED:
                self._visitation.finish(shard, epoch)
            # Its last run was lost, and is counted, if the queue has given it up.
            elif closure.worker != "" and type(closure.error) is not ClosureError:
                self._visitation.lose(shard, epoch)
        for identity in self._undone:
            epoch, shard = key = identity.what
            self._visitation.undo(shard, epoch)
            self._identities[key] = identity
        self._undone.clear()
        if self._visitation.epoch != self._known_epoch:
            # Of epochs that have ended a rollback may undo shards: ``EndedClosures`` has those.
            self._known_epoch = epoch = self._visitation.epoch
            left = {key: each for key, each in self._identities.items() if key[0] >= epoch}
            self._identities = left
        return self._visitation


def _checked(shards: Any) -> tuple[Any, ...]:
    """Return the shards; their order is the same in every program that is given the same."""
    is_array = isinstance(shards, np.ndarray) and shards.ndim
    hint = None
    if isinstance(shards, str | bytes) or not (isinstance(shards, Sequence) or is_array):
        wrong = f"expected a list, got {type_name(shards)}"
        hint = "sorted(glob.glob(pattern)) is the same list on every start"
    elif not len(shards):
        wrong = "expected at least one, got an empty list"
    elif len(shards) > MAX_SHARDS:
        wrong = f"expected at most {MAX_SHARDS}, got {len(shards)}: each shard is a closure"
        hint = "make shards larger: a range of rows instead of one row"
    else:
        checked = tuple(shards)
        pack(checked, subject="the list of shards")
        return checked
    raise UsageError(f"shards: {wrong}", hint=hint)


def _digest(shards: tuple[Any, ...]) -> str | None:
    """Return what tells these shards from others; None if that cannot be read off them."""
    if not all(map(_is_plain, shards)):
        return None
    return hashlib.blake2b(repr(shards).encode(), digest_size=16).hexdigest()


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is the value, in every process."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    plain = str | bytes | int | float | range | slice | pathlib.PurePath | None
    return isinstance(value, plain)
