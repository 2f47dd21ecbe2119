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
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from psync.client.context import ClosureContext, Running, forbid_in_step, here
from psync.cluster import CHIEF
from psync.errors import ContextError, RemoteProtocolError
from psync.net.shielding import shielded
from psync.numerics.replicas import (
    ReduceOp,
    as_reduce_op,
    gather_values,
    local_results,
    reducing_distributed,
    reducing_values,
    regroup,
    select,
)
from psync.numerics.sums import Pieces
from psync.serialization.failures import rebuild_exception
from psync.serialization.payloads import Payload, Segment, check_size, pack, unpack
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.limits import Limits
from psync.wire.messages import Merged, ReachCollective

if TYPE_CHECKING:
    from psync.replicas.extended import Extended


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
    limits: Limits  # for what it sends
    main_by_name: bool  # whether classes of ``__main__`` travel by name

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
        payload = pack(
            (function, value),
            subject=subject,
            receiver="the coordinator",
            main_by_name=self.main_by_name,
        )
        check_size(payload, subject, self.limits)
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
        if not isinstance(answer, Merged):
            raise RemoteProtocolError(f"{what}: expected Merged, got {type(answer).__name__}")
        if answer.error is not None:
            raise rebuild_exception(CHIEF, *answer.error, result)
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
    state = _state()
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
        made: Extended = import_module("psync.replicas.extended").Extended(self)
        return made

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
