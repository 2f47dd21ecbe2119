"""ParameterServerStrategy: where variables go.

Layer: L4. Imports: errors, cluster, declarations, placement, resolvers, runtime, scopes, variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from psync.cluster import ClusterSpec
from psync.context import forbid_in_step
from psync.declarations import Declaration, beside, describe, split
from psync.errors import ClosedError, UsageError
from psync.placement import Placement, RoundRobin
from psync.resolvers import ClusterResolver, training_cluster
from psync.runtime import Runtime
from psync.scopes import add_strategy, open_scope
from psync.specs import VariableSpec
from psync.variables import ShardedVariable, Variable

Partitioner = Callable[[tuple[int, ...], Any], Any]


class ParameterServerStrategy:
    """Variables on ps tasks, steps on workers.

    Args:
        cluster_resolver: Says who is in the cluster.
        variable_partitioner: (shape, dtype) → number of shards for each axis (the first may
            be above 1), or None: variables are not sharded.

    Raises:
        ConfigurationError: The cluster cannot train: no ps, no worker, an unknown job, ….

    Source: ``tf.distribute.ParameterServerStrategy``.
    """

    __psync_capture_error__ = "the strategy lives on the coordinator"

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None = None,
    ) -> None:
        forbid_in_step("making a strategy")
        spec, task_type, task_id = training_cluster(cluster_resolver)
        self.origin = os.urandom(8).hex()
        self.runtime: Runtime | None = None  # the coordinator's; None while none runs
        self.created = False  # a coordinator has run: variables may exist on ps tasks
        self.declared: list[Declaration] = []  # not created yet
        self._resolver = cluster_resolver
        self._cluster = spec
        self._task = (task_type, task_id)
        self._partitioner = variable_partitioner
        self._placement = RoundRobin(spec.num_tasks("ps"))
        self.accumulators: dict[str, Any] = {}
        self.accumulator_placement: Placement = RoundRobin(spec.num_tasks("ps"))
        self._names: dict[str, int] = {}  # those taken, and how often each was asked for
        self._variables: list[Variable | ShardedVariable] = []
        self._next_id = 0
        add_strategy(self)

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy {self._cluster!r}, {len(self._variables)} variables>"

    def __copy__(self) -> ParameterServerStrategy:
        raise UsageError("a strategy cannot be copied: it owns its variables")

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterServerStrategy:
        return self

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver it was made with."""
        return self._resolver

    @property
    def cluster(self) -> ClusterSpec:
        """The training cluster: without evaluators, checked."""
        return self._cluster

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas within one step: 1, as each worker computes by itself."""
        return 1

    @property
    def variables(self) -> tuple[Variable | ShardedVariable, ...]:
        """All variables, in the order of declaration."""
        return tuple(self._variables)

    @property
    def trainable_variables(self) -> tuple[Variable | ShardedVariable, ...]:
        """Those that were declared trainable, as they are by default."""
        return tuple(variable for variable in self._variables if variable.trainable)

    @contextmanager
    def scope(self) -> Generator[ParameterServerStrategy, None, None]:
        """Return a context manager in which ``Variable(...)`` declares variables of this strategy.

        Raises:
            UsageError: Inside another strategy's scope, or inside a step.
        """
        forbid_in_step("opening a strategy's scope")
        outer = open_scope.get()
        if outer is not None and outer is not self:
            raise UsageError(
                "mixing different strategies: another one's scope is open here",
                hint="leave that scope first",
            )
        token = open_scope.set(self)
        try:
            yield self
        finally:
            open_scope.reset(token)

    # scopes.Scope.

    def declare(
        self,
        initial_value: Any,
        name: str,
        dtype: object,
        shape: tuple[int, ...] | None,
        trainable: bool,
        where: str,
        *,
        placement: Placement | None = None,
    ) -> VariableSpec:
        """Place a new variable; it is created before anything needs it.

        With a placement of its own it is not partitioned, and takes nobody's turn.
        """
        self._check_open(name)
        initial, full_shape, dtype_name = describe(initial_value, name, dtype, shape, where)
        spec = split(
            self._unique(name), self._next_id, full_shape, dtype_name, trainable=trainable,
            partitioner=self._partitioner if placement is None else None,
            place=(placement or self._placement).place, where=where,
        )  # fmt: skip
        self._declared(name, Declaration(spec, initial))
        return spec

    def declare_copy(self, original: VariableSpec, name: str, where: str) -> VariableSpec:
        """Place a new variable beside another one, with whose value it begins."""
        self._check_open(name)
        spec = beside(original, self._unique(name), self._next_id, trainable=False, where=where)
        self._declared(name, Declaration(spec, None, original))
        return spec

    def add(self, variable: Any) -> None:
        """Note the handle of a variable that was declared."""
        self._variables.append(variable)

    def _check_open(self, name: str) -> None:
        if self.created and self.runtime is None:
            raise ClosedError(
                f'variable "{name}": the coordinator of this strategy was closed',
                hint="make a new strategy, and declare it there",
            )

    def _unique(self, name: str) -> str:
        """Return a name that is not taken."""
        unique, count = name, self._names.get(name, 0)
        while unique in self._names:
            unique = f"{name}_{count}"
            count += 1
        return unique

    def _declared(self, name: str, declaration: Declaration) -> None:
        """Note what was declared, under the name that was asked for or one made of it."""
        self._names[name] = self._names.get(name, 0) + 1
        self._names.setdefault(declaration.spec.name, 1)
        self._next_id += 1
        self.declared.append(declaration)
