"""Push and pull in one: the values of the next step come with the answers to the push."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from psync.api.gradient_arguments import AnyVariable, GradsAndVars
from psync.api.optimizers.staleness_bound import StalenessBound
from psync.api.optimizers.state import PushResult
from psync.api.pulls import leaves, mapped
from psync.api.pulls import pull as pull_values
from psync.api.reads import keeps_reads
from psync.api.variables import OnReadVariable
from psync.client.plans import Plan
from psync.client.runtime import Runtime

Answered = tuple[PushResult, list[np.ndarray] | None]
"""What became of a push, and values that came with its answers; None: they are to be pulled."""


class _Pushes(Protocol):
    _push_options: ClassVar[frozenset[str]]
    _staleness_bound: StalenessBound | None

    @property
    def _pushed(self) -> Callable[..., Awaitable[Answered]]:
        """Pushes gradients, and asks for values of variables, if there are some."""

    def _may_bring(self, pulled: Sequence[AnyVariable], step: AnyVariable | None) -> bool:
        """Return whether values may come with a push: else they are pulled."""


class PushPull:
    """The part of an optimizer that pulls with its pushes."""

    _push_options: ClassVar[frozenset[str]] = frozenset()
    """Names of further arguments of ``apply_gradients``."""

    async def push_pull(
        self: _Pushes,
        grads_and_vars: GradsAndVars,
        pull: Any,
        global_step: AnyVariable | None = None,
        **options: Any,
    ) -> tuple[PushResult, Any]:
        """Push gradients, and return the values as the push has left them: for the next step.

        As ``apply_gradients``, then ``psync.pull``, with one round trip to each ps for both. They
        are pulled apart if some of the variables are on a ps to which nothing is pushed, if another
        task's update of them is under way, if the ``global_step`` is one of them, with a
        ``staleness_bound``, in replicas of ``strategy.run``, and in ``cache_variable_reads``; and,
        of a synchronous optimizer, if they are more than 64 KiB.

        Args:
            grads_and_vars: As for ``apply_gradients``.
            pull: A variable, or any nesting of variables, as ``psync.pull`` takes it.
            global_step: As for ``apply_gradients``.
            options: What else ``apply_gradients`` takes.

        Returns:
            What ``apply_gradients`` returns; and the same nesting as ``pull`` with an array for
            each variable, read-only. Each shard is read on its ps once the push is applied there:
            it may lack what others have done since, also what ``staleness`` has counted. In
            ``cache_variable_reads`` they are what was read there before, if anything was.

        Raises:
            PsyncError: As ``apply_gradients`` and ``psync.pull``. Of variables that cannot be
                pulled, nothing is pushed.

        Cancellation: As ``apply_gradients``.

        Example:
            values = await psync.pull(model)
            for batch in batches:
                loss, grads = value_and_grad(values, batch)
                result, values = await optimizer.push_pull(zip(grads, model), pull=model)

        Source: ``push_pull`` of BytePS.
        """
        if unknown := sorted(options.keys() - self._push_options):
            raise TypeError(f"push_pull() got an unexpected keyword argument {unknown[0]!r}")
        variables = tuple(dict.fromkeys(leaves(pull)))
        result, values = await self._pushed(grads_and_vars, global_step, variables, **options)
        if values is None:
            return result, await pull_values(pull)
        return result, mapped(pull, dict(zip(variables, values, strict=True)).__getitem__)

    def _asked(
        self: _Pushes, runtime: Runtime, pulled: Sequence[AnyVariable], step: AnyVariable | None
    ) -> Plan | None:
        """Return the plan of what may come with a push; None: nothing, it is pulled apart."""
        if keeps_reads() or any(isinstance(v, OnReadVariable) for v in pulled):
            return None
        if not self._may_bring(pulled, step):
            return None
        return runtime.ps.plan(tuple([variable.spec for variable in pulled]))

    def _may_bring(self: _Pushes, pulled: Sequence[AnyVariable], step: AnyVariable | None) -> bool:
        """Return whether values may be of when the push is applied: nothing changes them later."""
        raised = None if step is None else step.spec.variable_id
        changes = any(variable.spec.variable_id == raised for variable in pulled)
        return not changes and self._staleness_bound is None
