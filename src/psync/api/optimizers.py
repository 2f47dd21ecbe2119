"""The optimizer handle: its arguments, pushes and their outcomes, its state on the ps tasks.

An optimizer is a handle: a number and a configuration. A ps gets the configuration with the first
push on a connection, keeps the slots beside their shards, and applies each push immediately
(asynchronous training). The public classes are in ``psync.optimizers``. ``SyncReplicasOptimizer``
is the averaged, synchronous form.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict, Unpack

import msgspec
import numpy as np

from psync.api.pulls import is_flat, leaves, mapped, pairs
from psync.api.pulls import pull as pull_values
from psync.api.scopes import kept_here, running_scopes, runtime_of
from psync.api.variables import Handle, OnReadVariable, ShardedVariable, Variable, check_step
from psync.client.context import Runtime, current_runtime, forbid_in_step
from psync.client.link import PsLink
from psync.client.plan import Plan
from psync.client.ps import check_plugins
from psync.errors import UsageError, ValueMismatchError, check_fits
from psync.net.platform import PerProcess, random_hex
from psync.numerics.casting import fitting
from psync.numerics.compression import Compression, checked_compression
from psync.numerics.rows import IndexedSlices
from psync.numerics.rules import (
    RuleOptions,
    UpdateRule,
    clipped_by_norm,
    clips_norms,
    registered_in,
    rule_from_config,
    slot_dtype,
    words_of,
)
from psync.replicas import gang_updates
from psync.replicas.context import current_gang
from psync.schedules import Constant, Schedule, as_schedule
from psync.schedules import from_config as schedule_from_config
from psync.specs import (
    STEP_BITS,
    Outcome,
    VariableSpec,
    checked_integer,
    checked_kind,
    count_of,
    dtype_of,
)
from psync.store.snapshot_state import NewOptimizer
from psync.wire.messages import Pushed, TickClock

MAX_ITERATIONS = 1 << 32
"""Of an optimizer whose number is set."""


MAX_SETTLED = 1024
"""Sets of variables that an optimizer knows it may train."""

MAX_STALENESS = 1 << 31
"""More rounds than anybody is ever ahead: no bound at all is ``staleness_bound=None``."""


@dataclass(frozen=True)
class StalenessBound:
    """A bound on how far a worker may run ahead of the others.

    A round is one accepted push of a step through the optimizer. After it, ``apply_gradients``
    returns once the worker is at most ``max_staleness`` rounds ahead of the slowest worker that has
    work. Workers that are idle, dead or out of data do not count, nor do workers that wait for
    another optimizer's bound or step; they may fall behind by more. Updates are still applied one
    by one: 0 is lock-step, not the mean of ``SyncReplicasOptimizer``.

    Pushes by the coordinator's own program, outside a step, are not counted. Each optimizer counts
    separately: a step that does not push through it makes no round.

    Args:
        max_staleness: Rounds, at least 0.

    Raises:
        ConfigurationError: ``max_staleness`` is not such a number.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server".

    Example:
        optimizer = psync.optimizers.SGD(0.5, staleness_bound=psync.StalenessBound(2))
    """

    max_staleness: int

    def __post_init__(self) -> None:
        expected = f"StalenessBound: expected max_staleness from 0 to {MAX_STALENESS} rounds"
        hint = "a whole number; without a bound workers never wait for each other"
        rounds = checked_integer(expected, self.max_staleness, 0, MAX_STALENESS, hint=hint)
        object.__setattr__(self, "max_staleness", rounds)

    async def end_round(self, runtime: Runtime, optimizer: int) -> None:
        """Report a completed round to ps 0, and return when this worker may continue.

        Args:
            runtime: Runtime of the step.
            optimizer: Number of the optimizer, which has its own clocks.

        Raises:
            ConfigurationError: The same optimizer has another bound elsewhere.
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe; the round stays completed.
        """
        number = runtime.rounds[optimizer] = runtime.rounds.get(optimizer, 0) + 1
        with runtime.ps.work.wait:
            await runtime.ps.links[0].call(TickClock(optimizer, self.max_staleness, number))


class PushResult(msgspec.Struct, frozen=True):
    """The outcome of a push.

    Attributes:
        outcome: ACCEPTED, or DUPLICATE if another run of the closure was first. A synchronous push
            may also be STALE: it was older than the step and not applied.
        step: Pushes of the optimizer including this one, as known to the ps tasks that applied it.
            Synchronous: the token, which is the step from which the replica continues.
        staleness: Updates by others since this task's previous push, a bound on the age of the
            pulled values. Synchronous: steps completed since the values were pulled.
        partial: Synchronous: whether its step was completed with fewer pushes than the target.
        count: Synchronous: pushes in its step. 0: the push is in no step, or in one that was not
            yet complete when the token arrived.
    """

    outcome: Outcome
    step: int
    staleness: int
    partial: bool = False
    count: int = 0


def result_of(answers: Sequence[Pushed], known: int) -> PushResult:
    """Return what became of a push.

    Args:
        answers: Of the ps tasks.
        known: The number of pushes that was known before, marked: what others have done since is
            the staleness, unless the number was set meanwhile.
    """
    step, outcome = known, Outcome.ACCEPTED
    for answer in answers:
        step = max(step, answer.step)  # a duplicate's is 0
        if answer.outcome != "accepted" and outcome is Outcome.ACCEPTED:
            outcome = Outcome(answer.outcome)
    others = step - known - 1 if step >> STEP_BITS == known >> STEP_BITS else 0
    return PushResult(outcome, count_of(step), max(0, others))


@dataclass(frozen=True, slots=True)
class Slot:
    """An optimizer's companion array of a variable, such as a momentum."""

    variable: Variable | ShardedVariable
    optimizer: Optimizer
    name: str

    @property
    def dtype(self) -> str:
        """Name of its dtype: the variable's, or float32 if the variable has half precision."""
        return slot_dtype(self.variable.dtype).name

    @property
    def first_element(self) -> float:
        """Value of all its elements before the first push."""
        return self.optimizer._rule.initial_slot(self.name)

    async def read(self) -> np.ndarray:
        """Return the slot's value, which has the variable's shape.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ValueMismatchError: The variable's dtype cannot be optimized.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        operation = f'read of slot "{self.name}" of "{self.variable.name}"'
        optimizer, runtime = self.optimizer, await self.optimizer._runtime(operation, self.variable)
        await runtime.ps.set_optimizer(optimizer.number, optimizer._config)
        plan = runtime.ps.plan((self.variable.spec.with_dtype(self.dtype),))
        (array,) = await runtime.ps.pull(plan, optimizer=optimizer.number, slot=self.name)
        return array

    async def assign(self, value: Any) -> Self:
        """Set the slot's value, for example from a checkpoint.

        Do not call it while steps push to the variable: the last write wins.

        Args:
            value: Array of the variable's shape, or a value that numpy converts to one. Not copied.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ValueMismatchError: Shape or dtype do not fit.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background.
        """
        spec = self.variable.spec.with_dtype(self.dtype)  # as if the variable were the slot
        operation = f'assign to slot "{self.name}" of "{spec.name}"'
        array = fitting(value, spec, operation, casting="same_kind")
        optimizer, runtime = self.optimizer, await self.optimizer._runtime(operation, self.variable)
        await runtime.ps.set_slot(
            spec, array,
            optimizer=optimizer.number, config=optimizer._config, slot=self.name,
        )  # fmt: skip
        return self


@dataclass(frozen=True, slots=True)
class Iterations:
    """The number of updates that an optimizer has made.

    An update is one push, or ``gradient_accumulation_steps`` pushes. Each push counts once,
    regardless of how many ps tasks hold its variables and how often it was sent. Pushes that have
    returned are counted; those in flight may be.

    Schedules follow the same number as the ps that applies an update knows it. Pushes in flight may
    be missing, and so may pushes of the last 50 ms that went to other ps tasks only.
    """

    optimizer: Optimizer

    async def read(self) -> int:
        """Return the number.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running; or there
                is no variable.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        optimizer = self.optimizer
        runtime = await optimizer._runtime("read of iterations")
        pushes = await runtime.ps.set_optimizer(optimizer.number, optimizer._config)
        return optimizer._rule.iteration(pushes)

    async def assign(self, step: int) -> None:
        """Set the number on all ps tasks, for example from a checkpoint.

        Raises:
            UsageError: See ``read``; or the value is not a number of updates.
            ParameterServerLost: A ps is lost.

        Cancellation: Some ps tasks have the new number, others do not.
        """
        optimizer = self.optimizer
        pushes = pushes_of(optimizer, step)
        runtime = await optimizer._runtime("assign to iterations")
        await runtime.ps.set_optimizer(optimizer.number, optimizer._config, step=pushes)


def pushes_of(optimizer: Optimizer, step: object) -> int:
    """Return of how many pushes an optimizer makes so many updates.

    Raises:
        ConfigurationError: It is no number of updates.
    """
    each = optimizer._rule.options.gradient_accumulation_steps or 1
    highest = min(MAX_ITERATIONS, (1 << STEP_BITS - 1) // each)
    expected = f"iterations: expected a whole number from 0 to {highest}"
    return checked_integer(expected, step, 0, highest) * each


AnyVariable = Variable | ShardedVariable
GradsAndVars = Iterable[tuple[Any, AnyVariable]]
_PAIRS, _ARRAYS = {tuple, list}, {np.ndarray}
Gradient = np.ndarray | IndexedSlices


def _checked(gradient: Any, spec: VariableSpec, finite: str | None) -> Gradient:
    what, slices = f'gradient for "{spec.name}"', None
    indices = None if isinstance(gradient, np.ndarray) else getattr(gradient, "indices", None)
    try:
        if "float" not in spec.dtype:  # here, before the ps tasks of other variables have theirs
            slot_dtype(dtype_of(spec.dtype))
        if indices is not None and hasattr(gradient, "values") and not callable(indices):
            shape = getattr(gradient, "dense_shape", None)
            slices = IndexedSlices(gradient.values, indices, shape)
    except ValueMismatchError as exc:
        raise ValueMismatchError(f"{what}: {exc.message}", hint=exc.hint) from None
    if slices is None:
        checked: Gradient = fitting(gradient, spec, what, casting="no")
    else:
        checked = _checked_rows(slices, spec, what)
    if finite is not None:
        array = checked.values if isinstance(checked, IndexedSlices) else checked
        bad = array.size - int(np.count_nonzero(np.isfinite(array)))
        if bad:
            raise ValueMismatchError(
                f"{what}: {bad} of {array.size} elements are NaN or infinite",
                hint=f"{finite} was made with forbid_nonfinite=True",
            )
    return checked


def _checked_rows(slices: IndexedSlices, spec: VariableSpec, what: str) -> IndexedSlices:
    if not spec.shape:
        raise ValueMismatchError(f"{what}: a scalar has no rows, got IndexedSlices")
    fits = slices.dense_shape in (None, spec.shape)
    expected = f"{what}: expected rows of an array of shape {spec.shape} as dense_shape"
    check_fits(fits, expected, slices.dense_shape, error=ValueMismatchError)
    indices, count = slices.indices, spec.shape[0]
    if len(indices):
        lowest, highest = int(indices.min()), int(indices.max())  # uint64 may not fit into int64
        if lowest < 0 or highest >= count:
            raise ValueMismatchError(
                f"{what}: row {lowest if lowest < 0 else highest} does not exist, the variable "
                f"has {count}"
            )
    shape = len(indices), *spec.shape[1:]
    values = fitting(slices.values, spec, what, casting="no", shape=shape)
    return IndexedSlices(values, indices.astype(np.int64, copy=False), slices.dense_shape)


def _no_pairs(given: object) -> ValueMismatchError:
    return ValueMismatchError(
        f"apply_gradients: expected (gradient, variable) pairs, got {type(given).__name__}",
        hint="apply_gradients(zip(gradients, variables))",
    )


def listed(var_list: Any) -> Any:
    """Return the variables that a call was given: a list of them, or as they are nested.

    Args:
        var_list: One variable, several, or a nesting as ``pull`` takes it.

    Raises:
        ValueMismatchError: Something else is among them, or there is none in a nesting.
    """
    if isinstance(var_list, dict):
        variables: Any = var_list
    elif isinstance(var_list, Handle):
        variables = [var_list]
    else:
        variables = var_list if isinstance(var_list, list | tuple) else list(var_list)
        for item in variables:
            if not isinstance(item, Handle | dict | list | tuple):
                raise ValueMismatchError(f"var_list: expected variables, got {type(item).__name__}")
    if is_flat(variables):
        return list(variables)
    if not leaves(variables):
        raise ValueMismatchError("var_list: expected variables, got none")
    return variables


def trainable_here(operation: str, arrived: Sequence[AnyVariable]) -> list[AnyVariable]:
    """Return the trainable variables of the strategy that is served here.

    Args:
        operation: For messages.
        arrived: Those that came with an optimizer from another process.

    Raises:
        UsageError: There is none, or it is not clear of which strategy.
    """
    runtime, scopes = current_runtime(), running_scopes()
    if runtime is not None:
        scopes = [scope for scope in scopes if scope._origin == runtime.origin]
    elif len(scopes) > 1:
        raise UsageError(
            f"{operation}: {len(scopes)} strategies are running", hint="say which variables"
        )
    if scopes:
        variables = scopes[0]._trainable()
    else:  # another process than the program's
        origin = runtime.origin if runtime is not None else None
        variables = [variable for variable in arrived if variable.origin == origin]
    if not variables:
        raise UsageError(
            f"{operation}: no trainable variable is declared here",
            hint="declare variables before the step that captures this optimizer is first "
            "scheduled, or say which variables",
        )
    return variables


ValueAndGrad = Callable[..., Any]
"""Called with the values of a list of variables, one argument each, or with another nesting of
values as one argument. Returns the loss and the gradients in that order, or nested so; and
predictions, if it has any."""


def parts_of(made: Any) -> Sequence[Any]:
    """Return (loss, gradients), or those and predictions, of what a function of the user has made.

    Raises:
        ValueMismatchError: It has made something else.
    """
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise ValueMismatchError(
            "value_and_grad: expected a tuple or list (loss, gradients) or (loss, gradients, "
            f"predictions), got {got}",
            hint="return loss, [gradient_of_w, gradient_of_b]. For evaluation alone, a Trainer's "
            "loss_and_predictions returns (loss, predictions)",
        )
    return made


OF_THE_PROCESS = frozenset(
    {
        "number", "origin", "_rule", "_clips", "_arrived", "_also_trained", "_wrapper", "_in_use",
        "_global_step", "_told", "_settled", "_counter",
    }
)  # fmt: skip
"""Attributes of an optimizer that do not travel with it as they are."""


class OtherOptions(TypedDict, total=False):
    """Keyword arguments of all optimizers; see ``Optimizer``."""

    name: str | None
    forbid_nonfinite: bool
    staleness_bound: StalenessBound | None
    clipnorm: float | None
    global_clipnorm: float | None
    clipvalue: float | None
    gradient_accumulation_steps: int | None
    compression: Compression | None


class Options(OtherOptions, total=False):
    """Keyword arguments of all optimizers, including weight decay."""

    weight_decay: float | None


class Optimizer:
    """Base of all optimizers.

    ``synchronous``: whether its pushes are aggregated into steps, which several replicas complete.

    Args:
        rule: Update rule for each shard; see ``psync.rules`` for user-defined ones.
        name: Name for messages; default: the class's name, or the rule's for ``Optimizer`` itself.
        forbid_nonfinite: Whether a gradient with NaN or infinity is an error.
        staleness_bound: Bound on how far a worker may run ahead of the others; None: no bound.
        weight_decay: ``w -= learning_rate * weight_decay * w`` before each update ("decoupled").
            A push of some rows decays only these rows. See ``exclude_from_weight_decay``.
        clipnorm: Largest norm of a variable's gradient. A larger gradient is scaled down to it
            before the push; the given arrays are not changed.
        global_clipnorm: Largest norm of all gradients of a push, taken as one vector.
        clipvalue: Largest absolute value of an element; with accumulation, of the mean's elements.
            At most one of these three may be given.
        gradient_accumulation_steps: Number of pushes, at least 2, to a variable (or to a shard that
            is pushed alone) whose mean makes one update. The ps sums them in the slot
            "gradient_accumulator". Schedules count pushes, everything else counts updates. Norms
            are clipped for each push.
        compression: "bf16" or "f16": whole gradients of float32 variables travel in 16 bits. The
            rounding error is added to the same worker's next gradient of that variable.

    Raises:
        ConfigurationError: An argument is wrong; or more than one clipping option is given; or a
            user-defined rule or schedule is not registered here, or is unknown to a ps of the
            running coordinator (if none is running, its start raises). It is also a ValueError.

    Source: ``keras.optimizers.Optimizer`` of Keras 3, for names and defaults. There, norms of
        accumulated gradients are clipped after the mean.
    """

    _synchronous: ClassVar[bool] = False
    _push_options: ClassVar[frozenset[str]] = frozenset()  # further ones of ``apply_gradients``
    number: int  # with ``origin``, what it is known by
    origin: str  # the process that made it

    def __init__(self, rule: UpdateRule, **options: Unpack[Options]) -> None:
        self._check_names(options)
        forbid_in_step(
            f"making an optimizer ({type(self).__name__})",
            instead="make it once in main(), on the coordinator; the step may capture it. "
            "Its slots live as long as it does",
        )
        bound = options.get("staleness_bound")
        expected = "expected a StalenessBound or None as staleness_bound"
        hint = "staleness_bound=psync.StalenessBound(2)"
        check_fits(isinstance(bound, StalenessBound | None), expected, bound, hint)
        kind: Any = UpdateRule  # abstract, which a type[…] must not be
        checked_kind("optimizer: expected an UpdateRule", rule, kind, hint="psync.optimizers.SGD()")
        of_rule = RuleOptions(
            options.get("weight_decay"), options.get("clipnorm"), options.get("global_clipnorm"),
            options.get("clipvalue"), options.get("gradient_accumulation_steps"),
        )  # fmt: skip
        # A copy either way: others may be made of the same rule, and have rates of their own.
        self._set_rule(rule.with_options(rule.options if of_rule == RuleOptions() else of_rule))
        default = type(rule if type(self) is Optimizer else self).__name__
        self._name = options.get("name") or default
        if registered_in(rule):
            rule_from_config(self._config)  # it is registered here, and bears its probe
            for scope in running_scopes():
                if scope._runtime is not None:
                    check_plugins(scope._runtime.ps.links, self._name, rule)
        self._forbid_nonfinite = options.get("forbid_nonfinite", False)
        self._compression = checked_compression(self._name, options.get("compression"))
        self._staleness_bound = bound
        self._begin(in_use=False)
        optimizers_here().add_new(self)

    def _check_names(self, options: Iterable[str]) -> None:
        for name in options:
            if name not in Options.__annotations__:
                taken = inspect.signature(type(self)).parameters.values()
                own = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
                known = [*own, *Options.__annotations__]
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(known)}"
                text = f"{type(self).__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{text}; {hint}")

    def _begin(self, *, in_use: bool) -> None:
        """Take up life in this process."""
        self._arrived: tuple[AnyVariable, ...] = ()
        self._also_trained: set[tuple[str, int]] = set()  # not trainable, and pushed from here
        self._wrapper: weakref.ref[Optimizer] | None = None
        # Variables that it may train together, and what their gradients are.
        self._settled: dict[tuple[Any, ...], list[tuple[np.dtype, tuple[int, ...]]]] = {}
        self._counter: Variable | None = None  # a global step that was checked
        self._in_use = in_use  # from then on the ps tasks know the configuration, or soon will

    def __psync_handle__(self) -> tuple[int, ...]:
        """Say on what its pickle depends: variables are declared one after the other."""
        return tuple(len(scope._variables) for scope in running_scopes())

    def __reduce__(self) -> tuple[Any, ...]:
        self._in_use = True
        variables = [v for scope in running_scopes() for v in scope._trainable()]
        state = {name: value for name, value in vars(self).items() if name not in OF_THE_PROCESS}
        arrived = tuple(variables or self._arrived)
        return restored, (type(self), self.origin, self.number, state, arrived)

    @property
    def _holder(self) -> Optimizer:
        """The optimizer that holds the state on ps tasks: the wrapper, if this one is wrapped."""
        wrapper = None if self._wrapper is None else self._wrapper()
        return wrapper or self

    def _set_rule(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._clips = clips_norms(rule.options)
        self._config = rule.to_config()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} {self._config}>"

    def get_name(self) -> str:
        """Return the name."""
        return self._name

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots."""
        return list(self._rule.slot_names())

    def get_slot(self, var: AnyVariable, name: str) -> Slot | None:
        """Return the slot ``name`` of ``var``, or None if there is no such slot.

        A trainable variable of a float dtype has all slots of this optimizer as soon as it is
        declared. Until gradients are pushed for it, they have their first values. Other variables
        have no slots unless this process has pushed gradients for them.

        Source: ``tf.compat.v1.train.Optimizer.get_slot``, where the first gradients create the
            slot, for any variable.
        """
        if name not in self._rule.slot_names() or not self._trains(var):
            return None
        return Slot(var, self._holder, name)

    def _trains(self, variable: AnyVariable) -> bool:
        spec = variable.spec
        if (variable.origin, spec.variable_id) in self._also_trained:
            return True
        return spec.trainable and "float" in spec.dtype

    def variables(self) -> list[Slot]:
        """Return its slots of all trainable variables of a float dtype.

        Raises:
            UsageError: It has slots, but the variables are unknown here; see ``compute_gradients``.

        Source: ``tf.compat.v1.train.Optimizer.variables``.
        """
        names = self._rule.slot_names()
        variables = trainable_here("variables", self._arrived) if names else ()
        trained = filter(self._trains, variables)
        return [Slot(variable, self._holder, name) for variable in trained for name in names]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return dict(self._config)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[AnyVariable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay; replaces the result of earlier calls.

        Args:
            var_list: Variables to exclude; a shard stands for its whole variable.
            var_names: Words such as "bias"; variables whose name contains one of them are excluded.

        Raises:
            UsageError: The optimizer is already in use: it has pushed gradients, or a step has
                captured it.
            ConfigurationError: An item is not a word, or a single word was given instead of
                several. It is also a ValueError.
            ValueMismatchError: An item of ``var_list`` is not a variable.

        Source: ``keras.optimizers.Optimizer.exclude_from_weight_decay``.
        """
        if self._in_use:
            raise UsageError(
                f"exclude_from_weight_decay: {self._name} is already in use",
                hint="call it right after creating the optimizer",
            )
        variables = [] if var_list is None else leaves(listed(var_list))
        options = dataclasses.replace(
            self._rule.options,
            excluded_names=tuple(variable.spec.shards[0].variable for variable in variables),
            excluded_words=words_of(var_names or ()),
        )
        self._set_rule(self._rule.with_options(options))

    @property
    def learning_rate(self) -> float | Schedule:
        """The learning rate: a number, or the schedule that the ps tasks evaluate."""
        rate = self._holder._rule.learning_rate
        return rate.value if isinstance(rate, Constant) else rate

    async def set_learning_rate(self, learning_rate: float | Schedule) -> None:
        """Set the learning rate on the ps tasks, for the pushes of all workers.

        Only this handle's ``learning_rate`` shows the new value; the copies on workers do not.

        Args:
            learning_rate: A number or a schedule.

        Raises:
            ConfigurationError: It is neither.
            UsageError: The call is inside a step, or no coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Some ps tasks may keep the old rate.
        """
        forbid_in_step("set_learning_rate", instead="call it in main(), or use a schedule")
        rate = as_schedule(learning_rate)
        runtime = await self._runtime("set_learning_rate")
        holder = self._holder
        await runtime.ps.set_optimizer(holder.number, self._config, learning_rate=rate.to_config())
        holder._rule.learning_rate = rate

    @property
    def iterations(self) -> Iterations:
        """The number of updates it has made: ``await optimizer.iterations.read()``.

        Source: ``keras.optimizers.Optimizer.iterations``.
        """
        return Iterations(self._holder)

    def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: AnyVariable | None = None
    ) -> Coroutine[Any, Any, PushResult]:
        """Push gradients; each ps applies them to its shards immediately.

        In a replica of ``strategy.run`` the gradients of all replicas are summed and pushed once.

        With a ``staleness_bound``, a step then waits until the others are not too far behind.

        Args:
            grads_and_vars: Pairs of gradient and variable. A gradient is an array of the variable's
                shape and dtype, or a CPU array of another library, such as torch or jax, that numpy
                converts without a copy. Pairs with None are skipped. Arrays are not copied: do not
                change them before this returns. For some rows only, use ``psync.IndexedSlices`` or
                TensorFlow's; repeated rows are summed, and other rows and their slots do not
                change.
            global_step: Integer scalar variable to increase by one: in the same update if its ps
                receives a part of it, otherwise once all parts are applied.

        Returns:
            The outcome, the optimizer's step, and the staleness.

        Raises:
            ValueMismatchError: There is no gradient; a variable occurs twice or is not floating; a
                shape or dtype is wrong; the variable does not have a row; some rows are given but
                this optimizer needs all; or there is NaN or infinity although the optimizer forbids
                it. Nothing was pushed.
            UsageError: The call is outside a step, and no coordinator is running; or the step has
                ended; or ``global_step`` belongs to another strategy, is not an integer scalar, or
                has a value for each task.
            ClosureCancelled: The step was cancelled.
            ParameterServerLost: A ps is lost.

        Cancellation: A push that has begun completes in the background; gradients must not change
            until then.

        Source: ``tf.compat.v1.train.Optimizer.apply_gradients``. Unlike there, gradients that are
            pushed again after the loss of a worker are applied at most once on each shard.
        """
        return self._pushed(grads_and_vars, global_step, (), [])

    async def _pushed(
        self,
        grads_and_vars: GradsAndVars,
        global_step: AnyVariable | None,
        pulled: Sequence[AnyVariable],
        values: list[np.ndarray],
    ) -> PushResult:
        """Push gradients. Values of ``pulled`` that come with the answers are added to ``values``.

        These are all or none.
        """
        gradients, variables = self._settled_pairs(grads_and_vars) or self._checked(grads_and_vars)
        concerned = variables
        if global_step is not None:
            if global_step is not self._counter:
                self._counter = check_step(global_step, "apply_gradients: global_step")
            concerned += (global_step,)
        if (member := current_gang()) is not None:
            pairs = list(zip(gradients, variables, strict=True))
            return await gang_updates.apply_gradients(member, self, pairs, global_step)  # type: ignore[no-any-return]
        if self._clips:
            ids = [variable.spec.variable_id for variable in variables]
            gradients = clipped_by_norm(gradients, ids, self._rule.options)
        runtime = await self._runtime("apply_gradients", *concerned, *pulled)
        self._wrapper = None  # then it has a state of its own
        ps, plan = runtime.ps, runtime.ps.plan_of(variables)
        landing = None
        if pulled and (asked := self._asked(runtime, pulled, global_step)) is not None:
            landing = ps.landing(asked, plan)
        call, known = runtime.begin_update("push"), runtime.pushes(self.number)
        number, before = known.number, {}
        if len(plan.first) < len(ps.links):
            before = known.before(plan, len(ps.links))
        raised = None  # by one, in the same update; not of a rule that may raise an error
        if global_step is not None and not self._rule.may_raise:
            (shard,) = global_step.spec.shards
            raised = shard if shard.ps in plan.first else None
        push = functools.partial(
            ps.push, optimizer=self.number, config=self._config, elsewhere=known.elsewhere,
            call=call, layerwise=self._rule.takes_norms, landing=landing, raised=raised,
        )  # fmt: skip
        kind, apart = self._compression, raised is None and global_step is not None
        if kind is None and not apart:
            answers = await push(plan, gradients)
        else:
            counting = runtime.begin_update("push") if apart else None

            async def in_parts() -> list[Pushed]:
                if kind is None:
                    found = await push(plan, gradients)
                else:
                    found = await runtime.feedback.push(
                        plan, gradients, push, kind=kind, optimizer=self.number
                    )
                if global_step is not None and counting is not None:
                    one = [np.ones((), global_step.dtype)]
                    await ps.assign(ps.plan_of((global_step,)), one, op="add", call=counting)
                return found

            answers = await ps.outgoing.shielded(in_parts)
            plan = ps.plan(plan.variables, kind)  # whose messages are answered
        if known.timeline != ps.outgoing.timeline:  # it is undone
            known, number, before = runtime.pushes(self.number), 0, {}
        known.learn(plan, before, answers)
        result = result_of(answers, number)
        if self._staleness_bound is not None and result.outcome is Outcome.ACCEPTED:
            if call[0] >= 0 or runtime.in_session:  # else the program itself, which has no clock
                await self._staleness_bound.end_round(runtime, self.number)
        if landing is not None and landing.arrays is not None:
            runtime.pulled.note(landing.steps)
            values += landing.arrays
        return result

    async def push_pull(
        self,
        grads_and_vars: GradsAndVars,
        pull: Any,
        global_step: AnyVariable | None = None,
        **options: Any,
    ) -> tuple[PushResult, Any]:
        """Push gradients, and return the values of the next step, read after the push.

        The same as ``apply_gradients``, then ``psync.pull``, but with one round trip to each ps for
        both. The values are pulled separately if a variable is on a ps to which nothing is pushed,
        or if another task is updating it. The same holds if the ``global_step`` is among the
        variables, with a ``staleness_bound``, in replicas of ``strategy.run``, and in
        ``cache_variable_reads``. A synchronous optimizer pulls more than 64 KiB separately, too.

        Args:
            grads_and_vars: See ``apply_gradients``.
            pull: A variable, or any nesting of variables, as ``psync.pull`` takes it.
            global_step: See ``apply_gradients``.
            options: Further arguments of ``apply_gradients``.

        Returns:
            The result of ``apply_gradients``; and the same nesting as ``pull`` with a read-only
            array for each variable. Each shard is read on its ps after the push is applied there.
            It may lack updates by others, including those that ``staleness`` has counted. In
            ``cache_variable_reads``, the values are the cached ones, if there are any.

        Raises:
            PsyncError: See ``apply_gradients`` and ``psync.pull``. If a variable cannot be pulled,
                nothing is pushed.

        Cancellation: See ``apply_gradients``.

        Example:
            values = await psync.pull(model)
            for batch in batches:
                loss, grads = value_and_grad(values, batch)
                result, values = await optimizer.push_pull(zip(grads, model), pull=model)

        Source: ``push_pull`` of BytePS.
        """
        if unknown := sorted(options.keys() - self._push_options):
            raise TypeError(f"push_pull() got an unexpected keyword argument {unknown[0]!r}")
        is_list = type(pull) is list and is_flat(pull)
        variables = tuple(dict.fromkeys(pull if is_list else leaves(pull)))
        values: list[np.ndarray] = []
        result = await self._pushed(grads_and_vars, global_step, variables, values, **options)
        if not values:
            return result, await pull_values(pull)
        if is_list and len(values) == len(pull):  # each stands there once
            return result, values
        return result, mapped(pull, dict(zip(variables, values, strict=True)).__getitem__)

    def _asked(
        self, runtime: Runtime, pulled: Sequence[AnyVariable], step: AnyVariable | None
    ) -> Plan | None:
        """Return the plan of what may come with a push; None: nothing, it is pulled apart."""
        raised = None if step is None else step.spec.variable_id
        for variable in pulled:
            if type(variable) is OnReadVariable or variable.spec.variable_id == raised:
                return None
        # Nothing changes the values after the push is applied.
        if self._staleness_bound is not None or kept_here() is not None:
            return None
        return runtime.ps.plan_of(tuple(pulled))

    async def compute_gradients(
        self, value_and_grad: ValueAndGrad, var_list: Any = None
    ) -> list[tuple[Any, AnyVariable]]:
        """Pull the variables and return pairs of gradient and variable.

        Args:
            value_and_grad: Function of the values, one argument each, that returns the loss and the
                gradients in the same order. If the variables are nested in anything but a list, the
                values are one argument with the same nesting, and so are the returned gradients.
                Predictions may follow, as for ``Trainer``; they are not used.
            var_list: The variables: one, several, or any nesting of them as ``pull`` takes it.
                Default: all trainable variables of the strategy. If steps run in other processes
                than the program, the default is the variables declared before the step was first
                scheduled.

        Raises:
            ValueMismatchError: The function returned another kind of value, another number of
                gradients, or another nesting; or an item of ``var_list`` is not a variable.
            UsageError: ``var_list`` is not given, and there is no trainable variable or, outside a
                step, two strategies are running.

        Cancellation: Safe.
        """
        if var_list is None:
            variables: Any = trainable_here("compute_gradients without var_list", self._arrived)
        else:
            variables = listed(var_list)
        flat, values = is_flat(variables), await pull_values(variables)
        _, grads, *_ = parts_of(value_and_grad(*values) if flat else value_and_grad(values))
        grads = list(grads) if flat and np.iterable(grads) else grads
        return [(gradient, variable) for variable, gradient in pairs(variables, grads, "gradients")]

    async def minimize(
        self,
        value_and_grad: ValueAndGrad,
        var_list: Any = None,
        global_step: AnyVariable | None = None,
    ) -> Any:
        """Pull, compute and push: ``compute_gradients``, then ``apply_gradients``.

        Returns:
            The loss.

        Raises:
            PsyncError: See these two methods.

        Cancellation: See ``apply_gradients``.
        """
        answers = []

        def noting(*values: Any) -> Any:
            answers.append(value_and_grad(*values))
            return answers[-1]

        gradients = await self.compute_gradients(noting, var_list)
        await self.apply_gradients(gradients, global_step)
        return answers[-1][0]

    def _checked(
        self, grads_and_vars: GradsAndVars
    ) -> tuple[Sequence[Gradient], tuple[AnyVariable, ...]]:
        """Return gradients that fit, as arrays or rows, and their variables; None is passed over.

        Raises:
            ValueMismatchError: No gradient at all, no pairs, a variable twice, one that is not
                floating, a wrong shape or dtype, a row that the variable does not have, or what
                this optimizer forbids.
        """
        if hasattr(grads_and_vars, "__next__"):  # it can be gone through once
            grads_and_vars = list(grads_and_vars)
            if (known := self._settled_pairs(grads_and_vars)) is not None:
                return known
        gradients: list[Gradient] = []
        variables: tuple[AnyVariable, ...] = ()
        without: list[str] = []  # names of variables whose gradient is None
        seen: set[tuple[str, int, int]] = set()  # shards
        finite = self._name if self._forbid_nonfinite else None
        if isinstance(grads_and_vars, dict) or not np.iterable(grads_and_vars):
            raise _no_pairs(grads_and_vars)
        for pair in grads_and_vars:
            try:
                gradient, variable = pair
            except (TypeError, ValueError):
                raise _no_pairs(pair) from None
            expected = "apply_gradients: expected a variable in each (gradient, variable) pair"
            spec = checked_kind(expected, variable, Handle, error=ValueMismatchError).spec
            if gradient is None:
                without.append(spec.name)
                continue
            if isinstance(variable, OnReadVariable):
                raise ValueMismatchError(
                    f'apply_gradients: variable "{spec.name}" is synchronized on read: each worker '
                    "has a different value, and optimizers do not train it"
                )
            shards = {(variable.origin, spec.variable_id, shard.index) for shard in spec.shards}
            if not seen.isdisjoint(shards):
                raise ValueMismatchError(f'apply_gradients: variable "{spec.name}" appears twice')
            seen |= shards
            gradient = _checked(gradient, spec, finite)
            if isinstance(gradient, IndexedSlices):  # a ps would refuse, others would not
                self._rule.check_rows(f'gradient for "{spec.name}"')
            gradients.append(gradient)
            variables += (variable,)
        if not gradients:
            names = ", ".join(without)
            found = f"all gradients are None ({names})" if names else "no gradients given"
            raise ValueMismatchError(f"apply_gradients: {found}")
        self._also_trained |= {
            (each.origin, each.spec.variable_id) for each in variables if not each.spec.trainable
        }
        if not self._forbid_nonfinite:
            if len(self._settled) >= MAX_SETTLED:
                self._settled.clear()
            self._settled[variables] = [
                (dtype_of(each.spec.dtype), each.spec.shape) for each in variables
            ]
        return gradients, variables

    def _settled_pairs(
        self, pairs: Any
    ) -> tuple[Sequence[Gradient], tuple[AnyVariable, ...]] | None:
        """Return gradients and variables that need no other check; None: it is not sure."""
        if not isinstance(pairs, (list, tuple)) or not _PAIRS.issuperset(map(type, pairs)):
            return None  # or they could be gone through once
        try:
            gradients, variables = zip(*pairs, strict=True)
            expected = self._settled[variables]
        except (TypeError, ValueError, KeyError):
            return None
        if not _ARRAYS.issuperset(map(type, gradients)):
            # numpy's numbers are arrays, too; all else is looked at more closely.
            gradients = tuple(
                [np.asarray(each) if isinstance(each, np.generic) else each for each in gradients]
            )
            if not _ARRAYS.issuperset(map(type, gradients)):
                return None
        for each, (dtype, shape) in zip(gradients, expected, strict=True):
            if each.dtype != dtype or each.shape != shape or not each.flags.c_contiguous:
                return None
        return gradients, variables

    async def _runtime(self, operation: str, *variables: AnyVariable) -> Runtime:
        """Return what carries ``operation`` to the ps tasks, by default on all that it trains."""
        chosen = variables or trainable_here(operation, self._arrived)[:1]
        if not variables:
            operation = f'{operation} of optimizer "{self._name}"'
        runtime = await runtime_of(operation, *chosen)
        self._in_use = True
        if runtime.program and runtime.program != self.origin:
            raise UsageError(
                f"optimizer {self._name!r} was created on this worker, so its slots would not be "
                "shared",
                hint="create it in main(), on the coordinator, and let the step capture it",
            )
        return runtime


class OptimizerRegistry:
    """Optimizers by their origin and number.

    Attributes:
        known: This process's handles.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[tuple[str, int], Optimizer] = (
            weakref.WeakValueDictionary()
        )
        self.begin_process()

    def begin_process(self) -> None:
        """Number the optimizers that are made from now on as those of a process of their own."""
        self.process = random_hex(8)  # the origin of those that are made here
        self._numbers = itertools.count(1)

    def add_new(self, optimizer: Optimizer) -> None:
        """Number an optimizer that is made here."""
        optimizer.number, optimizer.origin = next(self._numbers), self.process
        self.known[optimizer.origin, optimizer.number] = optimizer

    def of_the_program(self) -> list[NewOptimizer]:
        """Return the optimizers of this program through which it may push, by their numbers."""
        return [
            NewOptimizer(number, each._name, each._config, each._rule.learning_rate.to_config())
            for (origin, number), each in sorted(self.known.items())
            if origin == self.process and each._holder is each  # else it is wrapped
        ]

    def check_unused(self, links: Sequence[PsLink]) -> None:
        """Check that all ps tasks know the rules of the optimizers that were not used yet.

        Those that were may belong to another cluster. Raises ConfigurationError: one does not.
        """
        for optimizer in list(self.known.values()):
            if optimizer.origin == self.process and not optimizer._in_use:
                check_plugins(links, optimizer._name, optimizer._rule)

    def begin_cluster(self) -> None:
        """Note that ps tasks begin with the learning rates with which optimizers were made.

        Those that were set in a cluster before are gone, as its variables and steps are.
        """
        if running_scopes():
            return  # a cluster runs beside it, and may use them
        for optimizer in self.known.values():
            made_with = optimizer._config.get("learning_rate")
            if optimizer._rule.learning_rate.to_config() != made_with and made_with is not None:
                optimizer._rule.learning_rate = schedule_from_config(made_with)

    def note_learning_rate(self, number: int, config: Mapping[str, Any]) -> None:
        """The ps tasks go on with a learning rate that another program has set."""
        optimizer = self.known.get((self.process, number))
        if optimizer is not None:
            optimizer._rule.learning_rate = schedule_from_config(config)

    def any_synchronous(self) -> bool:
        """Return whether this process has an optimizer whose pushes are counted in steps."""
        return any(optimizer._synchronous for optimizer in self.known.values())


optimizers_here = PerProcess(OptimizerRegistry)


def restored(
    cls: type[Optimizer],
    origin: str,
    number: int,
    state: dict[str, Any],
    variables: tuple[AnyVariable, ...],
) -> Optimizer:
    """Return this process's handle of an optimizer: one object, however often it arrives."""
    optimizer = optimizers_here().known.get((origin, number))
    if optimizer is None:
        optimizer = cls.__new__(cls)
        vars(optimizer).update(state, origin=origin, number=number)
        optimizer._set_rule(rule_from_config(optimizer._config))
        optimizer._begin(in_use=True)
        optimizers_here().known[origin, number] = optimizer
    if len(variables) > len(optimizer._arrived):  # more may have been declared since
        optimizer._arrived = variables
    return optimizer
