"""``strategy.run``: one function on all workers at once; and reductions of its results."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from psync.client.context import forbid_in_dataset, forbid_in_step
from psync.client.runtime import Runtime
from psync.errors import ClosedError, SerializationError, other_loop
from psync.numerics.replica_sums import ReduceOp
from psync.numerics.replica_values import (
    DistributedValues,
    gather_distributed,
    local_results,
    reducing_distributed,
)
from psync.replicas.chunks import in_turns
from psync.replicas.context import check_cross_replica, replicas_in_sync, run_alone
from psync.replicas.gang_runner import GangRunner
from psync.serialization.remote_value import RemoteValue

if TYPE_CHECKING:
    from psync.compat.strategy_extended import StrategyExtended


class LocalRunWarning(UserWarning):
    """``strategy.run`` found no workers to run on: no coordinator is running."""


class ReplicaRuns:
    """The part of a strategy that runs replicas, and makes one value of theirs."""

    _gangs: GangRunner | None = None  # the coordinator's; None while none runs
    _runtime: Runtime | None
    _created: bool

    async def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``fn`` once on every living worker, at the same time, and return what all returned.

        Each run is a replica: ``psync.get_replica_context()`` says which, and through its
        ``merge_call``, ``all_reduce`` and ``all_gather`` the replicas meet. In a replica
        ``apply_gradients`` sums the gradients of all and pushes them once, and ``assign`` writes
        once what the variable's ``aggregation`` makes of all values.

        It comes after all that was scheduled before it and before all that is scheduled after it.
        All replicas begin together, on the workers that live then, and fail together. None runs
        twice; what was pushed before a failure stays.

        Where no coordinator runs there is one replica, and it runs here: with a warning, outside of
        a training session.

        Args:
            fn: A coroutine function, or a plain one, which runs in a thread. Pickled like a step.
            args: Its arguments, captured by value now. Of a ``PerReplica`` each replica gets its
                own; of a per-worker iterator, its worker's.
            kwargs: Likewise.

        Returns:
            What the replicas returned, regrouped: structures item by item, a variable as itself,
            all else as a ``PerReplica`` in the order of replica ids. With one replica, what it
            returned.

        Raises:
            Exception: What the first replica raised that failed, with a RemoteError as its cause.
                When it is raised no replica runs any more.
            WorkerLost: The worker of a replica was lost; names it.
            UsageError: The replicas did not all come to the same collectives; or in a step or a
                merge function.
            ReplicaValueError: There are arguments for another number of replicas than workers; or
                the replicas returned structures that do not match.
            SerializationError: Something cannot be sent to a worker.
            ClosureCancelled: An error that ``join`` is to raise has ended everything.
            ParameterServerLost: A ps is gone.
            ClosedError: The coordinator was closed.

        Cancellation: All replicas are asked to stop. What was scheduled waits until they have.

        Source: ``tf.distribute.Strategy.run``; with parameter servers it runs one replica there, on
            the coordinator unless it is called in a scheduled function.
        """
        forbid_in_step("strategy.run", instead="in a step: await psync.get_strategy().run(…)")
        forbid_in_dataset("strategy.run")
        if isinstance(args, RemoteValue | DistributedValues) or not isinstance(args, tuple | list):
            raise SerializationError(
                f"args: expected a tuple, got {type(args).__name__}", hint="run(fn, args=(value,))"
            )
        args, kwargs = tuple(args), dict(kwargs or {})
        if self._gangs is not None:
            assert self._runtime is not None, "both are a coordinator's"
            if asyncio._get_running_loop() is not self._runtime.ps.loop:
                raise other_loop("strategy.run")
            try:
                return await self._gangs.run(self, fn, args, kwargs)
            except (
                SerializationError
            ) as error:  # about the program, and begins where that has called
                raise error.with_traceback(None) from error.__cause__
        if self._runtime is None:
            if self._created:
                raise ClosedError(
                    "strategy.run: the coordinator of this strategy was closed",
                    hint="run inside `async with ClusterCoordinator(strategy):`",
                )
            warnings.warn(
                "strategy.run without a running coordinator: one replica runs in this process",
                LocalRunWarning,
                stacklevel=2,
            )
        return await run_alone(self, fn, args, kwargs)

    experimental_run_v2 = run

    @property
    def extended(self) -> StrategyExtended:
        """What code needs that is aware of replicas: reductions, updates, devices."""
        made: StrategyExtended = import_module("psync.compat.strategy_extended").StrategyExtended(
            self
        )
        return made

    async def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Return the sum or mean of a value over its replicas; see ``reducing_values``.

        Args:
            reduce_op: ``psync.ReduceOp.SUM`` or MEAN, or its name.
            value: What ``run`` returned, or a structure of such. An ordinary value is what all
                replicas have: its mean is itself, 0 is 0, and its sum is refused if there are
                several.
            axis: Along which each replica's value is reduced as well: a number, or several; the
                mean then is that of all elements. None: over replicas only.

        Raises:
            ReplicaValueError: The values do not fit each other, the operation, or the axis.
            UsageError: In a replica.

        Cancellation: Safe.

        Source: ``tf.distribute.Strategy.reduce``.
        """
        check_cross_replica("reduce")
        return await in_turns(reducing_distributed(reduce_op, value, replicas_in_sync(), axis))

    async def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas, one after the other along ``axis``.

        Args:
            value: What ``run`` returned, or a structure of such; of rank 1 at least.
            axis: A number; negative ones count from the end.

        Raises:
            ReplicaValueError: Shapes differ elsewhere, there is no such axis, or it is an
                ``IndexedSlices``.
            UsageError: In a replica.

        Cancellation: Safe.

        Source: ``tf.distribute.Strategy.gather``.
        """
        check_cross_replica("gather")
        return gather_distributed(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each replica, in the order of their ids.

        Source: ``tf.distribute.Strategy.experimental_local_results``.
        """
        return local_results(value)
