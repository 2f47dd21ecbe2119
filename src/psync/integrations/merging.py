"""Merging of state over workers: what a model changes itself, such as BatchNorm's statistics.

State is kept like all else: one variable for each array, which every step pulls. So a step sees
what all workers have done, and one that runs again elsewhere begins with the same; who joins,
evaluates, saves or exports has the merged value; and what a worker has seen outlives it. After its
forward pass a worker sends its value x, and the ps merges it into the present value s:

    "mean"   floats: s becomes (1 - a) s + a x, with a = 1 / workers. Each push has the same weight,
             so a worker counts by how often it pushes, and one that is gone fades. Integers and
             bools (counters, flags): the larger of s and x.
    "first"  s becomes x of worker 0; those of others are not sent.
    "local"  nothing is sent: each worker keeps its own, and all begin with what was built, or
             loaded.

Why a mean of values, and not a sum of differences, as of gradients: x was computed from an s that
is older than the present one, and differences to old values overshoot when they are added up; a
variance may become negative. A mean lies between the values that it is made of, however late they
come. With one worker it is what a single process has, bit for bit.

Merging is elementwise on the ps, beside the push of the gradients. In synchronous training it comes
before it: when a step gives its token, the state of all pushes that it counts is there. It is
applied at most once for each closure, as gradients are. State that comes with a stale push is
merged all the same: it describes data, and the gradient is what was too old. Values of workers are
merged in the order in which they come, also in a ``deterministic`` synchronous group: there
gradients are the same bits in each run, and merged floats need not be. In training mode no
gradient depends on them.

In a replica of ``strategy.run`` it is the plain mean over all replicas; of counters the first
one's.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from psync.api.scopes import runtime_of, scope_of
from psync.api.variables import ShardedVariable, Variable, VariableAggregation
from psync.client.context import Runtime, current_closure
from psync.client.link import all_of
from psync.errors import ConfigurationError
from psync.numerics.casting import fitting
from psync.optimizers import SGD
from psync.replicas.context import current_gang

AnyVariable = Variable | ShardedVariable

MERGES = ("mean", "first", "local")


class StateMerge:
    """How the state of one model is merged; goes to workers with the model.

    Args:
        how: "mean", "first" or "local".
        dtypes: Of the arrays of state, by name.
        workers: How many there are.
        what: The model, for messages.

    Attributes:
        names: Of the arrays that are merged, floats first; none if all are local.

    Raises:
        ConfigurationError: There is no such way.
    """

    def __init__(self, how: str, dtypes: Mapping[str, np.dtype], workers: int, what: str) -> None:
        if how not in MERGES:
            raise ConfigurationError(
                f"{what}: expected state (buffers) to be merged by one of "
                f"{', '.join(map(repr, MERGES))}, got {how!r}"
            )
        self._how, self._what = how, f"merging state of {what}"
        merged = {} if how == "local" else dtypes
        self._floats = [name for name, dtype in merged.items() if is_floating(dtype)]
        self._others = [name for name, dtype in merged.items() if not is_floating(dtype)]
        self.names = [*self._floats, *self._others]
        self._share = 1 / workers
        # s -= share * s, then s -= -share * x: an update rule that is a weighted mean.
        self._rule = None
        if how == "mean" and self._floats:
            self._rule = SGD(1.0, weight_decay=self._share, name="StateMerge")

    def aggregation(self, name: str) -> VariableAggregation:
        """Return how the variable of an array is to be declared, for replicas of a gang."""
        if self._how == "mean" and name in self._floats:
            return VariableAggregation.MEAN
        return VariableAggregation.ONLY_FIRST_REPLICA

    async def merge(
        self,
        variables: Mapping[str, AnyVariable],
        before: Mapping[str, np.ndarray],
        now: Mapping[str, np.ndarray],
    ) -> None:
        """Send what a step has changed.

        It is the same calls in the same order whatever that is: where a closure runs again it is
        compared with its first run call by call. (Of other arrays than then it is refused.)

        Args:
            variables: By name.
            before: Values of the arrays in ``names``, as they were pulled.
            now: What they are after the step. Copied.

        Raises:
            ValueMismatchError: An array does not fit its variable.
            PsyncError: As ``Variable.assign``.

        Cancellation: What was begun ends in the background.
        """
        if not self.names:
            return
        values = {
            name: np.array(
                fitting(now[name], variables[name].spec, f'state "{name}"', casting="same_kind")
            )
            for name in self.names
        }
        if current_gang() is not None:  # where all replicas have to make the same calls
            for name, value in values.items():
                await variables[name].assign(value)
            return
        different = [name for name in self.names if _differ(before[name], values[name])]
        floats = [name for name in different if name in self._floats]
        others = [name for name in different if name not in self._floats]
        if self._how == "first":
            runtime = await runtime_of(self._what, *variables.values())
            chosen = different if _is_first(runtime, next(iter(variables.values()))) else []
            await self.assign(variables, values, chosen, "assign")
            return
        calls: list[Coroutine[Any, Any, Any]] = []
        if self._rule is not None and floats:
            pairs = [(self._weighted(values[name]), variables[name]) for name in floats]
            calls.append(self._rule.apply_gradients(pairs))
        elif self._floats:
            calls.append(self.assign(variables, values, (), "max"))  # has the number of that push
        if self._others:
            calls.append(self.assign(variables, values, others, "max"))
        await all_of(calls)

    async def assign(
        self,
        variables: Mapping[str, AnyVariable],
        values: Mapping[str, np.ndarray],
        names: Collection[str],
        op: str,
    ) -> None:
        """Assign several variables in one message to each ps; of none, only the call is counted.

        Args:
            variables: By name.
            values: By name; of the variables' dtypes, C-contiguous.
            names: Of those that are meant.
            op: As ``PsClient.assign`` takes it.

        Raises:
            PsyncError: As ``Variable.assign``.

        Cancellation: As ``Variable.assign``.
        """
        runtime = await runtime_of(self._what, *variables.values())
        call = runtime.begin_update(self._what)
        if names:
            plan = runtime.ps.plan(tuple(variables[name].spec for name in names))
            arrays: Sequence[Any] = [values[name] for name in names]
            await runtime.ps.assign(plan, arrays, op=op, call=call)

    def _weighted(self, value: np.ndarray) -> np.ndarray:
        """Return the gradient by which the rule takes up a value."""
        return np.asarray(np.multiply(value, -self._share), value.dtype)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a dtype is a floating one, bfloat16 too."""
    return "float" in dtype.name


def _differ(before: np.ndarray, now: np.ndarray) -> bool:
    return not np.array_equal(before, now, equal_nan=is_floating(now.dtype))


def _is_first(runtime: Runtime, variable: AnyVariable) -> bool:
    """Return whether the code that runs here is worker 0's, or the program's own."""
    closure = current_closure()
    if closure is not None:
        return closure.worker_index == 0
    scope = scope_of(variable)
    return not runtime.in_session or scope is None or scope.worker_index in (None, 0)
