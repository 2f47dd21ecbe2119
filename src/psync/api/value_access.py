"""Whole-value operations of variables: read and assign."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from psync.api.reads import values_of
from psync.api.rows import RowAccess
from psync.client.shard_locks import assign_at_once
from psync.errors import UsageError
from psync.numerics.casting import checked_target, fitting
from psync.replicas import gang_updates
from psync.replicas.context import current_gang


class ValueAccess(RowAccess):
    """The value of a variable, and its rows: a base of ``Variable`` and ``ShardedVariable``."""

    async def read(
        self, *, copy: bool = False, out: np.ndarray | None = None, consistent: bool = False
    ) -> np.ndarray:
        """Return the value; see ``psync.pull``, which reads many at once, for the arguments."""
        target = None if out is None else [checked_target(out, self.spec)]
        operation = f'read of "{self.spec.name}"'
        runtime = await self.runtime_for(operation)
        runtime.check_open(operation)
        (value,) = await values_of(runtime, (self,), copy=copy, out=target, consistent=consistent)
        return value

    async def read_value(self) -> np.ndarray:
        """Return the value: ``read`` under TensorFlow's name."""
        return await self.read()

    async def value(self) -> np.ndarray:
        """Return the value: ``read`` under TensorFlow's other name."""
        return await self.read()

    async def assign(self, value: Any, *, atomic: bool = False) -> Self:
        """Set the value.

        Each shard changes at once; shards on different ps tasks change one after the other. In a
        replica of ``strategy.run`` what the variable's ``aggregation`` makes of the values of all
        replicas is written, once.

        Args:
            value: An array of the variable's shape, or what numpy makes one of. It is cast to the
                variable's dtype within a kind (float64 to float32, integers to floats) if that
                can hold all its numbers: floats may be rounded, but none may become infinite.
                Not copied: do not change it before this returns.
            atomic: Whether all shards change as one: a read with ``consistent=True``, and another
                atomic assign, finds the old value or the new one in all of them. Other
                updates wait meanwhile; one that has its part on several ps tasks may come before
                it here and after it there. It costs two more messages to each ps. If this task or
                a ps dies half-way, some shards may have the new value and others not.

        Returns:
            The variable.

        Raises:
            GradientError: If shape or dtype do not fit, or the dtype cannot hold a number.
            ReplicaValueError: In a replica of ``strategy.run``: the variable has no aggregation.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: If a ps is gone.
            LockLost: ``atomic``, and a connection was lost, or this task's loop was blocked for
                longer than 10 s, before all shards had the value: assign it again.
            ClosureCancelled: In a step that was cancelled.

        Cancellation: An assign once begun ends in the background.

        Source: ``tf.Variable.assign``; there, the dtype must be the variable's.
        """
        if atomic and len(self.spec.shards) > 1:
            return await self._assign_at_once(value)
        return await self._assign("assign", "assign", value)

    async def assign_add(self, delta: Any) -> Self:
        """Add ``delta`` to the value; see ``assign``.

        What is refused is a ``delta`` that the dtype cannot hold. The sum is numpy's in place:
        integers wrap around, and floats that grow too large become infinite.
        """
        return await self._assign("assign_add", "add", delta)

    async def assign_sub(self, delta: Any) -> Self:
        """Subtract ``delta`` from the value; see ``assign_add``."""
        return await self._assign("assign_sub", "sub", delta)

    async def _assign(self, method: str, op: str, value: Any) -> Self:
        operation = f'{method} to "{self.spec.name}"'
        array = fitting(value, self.spec, operation, casting="same_kind")
        member = current_gang()
        if member is not None:
            await gang_updates.assign(member, self, method, array)
            return self
        runtime = await self.runtime_for(operation)
        closure, ordinal = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        await runtime.ps.assign(plan, [array], op=op, closure=closure, ordinal=ordinal)
        return self

    async def _assign_at_once(self, value: Any) -> Self:
        operation = f'assign to "{self.spec.name}"'
        array = fitting(value, self.spec, operation, casting="same_kind")
        if current_gang() is not None:
            raise UsageError(
                f"{operation}: an atomic one is not possible in one of several replicas",
                hint="write it in a merge_call",
            )
        runtime = await self.runtime_for(operation)
        closure, ordinal = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        await assign_at_once(
            runtime.ps, plan, [array], op="assign", closure=closure, ordinal=ordinal
        )
        return self
