"""SyncReplicasOptimizer: the mean of several replicas' gradients, applied once a step.

``SyncReplicasOptimizer`` is a handle like every optimizer. A push through it goes to the ps
tasks in parts, ps 0 decides which pushes make a step, and the push returns with a token: the
step at which its replica may go on. See docs/design.md, "A synchronous step".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NoReturn

import msgspec

from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers import (
    AnyVariable,
    GradsAndVars,
    Optimizer,
    PushResult,
    ValueAndGrad,
)
from psync.api.scopes import running_scopes, runtime_of, scope_of
from psync.api.variables import Handle, Variable, check_step, global_step_of
from psync.client.context import ClosureContext, current_runtime, here
from psync.client.link import PsLink
from psync.errors import (
    ClosedError,
    ConfigurationError,
    UsageError,
    check_fits,
)
from psync.net.shielding import first_of
from psync.numerics.rules import flag
from psync.numerics.sums import check_weight
from psync.specs import Outcome, as_number, checked_kind
from psync.store.sync_config import SyncConfig, whole_number

_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


class SessionHook:
    """Base class of hooks of a ``MonitoredTrainingSession``; its methods do nothing.

    Source: ``tf.compat.v1.train.SessionRunHook``, without the methods for its graph.
    """

    def begin(self) -> None:
        """Called before the session connects. Its exceptions go to the program."""

    async def after_create_session(self, session: Any) -> None:
        """Called when the variables exist; on the chief, before any other task may enter."""

    async def after_run(self, session: Any, result: Any) -> None:
        """Called after each ``session.run`` except the last one, with its result."""

    async def end(self, session: Any) -> None:
        """Called when the loop has ended without an error, before the session leaves."""


class SyncReplicasHook(SessionHook):
    """Hook that prepares synchronous steps.

    Made by ``SyncReplicasOptimizer.make_session_run_hook``. The chief puts the initial tokens, once
    each time it attaches the ps tasks. A chief that restarts begins with empty ps tasks, so it does
    not add tokens to existing ones. There is no local step to set: a replica's first pull tells it
    the step at which it begins.

    Args:
        put_tokens: Function that puts the initial tokens; idempotent.
        is_chief: Whether this process is the chief.

    Source: ``_SyncReplicasOptimizerHook``; there, a restarted chief adds tokens to those left.
    """

    def __init__(self, put_tokens: Callable[[], Awaitable[Any]], is_chief: bool) -> None:
        self._put_tokens = put_tokens
        self._is_chief = is_chief

    async def after_create_session(self, session: Any) -> None:
        """Put the initial tokens, on the chief."""
        if self._is_chief:
            await self._put_tokens()


class ChiefQueueRunner:
    """A stand-in for TensorFlow's queue runner on the chief; ps 0 closes the steps instead.

    Args:
        global_step: The global step of the training.
    """

    def __init__(self, global_step: Variable) -> None:
        self._global_step = global_step

    async def run(self) -> None:
        """Return when training has ended, or when this task's connections are closed.

        Raises:
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe.
        """
        runtime = await runtime_of("the chief's queue runner", self._global_step)
        scope = scope_of(self._global_step)
        over = asyncio.Event() if scope is None else scope._training_over
        with contextlib.suppress(ClosedError):
            await first_of(over.wait(), until_lost(runtime.ps.links[0]))


async def until_lost(link: PsLink) -> NoReturn:
    """Raise what a call to a ps would raise, even if there are no calls. Cancellation: safe."""
    while True:
        await (await link.peer("control")).wait_closed()


NOWHERE = (0, -1, 0)
"""Stands for the global step in a configuration until the first push names it."""


def checked_step(operation: str, variable: object) -> Variable:
    """Return the global step that was given to ``operation``: stale gradients are detected by it.

    Raises:
        ConfigurationError: It is not a variable, or not an int64 scalar.
    """
    return check_step(variable, operation, dtype="int64", error=ConfigurationError)


class SyncReplicasOptimizer(Optimizer):
    """Averages the gradients of several replicas and applies the mean in one step.

    A replica is a worker. Each step takes the pushes of ``replicas_to_aggregate`` (R) of the
    ``total_num_replicas`` (N) replicas. If R < N, the others are backup workers, and steps do not
    wait for late ones. If R > N, a replica contributes several pushes to a step. A push counts
    whole or not at all, over all variables and ps tasks. A push whose gradients were computed from
    values of an earlier step is *stale*: it is dropped, and its result says so.

    ``apply_gradients`` returns when its replica may begin the next step, so replicas stay together.
    No replica waits for ever: with fewer living workers, or when nothing is left to schedule, a
    step closes with the pushes it has (``PushResult.partial``).

    The wrapped optimizer's rule is applied to the mean. So ``clipnorm`` and ``global_clipnorm``
    clip the mean of a step, not each replica's gradients. A step takes one more round trip between
    ps tasks if that needs norms over several ps tasks, and for ``Lamb`` with variables on several
    ps tasks. Slots belong to this optimizer: call its ``get_slot``, not the wrapped one's.

    Args:
        opt: One of ``psync.optimizers``. Its rule, name, ``forbid_nonfinite`` and ``compression``
            are used.
        replicas_to_aggregate: R, at least 1: number of pushes in a step.
        total_num_replicas: N, at least 1: number of replicas that are meant to run. Default: R.
        variable_averages: Moving averages to update in each step.
        variables_to_average: Variables to average; only with ``variable_averages``. Default: the
            trainable variables of the strategy whose scope is open.
        use_locking: No effect: each ps applies steps in order.
        name: Name in messages and statistics.
        strict: Whether a replica may contribute at most ⌈R/N⌉ pushes to a step, so that a fast one
            does not take the place of a slow one (tokens are bound to replicas).
        deterministic: Whether gradients are summed in the order of worker indices. The result then
            equals, bit for bit, that of one process that sums the same gradients in that order.
            Implies ``strict``; needs N = R.
        tensorflow_compat: Whether tokens work as in TensorFlow: R initial tokens, which waste each
            replica's second step; old tokens stay valid; and only the token, not the pulled values,
            determines the age of gradients.
        min_replicas: Number of living workers below which only ``join`` closes a step.
        patience_s: Seconds after which a replica waiting for ``min_replicas`` gets
            NotEnoughReplicas.
        reduction: "mean", weighted; or "sum".
        sparse_divisor: Divisor for gradients of some rows. "per_index" divides each row by the
            weights of the replicas that have it, as TensorFlow does; "total" divides by the weights
            of all counted replicas. If one replica has a whole gradient of a variable, the rows of
            others count as whole gradients with zeros in all other rows.
        pull_ahead: Whether the token brings the values of the new step, so that ``psync.pull`` of
            these variables needs no message. It brings the variables that were pulled first after
            the last push. Their values are from the token's step or later. They include this
            worker's own earlier pushes and assigns, and the program's updates before it scheduled
            the closure that pulls. Other changes between the step's end and the pull are seen by
            later pulls only. Set it to False if a step learns of such changes outside psync (a
            file, a clock) without awaiting anything. No effect for values above 64 KiB, with
            several synchronous optimizers, and if a step awaits anything between its push and its
            pull.

    Raises:
        ConfigurationError: An argument is invalid, or two contradict each other; also ValueError.
        UsageError: Inside a step.
        ValueMismatchError: A variable to average does not have a float dtype.

    Source: ``tf.compat.v1.train.SyncReplicasOptimizer``; Chen et al. 2016 for backup workers. There
        a gradient is judged for each variable separately, a dropped gradient is not reported, and
        every replica's second step is wasted.

    Example:
        with strategy.scope():
            w = psync.Variable(np.zeros(10, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.1), 4, 5)

        async def step():
            weights = await w.read()
            result = await optimizer.apply_gradients([(gradient(weights), w)], global_step)
            return result.outcome
    """

    _synchronous = True
    _push_options = frozenset({"name", "weight"})
    GATE_NONE = 0
    """Value of ``minimize(gate_gradients=…)``, without effect."""
    GATE_OP = 1
    """Value of ``minimize(gate_gradients=…)``, without effect."""
    GATE_GRAPH = 2
    """Value of ``minimize(gate_gradients=…)``, without effect."""

    def __init__(
        self,
        opt: Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: ExponentialMovingAverage | None = None,
        variables_to_average: Iterable[AnyVariable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        strict: bool = False,
        deterministic: bool = False,
        tensorflow_compat: bool = False,
        min_replicas: int = 1,
        patience_s: float = 30.0,
        reduction: str = "mean",
        sparse_divisor: str = "per_index",
        pull_ahead: bool = True,
    ) -> None:
        fits = isinstance(name, str) and name != ""
        check_fits(fits, "a synchronous optimizer: expected a name", name)
        opt = checked_kind(f"{name}: expected one of psync.optimizers as opt", opt, Optimizer)
        if opt._synchronous:
            raise ConfigurationError(
                f"{name}: opt {opt.get_name()!r} is already synchronous",
                hint="wrap one of psync.optimizers",
            )
        if opt._staleness_bound is not None:
            raise ConfigurationError(
                f"{name}: opt {opt.get_name()!r} has a staleness bound, which has no effect here: "
                "gradients of an earlier step are never applied",
                hint="leave out staleness_bound",
            )
        total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        config = SyncConfig(
            name=name,
            optimizer=opt._config,
            replicas_to_aggregate=replicas_to_aggregate,
            total_num_replicas=total,
            min_replicas=min_replicas,
            patience_s=patience_s,
            strict=strict,
            deterministic=deterministic,
            tensorflow_compat=tensorflow_compat,
            reduction=reduction,  # type: ignore[arg-type]
            sparse_divisor=sparse_divisor,
            global_step=NOWHERE,
        )
        self._opt = opt
        super().__init__(
            opt._rule, name=name, forbid_nonfinite=opt._forbid_nonfinite,
            compression=opt._compression,
        )  # fmt: skip
        self._in_use = opt._in_use = True  # what it does was written into ``config``
        # What ps tasks are told, but for the global step, which the first push names.
        self._sync = config
        # The variable whose value the decay of its moving averages follows.
        self._averaged_by: Variable | None = None
        # A variable that has one of these; the others are of its strategy.
        self._averaged: AnyVariable | None = None
        self._pull_ahead = flag(name, "pull_ahead", pull_ahead)
        self._add_averages(variable_averages, variables_to_average)

    def _begin(self, *, in_use: bool) -> None:
        super()._begin(in_use=in_use)
        self._global_step: Variable | None = None  # that of the last push; None before the first
        self._told: dict[str, Any] = {}  # what ps tasks are told, once it is known
        self._opt._wrapper = weakref.ref(self)

    def __repr__(self) -> str:
        config = self._sync
        return (
            f"<SyncReplicasOptimizer {self._name!r} {config.replicas_to_aggregate} of "
            f"{config.total_num_replicas}, {self._opt!r}>"
        )

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as plain data, with the wrapped optimizer's in "optimizer"."""
        config = self._sync.to_config()
        del config["global_step"]  # of the program, not of the optimizer
        return config

    @property
    def local_step(self) -> int | None:
        """This task's last token: the step at which it may continue. None before the first token.

        Source: ``sync_rep_local_step`` of TensorFlow's SyncReplicasOptimizer.
        """
        runtime, global_step = current_runtime(), self._global_step
        if runtime is None and global_step is not None:
            scope = scope_of(global_step)
            runtime = None if scope is None else scope._runtime
        return None if runtime is None else runtime.sync.token(self.number)

    def _add_averages(self, averages: object, variables: Iterable[AnyVariable] | None) -> None:
        """Add moving averages that follow each step; see the options of ``SyncReplicasOptimizer``.

        Raises:
            ConfigurationError: There are variables and no averages, these are none, or the
                variables are of several strategies.
            UsageError: The variables are one variable.
            ValueMismatchError: One of them is of no float dtype.
        """
        name = self._name
        if averages is None:
            if variables is not None:
                raise ConfigurationError(
                    f"{name}: variables_to_average without variable_averages",
                    hint="variable_averages=psync.ExponentialMovingAverage(0.999)",
                )
            return
        expected = f"{name}: expected an ExponentialMovingAverage as variable_averages"
        averages = checked_kind(expected, averages, ExponentialMovingAverage)
        if variables is not None and not isinstance(variables, Handle):  # apply refuses a handle
            variables = list(variables)
        averages.apply(variables)
        follows = averages.num_updates
        self._averaged_by = follows if isinstance(follows, Variable) else None
        averaged = averages._shadows if variables is None else variables
        self._averaged = next(iter(averaged), None)
        for each in averaged:
            self._check_averaged(each)
        self._sync = msgspec.structs.replace(
            self._sync,
            decay=averages.decay,
            num_updates=follows is not False,
            averages=averages._pairs(variables),
        )

    def _of_step(self, global_step: Variable) -> dict[str, Any]:
        """Return what ps tasks are told; the global step becomes part of it with the first push.

        Raises:
            ConfigurationError: It is another one than before, or than the averages follow, or of
                another strategy than these.
        """
        name, before = self._name, self._global_step
        if before is not None and before is not global_step and before.origin == global_step.origin:
            raise ConfigurationError(
                f'{name}: expected the same global step "{before.name}" as before, got '
                f'"{global_step.name}"'
            )
        self._check_averaged(global_step)
        follows = self._averaged_by
        if follows is not None and follows is not global_step:
            raise ConfigurationError(
                f'{name}: the decay of its moving averages depends on "{follows.name}", not on the '
                f'global step "{global_step.name}"',
                hint="ExponentialMovingAverage(…, num_updates=True)",
            )
        (shard,) = global_step.spec.shards
        sync = msgspec.structs.replace(self._sync, global_step=(shard.ps, *shard.key))
        self._told, self._global_step = sync.to_config(), global_step
        return self._told

    def _check_averaged(self, other: AnyVariable) -> None:
        if self._averaged is not None and self._averaged.origin != other.origin:
            raise ConfigurationError(
                f'{self._name}: averages of "{self._averaged.name}" and variable "{other.name}" '
                "belong to different programs or strategies",
                hint="create an optimizer and an ExponentialMovingAverage for each strategy",
            )

    # Training.

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        global_step: AnyVariable | None = None,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Coroutine[Any, Any, PushResult]:
        """Contribute gradients to the present step, and wait for the token of the next one.

        The age of the gradients is that of the oldest values that the step function has pulled
        since its last push; if it has pulled nothing, that of the last token.

        Each call counts at most once, even if its closure runs again. The updates of each run are
        numbered in order, and of all runs one call of each number counts; the others are DUPLICATE.
        A stale call has not counted.

        A closure that pushes again after STALE makes a further call, with the next number. If its
        worker is lost afterwards, the first call of the next run may count as well, and calls after
        the loop have other numbers than before. Such a call may be taken for another one: it is
        DUPLICATE, or a UsageError if their variables differ. If a closure must count once, let it
        return after STALE, and schedule it again.

        Args:
            grads_and_vars: Pairs of gradient and variable, as for every optimizer. Not copied.
            global_step: An int64 scalar, incremented in each step of the optimizer, once all its
                variables are updated. Always the same variable.
            name: No effect.
            weight: Weight of these gradients, such as the number of examples; from 1e-30 to 1e30.

        Returns:
            A ``PushResult``. ``outcome`` is ACCEPTED, counted in a step; STALE, dropped; or
            DUPLICATE, another run of the closure was counted. ``step`` is the token. ``staleness``
            is the number of steps closed since the values were pulled. ``partial`` and ``count``
            describe the step in which the push counts.

        Raises:
            ValueMismatchError: See ``apply_gradients`` of other optimizers; or the weight is out of
                range. Also a ValueError.
            ConfigurationError: The weight is no finite number; or the global step is missing, or
                differs from the previous one. Also a ValueError.
            UsageError: Outside a step and outside a training session.
            NotEnoughReplicas: Fewer than ``min_replicas`` workers have lived for ``patience_s``.
            TrainingEnded: No further step will be closed.
            ClosureCancelled: The step was cancelled.
            ParameterServerLost: A ps is lost.

        Cancellation: A push that is cancelled before ps 0 has received it does not count;
            afterwards it may. Gradients must not change until the step has ended.

        Source: ``tf.compat.v1.train.SyncReplicasOptimizer.apply_gradients``, whose train_op is this
            call.
        """
        return self._pushed(grads_and_vars, global_step, (), [], weight)

    async def _pushed(
        self,
        grads_and_vars: GradsAndVars,
        global_step: AnyVariable | None,
        pulled: Sequence[AnyVariable],
        values: list[Any],
        weight: float = 1.0,
        name: str | None = None,
    ) -> PushResult:
        gradients, variables = self._settled_pairs(grads_and_vars) or self._checked(grads_and_vars)
        if weight != 1.0 or type(weight) is not float:
            number = as_number("apply_gradients: weight", weight)
            weight = check_weight(number, "apply_gradients")
        step = self._global_step  # was checked when it was first given
        if step is None or step is not global_step:
            step = checked_step("apply_gradients", global_step)
        runtime = await self._runtime("apply_gradients", *variables, step, *pulled)
        run = here.get()  # a step, or the program: in dataset code there is no runtime
        if run is None and not runtime.in_session:
            raise UsageError(
                "apply_gradients of a synchronous optimizer outside a step: the program is not a "
                "replica and would wait forever",
                hint="call it in a scheduled step function, or in a training session",
            )
        plan = runtime.ps.plan_of(variables)
        push = functools.partial(
            runtime.sync.contribute,
            group=self.number,
            config=self._told if step is self._global_step else self._of_step(step),
            pulled=None if self._sync.tensorflow_compat else runtime.pulled,
            call=runtime.begin_update("push"),
            weight=weight,
            ahead=runtime.ahead if self._pull_ahead else None,
            announced=self._asked(runtime, pulled, step) if pulled else None,
        )
        if self._compression is None:
            answer = await push(plan, gradients)
        else:
            answer = await runtime.feedback.push(
                plan, gradients, push, kind=self._compression, optimizer=self.number
            )
        result = PushResult(
            _OUTCOMES[answer.outcome], answer.token, answer.staleness, answer.partial, answer.count
        )
        if type(run) is ClosureContext and result.outcome is Outcome.STALE:
            run.dropped += 1
        return result  # the next pull takes the values that have come

    async def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, AnyVariable]]:
        """Return pairs of gradient and variable: ``compute_gradients`` of the wrapped optimizer.

        The gradients are this replica's alone, so they may be changed, for example by clipping
        their norm, before they are passed to ``apply_gradients``.
        """
        return await self._opt.compute_gradients(*args, **kwargs)

    async def minimize(  # type: ignore[override]  # TensorFlow's order of arguments
        self,
        loss: ValueAndGrad,
        global_step: AnyVariable | None = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: object = None,
    ) -> Any:
        """Pull, compute and push: ``compute_gradients``, then ``apply_gradients``.

        Args:
            loss: Function of the values of the variables; returns the loss and the gradients. The
                same as ``value_and_grad`` of ``compute_gradients``.
            global_step: See ``apply_gradients``.
            var_list: See ``compute_gradients``; default: the trainable variables.
            gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH. No effect, since there is no graph.
            aggregation_method: No effect.
            colocate_gradients_with_ops: No effect.
            name: No effect.
            grad_loss: No effect, as in TensorFlow's eager mode.

        Returns:
            The loss. To learn the outcome of the push, call ``apply_gradients``.

        Raises:
            ConfigurationError: ``gate_gradients`` is none of the three; also a ValueError.
            PsyncError: See ``compute_gradients`` and ``apply_gradients``.

        Source: ``tf.compat.v1.train.Optimizer.minimize``.
        """
        fits = gate_gradients in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH)
        expected = f"{self._name}: expected gate_gradients GATE_NONE, GATE_OP or GATE_GRAPH"
        check_fits(fits, expected, gate_gradients)
        checked_step("minimize", global_step)
        return await super().minimize(loss, var_list, global_step)

    # What programs for TensorFlow call.

    async def init_tokens(self, global_step: AnyVariable, num_tokens: int = -1) -> int:
        """Put the initial tokens, unless they are already there.

        ps 0 does this automatically with the first push.

        Args:
            global_step: See ``apply_gradients``.
            num_tokens: Number of tokens, at least R - N. -1: as many as are needed; R in
                ``tensorflow_compat``.

        Returns:
            The present step.

        Raises:
            ConfigurationError: ``num_tokens`` is too small, or not a number of tokens; also a
                ValueError.
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe; the tokens may have been put.
        """
        count = self._checked_tokens(num_tokens)
        step = checked_step("init_tokens", global_step)
        runtime = await self._runtime("init_tokens", step)
        return await runtime.sync.init_tokens(self.number, self._of_step(step), count)

    def get_init_tokens_op(self, num_tokens: int = -1) -> Coroutine[Any, Any, int]:
        """Return an awaitable that puts the initial tokens; see ``init_tokens``.

        The global step is that of ``apply_gradients``. If other tasks call ``apply_gradients``, it
        is that of ``psync.get_or_create_global_step``.

        Raises:
            ConfigurationError: Neither is known: ``apply_gradients`` was not called in this
                process, and there is no such variable, or no coordinator or session is running. See
                also ``init_tokens``. Also a ValueError.

        Source: ``tf.compat.v1.train.SyncReplicasOptimizer.get_init_tokens_op``.
        """
        global_step = self._step_meant("get_init_tokens_op")
        self._checked_tokens(num_tokens)
        return self.init_tokens(global_step, num_tokens)

    def get_chief_queue_runner(self) -> ChiefQueueRunner:
        """Return a runner that does nothing, since ps 0 closes the steps.

        Raises:
            ConfigurationError: See ``get_init_tokens_op``; also a ValueError.

        Source: ``tf.compat.v1.train.SyncReplicasOptimizer.get_chief_queue_runner``.
        """
        return ChiefQueueRunner(self._step_meant("get_chief_queue_runner"))

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SyncReplicasHook:
        """Return a hook for a training session, which puts the initial tokens.

        Args:
            is_chief: Whether this task is the chief.
            num_tokens: See ``init_tokens``.

        Raises:
            ConfigurationError: See ``init_tokens``; also a ValueError.

        Source: ``tf.compat.v1.train.SyncReplicasOptimizer.make_session_run_hook``.
        """
        self._checked_tokens(num_tokens)

        async def put_tokens() -> None:
            if num_tokens == -1:  # ps 0 puts as many by itself
                return
            step = self._known_step()
            if step is None:
                raise UsageError(
                    f"{self._name}: {num_tokens} initial tokens for an unknown global step",
                    hint="create it with psync.get_or_create_global_step() before the session "
                    "begins",
                )
            await self.init_tokens(step, num_tokens)

        return SyncReplicasHook(put_tokens, is_chief)

    def _known_step(self) -> Variable | None:
        """Return the global step of the last push; else that of the strategy that is running."""
        if self._global_step is not None:
            return self._global_step
        steps = [global_step_of(scope) for scope in running_scopes()]
        return steps[0] if len(steps) == 1 else None

    def _step_meant(self, operation: str) -> Variable:
        step = self._known_step()
        if step is None:
            raise ConfigurationError(
                f"{operation} before apply_gradients of {self._name} was called in this process, "
                "and there is no other global step",
                hint="call it while a coordinator or session is running, with "
                "psync.get_or_create_global_step(). ps 0 puts the tokens and closes the steps "
                "automatically; to put a different number of tokens: `await "
                "optimizer.init_tokens(global_step, num_tokens)`",
            )
        return step

    def _checked_tokens(self, num_tokens: int) -> int:
        count = whole_number(self._name, "num_tokens", num_tokens)
        self._sync.initial_tokens(count)
        return count
