"""Served models: the arrays of a library's model as variables on the ps tasks.

What the integrations share, without any of their libraries. A model is arrays by name, of three
kinds:

    trained   gradients of the optimizer change them; pulled by every step
    state     the model changes them itself ("buffers" in torch, non-trainable weights in Keras);
              merged over workers, see ``merging``, and pulled by every step unless they are local
    frozen    nobody changes them but who loads values: pulled when they have changed
"""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from psync.api.optimizers import Optimizer, PushResult
from psync.api.pulls import pull
from psync.api.scopes import Scope, runtime_of, scope_for
from psync.api.variables import Module, Variable, VariableAggregation, get_or_create_global_step
from psync.client.context import Runtime, current_closure, forbid_in_step
from psync.client.link import all_of
from psync.errors import ConfigurationError, UsageError, ValueMismatchError
from psync.integrations.merging import AnyVariable, StateMerge
from psync.net.platform import PerProcess
from psync.net.shielding import carried_out
from psync.numerics.casting import fitting
from psync.numerics.rows import IndexedSlices
from psync.replicas.context import current_gang
from psync.specs import checked_kind

VERSION = "~frozen"
"""Name of the variable that tells whether frozen values have changed, by a digest of them.

After a restore, or a rollback, it tells by itself which frozen values it belongs to."""

SHOWN = 5
"""Differences between two builds of a model that a message names."""

L = TypeVar("L")

_kept: PerProcess[weakref.WeakKeyDictionary[Runtime, dict[Any, Any]]] = PerProcess(
    weakref.WeakKeyDictionary
)
"""What each task in this process keeps of models; it ends with the task's session."""


class LoadedKeys(NamedTuple):
    """The result of ``load_state_dict``, with torch's field names."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ServedVariables(Module):
    """The variables of one model: the base class of the integrations' models.

    Steps capture it; it travels as handles, without values.

    Args:
        what: Name in messages: "PSModule".
        values: Initial values of all arrays, by name, in order.
        trained: Names of the arrays that the optimizer trains.
        state: Names of the arrays that the model changes itself.
        optimizer: Optimizer that applies the gradients.
        name: Prefix of the variables' names, as in "name/weight"; None: no prefix.
        merge: How state is merged over workers: "mean", "first" or "local".
        cast_gradients: Whether gradients of another floating dtype than their variable's are cast
            to it. A finite number that would become infinite is then an error.

    Raises:
        ConfigurationError: An argument is invalid.
        UsageError: Outside a strategy's scope, or inside a step.
        PartitionError: An array has a dtype that variables cannot have.
    """

    def __init__(
        self,
        what: str,
        values: Mapping[str, np.ndarray],
        trained: Collection[str],
        state: Collection[str],
        optimizer: Optimizer,
        *,
        name: str | None,
        merge: str,
        cast_gradients: bool,
    ) -> None:
        scope = checked_scope(what, optimizer)
        super().__init__(name)
        self._what = what
        self.optimizer = optimizer
        self._cast = checked_kind(
            f"{what}: expected cast_gradients to be a bool", cast_gradients, bool
        )
        workers = scope.cluster.num_tasks("worker")
        dtypes = {key: values[key].dtype for key in values if key in state}
        self._state = StateMerge(merge, dtypes, workers, f"{what} {self.name!r}")
        self._trained = [key for key in values if key in trained]
        self._often = [*self._trained, *self._state.names]
        self._seldom = [key for key in values if key not in self._often]
        prefix = f"{name}/" if name else ""
        self._by_name: dict[str, AnyVariable] = {
            key: Variable(
                value,
                name=prefix + key,
                trainable=key in trained,
                aggregation=VariableAggregation.NONE
                if key in trained
                else self._state.aggregation(key),
            )
            for key, value in values.items()
        }
        self._version: Variable | None = None
        if self._seldom:
            first = digest_of({key: values[key] for key in self._seldom})
            self._version = Variable(first, name=prefix + VERSION, dtype=np.int64, trainable=False)
        self._global_step = get_or_create_global_step() if optimizer._synchronous else None

    def __repr__(self) -> str:
        others = len(self._by_name) - len(self._trained)
        return (
            f"<{self._what} {self.name!r}: {len(self._trained)} trained variables, {others} others>"
        )

    def variable(self, key: str) -> AnyVariable:
        """Return the variable of an array.

        Args:
            key: Name of the array in the model.

        Raises:
            UsageError: There is no array of that name.
        """
        if key not in self._by_name:
            raise UsageError(
                f"{self._what} {self.name!r}: no variable {key!r}",
                hint=f"there are {', '.join(list(self._by_name)[:10])}",
            )
        return self._by_name[key]

    def _checkpoint_items(self) -> Mapping[str, Any]:
        """Return the variables of a checkpoint: "model/weight" is the array "weight" of "model"."""
        version = {} if self._version is None else {VERSION: self._version}
        return {**self._by_name, **version}

    async def _kept_here(self, begin: Callable[[], L]) -> L:
        """Return this task's object for the model, kept while the task serves this coordinator.

        Args:
            begin: Function that makes the object the first time; runs in a thread. The object must
                not refer to a step's run, which would keep the session.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            Exception: An exception of ``begin``.
        """
        variable = next(iter(self._by_name.values()))
        runtime = await runtime_of(f"{self._what} {self.name!r}", variable)
        models = _kept().setdefault(runtime, {})
        key = variable.origin, variable.spec.variable_id
        if key not in models:
            models.setdefault(key, await asyncio.to_thread(begin))
        kept: L = models[key]
        return kept

    def _compare_keys(
        self, names: Collection[str], given: Collection[str], *, strict: bool
    ) -> LoadedKeys:
        """Return the names that are missing or unknown in a mapping to load.

        Raises:
            UsageError: There are some, and ``strict``.
        """
        found = LoadedKeys(
            [key for key in names if key not in given], [key for key in given if key not in names]
        )
        if strict and any(found):
            raise UsageError(
                f"{self._what} {self.name!r}: load_state_dict: "
                + "; ".join(
                    f"{what}: {', '.join(keys[:10])}"
                    for what, keys in zip(("missing", "unknown"), found, strict=True)
                    if keys
                ),
                hint="load_state_dict(…, strict=False) loads the matching entries",
            )
        return found

    # Values.

    async def _pull_values(
        self, seen: int | None, target_of: Callable[[str], np.ndarray] | None = None
    ) -> tuple[dict[str, np.ndarray], int | None]:
        """Return all values that may have changed, and the version of the frozen ones.

        Args:
            seen: Version of the frozen values that the caller has; None: it has none.
            target_of: Function that returns the array to read a value into; None: new arrays.

        Raises:
            PsyncError: See ``psync.pull``.

        Cancellation: Safe; the contents of targets are then undefined.
        """
        variables: list[AnyVariable] = [self._by_name[key] for key in self._often]
        out = None if target_of is None else [target_of(key) for key in self._often]
        if self._version is not None:
            variables.append(self._version)
            if out is not None:
                out.append(np.empty((), np.int64))
        arrays = await pull(variables, out=out)
        values = dict(zip(self._often, arrays, strict=False))
        if self._version is None or int(arrays[-1]) == seen:
            return values, seen
        rest = [self._by_name[key] for key in self._seldom]
        out = None if target_of is None else [target_of(key) for key in self._seldom]
        values |= zip(self._seldom, await pull(rest, out=out), strict=True)
        return values, int(arrays[-1])

    async def _read_values(self) -> dict[str, np.ndarray]:
        """Return the values of all arrays, which the caller may change.

        Raises:
            PsyncError: See ``psync.pull``.

        Cancellation: Safe.
        """
        read: dict[str, np.ndarray] = await pull(self._by_name, copy=True)
        return read

    async def _load_values(self, values: Mapping[str, Any]) -> None:
        """Set arrays; the optimizer's slots stay.

        Args:
            values: Arrays by name; cast within a kind to the variables' dtypes.

        Raises:
            ValueMismatchError: A value does not match. Nothing was changed.
            UsageError: Inside a step, outside of a running coordinator, or a name is unknown.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background; steps may see some of it.
        """
        forbid_in_step(f"{self._what} {self.name!r}: loading values")
        arrays = {
            key: fitting(value, self.variable(key).spec, f'value for "{key}"', casting="same_kind")
            for key, value in values.items()
        }
        await self._state.assign(self._by_name, arrays, list(arrays), "assign")
        if self._version is not None and not arrays.keys().isdisjoint(self._seldom):
            # Written last: whoever sees it, and pulls then, gets all that it stands for.
            frozen = await pull({key: self._by_name[key] for key in self._seldom})
            await self._version.assign(await asyncio.to_thread(digest_of, frozen))

    # Pushes.

    async def _push_values(
        self,
        gradients: Mapping[str, Any],
        before: Mapping[str, np.ndarray],
        now: Mapping[str, np.ndarray],
    ) -> PushResult:
        """Merge the state that a step has changed, and push its gradients.

        Args:
            gradients: Gradients by name, of trained arrays: arrays, ``IndexedSlices``, or None. Not
                copied.
            before: Merged state, as it was pulled.
            now: The same state after the step. Copied.

        Returns:
            The result of the optimizer's ``apply_gradients``.

        Raises:
            ValueMismatchError: There is no gradient at all, a gradient does not match, or a number
                does not survive the cast. Nothing was pushed.
            PsyncError: See ``apply_gradients`` of the optimizer.

        Cancellation: See ``apply_gradients`` of the optimizer.
        """
        pairs = [(self._cast_to(key, each), self.variable(key)) for key, each in gradients.items()]
        if all(gradient is None for gradient, _ in pairs):
            raise ValueMismatchError(
                f"{self._what} {self.name!r}: no gradient to push",
                hint="compute gradients in this step, from a loss that depends on the pulled model",
            )
        merging = self._state.merge(self._by_name, before, now)
        if self._global_step is None and current_gang() is None:
            pushing = self.optimizer.apply_gradients(pairs)
            _, result = await all_of([merging, pushing])
            assert result is not None, "it is that of the push"
            return result
        await merging
        return await self.optimizer.apply_gradients(pairs, self._global_step)

    def _cast_to(self, key: str, gradient: Any) -> Any:
        if gradient is None or not self._cast:
            return gradient
        spec = self.variable(key).spec
        what = f'gradient for "{spec.name}"'
        if not isinstance(gradient, IndexedSlices):
            return fitting(gradient, spec, what, casting="same_kind")
        shape = len(gradient.indices), *spec.shape[1:]
        values = fitting(gradient.values, spec, what, casting="same_kind", shape=shape)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)


def checked_scope(what: str, optimizer: object) -> Scope:
    """Check where a served model is made, and with which optimizer, before it is built.

    Raises:
        ConfigurationError: It is no optimizer of psync.
        UsageError: No scope is open, or inside a step.
    """
    scope = scope_for(f"making a {what}", "make it")
    checked_kind(
        f"{what}: expected an optimizer of psync, which runs on the ps tasks,",
        optimizer,
        Optimizer,
        hint="psync.optimizers.Adam(1e-3), say, or a SyncReplicasOptimizer around it",
    )  # fmt: skip
    return scope


async def in_thread(function: Callable[[], L]) -> L:
    """Run a function in a thread; a cancellation is raised when it has ended."""
    return await carried_out(asyncio.ensure_future(asyncio.to_thread(function)))


def current_run() -> object:
    """Return what only this run of a closure has, without keeping it alive; or the program's."""
    closure = current_closure()
    return "program" if closure is None else closure.ordinals


Kind = tuple[tuple[int, ...], str]
"""Shape, and name of the dtype."""


def check_same(
    what: str,
    declared: Mapping[str, Kind],
    built: Iterable[tuple[str, Kind]],
    *,
    problem: str = "it is built otherwise on this task than it was declared",
    hint: str = "what builds it must return the same names, shapes and dtypes on each task: let it "
    "capture sizes, and not ask data, files or the environment",
) -> None:
    """Check that a model has the arrays that the program declared, where a task has built it.

    Args:
        what: The model, for messages; ``problem`` and ``hint`` are of the error.
        declared: By name.
        built: (name, kind) of each array that the model has here.

    Raises:
        ConfigurationError: They differ; the first differences are named.
    """
    found = dict(built)
    differences = [
        f'"{name}": declared {_text(declared.get(name))}, here {_text(found.get(name))}'
        for name in dict.fromkeys((*declared, *found))
        if declared.get(name) != found.get(name)
    ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ConfigurationError(
            f"{what}: {problem}; {'; '.join(differences[:SHOWN])}{more}", hint=hint
        )


def digest_of(values: Mapping[str, np.ndarray]) -> int:
    """Return 63 bits of a hash of arrays and their names."""
    digest = hashlib.blake2b(digest_size=8)
    for key, value in values.items():
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") >> 1


def _text(kind: Kind | None) -> str:
    return "nothing" if kind is None else f"shape {kind[0]} {kind[1]}"
