"""What a fit has done: its history, and the steps that rollbacks have undone.

    a closure of the fit ends        its updates may be undone until a checkpoint has them
    a rollback names it              its steps are owed
    the epoch's closures have ended  what is owed is trained again, and that until nothing is owed
    the epoch's callbacks, its save  the same, and saved again

The steps that are trained again are new: they take the batches that come next, and a rollback lets
each worker's data begin anew. Steps of earlier epochs (the checkpoint may be older than the epoch
that runs) are trained in the epoch that runs, whose values count them.

Where a worker's data end within a closure, the steps that it lacks are scheduled again as well, in
the same pass over the data: other workers have more. If it ran before on a worker that was lost,
that run may have trained some of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.closures.closure import State
from psync.coordinator import Coordinator
from psync.serialization.remote_value import RemoteValue
from psync.store.untrusted_json import read_json, to_json, wrong


@dataclass(slots=True)
class History:
    """The result of ``fit``.

    Attributes:
        epoch: Numbers of the completed epochs, from 0, including those before a resume.
        history: Values by name, one for each of these epochs.
        repeated: Number of steps in each of these epochs that were trained again after a rollback.
        stop_reason: Reason given to ``psync.request_stop`` by a step, or to
            ``trainer.request_stop`` by a callback, in the last fit; None if there was no request.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    stop_reason: str | None = None

    def _add(self, epoch: int, logs: Mapping[str, float], repeated: int = 0) -> None:
        """Add an epoch."""
        self.epoch.append(epoch)
        self.repeated.append(repeated)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def _add_repeated(self, steps: int) -> None:
        """Add steps that were trained again after the last epoch."""
        if self.repeated:
            self.repeated[-1] += steps

    def _clear(self) -> None:
        """Remove all epochs."""
        self.epoch, self.history, self.repeated, self.stop_reason = [], {}, [], None

    def _copy(self) -> History:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the history as plain data."""
        return {
            "epoch": self.epoch,
            "history": self.history,
            "repeated": self.repeated,
            "stop_reason": self.stop_reason,
        }

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Restore a saved history."""
        self.epoch, self.history = state["epoch"], state["history"]
        self.repeated = state.get("repeated", [0] * len(self.epoch))
        self.stop_reason = state.get("stop_reason")

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise CheckpointError if the state is not a saved history."""
        saved = read_json(to_json(state), _Saved, "the history of a fit")
        if len(saved.repeated or saved.epoch) != len(saved.epoch):
            raise wrong("the history of a fit", "repeated", "one for each epoch", saved.repeated)


class FitState:
    """What a checkpoint holds of a trainer's fits: the history, and how many steps it lacks.

    Args:
        history: History of the trainer.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.before = 0  # steps owed when the last fit ended, or that the restored checkpoint lacks
        self._now: Callable[[], int] | None = None  # counts the steps owed by the running fit

    def begin(self, now: Callable[[], int]) -> None:
        """A fit begins, which counts the steps that it owes."""
        self._now = now

    def close(self) -> None:
        """The fit has ended: keep the number alone, and not the coordinator and its closures."""
        self.before, self._now = self.owed, None

    @property
    def owed(self) -> int:
        """How many steps are owed just now."""
        return self.before if self._now is None else self._now()

    def clear(self) -> None:
        """Forget all epochs, and the steps that are owed."""
        self.history._clear()
        self.before = 0

    def checkpoint_state(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**self.history.checkpoint_state(), "owed": self.owed}

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.history.restore_checkpoint_state(state)
        self.before = state.get("owed", 0)

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise CheckpointError unless this was saved."""
        self.history.check_checkpoint_state(state)


@dataclass
class _Saved:
    """A state, as JSON."""

    epoch: list[int]
    history: dict[str, list[float]]
    repeated: list[int] = field(default_factory=list)  # which older ones do not have
    owed: int = 0


class OwedSteps:
    """The steps of one fit that are to be trained, and those that were and may be undone.

    Args:
        coordinator: Schedules, and knows of rollbacks.
        per_closure: Most steps of one closure.
        state: Of the trainer. The checkpoint that it came from may say that steps are owed.

    Attributes:
        closures: Those of the present epoch, without those that were undone, by id.
        scheduled: Number of steps that were scheduled in the present epoch, without missing ones.
    """

    def __init__(self, coordinator: Coordinator, per_closure: int, state: FitState) -> None:
        self._coordinator = coordinator
        self._per_closure = per_closure
        self._seen = len(coordinator.events.rollbacks)
        self._steps: dict[int, int] = {}  # by the id of a closure that may be undone
        self._owed = state.before
        self._of_earlier = self._owed > 0  # whether some of these are of earlier epochs
        self._pass = (
            0  # over the data: those that end in a later one than they began in begin again
        )
        self.closures: dict[int, RemoteValue[Any]] = {}
        self.scheduled = 0
        state.begin(self.steps)

    def begin_epoch(self) -> None:
        """Begin an epoch: what is undone from now on and was trained before is of earlier ones."""
        self.steps()
        ended = self._coordinator.recovery.ended
        self._steps = {number: steps for number, steps in self._steps.items() if number in ended}
        self.closures = {}
        self.scheduled = 0
        self._pass += 1

    def steps(self) -> int:
        """Return how many steps are owed just now."""
        rollbacks = self._coordinator.events.rollbacks
        for event in rollbacks[self._seen :]:
            for number in event.closures:
                if (steps := self._steps.pop(number, 0)) > 0:
                    self._owed += steps
                    self._of_earlier |= self.closures.pop(number, None) is None
        self._seen = len(rollbacks)
        return self._owed

    def forget(self) -> None:
        """Owe nothing: training was stopped."""
        self.steps()
        self._owed = 0

    def missing(self, closures: Sequence[RemoteValue[Any]], counts: Sequence[int]) -> int:
        """Return how many steps closures lack that met the end of their worker's data.

        All have ended. Those that had no batch at all count as well: no worker had one for them.

        Args:
            closures: What ``schedule`` returned.
            counts: Steps of each.
        """
        found = 0
        for value, count in zip(closures, counts, strict=True):
            state, lacks = value._closure.state, count
            if state is State.FINISHED:
                result = value.get_nowait()
                lacks = 0 if result is None else result[0]
            if lacks and value.closure_id in self._steps:  # or it was undone: all of it is owed
                self._steps[value.closure_id] -= lacks
                self.scheduled -= lacks
                found += lacks
        return found

    def schedule(
        self, run_steps: Callable[..., Any], batches: Any, steps: int | None = None
    ) -> tuple[list[RemoteValue[Any]], list[int]]:
        """Schedule steps; return the closures, and how many steps each of them has.

        Args:
            run_steps: The step function: of batches, the number of the pass, and a count.
            batches: Of the data.
            steps: Of the present epoch; None: those that are owed, which are not any more.
        """
        if steps is None:
            steps = self.steps()
            self._pass += self._of_earlier  # an epoch's data may be too few for these, too
            self._owed, self._of_earlier = 0, False
        each = self._per_closure
        counts = [min(each, steps - start) for start in range(0, steps, each)]
        made = [
            self._coordinator.schedule(
                run_steps,
                (batches, self._pass, count),
                {},
                may_repeat=False,
                needs=batches._needs(self._pass),
            )
            for count in counts
        ]
        self.scheduled += steps
        for value, count in zip(made, counts, strict=True):
            self._steps[value.closure_id] = count
            self.closures[value.closure_id] = value
        return made, counts
