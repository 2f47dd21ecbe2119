"""``strategy.run``: one function on all workers at once; and reductions of its results."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

from psync.client.context import forbid_in_dataset, forbid_in_step
from psync.client.runtime import Runtime
from psync.errors import ClosedError, SerializationError, other_loop
from psync.numerics.replicas import (
    DistributedValues,
    ReduceOp,
    gather_distributed,
    local_results,
    reducing_distributed,
)
from psync.replicas.chunks import in_turns
from psync.replicas.context import check_cross_replica, replicas_in_sync, run_alone
from psync.replicas.extended import StrategyExtended
from psync.replicas.gang_runner import GangRunner
from psync.serialization.remote_value import RemoteValue


class LocalRunWarning(UserWarning):
    """``strategy.run`` found no workers to run on: no coordinator is running."""


class ReplicaRuns:
    """The methods of a strategy that run replicas and combine their values."""

    _gangs: GangRunner | None = None  # the coordinator's; None while none runs
    _runtime: Runtime | None
    _created: bool

    async def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``fn`` once on every living worker, at the same time, and return all results.

        Each run is a replica: ``psync.get_replica_context()`` tells it which one. Replicas
        communicate by ``merge_call``, ``all_reduce`` and ``all_gather`` of that context. In a
        replica, ``apply_gradients`` sums the gradients of all replicas and pushes them once, and
        ``assign`` writes the aggregate (the variable's ``aggregation``) of all values once.

        It runs after everything scheduled before it, and before everything scheduled after it. All
        replicas begin together, on the workers that live then, and fail together. No replica runs
        twice; pushes made before a failure stay.

        Without a running coordinator there is one replica, and it runs here: with a warning, unless
        in a training session.

        Args:
            fn: A coroutine function, or a plain one, which runs in a thread. Pickled like a step.
            args: Positional arguments, captured by value now. Each replica gets its own value of a
                ``PerReplica``, and its worker's iterator of a per-worker iterator.
            kwargs: Keyword arguments, treated the same way.

        Returns:
            The results of the replicas, regrouped. Structures are regrouped item by item, a
            variable stays itself, and other values become a ``PerReplica`` in the order of replica
            ids. With one replica, its result.

        Raises:
            Exception: The error of the first replica that failed, with a RemoteError as its cause.
                By then no replica is running.
            WorkerLost: The worker of a replica was lost; names it.
            UsageError: The replicas did not all call the same collectives; or in a step or a merge
                function.
            ReplicaValueError: An argument has values for another number of replicas; or the
                replicas returned structures that do not match.
            SerializationError: Something cannot be sent to a worker.
            ClosureCancelled: An error that ``join`` will raise has ended everything.
            ParameterServerLost: A ps is lost.
            ClosedError: The coordinator was closed.

        Cancellation: All replicas are asked to stop. Scheduled closures wait until they have.

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
        """Operations for code that is aware of replicas: reductions, updates, devices."""
        return StrategyExtended(self)

    async def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Return the sum or mean of a value over its replicas; see ``reducing_values``.

        Args:
            reduce_op: ``psync.ReduceOp.SUM`` or MEAN, or its name.
            value: Result of ``run``, or a structure of such. An ordinary value is common to all
                replicas: its mean is itself, 0 is 0, and its sum is refused if there are several.
            axis: Axis, or axes, along which each replica's value is reduced as well; the mean is
                then that of all elements. None: over replicas only.

        Raises:
            ReplicaValueError: The values do not match each other, the operation, or the axis.
            UsageError: Called in a replica.

        Cancellation: Safe.

        Source: ``tf.distribute.Strategy.reduce``.
        """
        check_cross_replica("reduce")
        return await in_turns(reducing_distributed(reduce_op, value, replicas_in_sync(), axis))

    async def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas, concatenated along ``axis``.

        Args:
            value: Result of ``run``, or a structure of such; of rank 1 or higher.
            axis: Number of the axis; negative ones count from the end.

        Raises:
            ReplicaValueError: Shapes differ on another axis, there is no such axis, or the value is
                an ``IndexedSlices``.
            UsageError: Called in a replica.

        Cancellation: Safe.

        Source: ``tf.distribute.Strategy.gather``.
        """
        check_cross_replica("gather")
        return gather_distributed(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each replica, in the order of replica ids.

        Source: ``tf.distribute.Strategy.experimental_local_results``.
        """
        return local_results(value)
