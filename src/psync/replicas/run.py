"""``strategy.run``: one function on all workers at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from psync.client.context import forbid_in_dataset, forbid_in_step
from psync.client.runtime import Runtime
from psync.errors import CaptureError, ClosedError
from psync.numerics.replica_values import DistributedValues
from psync.replicas.context import run_alone
from psync.replicas.gang_runner import GangRunner
from psync.serialization.remote_value import RemoteValue


class LocalRunWarning(UserWarning):
    """``strategy.run`` found no workers to run on: no coordinator is running."""


class ReplicaRuns:
    """The part of a strategy that runs replicas."""

    gangs: GangRunner | None = None  # the coordinator's; None while none runs
    runtime: Runtime | None
    created: bool

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
            CaptureError: Something cannot be sent to a worker.
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
            raise CaptureError(
                f"args: expected a tuple, got {type(args).__name__}", hint="run(fn, args=(value,))"
            )
        args, kwargs = tuple(args), dict(kwargs or {})
        if self.gangs is not None:
            return await self.gangs.run(self, fn, args, kwargs)
        if self.runtime is None:
            if self.created:
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
