"""Waits of scheduled closures: for the values of their inputs, and for gangs before them.

``Waits`` reports closures that no longer wait, and closures that wait in vain; ``queue`` acts on
both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psync.closures.closure import Closure, State


@dataclass(slots=True, eq=False)
class Barrier:
    """What keeps closures that come before a gang from those that come after it."""

    cutoff: int  # closures with ids below it come before
    behind: list[Closure] = field(default_factory=list)  # they wait until it is opened


class Waits:
    """Who waits for whom. A closure counts what it misses itself; a barrier counts as one input."""

    def __init__(self) -> None:
        self.barriers: list[Barrier] = []  # that are not open, in order

    def add_barrier(self, cutoff: int) -> Barrier:
        """Let closures wait that begin to from now on, until the barrier is opened."""
        barrier = Barrier(cutoff)
        self.barriers.append(barrier)
        return barrier

    def begin(self, closure: Closure) -> bool:
        """Return whether this closure, which is new, has to wait; if so, it begins to.

        None of its inputs has ended without a value.
        """
        inputs = dict.fromkeys(closure.dependencies)
        unfinished = [c for c in inputs if c.state is not State.FINISHED]
        for dependency in unfinished:
            if dependency.dependents is None:
                dependency.dependents = []
            dependency.dependents.append(closure)
        closure.num_missing = len(unfinished)
        if self.barriers:
            self.barriers[-1].behind.append(closure)
            closure.num_missing += 1
        if not closure.num_missing:
            closure.dependencies = ()
        return closure.num_missing > 0

    def has_value(self, closure: Closure) -> list[Closure]:
        """A closure has its value. Return those that waited for nothing else."""
        dependents, closure.dependents = closure.dependents, None
        return _less_one(dependents or ())

    def has_no_value(self, closure: Closure) -> list[Closure]:
        """A closure ended without a value. Return those that waited for it, in vain."""
        dependents, closure.dependents = closure.dependents, None
        return [c for c in dependents or () if c.state is State.WAITING]

    def open(self, barrier: Barrier) -> list[Closure]:
        """Take a barrier away. Return those that waited for nothing else.

        What is behind it waits for the barrier before it, if there is one.
        """
        at = self.barriers.index(barrier)
        del self.barriers[at]
        if at:
            self.barriers[at - 1].behind += barrier.behind
            return []
        return _less_one(barrier.behind)


def _less_one(closures: Iterable[Closure]) -> list[Closure]:
    """Each of these misses one thing less. Return those that miss nothing now."""
    ready: list[Closure] = []
    for closure in closures:
        closure.num_missing -= 1
        if closure.num_missing == 0 and closure.state is State.WAITING:  # or it was cancelled
            closure.dependencies = ()
            ready.append(closure)
    return ready
