"""``strategy.extended``: operations of a strategy for code that is aware of replicas.

Reductions and updates are those of ``extended``, which steps have too. Here is what needs the
program itself: devices, roles, placement of variables, and steps over an iterator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from psync.cluster import device_name
from psync.cluster_roles import is_chief
from psync.compat.extended import Extended, is_variable
from psync.errors import EndOfData, UsageError
from psync.numerics.replicas import ReduceOp, local_results, reducing_distributed
from psync.numerics.sums import at_once
from psync.replicas.context import (
    check_cross_replica,
    cross_replica,
    entered_replica,
    replicas_in_sync,
)


class StrategyExtended(Extended):
    """Additional operations of a strategy, for code that is aware of replicas.

    ``strategy.extended`` returns it. These methods must be awaited: ``reduce_to``,
    ``batch_reduce_to``, ``broadcast_to``, ``update``, ``update_non_slot``,
    ``call_for_each_replica`` and ``experimental_run_steps_on_iterator``.

    Args:
        strategy: A ``ParameterServerStrategy``.

    Source: ``tf.distribute.StrategyExtended``.
    """

    # Devices.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each worker: "/job:worker/replica:0/task:0/device:CPU:0"."""
        return self._devices("worker")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of each ps, where variables are."""
        return self._devices("ps")

    def _devices(self, job: str) -> tuple[str, ...]:
        return tuple(device_name(job, index) for index in self._strategy.cluster.task_indices(job))

    # Who does what.

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process saves: the chief, or a program that is not a task.

        In a cluster without a chief, worker 0 saves.
        """
        job, index = self._strategy.task
        return job is None or is_chief(self._strategy.cluster, job, index)

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries; the same as ``should_checkpoint``."""
        return self.should_checkpoint

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables; the same as ``should_checkpoint``."""
        return self.should_checkpoint

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all batches must have one shape: always False."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether workers compute separately: always True."""
        return True

    # Variables and data.

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return a context manager in which variables are declared on the ps of another variable.

        Args:
            colocate_with_variable: A variable of this strategy, or a device from
                ``non_slot_devices``.

        Raises:
            UsageError: Outside the strategy's scope; inside a step; or the variable belongs to
                another strategy.
            ConfigurationError: There is no such device.

        Source: ``tf.distribute.StrategyExtended.colocate_vars_with``.
        """
        if isinstance(colocate_with_variable, str):
            pinned: AbstractContextManager[None] = self._strategy.pinned(colocate_with_variable)
            return pinned
        beside: AbstractContextManager[None] = self._strategy.colocate_vars_with(
            colocate_with_variable
        )
        return beside

    def value_container(self, value: Any) -> Any:
        """Return the variable that has ``value`` as a shard; return anything else unchanged.

        Source: ``tf.distribute.StrategyExtended.value_container``.
        """
        if is_variable(value):
            whole = value.spec.shards[0].variable
            for variable in self._strategy.variables:
                if variable.name == whole and variable.origin == value.origin:
                    return variable
        return value

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> Any:
        """Return a dataset whose elements are the rows of arrays.

        Args:
            numpy_input: An array, or a tuple or dict of arrays. A list is one array: it is stacked.
            session: A TensorFlow 1 argument; not used.

        Raises:
            UsageError: The arrays differ in length, or have no rows.

        Source: ``tf.distribute.StrategyExtended.experimental_make_numpy_dataset``.
        """
        return self._strategy.experimental_make_numpy_dataset(numpy_input)

    async def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Run ``fn(context, inputs)`` on elements of an iterator, one after the other.

        ``fn`` runs here, in cross-replica context, and usually starts replicas: ``await
        strategy.run(step, args=(inputs,))``.

        Args:
            fn: A function or coroutine function.
            iterator: An iterator of the program: of a list, a generator, or an asynchronous one.
            iterations: Number of elements.
            initial_loop_values: Value of ``last_step_outputs`` until a step sets it.

        Returns:
            The context, with the outputs that the steps have set.

        Raises:
            UsageError: Called in a replica; ``iterations`` is not a whole number; or ``iterator``
                is not an iterator.
            EndOfData: The iterator has too few elements.
            Exception: An exception of ``fn``.

        Cancellation: Cancels ``fn``; the element is lost.

        Source: ``tf.distribute.StrategyExtended.experimental_run_steps_on_iterator``.
        """
        operation = "experimental_run_steps_on_iterator"
        check_cross_replica(operation)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise UsageError(f"{operation}: expected at least 1 iteration, got {iterations!r}")
        context = MultiStepContext(self._strategy, initial_loop_values)
        with cross_replica(self._strategy):
            for done in range(iterations):
                inputs = await _next(iterator, operation)
                if inputs is _END:
                    raise EndOfData(
                        f"{operation}: the iterator ended after {done} of {iterations} elements"
                    )
                result = fn(context, inputs)
                if inspect.isawaitable(result):
                    await result
        return context


class MultiStepContext:
    """The outputs of steps over an iterator.

    Attributes:
        last_step_outputs: Outputs by name, from the last step that set each.
        non_tensor_outputs: Outputs that are not numbers or arrays, by name; a tuple with one value
            per replica where replicas have values.

    Source: TensorFlow ``MultiStepContext`` of ``distribute/input_lib.py``.
    """

    def __init__(self, strategy: Any, initial: Mapping[str, Any] | None = None) -> None:
        self._strategy = strategy
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def __repr__(self) -> str:
        names = [*self.last_step_outputs, *self.non_tensor_outputs]
        return f"<MultiStepContext: {', '.join(names) or 'nothing'}>"

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Set an output of this step, in place of the previous step's.

        Args:
            name: Name in ``last_step_outputs``.
            output: Value, such as the result of ``strategy.run``.
            reduce_op: Reduction of the replicas' values to one; None: they stay as they are.

        Raises:
            ReplicaValueError: The output cannot be reduced.
            UsageError: Called in a replica.
        """
        self._check(name, "set_last_step_output")
        if reduce_op is not None:
            replicas = replicas_in_sync()
            output = at_once(reducing_distributed(reduce_op, output, replicas))
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set an output that is not a number or array.

        Args:
            name: Name in ``non_tensor_outputs``.
            output: Any value.

        Raises:
            UsageError: Called in a replica.
        """
        self._check(name, "set_non_tensor_output")
        results = local_results(output)
        self.non_tensor_outputs[name] = output if len(results) == 1 else results

    def _check(self, name: str, operation: str) -> None:
        if entered_replica() is not None:
            raise UsageError(
                f'{operation} of "{name}" in a replica, which has only a copy of the context',
                hint="return the value from the function given to strategy.run, and set it in the "
                "program",
            )


_END = object()  # an asynchronous function cannot let StopIteration through


async def _next(iterator: Any, operation: str) -> Any:
    if isinstance(iterator, Iterator):
        return next(iterator, _END)
    if hasattr(iterator, "__anext__"):
        return await anext(iterator, _END)
    raise UsageError(
        f"{operation}: expected an iterator, got {type(iterator).__name__}",
        hint="iter(batches)",
    )
