"""The optimizer handle: configuration, pushes and their outcomes, slots.

An optimizer is a handle: a number and a configuration. A ps gets the configuration with the
first push on a connection, keeps the slots beside their shards, and applies each push at
once (asynchronous training). The classes that users make are in ``psync.optimizers``; the averaged,
synchronous form is ``SyncReplicasOptimizer``.
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
from psync.client.scopes import running_scopes
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

    ``synchronous``: whether its pushes are counted in steps, which several replicas complete.

    Args:
        rule: What is applied to each shard: one of your own, see ``psync.rules``.
        name: For messages; default: the class's name, or of ``Optimizer`` itself the rule's.
        forbid_nonfinite: Whether a gradient with NaN or infinity is an error.
        staleness_bound: How far a worker may run ahead of the others; None: as far as it likes.
        weight_decay: ``w -= learning_rate * weight_decay * w`` before each update ("decoupled"),
            where a push of some rows decays these only. See ``exclude_from_weight_decay``.
        clipnorm: Longest gradient of a variable: a longer one is shortened to it before it is
            pushed. The arrays that were given stay as they are.
        global_clipnorm: The same for all gradients of a push, taken as one vector.
        clipvalue: Largest absolute value of an element; with accumulation, of the mean. At most one
            of these three.
        gradient_accumulation_steps: At least 2: that many pushes to a variable, or to a shard that
            is pushed alone, make one update, with their mean. Until then they are summed on the
            ps, in the slot "gradient_accumulator". Schedules count pushes, all else updates.
            Norms are clipped of each push.
        compression: "bf16" or "f16": whole gradients of float32 variables travel in 16 bits; what
            rounding takes from one is added to the same worker's next one of that variable.

    Raises:
        ConfigurationError: An argument is wrong, there are two ways to clip, or a rule or schedule
            of your own is not registered here, or not known to a ps of a running coordinator
            (which else says so when it starts); also ValueError.

    Source: ``keras.optimizers.Optimizer`` of Keras 3, whose names and defaults these are. There
        norms of accumulated gradients are clipped after the mean.
    """

    synchronous: ClassVar[bool] = False
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
                if scope.runtime is not None:
                    check_plugins(scope.runtime.ps.links, self._name, rule)
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
        return tuple(len(scope.variables) for scope in running_scopes())

    def __reduce__(self) -> tuple[Any, ...]:
        self._in_use = True
        variables = [v for scope in running_scopes() for v in scope.trainable_variables]
        state = {name: value for name, value in vars(self).items() if name not in OF_THE_PROCESS}
        arrived = tuple(variables or self._arrived)
        return restored, (type(self), self.origin, self.number, state, arrived)

    @property
    def holder(self) -> Optimizer:
        """Whose state on ps tasks is meant: of an optimizer that is wrapped, its wrapper's."""
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
        """Return the slot ``name`` of ``var``, or None if there is none.

        A trainable variable of a float dtype has all slots of this optimizer from its declaration
        on: until gradients are pushed for it they have their first values. Other variables have
        none, unless this process has pushed gradients for them.

        Source: ``tf.compat.v1.train.Optimizer.get_slot``; there a slot is made with the first
            gradients, of whatever variable.
        """
        if name not in self._rule.slot_names() or not self._trains(var):
            return None
        return Slot(var, self.holder, name)

    def _trains(self, variable: AnyVariable) -> bool:
        spec = variable.spec
        if (variable.origin, spec.variable_id) in self._also_trained:
            return True
        return spec.trainable and "float" in spec.dtype

    def variables(self) -> list[Slot]:
        """Return its slots of all trainable variables that can be optimized (of a float dtype).

        Raises:
            UsageError: It has slots, and it is not known here of which variables; see
                ``compute_gradients``.

        Source: ``tf.compat.v1.train.Optimizer.variables``.
        """
        names = self._rule.slot_names()
        variables = trainable_here("variables", self._arrived) if names else ()
        trained = filter(self._trains, variables)
        return [Slot(variable, self.holder, name) for variable in trained for name in names]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return dict(self._config)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[AnyVariable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay; replaces what an earlier call said.

        Args:
            var_list: These variables; a shard stands for the whole of its variable.
            var_names: Those in whose name one of these words occurs, such as "bias".

        Raises:
            UsageError: The optimizer is in use already: it was pushed through, or a step has
                captured it.
            ConfigurationError: A word is none, or one instead of several; also a ValueError.
            ValueMismatchError: Something in ``var_list`` is no variable.

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
        rate = self.holder._rule.learning_rate
        return rate.value if isinstance(rate, Constant) else rate

    async def set_learning_rate(self, learning_rate: float | Schedule) -> None:
        """Set the learning rate on the ps tasks, for the pushes of all workers.

        Only this handle's ``learning_rate`` shows it: workers do not need to know.

        Args:
            learning_rate: A number or a schedule.

        Raises:
            ConfigurationError: It is neither.
            UsageError: Inside a step, or outside of a running coordinator.
            ParameterServerLost: A ps is gone.

        Cancellation: Some ps tasks may go on with the old one.
        """
        forbid_in_step("set_learning_rate", instead="call it in main(), or use a schedule")
        rate = as_schedule(learning_rate)
        runtime = await self._runtime("set_learning_rate")
        holder = self.holder
        await set_optimizer(runtime.ps, holder.number, self._config, learning_rate=rate.to_config())
        holder._rule.learning_rate = rate

    @property
    def iterations(self) -> Iterations:
        """How many updates it has made: ``await optimizer.iterations.read()``.

        Source: ``keras.optimizers.Optimizer.iterations``.
        """
        return Iterations(self.holder)

    async def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: AnyVariable | None = None
    ) -> PushResult:
        """Push gradients; each ps applies them to its shards at once.

        In a replica of ``strategy.run`` the gradients of all replicas are summed and pushed once.

        With a ``staleness_bound`` a step then waits until the others are not too far behind.

        Args:
            grads_and_vars: Pairs of gradient and variable. A gradient is an array (or anything
                that numpy makes one of without a copy, such as a torch or jax array on the
                CPU) of the variable's shape and dtype; None is passed over. It is not copied:
                do not change it before this returns. Of some rows only: ``psync.IndexedSlices``,
                or TensorFlow's; rows that occur more than once are summed, and rows that do not
                occur are not touched, nor what this optimizer keeps beside them.
            global_step: A variable, an integer scalar, that is raised by one: in the same update,
                if its ps gets a part of it, else once all are applied.

        Returns:
            The outcome, the optimizer's step, and the staleness.

        Raises:
            ValueMismatchError: No gradient at all, a variable twice, one that is not floating, a wrong
                shape or dtype, a row that the variable does not have, rows where this optimizer
                needs all of them, or NaN or infinity where it forbids them. Nothing was pushed.
            UsageError: Outside a step without a running coordinator, or after the step ended; or
                the ``global_step`` is of another strategy, no integer scalar, or one for each task.
            ClosureCancelled: In a step that was cancelled.
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun ends in the background; gradients must not change
            until then.

        Source: ``tf.compat.v1.train.Optimizer.apply_gradients``. Unlike there, gradients that
            are pushed again after a worker's loss are applied at most once on each shard.
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
            value_and_grad: Called with the values, one argument each; returns the loss and the
                gradients in the same order. Of variables that are nested otherwise than in a list
                it gets the values as one argument, nested alike, and so it returns the gradients.
                Predictions may follow them, as for ``Trainer``, and are not used.
            var_list: The variables: one, several, or any nesting of them as ``pull`` takes it.
                Default: all trainable variables of the strategy. Where steps run in other
                processes than the program, those that were declared before the step was first
                scheduled.

        Raises:
            ValueMismatchError: If the function returns something else, another number of gradients, or
                nested otherwise; or something in ``var_list`` is no variable.
            UsageError: Without ``var_list``: there is no trainable variable; or, outside a step,
                two strategies are running.

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
            PsyncError: As these two.

        Cancellation: As ``apply_gradients``.
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
