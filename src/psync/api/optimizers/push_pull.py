"""Push and pull in one: the values of the next step come with the answer to the push."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from psync.api.gradient_arguments import AnyVariable, GradsAndVars
from psync.api.optimizers.state import PushResult
from psync.api.pulls import leaves
from psync.api.pulls import pull as pull_values
from psync.api.reads import runtime_of
from psync.api.variables import OnReadVariable


class PushPull:
    """What pushes gradients, and can pull with the same messages."""

    @abstractmethod
    async def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: AnyVariable | None = None
    ) -> PushResult:
        """Push gradients."""

    async def push_pull(
        self,
        grads_and_vars: GradsAndVars,
        pull: Any,
        global_step: AnyVariable | None = None,
        **options: Any,
    ) -> tuple[PushResult, Any]:
        """Push gradients, and return the values as the push has left them: for the next step.

        The same as ``apply_gradients``, then ``psync.pull``, with one round trip to each ps for
        both. The values come in messages of their own, as those of ``psync.pull``, if some of them
        are on a ps to which nothing is pushed; if another task's update of them is under way; if
        the ``global_step`` is one of them; after a wait for a ``staleness_bound``; in replicas of
        ``strategy.run``; or, of a synchronous optimizer, if they are more than 64 KiB.

        Args:
            grads_and_vars: As for ``apply_gradients``.
            pull: A variable, or any nesting of variables, as ``psync.pull`` takes it.
            global_step: As for ``apply_gradients``.
            options: As for ``apply_gradients``.

        Returns:
            What ``apply_gradients`` returns; and the same nesting as ``pull`` with an array for
            each variable, read-only. Each shard is read on its ps once the push is applied there.

        Raises:
            PsyncError: As ``apply_gradients``; as ``psync.pull``, if what is wrong with ``pull`` is
                seen at once, before anything is pushed.

        Cancellation: As ``apply_gradients``.

        Example:
            values = await psync.pull(model)
            for batch in batches:
                loss, grads = value_and_grad(values, batch)
                result, values = await optimizer.push_pull(zip(grads, model), pull=model)

        Source: ``push_pull`` of BytePS.
        """
        stored = [
            variable
            for variable in dict.fromkeys(leaves(pull))
            if not isinstance(variable, OnReadVariable)
        ]
        if not stored:
            result = await self.apply_gradients(grads_and_vars, global_step, **options)
            return result, await pull_values(pull)
        runtime = await runtime_of("push_pull", *stored)
        runtime.ahead.announce(runtime.ps.plan(tuple([variable.spec for variable in stored])))
        try:
            result = await self.apply_gradients(grads_and_vars, global_step, **options)
        finally:
            runtime.ahead.announce(None)  # if nothing was sent
        return result, await pull_values(pull)
