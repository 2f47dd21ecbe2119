"""Epochs over data shards: every shard is visited exactly once in each epoch.

    PENDING --hand out--> HANDED_OUT --finish--> DONE
                          HANDED_OUT --lose its worker--> HANDED_OUT, and it will be run again
                          HANDED_OUT --put back (an error, a cancellation)--> PENDING

``api.data_shards`` schedules a closure for each pending shard and reads off the closures what
became of them. A shard whose closure is lost with its worker runs again as any closure does; one
whose closure raises, or is cancelled, is pending again, and the next ``schedule`` hands it out.

An epoch ends when all of its shards are done, and only then does the next one begin. A run that
did not end may have seen a part of its shard; that is counted, so that the account can say which
batches may have been seen more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, LocalProtocolError

STATE_VERSION = 1


class Mark(Enum):
    """Where a shard of the present epoch is."""

    PENDING = "pending"
    HANDED_OUT = "handed out"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """What became of the shards of one epoch. Shards are named by their index."""

    epoch: int  # from 0
    num_shards: int
    undone: tuple[int, ...]  # no run has finished; all others are done, each exactly once
    runs: dict[int, int]  # of shards with a run that did not finish: runs so far, at most

    @property
    def num_done(self) -> int:
        """Shards that are done."""
        return self.num_shards - len(self.undone)

    @property
    def is_complete(self) -> bool:
        """Whether every shard is done."""
        return not self.undone

    @property
    def restarted(self) -> dict[int, int]:
        """Shards that are done and took more than one run: how many."""
        return {shard: runs for shard, runs in self.runs.items() if shard not in self.undone}

    def __str__(self) -> str:
        text = f"epoch {self.epoch}: {self.num_done} of {self.num_shards} shards done"
        runs = ", ".join(f"{shard} ({runs} runs)" for shard, runs in self.restarted.items())
        return f"{text}, restarted: {runs}" if runs else text


class Visitation:
    """The shards of all epochs. Single owner.

    Args:
        num_shards: At least 1.
        num_epochs: At least 1.
        shuffle_seed: Orders the shards of each epoch anew; None: as they are numbered.
        state: What ``state`` returned, to go on from there.

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
        self.epoch = 0  # whose shards are handed out; num_epochs when all is done
        self._seed = None if shuffle_seed is None else _at_least("shuffle_seed", shuffle_seed, 0)
        self._past: list[dict[int, int]] = []  # of each complete epoch, runs of restarted shards
        self._begin_epoch()
        if state is not None:
            self._restore(state)

    def __repr__(self) -> str:
        if self.is_over:
            return f"<visitation: {self.num_epochs} epochs of {self.num_shards} shards, all done>"
        handed_out = self._marks.count(Mark.HANDED_OUT)
        return (
            f"<visitation: epoch {self.epoch} of {self.num_epochs}, "
            f"{self.num_shards - self._num_undone} of {self.num_shards} shards done, "
            f"{handed_out} handed out>"
        )

    @property
    def is_over(self) -> bool:
        """Whether every shard of every epoch is done."""
        return self.epoch == self.num_epochs

    def pending(self) -> list[int]:
        """Return the shards that are to be handed out now, in this order."""
        if self.is_over:
            return []
        order = range(self.num_shards)
        if self._seed is not None:  # the same in every program that has the seed
            order = np.random.default_rng((self._seed, self.epoch)).permutation(order).tolist()
        return [shard for shard in order if self._marks[shard] is Mark.PENDING]

    def hand_out(self, shard: int) -> None:
        """A worker is to run ``shard``. Raises LocalProtocolError unless it is pending."""
        self._move(shard, Mark.PENDING, Mark.HANDED_OUT, "be handed out")

    def lose(self, shard: int) -> None:
        """Its worker was lost: it runs again. Raises LocalProtocolError unless handed out."""
        self._move(shard, Mark.HANDED_OUT, Mark.HANDED_OUT, "lose its worker")
        self._unfinished[shard] += 1

    def put_back(self, shard: int, *, begun: bool) -> None:
        """It is not done, and is pending again. Raises LocalProtocolError unless handed out.

        Args:
            shard: Index of the shard.
            begun: Whether a run may have seen a part of it.
        """
        self._move(shard, Mark.HANDED_OUT, Mark.PENDING, "be put back")
        self._unfinished[shard] += begun

    def finish(self, shard: int) -> None:
        """It is done; with the last one the next epoch begins. Raises LocalProtocolError
        unless it was handed out."""
        self._move(shard, Mark.HANDED_OUT, Mark.DONE, "finish")
        self._num_undone -= 1
        if self._num_undone == 0:
            self._past.append(self._runs())
            self.epoch += 1
            if not self.is_over:
                self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._marks = [Mark.PENDING] * self.num_shards
        self._unfinished = [0] * self.num_shards  # runs that ended without finishing their shard
        self._num_undone = self.num_shards

    def account(self) -> list[EpochAccount]:
        """Return what became of every shard, for each epoch that has begun."""
        accounts = [
            EpochAccount(epoch, self.num_shards, (), dict(runs))
            for epoch, runs in enumerate(self._past)
        ]
        if not self.is_over:
            undone = tuple(s for s, mark in enumerate(self._marks) if mark is not Mark.DONE)
            accounts.append(EpochAccount(self.epoch, self.num_shards, undone, self._runs()))
        return accounts

    def _runs(self) -> dict[int, int]:
        """Return the runs of shards of this epoch that some run has not finished."""
        return {
            shard: count + (self._marks[shard] is Mark.DONE)
            for shard, count in enumerate(self._unfinished)
            if count
        }

    def _move(self, shard: int, before: Mark, after: Mark, verb: str) -> None:
        if self._marks[shard] is not before:
            mark = self._marks[shard].value
            raise LocalProtocolError(f"shard {shard} cannot {verb}: it is {mark}")
        self._marks[shard] = after

    # To be kept, and gone on from.

    def state(self) -> dict[str, Any]:
        """Return plain data (as JSON has it) from which a later program can go on.

        What is handed out now is not done: there it is pending, with one more run that has not
        finished.
        """
        handed_out = [mark is Mark.HANDED_OUT for mark in self._marks]
        over = self.is_over
        return {
            "version": STATE_VERSION,
            "num_shards": self.num_shards,
            "past": [[list(each) for each in runs.items()] for runs in self._past],
            "done": [] if over else [s for s, m in enumerate(self._marks) if m is Mark.DONE],
            "unfinished": [] if over else [
                [shard, count + handed_out[shard]]
                for shard, count in enumerate(self._unfinished)
                if count or handed_out[shard]
            ],
        }  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise ConfigurationError(
                f"state: expected what state() returned, of version {STATE_VERSION}, "
                f"got {type(state).__name__} of version {version!r}"
            )
        if state.get("num_shards") != self.num_shards:
            raise ConfigurationError(
                f"state: expected one of {self.num_shards} shards, as are given now, got one of "
                f"{state.get('num_shards')!r}",
                hint="give the same shards in the same order as before, or begin without the state",
            )
        try:
            past = [{int(s): int(runs) for s, runs in epoch} for epoch in state["past"]]
            done = {int(shard) for shard in state["done"]}
            unfinished = {int(shard): int(count) for shard, count in state["unfinished"]}
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"state: expected what state() returned, got {dict(state)!r:.200}"
            ) from exc
        named = done.union(unfinished, *past)
        if named and not 0 <= min(named) <= max(named) < self.num_shards:
            raise ConfigurationError(
                f"state: expected shards 0 to {self.num_shards - 1}, got {sorted(named)}"
            )
        counts = [*unfinished.values(), *(runs for epoch in past for runs in epoch.values())]
        if counts and min(counts) < 0:
            raise ConfigurationError(f"state: expected numbers of runs from 0, got {min(counts)}")
        begun = len(past) + bool(done or unfinished)
        if begun > self.num_epochs:
            raise ConfigurationError(
                f"state: expected at most {self.num_epochs} epochs (num_epochs), got {begun}"
            )
        self._past, self.epoch = past, len(past)
        for shard, count in unfinished.items():
            self._unfinished[shard] = count
        for shard in done:
            self._marks[shard] = Mark.HANDED_OUT
        for shard in done:  # as they were then: should they be all, the next epoch begins
            self.finish(shard)


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigurationError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return int(value)
