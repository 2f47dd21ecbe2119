"""ParameterServerStrategy: variable placement, scopes, and the entry to ``strategy.run``.

A variable that is declared beside another one (``colocate_vars_with``) lies on the same ps, and is
not partitioned by itself. Placement is decided when a variable is declared, without asking a ps,
and by the same rules each time: programs without a coordinator depend on it. ``Variable(...)``
asks, in this order: ``variable_creator_scope`` hooks, the innermost first; the place in force
(``pinned``, ``colocate_vars_with``), then no partitioner is asked; ``variable_partitioner``, and
the placement for each shard.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from psync.api.datasets import (
    DatasetFunction,
    DistributedDataset,
    InputOptions,
    distribute_dataset,
    distribute_function,
)
from psync.api.placement_report import PlacementReport, report_of
from psync.api.scopes import Elsewhere, Partitioner, Scope, current_scope, elsewhere
from psync.api.variables import Handle, ShardedVariable, Variable
from psync.client.context import forbid_in_step
from psync.errors import ConfigurationError, ContextError, UnsupportedError, UsageError
from psync.net.resolvers import ClusterResolver, resolve_cluster, training_cluster
from psync.partitioners import Pinned, Placement
from psync.replicas.context import cross_replica, replicas_in_sync
from psync.replicas.run import ReplicaRuns
from psync.replicas.states import open_scope
from psync.specs import checked_kind
from psync.worker.data_sources import ArrayDataset

T = TypeVar("T")


class ParameterServerStrategy(Scope, ReplicaRuns):
    """A strategy with variables on ps tasks and steps on workers.

    Args:
        cluster_resolver: Resolver that describes the cluster. None: the result of
            ``psync.resolve_cluster()``, as under ``psync run``, in a ``LocalCluster``, under SLURM
            and on Kubernetes.
        variable_partitioner: Function (shape, dtype) → number of shards for each axis (only the
            first may be above 1). None: variables are not sharded.
        placement: Choice of the ps for the next shard: "round_robin"; "least_bytes", the ps with
            the fewest bytes of variables so far; or an object with ``place(nbytes) -> ps index``.
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
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ConfigurationError(
                "variable_partitioner: expected a callable (shape, dtype) -> partitions per axis, "
                f"got {variable_partitioner!r}",
                hint="see psync.partitioners, such as psync.FixedShardsPartitioner(2)",
            )
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
        if ps_recovery not in ("checkpoint", "backup"):
            raise ConfigurationError(
                f'ps_recovery: expected "checkpoint" or "backup", got {ps_recovery!r}'
            )
        if ps_recovery == "backup" and spec.num_tasks("ps") < 2:
            raise ConfigurationError(
                'ps_recovery="backup" needs at least two ps tasks, got '
                f"{spec.num_tasks('ps')}: the backup of each ps runs in the process of another ps",
            )
        workers = spec.task_indices("worker")
        here = task_id if task_type == "worker" else None
        worker_index = None if here is None else workers.index(here)
        super().__init__(spec, worker_index, variable_partitioner, placement)
        self.ps_recovery = ps_recovery
        self.cluster_resolver = cluster_resolver
        self.task = (task_type, task_id)
        self._workers = len(workers), worker_index

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
        token = open_scope.set(self)
        try:
            with cross_replica(self):
                yield self
        finally:
            open_scope.reset(token)

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
        return elsewhere(Elsewhere(self, self._placer.pinned(where)))

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
        if current_scope() is not self:
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
        spec = variable.spec
        if len(spec.shards) > 1:
            return elsewhere(Elsewhere(self, beside=spec))
        return elsewhere(Elsewhere(self, Pinned(spec.shards[0].ps)))

    def placement(self) -> PlacementReport:
        """Return the ps of each shard declared so far; ``str()`` of it is a table."""
        specs = (variable.spec for variable in self._variables)
        return report_of(specs, self.cluster.num_tasks("ps"))
