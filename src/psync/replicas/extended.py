"""``strategy.extended``: operations for code that is aware of replicas.

``Extended`` is the part that works wherever there are replicas: on the coordinator, and in a step,
where one replica merges with itself. ``StrategyExtended`` adds what needs the program itself:
devices, roles, placement of variables, and steps over an iterator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from psync.cluster import device_name, is_chief
from psync.errors import ContextError, EndOfData, ReplicaValueError, UsageError
from psync.numerics.replicas import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    as_reduce_op,
    local_results,
    map_in_pieces,
    map_structures,
    reducing_distributed,
    select,
)
from psync.numerics.sums import Pieces, at_once
from psync.replicas.context import (
    check_cross_replica,
    cross_replica,
    entered_replica,
    in_turns,
    replicas_in_sync,
    update_context,
)
from psync.specs import VariableSpec, plain_array


class Extended:
    """Operations on values of replicas, and on variables.

    All except ``update`` and ``update_non_slot`` are for cross-replica context: in
    ``strategy.scope()``, in a merge function, or in the program outside of both.

    Args:
        strategy: The strategy of the replicas.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._strategy!r}>"

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each worker: "/job:worker/replica:0/task:0/device:CPU:0".

        Raises:
            ContextError: Called in a step, or outside of every scope: only the program knows.
        """
        return self._devices("worker_devices", "worker")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of each ps, where variables are.

        Raises:
            ContextError: Called in a step, or outside of every scope: only the program knows.
        """
        return self._devices("parameter_devices", "ps")

    def _devices(self, operation: str, job: str) -> tuple[str, ...]:
        raise ContextError(
            f"{operation} of {self._strategy!r}",
            hint="use the strategy itself, in the program: strategy.extended",
        )

    # Values.

    async def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any) -> Any:
        """Return the sum or mean of a value over its replicas, to update a variable with it.

        Args:
            reduce_op: ``psync.ReduceOp.SUM`` or MEAN, or its name.
            value: A ``PerReplica``, or a structure of such. An ordinary value is common to all
                replicas: its mean is itself, 0 is 0, and its sum is refused if there are several.
            destinations: The variable, value or device whose locality the result should have.
                Values stay where they are summed, and travel to ps tasks when a variable is
                updated.

        Returns:
            A ``Mirrored`` for each ``PerReplica``; ordinary values unchanged.

        Raises:
            ReplicaValueError: The operation is unknown; values do not match each other; or there is
                no destination, or a list of them.
            ContextError: Called in replica context.

        Cancellation: Safe.

        Source: ``tf.distribute.StrategyExtended.reduce_to``.
        """
        check_cross_replica("reduce_to")
        return await self._reduced_to(as_reduce_op(reduce_op), value, destinations, "reduce_to")

    async def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Iterable[tuple[Any, Any]]
    ) -> list[Any]:
        """Return the result of ``reduce_to`` for each pair (value, destinations), in order.

        Raises:
            ReplicaValueError: See ``reduce_to``; or an element is not a pair.
            ContextError: Called in replica context.

        Cancellation: Safe.

        Source: ``tf.distribute.StrategyExtended.batch_reduce_to``.
        """
        check_cross_replica("batch_reduce_to")
        op = as_reduce_op(reduce_op)
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ReplicaValueError(
                    f"batch_reduce_to: expected pairs (value, destination), got {pair!r:.80}"
                )
        return [await self._reduced_to(op, value, to, "batch_reduce_to") for value, to in pairs]

    async def _reduced_to(self, op: ReduceOp, value: Any, destinations: Any, operation: str) -> Any:
        _check_destination(destinations, operation)
        replicas = self._strategy.num_replicas_in_sync

        def reducing(leaf: Any) -> Pieces[Any]:
            result = yield from reducing_distributed(op, leaf, replicas)
            return Mirrored([result], destinations) if isinstance(leaf, PerReplica) else result

        return await in_turns(map_in_pieces(reducing, (value,)))

    async def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return a value as one that is common to all replicas.

        Args:
            tensor: An array, or something that numpy converts to one. Python numbers are returned
                unchanged.
            destinations: The variable, value or device whose locality the result should have.

        Raises:
            ReplicaValueError: ``tensor`` has a value for each replica; or there is no destination,
                or a list of them.
            ContextError: Called in replica context.

        Cancellation: Safe.

        Source: ``tf.distribute.StrategyExtended.broadcast_to``.
        """
        check_cross_replica("broadcast_to")
        _check_destination(destinations, "broadcast_to")
        if isinstance(tensor, PerReplica):
            raise ReplicaValueError(
                f"broadcast_to: expected one value, got those of {len(tensor)} replicas",
                hint="reduce_to combines them into one",
            )
        if isinstance(tensor, bool | int | float | complex):
            return tensor
        try:
            value = tensor.value if isinstance(tensor, Mirrored) else plain_array(tensor)
        except (TypeError, ValueError) as exc:
            raise ReplicaValueError(f"broadcast_to: expected an array, got {exc}") from exc
        return Mirrored([value], destinations)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each replica, in the order of replica ids.

        Source: ``tf.distribute.StrategyExtended.experimental_local_results``.
        """
        return local_results(value)

    def value_container(self, value: Any) -> Any:
        """Return the value unchanged: values have no container.

        Source: ``tf.distribute.StrategyExtended.value_container``.
        """
        return value

    # Updates.

    async def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` once, in update context, to update a variable.

        ps tasks run no user code, so ``fn`` runs here and updates the variable by its methods:
        ``await var.assign_add(…)``. In replica context it runs in a merge call, once all replicas
        have called it.

        Args:
            var: A variable.
            fn: A function or coroutine function.
            args: Positional arguments after the variable. A ``Mirrored``, or a ``PerReplica`` of
                one replica, is unwrapped.
            kwargs: Keyword arguments, treated the same way.
            group: Whether to return the result as it is; otherwise as a tuple of local results.

        Returns:
            The result of ``fn``.

        Raises:
            ReplicaValueError: ``var`` is not a variable; or an argument has values of several
                replicas, while the variable takes only one.
            Exception: An exception of ``fn``.

        Cancellation: Cancels ``fn``.

        Source: ``tf.distribute.StrategyExtended.update``; there ``fn`` runs where the variable is.
        """
        _check_variable(var, "update")
        calls = (var, *args), dict(kwargs or {})
        return await self._update("update", fn, *calls, group=group)

    async def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once, in update context, to update an optimizer's variables.

        Args:
            colocate_with: Device from ``non_slot_devices``.
            fn: A function or coroutine function.
            args: Positional arguments; see ``update``.
            kwargs: Keyword arguments; see ``update``.
            group: See ``update``.

        Raises:
            ReplicaValueError: See ``update``; or ``colocate_with`` is missing.
            Exception: An exception of ``fn``.

        Cancellation: Cancels ``fn``.

        Source: ``tf.distribute.StrategyExtended.update_non_slot``.
        """
        _check_destination(colocate_with, "update_non_slot")
        return await self._update(
            "update_non_slot", fn, tuple(args), dict(kwargs or {}), group=group
        )

    async def _update(
        self,
        operation: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        group: bool,
    ) -> Any:
        replica = entered_replica()
        if replica is not None:
            return await replica.merge_call(_merged_update, (operation, fn, args, kwargs, group))
        args, kwargs = map_structures(lambda leaf: _single(leaf, operation), ((args, kwargs),))
        with update_context(self._strategy):
            result = fn(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
        return result if group else map_structures(local_results, (result,))

    def non_slot_devices(self, var_list: Iterable[Any]) -> str:
        """Return the device for values that an optimizer keeps once for all variables.

        It is the device of the first shard of the variable whose name sorts first, so it is the
        same one on every call and every task.

        Raises:
            ReplicaValueError: An element is not a variable, or there is none.

        Source: ``tf.distribute.StrategyExtended.non_slot_devices``.
        """
        variables = list(var_list)
        if not variables:
            raise ReplicaValueError("non_slot_devices: expected at least one variable, got none")
        for variable in variables:
            _check_variable(variable, "non_slot_devices")
        first: VariableSpec = min((variable.spec for variable in variables), key=lambda s: s.name)
        return device_name("ps", first.shards[0].ps)

    async def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run ``fn`` once on each replica; the older name of ``strategy.run``.

        Source: ``tf.distribute.StrategyExtended.call_for_each_replica``.
        """
        return await self._strategy.run(fn, args=args, kwargs=kwargs)


async def _merged_update(
    strategy: Any,
    operation: Any,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: Any,
) -> Any:
    """What ``update`` is in replica context; the first replica's function is called."""
    operation, fn, group = (select(0, each) for each in (operation, fn, group))
    return await strategy.extended._update(operation, fn, args, kwargs, group=group)


def _single(value: Any, operation: str) -> Any:
    """Return the only value of a distributed one."""
    if isinstance(value, PerReplica) and len(value) > 1:
        raise ReplicaValueError(
            f"{operation}: an argument has values of {len(value)} replicas, but a variable is "
            "updated once",
            hint="combine them: await extended.reduce_to(psync.ReduceOp.SUM, value, var); or, if "
            "all are equal: psync.Mirrored([value])",
        )
    return value[0] if isinstance(value, DistributedValues) else value


def is_variable(value: Any) -> bool:
    """Return whether this is the handle of a variable."""
    return isinstance(getattr(value, "spec", None), VariableSpec)


def _check_variable(value: Any, operation: str) -> None:
    if not is_variable(value):
        raise ReplicaValueError(f"{operation}: expected a variable, got {type(value).__name__}")


def _check_destination(destinations: Any, operation: str) -> None:
    if destinations is None or (isinstance(destinations, str) and not destinations):
        raise ReplicaValueError(
            f"{operation}: a destination is missing", hint="give the variable to be updated"
        )
    if isinstance(destinations, list | tuple):
        raise ReplicaValueError(
            f"{operation}: expected one destination, got a {type(destinations).__name__}",
            hint="batch_reduce_to takes a list of pairs (value, destination)",
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

    def _devices(self, operation: str, job: str) -> tuple[str, ...]:
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
            output = at_once(reducing_distributed(as_reduce_op(reduce_op), output, replicas))
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
