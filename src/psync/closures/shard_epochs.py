"""Epochs over data shards: every shard is visited exactly once in each epoch.

    PENDING --run--> PENDING and running --finish--> DONE
                     PENDING and running --an error, a cancellation--> PENDING
                                                     DONE --undo (a rollback)--> PENDING

``api.data_shards`` schedules a closure for each pending shard and reads off the closures what
became of them. A shard whose closure is lost with its worker runs again as any closure does; one
whose closure raises, or is cancelled, is pending again, and the next ``schedule`` runs it. Which
shards run, whoever schedules them knows.

An epoch ends when all of its shards are done, and only then does the next one begin. A rollback may
undo shards of an epoch that had ended: then that is the present one until they are done again, and
later ones go on after it. A run that did not end may have seen a part of its shard; that is
counted, and so are runs that were undone, so that the account can say which batches may have been
seen more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct, ValidationError, convert

from psync.errors import ConfigurationError, LocalProtocolError, check_fits
from psync.specs import checked_integer

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """The state of the shards of one epoch, by shard index.

    Attributes:
        epoch: Number of the epoch, from 0.
        num_shards: Number of shards.
        undone: Shards without a finished run; all others are done, each exactly once.
        runs: Number of runs at most, for each shard with a run that did not finish.
    """

    epoch: int
    num_shards: int
    undone: tuple[int, ...]
    runs: dict[int, int]

    @property
    def num_done(self) -> int:
        """Number of completed shards."""
        return self.num_shards - len(self.undone)

    @property
    def is_complete(self) -> bool:
        """Whether every shard is done."""
        return not self.undone

    @property
    def restarted(self) -> dict[int, int]:
        """Number of runs by shard, for completed shards that took more than one run."""
        return {shard: runs for shard, runs in self.runs.items() if shard not in self.undone}

    def __str__(self) -> str:
        text = f"epoch {self.epoch}: {self.num_done} of {self.num_shards} shards done"
        runs = ", ".join(f"{shard} ({runs} runs)" for shard, runs in self.restarted.items())
        return f"{text}, restarted: {runs}" if runs else text


@dataclass(slots=True)
class _Epoch:
    """The shards of one epoch. Of one that is over nothing is kept but its runs."""

    undone: set[int]
    unfinished: Counter[int] = field(default_factory=Counter)
    """Runs that did not finish, or were undone."""

    def runs(self) -> dict[int, int]:
        """Return the runs of shards that some run has not finished, or that were undone."""
        runs = sorted(self.unfinished.items())
        return {shard: count + (shard not in self.undone) for shard, count in runs if count}


class _SavedEpoch(Struct):
    """An epoch that is not over, in a state."""

    done: list[int]
    unfinished: list[tuple[int, int]]  # (shard, runs that have not finished)


class _Saved(_SavedEpoch):
    """What a state has, beside its version and the number of shards: the present epoch first."""

    past: list[list[tuple[int, int]]]  # of each epoch that is over: (shard, runs)
    later: list[_SavedEpoch] = []


class Visitation:
    """The shards of all epochs. Single owner.

    Args:
        num_shards: At least 1.
        num_epochs: At least 1.
        shuffle_seed: Orders the shards of each epoch anew; None: as they are numbered.
        state: What ``state`` returned, to go on from there.

    Attributes:
        epoch: The first one that is not complete: its shards are handed out. ``num_epochs`` when
            all is done.

    Raises:
        ConfigurationError: If a number is out of range, or the state is none or of other shards.
    """

    def __init__(
        self,
        num_shards: int,
        num_epochs: int = 1,
        *,
        shuffle_seed: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.num_shards = _at_least("num_shards", num_shards, 1)
        self.num_epochs = _at_least("num_epochs", num_epochs, 1)
        self.epoch = 0
        self._seed = None if shuffle_seed is None else _at_least("shuffle_seed", shuffle_seed, 0)
        self._epochs = [_Epoch(set(range(num_shards)))]  # that have begun
        if state is not None:
            self._restore(state)

    def __repr__(self) -> str:
        if self.is_over:
            return f"<visitation: {self.num_epochs} epochs of {self.num_shards} shards, all done>"
        present = self._epochs[self.epoch]
        return (
            f"<visitation: epoch {self.epoch} of {self.num_epochs}, "
            f"{self.num_shards - len(present.undone)} of {self.num_shards} shards done>"
        )

    @property
    def is_over(self) -> bool:
        """Whether every shard of every epoch is done."""
        return self.epoch == self.num_epochs

    def pending(self, running: Collection[tuple[int, int]] = ()) -> list[int]:
        """Return the shards of the present epoch that are to be run now, in this order.

        Args:
            running: (epoch, shard) of those that run.
        """
        if self.is_over:
            return []
        present, order = self._epochs[self.epoch], range(self.num_shards)
        if self._seed is not None:  # the same in every program that has the seed
            order = np.random.default_rng((self._seed, self.epoch)).permutation(order).tolist()
        return [s for s in order if s in present.undone and (self.epoch, s) not in running]

    def lose(self, shard: int, epoch: int) -> None:
        """A run may have seen a part of it, and has not finished."""
        self._epochs[epoch].unfinished[shard] += 1

    def finish(self, shard: int, epoch: int) -> None:
        """It is done; with the last one the next epoch begins.

        Raises:
            LocalProtocolError: It was done before.
        """
        if shard not in self._epochs[epoch].undone:
            raise LocalProtocolError(f"shard {shard} cannot be finished: it is done")
        self._epochs[epoch].undone.remove(shard)
        self._go_on()

    def undo(self, shard: int, epoch: int) -> None:
        """It was done, and a rollback has undone that: it is pending again.

        Raises:
            LocalProtocolError: It was not done.
        """
        each = self._epochs[epoch]
        if shard in each.undone:
            raise LocalProtocolError(f"shard {shard} cannot be undone: it is not done")
        each.undone.add(shard)
        each.unfinished[shard] += 1
        self.epoch = min(self.epoch, epoch)

    def _go_on(self) -> None:
        """Go to the first epoch that is not complete, if there is one."""
        while not self.is_over and not self._epochs[self.epoch].undone:
            self.epoch += 1
            if len(self._epochs) == self.epoch < self.num_epochs:
                self._epochs.append(_Epoch(set(range(self.num_shards))))

    def account(self) -> list[EpochAccount]:
        """Return what became of every shard, for each epoch that has begun."""
        return [
            EpochAccount(number, self.num_shards, tuple(sorted(each.undone)), each.runs())
            for number, each in enumerate(self._epochs)
        ]

    # To be kept, and gone on from.

    def state(self, running: Collection[tuple[int, int]] = ()) -> dict[str, Any]:
        """Return plain data (as JSON has it) from which a later program can go on.

        What runs now is not done: there it is pending, with one more run that has not finished.

        Args:
            running: (epoch, shard) of those that run.
        """
        numbers = range(self.epoch, len(self._epochs))
        present, *later = [self._state_of(number, running) for number in numbers] or [
            {"done": [], "unfinished": []}
        ]
        return {
            "version": STATE_VERSION,
            "num_shards": self.num_shards,
            "past": [
                [list(each) for each in epoch.runs().items()]
                for epoch in self._epochs[: self.epoch]
            ],
            **present,
            "later": later,
        }

    def _state_of(self, number: int, running: Collection[tuple[int, int]]) -> dict[str, Any]:
        epoch = self._epochs[number]
        unfinished = epoch.unfinished + Counter(shard for of, shard in running if of == number)
        done = [shard for shard in range(self.num_shards) if shard not in epoch.undone]
        return {"done": done, "unfinished": [list(each) for each in sorted(unfinished.items())]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise ConfigurationError(
                f"state: expected a result of state(), version {STATE_VERSION}, got "
                f"{type(state).__name__} of version {version!r}"
            )
        if state.get("num_shards") != self.num_shards:
            raise ConfigurationError(
                f"state: expected a state of {self.num_shards} shards, as given now, got one of "
                f"{state.get('num_shards')!r}",
                hint="pass the same shards in the same order as before, or start without the state",
            )
        try:
            saved = convert(dict(state), _Saved)
        except ValidationError as exc:
            raise ConfigurationError(
                f"state: expected a result of state(), got {dict(state)!r:.200}"
            ) from exc
        every, begun = set(range(self.num_shards)), (saved, *saved.later)
        self._epochs = [
            _Epoch(set(), Counter({shard: runs - (runs > 0) for shard, runs in epoch}))
            for epoch in saved.past
        ]
        self._epochs += [
            _Epoch(every.difference(e.done), Counter(dict(e.unfinished))) for e in begun
        ]
        named = set().union(*(e.done for e in begun), *(e.unfinished for e in self._epochs))
        expected = f"state: expected shards 0 to {self.num_shards - 1}"
        check_fits(named <= every, expected, sorted(named))
        fewest = min((count for e in self._epochs for count in e.unfinished.values()), default=0)
        check_fits(fewest >= 0, "state: expected numbers of runs from 0", fewest)
        while len(self._epochs) > 1 and self._epochs[-1] == _Epoch(every):  # it has not begun
            self._epochs.pop()
        expected = f"state: expected at most {self.num_epochs} epochs (num_epochs)"
        check_fits(len(self._epochs) <= self.num_epochs, expected, len(self._epochs))
        self._go_on()


def _at_least(name: str, value: int, least: int) -> int:
    return checked_integer(f"{name}: expected an integer of at least {least}", value, least)
