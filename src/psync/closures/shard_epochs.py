"""Epochs over data shards: every shard is visited exactly once in each epoch.

    PENDING --hand out--> HANDED_OUT --finish--> DONE
                          HANDED_OUT --lose its worker--> HANDED_OUT, and it will be run again
                          HANDED_OUT --put back (an error, a cancellation)--> PENDING
                                                 DONE --undo (a rollback)--> PENDING

``api.data_shards`` schedules a closure for each pending shard and reads off the closures what
became of them. A shard whose closure is lost with its worker runs again as any closure does; one
whose closure raises, or is cancelled, is pending again, and the next ``schedule`` hands it out.

An epoch ends when all of its shards are done, and only then does the next one begin. A rollback may
undo shards of an epoch that had ended: then that is the present one until they are done again, and
later ones go on after it. A run that did not end may have seen a part of its shard; that is
counted, and so are runs that were undone, so that the account can say which batches may have been
seen more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, LocalProtocolError
from psync.specs import checked_integer

STATE_VERSION = 1


class Mark(Enum):
    """Where a shard of the present epoch is."""

    PENDING = "pending"
    HANDED_OUT = "handed out"
    DONE = "done"


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


class _Epoch:
    """The shards of one epoch."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.marks: list[Mark] | None = [Mark.PENDING] * num_shards  # None: all are done
        self.num_undone = num_shards
        self.unfinished: dict[int, int] = {}  # runs that did not finish their shard, or were undone

    def mark(self, shard: int) -> Mark:
        return Mark.DONE if self.marks is None else self.marks[shard]

    def set(self, shard: int, mark: Mark) -> None:
        if self.marks is None:
            self.marks = [Mark.DONE] * self.num_shards
        self.num_undone += (mark is not Mark.DONE) - (self.marks[shard] is not Mark.DONE)
        self.marks[shard] = mark
        if not self.num_undone:
            self.marks = None

    def having(self, *marks: Mark) -> list[int]:
        """Return the shards with one of these marks."""
        return [s for s in range(self.num_shards) if self.mark(s) in marks]

    def note_runs(self, shard: int, count: int) -> None:
        if count:
            self.unfinished[shard] = self.unfinished.get(shard, 0) + count

    def runs(self) -> dict[int, int]:
        """Return the runs of shards that some run has not finished, or that were undone."""
        return {
            shard: count + (self.mark(shard) is Mark.DONE)
            for shard, count in sorted(self.unfinished.items())
        }


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
        self._epochs = [_Epoch(self.num_shards)]  # that have begun
        if state is not None:
            self._restore(state)

    def __repr__(self) -> str:
        if self.is_over:
            return f"<visitation: {self.num_epochs} epochs of {self.num_shards} shards, all done>"
        present = self._epochs[self.epoch]
        return (
            f"<visitation: epoch {self.epoch} of {self.num_epochs}, "
            f"{self.num_shards - present.num_undone} of {self.num_shards} shards done, "
            f"{len(present.having(Mark.HANDED_OUT))} handed out>"
        )

    @property
    def is_over(self) -> bool:
        """Whether every shard of every epoch is done."""
        return self.epoch == self.num_epochs

    def pending(self) -> list[int]:
        """Return the shards of the present epoch that are to be handed out now, in this order."""
        if self.is_over:
            return []
        present, order = self._epochs[self.epoch], range(self.num_shards)
        if self._seed is not None:  # the same in every program that has the seed
            order = np.random.default_rng((self._seed, self.epoch)).permutation(order).tolist()
        return [shard for shard in order if present.mark(shard) is Mark.PENDING]

    # Shards are of the present epoch, if none is named. Each raises LocalProtocolError where the
    # shard is not what it says.

    def hand_out(self, shard: int) -> None:
        """A worker is to run ``shard``, which is pending."""
        self._move(shard, None, Mark.PENDING, Mark.HANDED_OUT)

    def lose(self, shard: int, epoch: int | None = None) -> None:
        """Its worker was lost: it was handed out, and runs again."""
        each = self._move(shard, epoch, Mark.HANDED_OUT, Mark.HANDED_OUT)
        each.note_runs(shard, 1)

    def put_back(self, shard: int, epoch: int | None = None, *, begun: bool) -> None:
        """It was handed out, is not done, and is pending again.

        Args:
            shard: Index of the shard.
            epoch: Number of its epoch.
            begun: Whether a run may have seen a part of it.
        """
        each = self._move(shard, epoch, Mark.HANDED_OUT, Mark.PENDING)
        each.note_runs(shard, begun)

    def finish(self, shard: int, epoch: int | None = None) -> None:
        """It was handed out, and is done; with the last one the next epoch begins."""
        self._move(shard, epoch, Mark.HANDED_OUT, Mark.DONE)
        self._go_on()

    def undo(self, shard: int, epoch: int) -> None:
        """It was done, and a rollback has undone that: it is pending again."""
        each = self._move(shard, epoch, Mark.DONE, Mark.PENDING)
        each.note_runs(shard, 1)
        self.epoch = min(self.epoch, epoch)

    def _move(self, shard: int, epoch: int | None, before: Mark, after: Mark) -> _Epoch:
        number = min(self.epoch, len(self._epochs) - 1) if epoch is None else epoch
        each = self._epochs[number]
        if each.mark(shard) is not before:
            mark = each.mark(shard).value
            raise LocalProtocolError(f"shard {shard} cannot become {after.value}: it is {mark}")
        each.set(shard, after)
        return each

    def _go_on(self) -> None:
        """Go to the first epoch that is not complete, if there is one."""
        while not self.is_over and not self._epochs[self.epoch].num_undone:
            self.epoch += 1
            if len(self._epochs) == self.epoch < self.num_epochs:
                self._epochs.append(_Epoch(self.num_shards))

    def account(self) -> list[EpochAccount]:
        """Return what became of every shard, for each epoch that has begun."""
        return [
            EpochAccount(
                number,
                self.num_shards,
                tuple(each.having(Mark.PENDING, Mark.HANDED_OUT) if each.num_undone else ()),
                each.runs(),
            )
            for number, each in enumerate(self._epochs)
        ]

    # To be kept, and gone on from.

    def state(self) -> dict[str, Any]:
        """Return plain data (as JSON has it) from which a later program can go on.

        What is handed out now is not done: there it is pending, with one more run that has not
        finished.
        """
        present, *later = [self._state_of(each) for each in self._epochs[self.epoch :]] or [
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

    def _state_of(self, epoch: _Epoch) -> dict[str, Any]:
        unfinished = dict(epoch.unfinished)
        for shard in epoch.having(Mark.HANDED_OUT):
            unfinished[shard] = unfinished.get(shard, 0) + 1
        done = epoch.having(Mark.DONE)
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
        try:  # of each epoch, the shards that are done, None: all; and runs that have not finished
            epochs: list[tuple[set[int] | None, dict[int, int]]] = [
                (None, {int(s): int(runs) - (int(runs) > 0) for s, runs in epoch})
                for epoch in state["past"]
            ]
            epochs += [
                ({int(s) for s in each["done"]}, {int(s): int(n) for s, n in each["unfinished"]})
                for each in (state, *state.get("later", ()))
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"state: expected a result of state(), got {dict(state)!r:.200}"
            ) from exc
        named = set().union(*(each for done, runs in epochs for each in (done or (), runs)))
        if named and not 0 <= min(named) <= max(named) < self.num_shards:
            raise ConfigurationError(
                f"state: expected shards 0 to {self.num_shards - 1}, got {sorted(named)}"
            )
        counts = [count for _, runs in epochs for count in runs.values()]
        if counts and min(counts) < 0:
            raise ConfigurationError(f"state: expected numbers of runs from 0, got {min(counts)}")
        while epochs and epochs[-1] == (set(), {}):  # it has not begun
            epochs.pop()
        if len(epochs) > self.num_epochs:
            raise ConfigurationError(
                f"state: expected at most {self.num_epochs} epochs (num_epochs), got {len(epochs)}"
            )
        self._epochs = [_Epoch(self.num_shards) for _ in epochs or (None,)]
        for each, (done, unfinished) in zip(self._epochs, epochs, strict=False):
            for shard in range(self.num_shards) if done is None else done:
                each.set(shard, Mark.DONE)
            for shard, count in unfinished.items():
                each.note_runs(shard, count)
        self._go_on()


def _at_least(name: str, value: int, least: int) -> int:
    return checked_integer(f"{name}: expected an integer of at least {least}", value, least)
