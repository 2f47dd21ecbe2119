"""Replica context and cross-replica context, as in ``tf.distribute``.

    default               --strategy.scope()-->  cross-replica
    default, closure      --merge_call-->        cross-replica, until the function has returned
    cross-replica         --strategy.run-->      replica
    cross-replica         --extended.update-->   update

In replica context a value is that of one replica, in cross-replica context there may be one for
each. Where no context was entered, that is outside of every scope and in a step that was given to
``schedule``, there is one replica, 0 of 1: the default. In a replica of ``strategy.run`` on the
coordinator, a *gang*, there are as many as workers took part.

A context holds for the code that entered it and for the tasks and threads that this starts
with its context, but never in a step: a step begins in a context of its own, even if it runs in
the coordinator's process.

``strategy.extended`` has operations for code that is aware of replicas. ``Extended`` is the part
that works wherever there are replicas: on the coordinator, and in a step, where one replica merges
with itself. ``StrategyExtended`` adds what needs the program itself: devices, roles, placement of
variables, and steps over an iterator.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from psync.client.context import ClosureContext, Running, forbid_in_step, here
from psync.cluster import CHIEF, device_name, is_chief
from psync.errors import (
    ContextError,
    EndOfData,
    RemoteProtocolError,
    ReplicaValueError,
    UsageError,
)
from psync.net.shielding import shielded
from psync.numerics.replicas import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    as_reduce_op,
    gather_values,
    local_results,
    map_in_pieces,
    map_structures,
    reducing_distributed,
    reducing_values,
    regroup,
    select,
)
from psync.numerics.sums import Pieces, at_once
from psync.serialization.payloads import Packing, Payload, Segment, rebuild_exception, unpack
from psync.specs import VariableSpec, plain_array
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import ClosureResults, ReachCollective

T = TypeVar("T")


async def in_turns(pieces: Pieces[T]) -> T:
    """Do all the work, with the loop running between the pieces; return its result.

    Raises:
        Exception: What the work raises.

    Cancellation: The work ends where it is.
    """
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return cast(T, end.value)
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, eq=False)
class CrossReplica:
    """All replicas are meant; or a variable is being updated where it lives."""

    strategy: Any  # whose replicas
    num_replicas: int  # how many there are
    is_default: bool = False  # it was set for all that follows; no block ends it
    merging: bool = False  # a gang waits for what is done here: the function of a collective
    updating: bool = False


REPLICAS_ONLY = ("merge_call", "all_reduce", "all_gather", "replica_id_in_sync_group")
"""Attributes of a replica context that nothing else has."""


def no_replica(what: str, state: CrossReplica) -> ContextError:
    """Return the error for what needs a replica and is done where there is none."""
    kind = "update" if state.updating else "cross-replica"
    return ContextError(
        f"{what} in {kind} context, which has no replicas to wait for",
        hint="call it in the function given to strategy.run, not in a merge function",
    )


open_scope: contextvars.ContextVar[Any] = contextvars.ContextVar("psync_scope", default=None)
"""The strategy whose scope is open; None: none is."""

_entered: contextvars.ContextVar[tuple[Running, ReplicaContext | CrossReplica] | None] = (
    contextvars.ContextVar("psync_replica_state", default=None)
)
"""What was entered last, and in which step or dataset code."""


class Enter:
    """Context manager of one state. Blocks are left in the order in which they were entered.

    Args:
        state: What holds inside.
        value: What ``as`` gives.

    Raises:
        ContextError: On leaving, if another one was entered in it and not left; or if code in it
            used the replica context, which is None in it, as if there were one.
    """

    __slots__ = ("_entry", "_token", "_value")

    def __init__(self, state: ReplicaContext | CrossReplica, value: Any = None) -> None:
        self._entry = (here.get(), state)
        self._value = value
        self._token: contextvars.Token[Any]

    def __enter__(self) -> Any:
        self._token = _entered.set(self._entry)
        return self._value

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if _entered.get() is not self._entry and exc is None:
            raise ContextError(
                "a replica context was exited before one that was entered inside it",
                hint="use `with` blocks, which exit in the right order",
            )
        _entered.reset(self._token)
        state = self._entry[1]
        if isinstance(exc, AttributeError) and exc.obj is None and exc.name in REPLICAS_ONLY:
            if isinstance(state, CrossReplica):
                raise no_replica(exc.name, state) from exc


Collective = Callable[[Any, Sequence[Any]], Any]
"""What is done with the values of all replicas: called once, on the coordinator, with the strategy
and the values by replica id; may be a coroutine function. Its module must be importable there.
Each replica gets what it returns, of values for each replica its own."""


async def reduce_all(strategy: Any, calls: Sequence[tuple[ReduceOp, Any]]) -> Any:
    """Return the sum or mean of what all replicas have."""
    return await in_turns(reducing_values(calls[0][0], [value for _, value in calls]))


def gather_all(strategy: Any, calls: Sequence[tuple[Any, int]]) -> Any:
    """Return what all replicas have, one after the other along an axis."""
    return gather_values([value for value, _ in calls], calls[0][1])


def merge_all(strategy: Any, calls: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Return the result of the first merge function for the regrouped arguments of all."""
    merge_fn = calls[0][0]
    args, kwargs = regroup([(args, kwargs) for _, args, kwargs in calls])
    return merge_fn(strategy, *args, **kwargs)


@dataclass(slots=True, eq=False)
class GangMember:
    """One replica of a gang, as the step on its worker sees it."""

    replica_id: int  # which one it is
    num_replicas: int  # how many there are
    closure: ClosureContext  # that runs it
    call: Callable[[Message, Sequence[Segment]], Awaitable[Frame]]
    """Sends a request with its segments to the coordinator and waits for the reply."""
    packing: Packing  # of what it sends

    async def collective(self, what: str, function: Collective, value: Any) -> Any:
        """Wait until all replicas are here; return what ``function`` makes of all the values.

        Args:
            what: Names it in errors. All replicas must come to the same: the first one's function
                is called.
            function: See `Collective`.
            value: This replica's.

        Raises:
            UsageError: The replicas came to different ones, or not all of them come.
            SerializationError: The value cannot be sent to the coordinator.
            ConnectionLost: The coordinator is gone; so is the gang.
            WorkerLost: The worker of another replica was lost.
            ClosureCancelled: Another replica failed, or the gang was cancelled.
            Exception: What the function raised; all replicas get it.

        Cancellation: The gang is over: no replica may be left out.
        """
        self.closure.check_open(what)
        subject = f"what replica {self.replica_id} brings to {what}"
        payload = self.packing.value((function, value), subject, "the coordinator")
        request = ReachCollective(self.closure.closure_id, what)
        call = asyncio.ensure_future(self.call(request, payload.segments))
        try:
            received = await shielded(call)
        except asyncio.CancelledError:
            # A step that is stopped has not given up: the coordinator knows of it, or of the end of
            # this worker, which is what the others should hear.
            if not self.closure.cancelled:
                call.cancel()
            raise
        answer, result = received.message, Payload.from_segments(received.segments)
        if not isinstance(answer, ClosureResults):
            got = type(answer).__name__
            raise RemoteProtocolError(f"{what}: expected ClosureResults, got {got}")
        ((_, _, _, error),) = answer.results
        if error is not None:
            raise rebuild_exception(CHIEF, *error, result)
        return unpack(result.data, result.buffers)


class ReplicaContext:
    """One replica of a function: its number, and operations over all replicas.

    Made by psync; ``psync.get_replica_context()`` returns the one of the calling code.

    Attributes:
        strategy: The strategy; in a step, a stand-in for it that knows only this replica.
        replica_id_in_sync_group: Number of this replica, from 0.
        num_replicas_in_sync: Number of replicas; 1 outside of ``strategy.run`` on the coordinator.

    Source: ``tf.distribute.ReplicaContext``.
    """

    def __init__(self, strategy: Any, member: GangMember | None = None) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = 0 if member is None else member.replica_id
        self.num_replicas_in_sync = 1 if member is None else member.num_replicas
        self._member = member

    def __repr__(self) -> str:
        return (
            f"<ReplicaContext: replica {self.replica_id_in_sync_group} of "
            f"{self.num_replicas_in_sync}>"
        )

    async def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Wait until every replica has called this; return this replica's part of the result.

        ``merge_fn(strategy, *args, **kwargs)`` runs once, in cross-replica context. In a gang, it
        runs on the coordinator's event loop, with the arguments of all replicas regrouped
        (arguments that differ become a ``PerReplica``). With a single replica, it runs here
        immediately, with that replica's arguments.

        Args:
            merge_fn: A function or coroutine function. In a gang it is pickled like a step, and the
                first replica's is called.
            args: Positional arguments after the strategy.
            kwargs: Keyword arguments.

        Raises:
            ContextError: Not in replica context; or the replicas do not all make the same calls.
            SerializationError: Something cannot be sent to the coordinator.
            WorkerLost: The worker of another replica was lost; names it.
            ClosureCancelled: Another replica failed, or the gang was cancelled.
            Exception: An exception of ``merge_fn``; every replica gets it.

        Cancellation: Ends the gang, unless there is one replica.

        Source: ``tf.distribute.ReplicaContext.merge_call``.
        """
        call = merge_fn, tuple(args), dict(kwargs or {})
        return await self._collective("merge_call", merge_all, call)

    async def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Return the sum or mean of ``value`` over all replicas; every replica must call it.

        Args:
            reduce_op: ``psync.ReduceOp.SUM`` or MEAN, or its name.
            value: A number, an array, IndexedSlices, or any nesting of them.

        Raises:
            ReplicaValueError: The operation is unknown, or the replicas' values do not match.
            PsyncError: See ``merge_call``.

        Cancellation: See ``merge_call``.

        Source: ``tf.distribute.ReplicaContext.all_reduce``.
        """
        op = as_reduce_op(reduce_op)
        return await self._collective(f"all_reduce {op.name}", reduce_all, (op, value))

    async def all_gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas, concatenated along ``axis``.

        Args:
            value: An array of rank 1 or higher, or any nesting of them.
            axis: Number of the axis; negative ones count from the end.

        Raises:
            ReplicaValueError: Shapes differ on another axis, there is no such axis, or the value is
                an ``IndexedSlices``.
            PsyncError: See ``merge_call``.

        Cancellation: See ``merge_call``.

        Source: ``tf.distribute.ReplicaContext.all_gather``.
        """
        return await self._collective(f"all_gather along {axis}", gather_all, (value, axis))

    async def _collective(self, what: str, function: Collective, value: Any) -> Any:
        state = _state()
        if not isinstance(state, ReplicaContext):
            raise no_replica(what, state)
        if self._member is not None:
            return await self._member.collective(what, function, value)
        with cross_replica(self.strategy):
            result = function(self.strategy, [value])
            result = await result if inspect.isawaitable(result) else result
        return select(0, result)


# --- where one is --------------------------------------------------------------------------------


def _state() -> ReplicaContext | CrossReplica:
    """Return the context of this code: what was entered last and holds here, or the default."""
    entry, closure = _entered.get(), here.get()
    if entry is not None and entry[0] is closure:
        return entry[1]
    if type(closure) is not ClosureContext:
        return _OUTSIDE
    return ReplicaContext(_IN_STEP, closure.gang) if closure.gang is not None else _ALONE


def cross_replica(
    strategy: Any, *, num_replicas: int | None = None, merging: bool = False
) -> Enter:
    """Return a context manager inside which all replicas of ``strategy`` are meant.

    Args:
        strategy: What ``get_strategy`` returns inside.
        num_replicas: How many there are; None: as many as here.
        merging: Whether a gang waits for what is done inside.
    """
    count = replicas_in_sync() if num_replicas is None else num_replicas
    return Enter(CrossReplica(strategy, count, merging=merging), strategy)


def update_context(strategy: Any) -> Enter:
    """Return a context manager inside which a variable is updated where it lives."""
    return Enter(CrossReplica(strategy, replicas_in_sync(), updating=True))


def get_replica_context() -> ReplicaContext | None:
    """Return the replica that runs here, or None in cross-replica and in update context.

    Outside of all scopes, and in a step, it is the only replica: 0 of 1. In the function passed to
    ``strategy.run`` on the coordinator it is one of the gang.

    Source: ``tf.distribute.get_replica_context``.
    """
    state = _state()
    return state if isinstance(state, ReplicaContext) else None


def entered_replica() -> ReplicaContext | None:
    """Return the replica that runs here; None outside of every scope too: none was entered."""
    replica = get_replica_context()
    return None if replica is _OUTSIDE else replica


def check_cross_replica(operation: str) -> None:
    """Refuse ``operation`` where one replica runs.

    Raises:
        ContextError: In a step, or in a function given to ``run``.
    """
    if entered_replica() is not None:
        raise ContextError(
            f"{operation} in replica context, where the values of other replicas are unknown",
            hint="call it in a merge function: await "
            "psync.get_replica_context().merge_call(merge_fn, args=…)",
        )


def in_cross_replica_context() -> bool:
    """Return whether this code stands for all replicas: in a strategy's scope or a merge function.

    Source: ``tf.distribute.in_cross_replica_context``.
    """
    state = _state()
    return isinstance(state, CrossReplica) and not state.updating


def get_strategy() -> Any:
    """Return the strategy whose scope, replica or merge function this code is in.

    In a step, and outside of all scopes, it is a stand-in that knows one replica. The strategy
    itself stays on the coordinator.

    Source: ``tf.distribute.get_strategy``.
    """
    return _state().strategy


def has_strategy() -> bool:
    """Return whether ``get_strategy`` returns a strategy other than the default.

    Source: ``tf.distribute.has_strategy``.
    """
    return _state().strategy is not _NOWHERE


def current_gang() -> GangMember | None:
    """Return the gang's member that runs here, if it has others to merge updates with."""
    closure = here.get()
    if type(closure) is not ClosureContext or closure.gang is None:
        return None
    member: GangMember = closure.gang
    return member if member.num_replicas > 1 and isinstance(_state(), ReplicaContext) else None


def replicas_in_sync() -> int:
    """Return how many replicas there are here: 1 outside of a gang."""
    state = _state()
    return state.num_replicas_in_sync if isinstance(state, ReplicaContext) else state.num_replicas


def forbid_in_merge(operation: str) -> None:
    """Refuse ``operation`` in a merge function: it would wait for a gang that waits for it.

    Raises:
        ContextError: In the function of a collective.
    """
    state = None if _entered.get() is None else _state()
    if isinstance(state, CrossReplica) and state.merging:
        raise ContextError(
            f"{operation} in a merge function: it would wait for the replicas, which wait for it",
            hint="call it after strategy.run has returned",
        )


def experimental_set_strategy(strategy: Any) -> None:
    """Enter a strategy's scope permanently, as if in ``with strategy.scope():``; None leaves it.

    It applies to this task and the tasks that it starts.

    Raises:
        ContextError: Inside a scope or a replica.
        UsageError: Inside a step.

    Source: ``tf.distribute.experimental_set_strategy``.
    """
    forbid_in_step("experimental_set_strategy")
    state = _state()
    if state is not _OUTSIDE and not (isinstance(state, CrossReplica) and state.is_default):
        raise ContextError(
            "experimental_set_strategy inside a strategy's scope",
            hint="call it at the start, outside any `with strategy.scope():`",
        )
    open_scope.set(strategy)
    default = CrossReplica(strategy, 1, is_default=True)
    _entered.set(None if strategy is None else (here.get(), default))


async def run_alone(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``fn`` here as the only replica of ``strategy``; await what can be awaited of it.

    Raises:
        ContextError: In a replica of a gang, or in its merge function.
        Exception: What ``fn`` raises.
    """
    forbid_in_merge("run")
    if current_gang() is not None:
        raise ContextError("run in a replica of run, which is one of several")
    with Enter(ReplicaContext(strategy)):
        args, kwargs = select(0, (args, kwargs))
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


class OneReplica:
    """A stand-in for the strategy with one replica: in a step, and outside of scopes.

    Args:
        name: Name in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas: 1; in a replica of a gang, the gang's."""
        return replicas_in_sync()

    async def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call ``fn`` here once, as the only replica, and await its result if it is awaitable.

        Raises:
            ContextError: Called in a replica of a gang.
            Exception: An exception of ``fn``.
        """
        return await run_alone(self, fn, tuple(args), dict(kwargs or {}))

    experimental_run_v2 = run

    @property
    def extended(self) -> Extended:
        """Operations of merge functions: reducing values, and updating variables with them."""
        return Extended(self)

    async def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Return the sum or mean of a value over the replicas.

        Raises:
            ContextError: Called in a replica of a gang, which has only its own value.
            ReplicaValueError: The value cannot be reduced.
        """
        if current_gang() is not None:
            raise ContextError(
                "reduce in replica context, where the other replicas' values are unknown",
                hint="await psync.get_replica_context().all_reduce(…), or reduce in a merge_call",
            )
        return await in_turns(reducing_distributed(reduce_op, value, replicas_in_sync(), axis))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each replica, in the order of replica ids."""
        return local_results(value)


_NOWHERE = OneReplica("the default strategy: no scope is open")
_IN_STEP = OneReplica("the strategy of a step: one replica, itself")
_OUTSIDE = ReplicaContext(_NOWHERE)
_ALONE = ReplicaContext(_IN_STEP)


# --- strategy.extended ---------------------------------------------------------------------------


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
            return await replica.merge_call(_merged_update, ((operation, fn, group), args, kwargs))
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
    strategy: Any, what: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``update`` is in replica context; the first replica's function is called."""
    operation, fn, group = select(0, what)
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
        strategy, is_device = self._strategy, isinstance(colocate_with_variable, str)
        place = strategy.pinned if is_device else strategy.colocate_vars_with
        made: AbstractContextManager[None] = place(colocate_with_variable)
        return made

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
