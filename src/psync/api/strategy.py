"""ParameterServerStrategy: variable placement, scopes, and the entry to ``strategy.run``.

A variable that is declared beside another one (``colocate_vars_with``) lies on the same ps, and is
not partitioned by itself. Placement is decided when a variable is declared, without asking a ps,
and by the same rules each time: programs without a coordinator depend on it. ``Variable(...)``
asks, in this order: ``variable_creator_scope`` hooks, the innermost first; the place in force
(``pinned``, ``colocate_vars_with``), then no partitioner is asked; ``variable_partitioner``, and
the placement for each shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from psync.api.datasets import (
    DatasetFunction,
    DistributedDataset,
    InputOptions,
    distribute_dataset,
    distribute_function,
)
from psync.api.scheduling import checked_call
from psync.api.scopes import (
    Elsewhere,
    Partitioner,
    Scope,
    current_elsewhere,
    runtime_here,
)
from psync.api.variables import Handle, ShardedVariable, Variable
from psync.chief.gangs import GangRunner
from psync.client.context import forbid_in_step, setting
from psync.errors import (
    ConfigurationError,
    ContextError,
    SerializationError,
    UnsupportedError,
    UsageError,
    check_fits,
)
from psync.net.resolvers import ClusterResolver, resolve_cluster, training_cluster
from psync.numerics.replicas import (
    ReduceOp,
    gather_distributed,
    local_results,
    reducing_distributed,
)
from psync.partitioners import Placement
from psync.replicas.context import (
    StrategyExtended,
    check_cross_replica,
    cross_replica,
    in_turns,
    open_scope,
    replicas_in_sync,
    run_alone,
)
from psync.specs import VariableSpec, checked_kind
from psync.status.html_tables import table
from psync.status.model import ShardStatus, placement_of
from psync.worker.data_sources import ArrayDataset

HEAD = ("variable", "shard", "shape", "dtype", "bytes", "ps")


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Where the variables of a strategy lie. ``str()`` is a table, as is what a notebook shows."""

    rows: tuple[ShardStatus, ...]  # in the order of declaration
    totals: tuple[int, ...]  # bytes on each ps

    def __str__(self) -> str:
        lines = [HEAD]
        for r in self.rows:
            cells = r.variable, str(r.shard), str(r.shape), r.dtype, f"{r.nbytes:,}", str(r.ps)
            lines.append(cells)
        for ps, nbytes in enumerate(self.totals):
            lines.append(("all of it", "", "", "", f"{nbytes:,}", str(ps)))
        v, s, h, d, b, p = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            f"{name:{v}}  {shard:>{s}}  {shape:{h}}  {dtype:{d}}  {size:>{b}}  {ps:>{p}}"
            for name, shard, shape, dtype, size, ps in lines
        )

    def _repr_html_(self) -> str:
        rows = [(r.variable, r.shard, r.shape, r.dtype, r.nbytes, f"ps {r.ps}") for r in self.rows]
        totals = [
            ("all of it", "", "", "", nbytes, f"ps {ps}") for ps, nbytes in enumerate(self.totals)
        ]
        title = f"Placement: {sum(self.totals):,} bytes on {len(self.totals)} ps"
        return table(title, HEAD, [*totals, *rows])


class LocalRunWarning(UserWarning):
    """``strategy.run`` found no workers to run on: no coordinator is running."""


class ParameterServerStrategy(Scope):
    """A strategy with variables on ps tasks and steps on workers.

    Args:
        cluster_resolver: Resolver that describes the cluster. None: the result of
            ``psync.resolve_cluster()``, as under ``psync run``, in a ``LocalCluster``, under SLURM
            and on Kubernetes.
        variable_partitioner: Function (shape, dtype) → number of shards for each axis (only the
            first may be above 1). None: variables are not sharded.
        placement: Choice of the ps for the next shard: "round_robin"; "least_bytes", the ps with
            the fewest bytes of variables so far; "packed", ps 0 up to 1 MiB of variables, then as
            "least_bytes"; or an object with ``place(nbytes) -> ps index``. A synchronous step of
            a model that lies on ps 0 alone takes two messages for each worker: the other ps tasks
            are not asked. A variable that is cut is placed shard by shard.
        ps_recovery: Behaviour when a ps dies. "checkpoint": all ps tasks roll back to the newest
            checkpoint that a ``CheckpointManager`` has saved. "backup": every ps has a backup ps in
            the process of another ps task. It takes over within a second, and no acknowledged
            update is lost. It needs two ps tasks or more, twice the memory, and asynchronous
            training.

    Attributes:
        cluster_resolver: The given resolver, or the one found.
        cluster: The training cluster: without evaluators, checked.
        task: Job and index of this process; None if it is not one of the cluster's tasks.
        worker_index: Index of this process among the workers; None if it is not a worker.

    Raises:
        ConfigurationError: There is no cluster; the cluster cannot train, for example without ps or
            worker or with an unknown job; or another argument is invalid.

    Source: ``tf.distribute.ParameterServerStrategy``.
    """

    __psync_capture_error__ = "the strategy lives on the coordinator"
    __psync_capture_hint__ = (
        "call psync.get_strategy() in the step instead; a dataset function gets an input_context"
    )

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        placement: str | Placement = "round_robin",
        ps_recovery: str = "checkpoint",
    ) -> None:
        forbid_in_step("making a strategy")
        check_fits(
            variable_partitioner is None or callable(variable_partitioner),
            "variable_partitioner: expected a callable (shape, dtype) -> partitions per axis",
            variable_partitioner, "see psync.partitioners, such as psync.FixedShardsPartitioner(2)",
        )  # fmt: skip
        cluster_resolver = cluster_resolver or resolve_cluster()
        spec, task_type, task_id = training_cluster(cluster_resolver)
        for job in ("ps", "worker"):
            if not spec or job not in spec.jobs:  # the chief's was checked, others may know less
                raise ConfigurationError(
                    f"{cluster_resolver.source}: cluster.{job}: expected at least one {job} to "
                    "declare variables for, got none",
                    hint="describe the whole training cluster here as well",
                )
        if ps_recovery == "replica":  # its name until 0.2
            ps_recovery = "backup"
        expected = 'ps_recovery: expected "checkpoint" or "backup"'
        check_fits(ps_recovery in ("checkpoint", "backup"), expected, ps_recovery)
        if ps_recovery == "backup" and spec.num_tasks("ps") < 2:
            raise ConfigurationError(
                'ps_recovery="backup" needs at least two ps tasks, got '
                f"{spec.num_tasks('ps')}: the backup of each ps runs in the process of another ps",
            )
        worker_index = None
        if task_type == "worker" and task_id is not None:
            worker_index = spec.task_indices("worker").index(task_id)
        super().__init__(spec, worker_index, variable_partitioner, placement)
        self.ps_recovery = ps_recovery
        self.cluster_resolver = cluster_resolver
        self.task = (task_type, task_id)
        self._workers = spec.num_tasks("worker"), worker_index
        self._gangs: GangRunner | None = None  # the coordinator's; None while none runs

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy {self.cluster!r}, {len(self._variables)} variables>"

    def __copy__(self) -> ParameterServerStrategy:
        raise UnsupportedError("a strategy cannot be copied: it owns its variables")

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterServerStrategy:
        return self

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in one step: 1, since workers compute separately; more in a gang."""
        return replicas_in_sync()

    @property
    def variables(self) -> tuple[Variable | ShardedVariable, ...]:
        """All variables, in the order of declaration."""
        return tuple(self._variables)

    @property
    def trainable_variables(self) -> tuple[Variable | ShardedVariable, ...]:
        """The trainable variables; variables are trainable by default."""
        return tuple(self._trainable())

    @contextmanager
    def scope(self) -> Generator[ParameterServerStrategy, None, None]:
        """Return a context manager in which ``Variable(...)`` declares variables of this strategy.

        Raises:
            ContextError: Inside another strategy's scope.
            UsageError: Inside a step.
        """
        forbid_in_step("opening a strategy's scope")
        outer = open_scope.get()
        if outer is not None and outer is not self:
            raise ContextError(
                "mixing different strategies: the scope of another strategy is open here",
                hint="exit that scope first",
            )
        with setting(open_scope, self), cross_replica(self):
            yield self

    # Data; see ``api.datasets``.

    def experimental_distribute_dataset(
        self, dataset: Iterable[T], options: InputOptions | None = None
    ) -> DistributedDataset[T]:
        """Return a dataset split into one share per worker: some files, or some elements.

        Batches stay as they are: with one replica per worker, a global batch is that replica's
        batch. A worker whose share has ended before the others' meets ``EndOfData``.

        Args:
            dataset: An iterable of batches that can be iterated over repeatedly, in the same order
                each time, such as ``psync.data`` makes.
            options: Kind of share; by default files if there are enough, otherwise elements.

        Raises:
            ConfigurationError: ``dataset`` is not such an iterable (the message says what to pass
                instead), or it cannot be split as the options say.

        Source: ``tf.distribute.Strategy.experimental_distribute_dataset``.
        """
        return distribute_dataset(dataset, options, *self._workers)

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction[T], options: InputOptions | None = None
    ) -> DistributedDataset[T]:
        """Return a dataset whose share on each worker is the result of a function there.

        Args:
            dataset_fn: Function that each worker calls with an ``InputContext``, which describes
                its share; it returns an iterable of batches.
            options: Options with a shard policy of "auto" or "off": the function itself splits the
                data.

        Raises:
            UsageError: ``dataset_fn`` is not a plain function of at most one argument.
            ConfigurationError: The shard policy is another one, or ``dataset_fn`` makes a variable.

        Source: ``tf.distribute.Strategy.distribute_datasets_from_function``.
        """
        return distribute_function(dataset_fn, options, *self._workers)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: None = None
    ) -> ArrayDataset:
        """Return a dataset whose elements are the single rows (axis 0) of arrays.

        Args:
            numpy_input: An array, or a tuple, named tuple or dict of arrays with the same number of
                rows. A list is one array: it is stacked.
            session: A TensorFlow 1 argument; not used.

        Raises:
            UsageError: The arrays differ in length, or have no rows.

        Source: ``tf.distribute.Strategy.experimental_make_numpy_dataset``.
        """
        return ArrayDataset(numpy_input, None)

    def pinned(self, where: int | str) -> AbstractContextManager[None]:
        """Return a context manager in which variables are declared on one ps.

        These variables are not partitioned and do not advance the placement. The innermost of
        several such scopes counts, including ``colocate_vars_with``.

        Args:
            where: Index of the ps, or its device: "/job:ps/replica:0/task:1/device:CPU:0", or short
                "/job:ps/task:1".

        Raises:
            ConfigurationError: There is no such ps.
            UsageError: Inside a step.

        Example:
            with strategy.scope(), strategy.pinned(1):
                table = psync.Variable(np.zeros((1000, 64), np.float32))

        Source: none; in TensorFlow the strategy's placement wins over ``tf.device``.
        """
        forbid_in_step("pinning variables")
        return setting(current_elsewhere, Elsewhere(self, self._placer.pinned(where)))

    def colocate_vars_with(
        self, colocate_with_variable: Variable | ShardedVariable
    ) -> AbstractContextManager[None]:
        """Return a context manager in which variables are declared on the ps of another variable.

        These variables do not advance the placement, and the partitioner is not called. Next to a
        variable with one shard, or a single shard of a variable, they have one shard. Next to a
        variable with several shards they must have its shape, and each shard is on the ps of the
        corresponding one. The innermost of several scopes counts, including ``pinned``.

        Args:
            colocate_with_variable: A variable of this strategy.

        Raises:
            UsageError: Outside the strategy's scope; inside a step; or the argument is not a
                variable of this strategy.

        Source: ``tf.distribute.StrategyExtended.colocate_vars_with``.
        """
        forbid_in_step("colocating variables")
        if open_scope.get() is not self:
            raise UsageError(
                "colocate_vars_with: the strategy's scope is not open here",
                hint="with strategy.scope(), strategy.colocate_vars_with(v): …",
            )
        variable = checked_kind(
            "colocate_vars_with: expected a variable", colocate_with_variable, Handle,
            hint="to name a ps: with strategy.pinned(index): …", error=UsageError,
        )  # fmt: skip
        if variable.origin != self._origin:
            raise UsageError(
                f'colocate_vars_with: variable "{variable.name}" belongs to another strategy'
            )
        return setting(current_elsewhere, Elsewhere(self, beside=variable.spec))

    def placement(self) -> PlacementReport:
        """Return the ps of each shard declared so far; ``str()`` of it is a table."""
        rows = placement_of(self._specs())
        totals = [0] * self.cluster.num_tasks("ps")
        for row in rows:
            totals[row.ps] += row.nbytes
        return PlacementReport(rows, tuple(totals))

    def _specs(self) -> list[VariableSpec]:
        return [each.spec for each in self._variables]

    # Replicas, and values of theirs.

    async def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
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
        args, kwargs = checked_call(args, kwargs)
        if self._gangs is not None:
            runtime_here("strategy.run", self)  # is this its event loop?
            try:
                return await self._gangs.run(self, fn, args, kwargs)
            except SerializationError as error:
                # It is about the program, and begins where that has called.
                raise error.with_traceback(None) from error.__cause__
        if self._runtime is None:
            self._check_not_closed("strategy.run")
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


T = TypeVar("T")
