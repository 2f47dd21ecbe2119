"""Pytrees of jax on ps tasks: each step gets the present values as arrays of jax.

    from psync.integrations.jax import PSPytree, step_key

    with strategy.scope():
        served = PSPytree(params, psync.optimizers.Adam(1e-3), name="net")
    value_and_grad = jax.jit(jax.value_and_grad(loss_of))

    def step(batches):  # a plain function runs in a thread, where it may compute
        images, labels = next(batches)
        params = psync.wait(served.pull())
        loss, grads = value_and_grad(params, images, labels, step_key(0))
        psync.wait(served.push(grads))
        return loss.item()

``served`` has what all integrations share: variables by name, pushes, and the merging of state over
workers; ``merging`` says how that is done and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from psync.api.optimizers import Optimizer, PushResult
from psync.client.context import current_closure
from psync.errors import ConfigurationError, UsageError
from psync.integrations.served import LoadedKeys, ServedVariables, checked_scope, current_run
from psync.numerics.casting import fitting
from psync.specs import dtype_of
from psync.wire.closure_numbers import first_of

try:
    import jax

    from psync.integrations.jax_trees import (
        NamedTree,
        aligned,
        are_here,
        by_name,
        check_present,
        first_value,
        is_gradient,
    )
except ImportError as exc:
    raise ConfigurationError(
        f"psync.integrations.jax needs the package jax, which cannot be imported here: {exc}",
        hint="pip install 'psync[jax]', on the chief and on every worker",
    ) from exc

P = TypeVar("P")
S = TypeVar("S")
T = TypeVar("T")

MANY = 32
"""More arrays than this are made in a thread: each takes some 30 µs."""


class _Live:
    """What one task keeps of a pytree.

    Attributes:
        version: Of the frozen values in ``kept``; None: they were not pulled yet.
        kept: Arrays that no step pulls: frozen ones, and state that is this task's own.
        puller: Who has pulled last, see ``current_run``; None: nobody yet.
        state: What was pulled of the arrays that are merged, by name.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.kept: dict[str, jax.Array] = {}
        self.puller: object = None
        self.state: dict[str, np.ndarray] = {}


class PSPytree(ServedVariables, Generic[T]):
    """A pytree of arrays, such as a model's parameters, whose leaves are variables on the ps tasks.

    Make it in ``strategy.scope()``, and capture it in steps. Variables are named by the paths of
    their leaves, after ``name``: ``{"dense": {"kernel": …}}`` of "net" has "net/dense/kernel";
    lists and tuples have numbers. All node types that jax knows are supported: dicts, dataclasses,
    modules of Equinox, states of Flax NNX. The tree travels without its values.

    - Floating leaves of ``params`` are trained. Other leaves, and those excluded by ``trainable``,
      are frozen. A worker pulls them the first time, and when ``load_state_dict`` or a restored
      checkpoint has changed them. Their gradients are ignored.
    - Dtypes are those of jax: float64 becomes float32 unless ``jax_enable_x64`` is set, which must
      then be set on all workers.

    Args:
        params: Initial values: a pytree of arrays of jax or numpy, or of numbers.
        optimizer: One of ``psync.optimizers``, or a ``SyncReplicasOptimizer``, which then counts in
            the strategy's global step. Slots live on the ps tasks.
        name: Prefix of the variables' names, an identifier; None: no prefix.
        state: A second pytree, which the model changes itself, such as BatchNorm's running
            statistics. Its variables are named "net/state/bn/mean"; ``pull`` then returns a pair.
        merge: How state is merged over workers. "mean": the mean of the workers' pushes, and the
            maximum of integers. "first": worker 0's. "local": each worker keeps its own, and
            ``state_dict`` and checkpoints have the initial one. See ``psync.integrations.merging``.
        trainable: Function (name of a leaf) → whether it is trained; None: all are. Names are those
            of ``state_dict()``, without ``name``.
        cast_gradients: Whether gradients of another floating dtype are cast to the variable's, such
            as f16, bf16 and f64 to f32. A finite number that would become infinite is an error that
            names the variable. False: another dtype is an error.

    Raises:
        ConfigurationError: jax is not installed, an argument is invalid, a leaf is not an array,
            two leaves have one name, or no leaf is trained; names the leaf.
        PartitionError: A leaf has a dtype that variables cannot have; names the variable.
        UsageError: Outside a strategy's scope, or inside a step.

    Example:
        with strategy.scope():
            served = PSPytree(params, psync.optimizers.Adam(1e-3), name="net", state=stats)

        def step(batches):
            params, stats = psync.wait(served.pull())
            (loss, stats), grads = value_and_grad(params, stats, next(batches))
            return psync.wait(served.push(grads, state=stats)).staleness
    """

    @overload
    def __init__(
        self: PSPytree[P], params: P, optimizer: Optimizer, *, name: str | None = None,
        state: None = None, merge: str = "mean", trainable: Callable[[str], bool] | None = None,
        cast_gradients: bool = True,
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: PSPytree[tuple[P, S]], params: P, optimizer: Optimizer, *,
        name: str | None = None, state: S, merge: str = "mean",
        trainable: Callable[[str], bool] | None = None, cast_gradients: bool = True,
    ) -> None: ...  # fmt: skip

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        *,
        name: str | None = None,
        state: Any = None,
        merge: str = "mean",
        trainable: Callable[[str], bool] | None = None,
        cast_gradients: bool = True,
    ) -> None:
        what = "PSPytree"
        checked_scope(what, optimizer)
        if trainable is not None and not callable(trainable):
            raise ConfigurationError(
                f"{what}: expected trainable to be a function of a name, got "
                f"{type(trainable).__name__}",
                hint='trainable=lambda name: not name.startswith("backbone/")',
            )
        self._params = NamedTree(params, f"params of {what} {name!r}", "params")
        self._stats = NamedTree(state, f"state of {what} {name!r}", "state", "state/")
        self._has_state = state is not None
        leaves = self._params.taken_apart(params, what)
        own = self._stats.taken_apart(state, what)
        if both := leaves.keys() & own.keys():
            raise ConfigurationError(
                f"{what}: a leaf of params and one of state are both called {min(both)!r}",
                hint='rename the part of params called "state"',
            )
        values = {key: first_value(key, leaf, what) for key, leaf in (leaves | own).items()}
        trained = {
            key for key in self._params.names
            if jax.numpy.issubdtype(values[key].dtype, jax.numpy.floating)
            and (trainable is None or trainable(key))
        }  # fmt: skip
        if not trained:
            raise ConfigurationError(
                f"{what}: params has no leaf to train",
                hint=f"leaves: {', '.join(self._params.names[:10])}; floating-point leaves are "
                "trained if trainable(name) is true",
            )
        super().__init__(
            what, values, trained, self._stats.names, optimizer,
            name=name, merge=merge, cast_gradients=cast_gradients,
        )  # fmt: skip

    async def pull(self, *, device: Any = None) -> T:
        """Return the pytree with the present values; with state, the pair (params, state).

        Leaves are arrays of jax, committed to no device unless one is given. Only variables that
        may have changed travel, in one round trip to each ps.

        On a CPU nothing is copied: the arrays use the memory into which this pull has read, aligned
        to 64 bytes. They may be kept and donated; jax never writes to such memory, and allocates
        new memory for results. On other devices the values are transferred.

        Args:
            device: A ``jax.Device`` or ``Sharding`` for all leaves; None: jax's default.

        Returns:
            ``params``, or ``(params, state)``. Each leaf is one version of its variable.

        Raises:
            ConfigurationError: A leaf has 64-bit numbers, and jax on this task does not support
                them.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.

        Cancellation: Safe.
        """
        live = await self._live()
        donated = any(array.is_deleted() for array in live.kept.values())
        seen = None if donated else live.version
        values, version = await self._pull_values(seen, self._target)
        for array in values.values():
            array.flags.writeable = False
        given = {**live.kept, **values}

        def put() -> dict[str, Any]:
            return by_name(given, lambda arrays: jax.device_put(arrays, device))

        leaves = await asyncio.to_thread(put) if len(given) > MANY else put()
        live.version, live.kept = version, {key: leaves[key] for key in self._seldom}
        live.state = {key: values[key] for key in self._state.names}
        live.puller = current_run()
        params = self._params.filled(leaves)
        return cast(T, (params, self._stats.filled(leaves)) if self._has_state else params)

    async def push(self, grads: Any, *, state: Any = None) -> PushResult:
        """Push gradients, and merge the state that the step has computed.

        Arrays that are still being computed are awaited in a thread. Arrays on a CPU are sent from
        their own memory.

        Args:
            grads: A pytree like ``params`` of arrays of jax or numpy, of any floating dtype, or
                ``psync.IndexedSlices``. None, and jax's ``float0``, are skipped.
            state: The new state, a pytree like the pulled one; required if there is state. Leaves
                that are None or have the same values are unchanged.

        Returns:
            The result of the optimizer's ``apply_gradients``. With a synchronous optimizer it may
            be STALE: the gradients were too old, and were dropped.

        Raises:
            ValueMismatchError: The structure differs, there is no gradient at all, or a gradient
                does not match its variable, was donated or is traced. Nothing was pushed.
            UsageError: State is missing or unexpected, or this step has not pulled it.
            PsyncError: See ``apply_gradients``.

        Cancellation: A push that has begun ends in the background, as with ``apply_gradients``.
        """
        what = f"{self._what} {self.name!r}"
        trained = set(self._trained)
        leaves = self._params.taken_apart(grads, f"{what}: gradients")
        gradients = {key: leaf for key, leaf in leaves.items() if key in trained}
        found = {key: leaf for key, leaf in gradients.items() if is_gradient(leaf)}
        check_present(found, f"{what}: gradient")
        now = self._checked_state(state, what)
        live = await self._live()
        if self._has_state and live.puller is not current_run():
            raise UsageError(
                f"{what}: state pushed in a step that has not pulled",
                hint="params, state = await served.pull(), then await served.push(grads, "
                "state=new_state)",
            )
        at_once = {**found, **now}
        here = are_here(list(at_once.values()))
        arrays = (
            by_name(at_once, jax.device_get) if here
            else await asyncio.to_thread(by_name, at_once, jax.device_get)
        )  # fmt: skip
        pushed = {key: arrays[key] if key in found else None for key in gradients}
        merged = {key: arrays.get(key, live.state[key]) for key in self._state.names}
        own = {key: self._fitting(key, arrays[key]) for key in now if key not in merged}
        result = await self._push_values(pushed, live.state, merged)
        live.kept |= by_name(own, jax.device_put)
        return result

    async def state_dict(self) -> dict[str, np.ndarray]:
        """Return the present values by name, such as "dense/kernel" and "state/bn/mean".

        Each shard is one version of itself; for all shards at one instant, save a checkpoint.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        return await self._read_values()

    async def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> LoadedKeys:
        """Set values for all tasks, for example those of a trained model.

        Slots of the optimizer stay as they are.

        Args:
            state_dict: Arrays of jax or numpy, by the names of ``state_dict()``. Cast within a kind
                to the variables' dtypes, if no number becomes infinite.
            strict: Whether missing or unknown names are an error.

        Returns:
            The missing and the unknown names.

        Raises:
            UsageError: Names differ, and ``strict``; inside a step; or outside of a running
                coordinator. Nothing was changed.
            ValueMismatchError: A shape differs, or a dtype cannot hold the numbers. Nothing was
                changed.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background.
        """
        found = self._compare_keys(self._by_name, state_dict, strict=strict)
        await self._load_values(
            {key: state_dict[key] for key in self._by_name if key in state_dict}
        )
        return found

    def _checked_state(self, state: Any, what: str) -> dict[str, Any]:
        """Return the leaves of a new state that are not None, by name."""
        if self._has_state != (state is not None):
            raise UsageError(
                f"{what}: expected the new state beside the gradients" if self._has_state
                else f"{what}: got a state, but was created without one",
                hint="await served.push(grads, state=new_state); the state that was pulled, if it "
                "has not changed" if self._has_state
                else "PSPytree(params, optimizer, state=state)",
            )  # fmt: skip
        leaves = self._stats.taken_apart(state, f"{what}: state")
        now = {key: leaf for key, leaf in leaves.items() if leaf is not None}
        check_present(now, f"{what}: state")
        return now

    def _fitting(self, key: str, value: np.ndarray) -> np.ndarray:
        return fitting(value, self.variable(key).spec, f'state "{key}"', casting="same_kind")

    def _target(self, key: str) -> np.ndarray:
        spec = self.variable(key).spec
        return aligned(spec.shape, dtype_of(spec.dtype))

    async def _live(self) -> _Live:
        """Return what this task keeps, after it has begun to use jax if it has not yet."""

        def begin() -> _Live:
            jax.devices()  # starts a backend, which takes long
            self._check_64_bit()
            return _Live()

        return await self._kept_here(begin)

    def _check_64_bit(self) -> None:
        """Check that jax keeps the dtypes of all leaves on this task."""
        for variable in self._by_name.values():
            dtype = dtype_of(variable.spec.dtype)
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ConfigurationError(
                    f'{self._what} {self.name!r}: variable "{variable.name}" is {dtype}, but jax '
                    "has no 64-bit numbers on this task",
                    hint="set JAX_ENABLE_X64=1 for all tasks, or for none",
                )


def step_key(seed: Any) -> jax.Array:
    """Return a key for the random numbers of this step, such as those of dropout.

    Each closure has its own key, so each step of each worker does. A closure that runs again,
    because its worker was lost or for a data shard that is not done, gets the same key as before,
    on any worker. The n-th closure of a program gets the same key when the program runs again with
    the same seed. Call it in the step, not in a jitted function, and ``jax.random.split`` the
    result; all calls in one step return the same key.

    A coordinator counts its closures from 0. A program that continues from a checkpoint should use
    another seed, such as the global step at which it begins.

    Args:
        seed: An integer, or a key of ``jax.random.key``.

    Raises:
        UsageError: Outside of a step; the hint names the alternative.

    Example:
        def step(batches):
            params = psync.wait(served.pull())
            loss, grads = value_and_grad(params, next(batches), step_key(0))
            psync.wait(served.push(grads))
    """
    closure = current_closure()
    if closure is None:
        raise UsageError(
            "step_key outside of a step",
            hint="jax.random.key(seed) in the program; in dataset code "
            "jax.random.fold_in(jax.random.key(seed), context.input_pipeline_id)",
        )
    is_number = jax.dtypes.issubdtype(getattr(seed, "dtype", int), np.integer) and not np.ndim(seed)
    key = jax.random.key(seed) if is_number else seed
    high, low = divmod(first_of(closure.number_on_ps), 1 << 32)  # fold_in takes 32 bits
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, low)


ServedPytree = PSPytree  # its name until 0.2
