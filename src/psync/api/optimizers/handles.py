"""The optimizer handle: configuration, pushes and their outcomes, slots.

An optimizer is a handle: a number and a configuration. A ps gets the configuration with the first
push on a connection, keeps the slots beside their shards, and applies each push immediately
(asynchronous training). The public classes are in ``psync.optimizers``. ``SyncReplicasOptimizer``
is the averaged, synchronous form.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from psync.api.global_step import check_step
from psync.api.gradient_arguments import (
    AnyVariable,
    GradsAndVars,
    Pairs,
    ValueAndGrad,
    checked_pairs,
    listed,
    trainable_here,
    value_and_gradients,
)
from psync.api.optimizers.push_pull import Answered, PushPull
from psync.api.optimizers.registry import optimizers_here, restored
from psync.api.optimizers.staleness_bound import StalenessBound
from psync.api.optimizers.state import Iterations, PushResult, result_of
from psync.api.optimizers.state import Slot as Slot
from psync.api.pulls import leaves
from psync.api.reads import runtime_of
from psync.api.scopes import running_scopes
from psync.client.context import forbid_in_step
from psync.client.optimizer_client import (
    check_plugins,
    push_and_count,
    push_gradients,
    raised_with,
    set_optimizer,
)
from psync.client.prefetch import Wanted
from psync.client.runtime import Runtime
from psync.errors import ConfigurationError, UsageError
from psync.numerics.clipping import clipped_by_norm
from psync.numerics.compression import Compression, checked_compression
from psync.numerics.rule_configs import registered_in, rule_from_config
from psync.numerics.rule_options import RuleOptions, words_of
from psync.numerics.scatter import IndexedSlices
from psync.numerics.update_rule import UpdateRule
from psync.replicas import gang_updates
from psync.replicas.context import current_gang
from psync.schedules import Constant, Schedule, as_schedule
from psync.specs import Outcome, checked_kind

OF_THE_PROCESS = frozenset(
    {"number", "origin", "_rule", "_arrived", "_also_trained", "_wrapper", "_in_use"}
)
"""Attributes of an optimizer that do not travel with it as they are."""


class Optimizer(PushPull):
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
    number: int  # with ``origin``, what it is known by
    origin: str  # the process that made it

    def __init__(
        self,
        rule: UpdateRule,
        *,
        name: str | None = None,
        forbid_nonfinite: bool = False,
        staleness_bound: StalenessBound | None = None,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        gradient_accumulation_steps: int | None = None,
        compression: Compression | None = None,
    ) -> None:
        forbid_in_step(
            f"making an optimizer ({type(self).__name__})",
            instead="make it once in main(), on the coordinator; the step may capture it. "
            "Its slots live as long as it does",
        )
        if not isinstance(staleness_bound, StalenessBound | None):
            raise ConfigurationError(
                f"expected a StalenessBound or None as staleness_bound, got {staleness_bound!r}",
                hint="staleness_bound=psync.StalenessBound(2)",
            )
        kind: Any = UpdateRule  # abstract, which a type[…] must not be
        checked_kind("optimizer: expected an UpdateRule", rule, kind, hint="psync.optimizers.SGD()")
        options = RuleOptions(
            weight_decay, clipnorm, global_clipnorm, clipvalue, gradient_accumulation_steps
        )
        # A copy either way: others may be made of the same rule, and have rates of their own.
        self._set_rule(rule.with_options(rule.options if options == RuleOptions() else options))
        self._name = name or type(rule if type(self) is Optimizer else self).__name__
        if registered_in(rule):
            rule_from_config(self._config)  # it is registered here, and bears its probe
            for scope in running_scopes():
                if scope._runtime is not None:
                    check_plugins(scope._runtime.ps.links, self._name, rule)
        self._forbid_nonfinite = forbid_nonfinite
        self._compression = checked_compression(self._name, compression)
        self._staleness_bound = staleness_bound
        self._begin(in_use=False)
        optimizers_here().add_new(self)

    def _begin(self, *, in_use: bool) -> None:
        """Take up life in this process."""
        self._arrived: tuple[AnyVariable, ...] = ()
        self._also_trained: set[tuple[str, int]] = set()  # not trainable, and pushed from here
        self._wrapper: weakref.ref[Optimizer] | None = None
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
        await set_optimizer(runtime.ps, holder.number, self._config, learning_rate=rate.to_config())
        holder._rule.learning_rate = rate

    @property
    def iterations(self) -> Iterations:
        """The number of updates it has made: ``await optimizer.iterations.read()``.

        Source: ``keras.optimizers.Optimizer.iterations``.
        """
        return Iterations(self._holder)

    async def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: AnyVariable | None = None
    ) -> PushResult:
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
        result, _ = await self._pushed(grads_and_vars, global_step, ())
        return result

    async def _pushed(
        self,
        grads_and_vars: GradsAndVars,
        global_step: AnyVariable | None,
        pulled: Sequence[AnyVariable],
    ) -> Answered:
        pairs = self._checked(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if global_step is not None:
            check_step(global_step, "apply_gradients: global_step")
            variables.append(global_step)
        if (member := current_gang()) is not None:
            return await gang_updates.apply_gradients(member, self, pairs, global_step), None
        gradients = [gradient for gradient, _ in pairs]
        specs = tuple(variable.spec for _, variable in pairs)
        ids = [spec.variable_id for spec in specs]
        gradients = clipped_by_norm(gradients, ids, self._rule.options)
        runtime = await self._runtime("apply_gradients", *variables, *pulled)
        self._wrapper = None  # then it has a state of its own
        pull = self._asked(runtime, pulled, global_step) if pulled else None
        closure, ordinal = runtime.begin_update("push")
        plan, known = runtime.ps.plan(specs), runtime.pushes(self.number)
        number, before = known.number, known.before(plan, len(runtime.ps.links))
        wanted = None if pull is None else Wanted(pull)
        raised = None if global_step is None else raised_with(plan, self._rule, global_step.spec)
        push = functools.partial(
            push_gradients, runtime.ps, self._rule, optimizer=self.number, config=self._config,
            elsewhere=known.elsewhere, closure=closure, ordinal=ordinal, wanted=wanted,
            raised=raised,
        )  # fmt: skip
        if self._compression is not None:
            push = functools.partial(
                runtime.feedback.push, send=push, kind=self._compression, optimizer=self.number
            )
        apart = None if global_step is None or raised is not None else global_step.spec
        answers = await push_and_count(runtime, functools.partial(push, plan, gradients), apart)
        if known is not (newer := runtime.pushes(self.number)):  # it is undone
            known, number, before = newer, 0, {}
        known.learn(plan, before, answers)
        result = result_of(answers, number)
        bound = self._staleness_bound
        if bound is not None and result.outcome is Outcome.ACCEPTED:
            if closure >= 0 or runtime.in_session:  # else the program itself, which has no clock
                await bound.end_round(runtime, self.number)
        return result, None if wanted is None else runtime.note_values(wanted)

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
        _, grads = await self._value_and_gradients(value_and_grad, var_list)
        return grads

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
        loss, grads = await self._value_and_gradients(value_and_grad, var_list)
        await self.apply_gradients(grads, global_step)
        return loss

    async def _value_and_gradients(
        self, value_and_grad: ValueAndGrad, var_list: Any
    ) -> tuple[Any, list[tuple[Any, AnyVariable]]]:
        if var_list is None:
            chosen = trainable_here("compute_gradients without var_list", self._arrived)
        else:
            chosen = listed(var_list)
        return await value_and_gradients(value_and_grad, chosen)

    def _checked(self, grads_and_vars: GradsAndVars) -> Pairs:
        pairs = checked_pairs(grads_and_vars, self._name if self._forbid_nonfinite else None)
        for gradient, variable in pairs:
            if not variable.spec.trainable:
                self._also_trained.add((variable.origin, variable.spec.variable_id))
            if isinstance(gradient, IndexedSlices):  # a ps would refuse, others would not
                self._rule.check_rows(f'gradient for "{variable.name}"')
        return pairs

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
