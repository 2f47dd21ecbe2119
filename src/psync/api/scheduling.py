"""Typed scheduling: ``submit``, ``schedule`` and ``fetch``, which are methods of a coordinator.

What the overloads of ``submit`` say: arguments are those of the step, which ParamSpec tells; and
where the step takes a value, it may be given the RemoteValue of one. No type says the latter of
every parameter (that would be "map over a ParamSpec"), so it is said of the first three, by
Concatenate: up to the last that is a RemoteValue, and the others as they are. Each is there for
coroutine functions and for plain ones, and in forms that only one checker needs: mypy cannot solve
``A | RemoteValue[A]`` for a ``RemoteValue[Any]``, and pyright does not divide a union to match
``RemoteValue[A]``. tests/typing holds what both find and what they let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, TypeVarTuple, overload

from psync.api.pulls import NamedFields
from psync.chief.events import RollbackEvent
from psync.closures.identities import Identity
from psync.coordinator import Coordinator
from psync.errors import SerializationError, other_loop
from psync.serialization.remote_value import RemoteValue, fetch_all
from psync.specs import checked_kind

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
K = TypeVar("K")
L = TypeVar("L")

Unchecked: TypeAlias = (
    list[Any]
    | tuple[RemoteValue[Any], *tuple[Any, ...]]
    | tuple[Any, RemoteValue[Any], *tuple[Any, ...]]
    | tuple[Any, Any, RemoteValue[Any], *tuple[Any, ...]]
)
"""Arguments of ``schedule`` that are not compared with the step's parameters."""


class Scheduling:
    """What ``ClusterCoordinator`` offers for closures: a base of it."""

    _coordinator: Coordinator | None

    def _running(self, operation: str) -> Coordinator:
        raise NotImplementedError

    @overload
    def submit(
        self,
        step: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self, step: Callable[P, Coroutine[Any, Any, T] | T], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
        a: A | RemoteValue[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, P], Coroutine[Any, Any, T] | T],
        a: A | RemoteValue[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
        a: RemoteValue[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, P], Coroutine[Any, Any, T] | T],
        a: RemoteValue[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T]],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T] | T],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T]],
        a: A | RemoteValue[A],
        b: RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T] | T],
        a: A | RemoteValue[A],
        b: RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T]],
        a: RemoteValue[A],
        b: RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, P], Coroutine[Any, Any, T] | T],
        a: RemoteValue[A],
        b: RemoteValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, C, P], Coroutine[Any, Any, T]],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        c: C | RemoteValue[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, C, P], Coroutine[Any, Any, T] | T],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        c: C | RemoteValue[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, C, P], Coroutine[Any, Any, T]],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        c: RemoteValue[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self,
        step: Callable[Concatenate[A, B, C, P], Coroutine[Any, Any, T] | T],
        a: A | RemoteValue[A],
        b: B | RemoteValue[B],
        c: RemoteValue[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteValue[T]: ...

    def submit(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Queue ``step(*args, **kwargs)`` to be run on some worker; never blocks.

        ``schedule`` in the form of ``concurrent.futures``, and the same in all else. Type checkers
        compare the arguments with the step's parameters, where a RemoteValue of the right type
        passes, as a per-worker iterator does, and know what the result is:
        docs/reference/typing.md.

        Args:
            step: As ``fn`` of ``schedule``.
            args: Likewise.
            kwargs: Likewise.

        Returns:
            The handle to its result.

        Raises:
            SerializationError: ``step`` is not callable, or something cannot be sent to a worker;
                names it.
            ClosedError: The coordinator is not running.

        Example:
            async def step(data: Iterator[Batch], rate: float) -> float:
                ...

            loss = coordinator.submit(step, data, rate=0.1)
            print(await loss)

        Source: ``concurrent.futures.Executor.submit``; ``Client.submit`` of Dask.
        """
        try:
            return self._running("submit").schedule(step, args, kwargs)
        except (
            SerializationError
        ) as error:  # it is about the program, and begins where that has called
            raise error.with_traceback(None) from error.__cause__

    @overload
    def schedule(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> RemoteValue[T]: ...
    @overload
    def schedule(self, fn: Callable[[], Coroutine[Any, Any, T] | T]) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], args: tuple[*Ts]
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T] | T], args: tuple[*Ts]
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[..., Coroutine[Any, Any, T]], args: Unchecked
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[..., Coroutine[Any, Any, T] | T], args: Unchecked
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        args: tuple[Any, ...] | list[Any],
        kwargs: dict[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self,
        fn: Callable[..., Coroutine[Any, Any, T] | T],
        args: tuple[Any, ...] | list[Any],
        kwargs: dict[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        *,
        kwargs: dict[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[..., Coroutine[Any, Any, T] | T], *, kwargs: dict[str, Any] | None
    ) -> RemoteValue[T]: ...

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue[Any]:
        """Queue ``fn(*args, **kwargs)`` to be run on some worker; never blocks.

        It runs at least once: again, elsewhere, if its worker is lost. Its pushes are applied
        at most once. After an error, and until ``join`` has raised it, what is scheduled is
        cancelled at once.

        A call takes some microseconds, and a queued closure half a KiB, beside its arguments, until
        it has ended. Whoever schedules hundreds of thousands in one loop should ``await
        asyncio.sleep(0)`` now and then: nothing is sent, and no result comes in, meanwhile.

        Args:
            fn: A coroutine function, which runs on the worker's event loop, or a plain one,
                which runs in a thread there. It is pickled when it is first scheduled: what it
                captured then is what workers see.
            args: Arguments, captured by value now. A RemoteValue among them, at any depth, is
                replaced by its value on the worker, and waited for. A per-worker iterator is
                the worker's own.
            kwargs: Likewise.

        Returns:
            The handle to its result.

        Raises:
            SerializationError: ``fn`` is not callable, or something cannot be sent to a worker;
                names it.
            ClosedError: The coordinator is not running.
        """
        if type(args) is not tuple or kwargs is not None:
            args, kwargs = _checked(args, kwargs)
        try:
            return self._running("schedule").schedule(fn, args, kwargs or {})
        except SerializationError as error:
            raise error.with_traceback(None) from error.__cause__

    def _schedule_shard(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any],
        kwargs: dict[str, Any] | None,
        identity: Identity,
    ) -> RemoteValue[Any]:
        """Do as ``schedule``; another closure of the same identity may come later."""
        checked = _checked(args, kwargs)
        try:
            return self._running("schedule").schedule(fn, *checked, identity)
        except SerializationError as error:
            raise error.with_traceback(None) from error.__cause__

    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]:
        """Schedule again the closures whose updates a rollback has undone, as new closures.

        Function and arguments are those of the first time; a per-worker iterator goes on with the
        batches that come next, which after a rollback are the worker's first ones. A closure of
        whose updates the checkpoint has some makes all of them again.

        Closures that ended cancelled and replicas of ``strategy.run`` are left out. So are
        closures of ``Trainer.fit``, which trains undone steps again, and data shards of
        ``distribute_once``, which are pending again automatically.

        The coordinator keeps calls in memory, up to 256 MiB, from the end of their closures until
        the next checkpoint. It keeps undone calls until they are scheduled again, until the next
        rollback, or until the second checkpoint after the rollback.

        Args:
            event: One that ``events()`` has yielded.

        Returns:
            The handles to the results of the new closures, in the order of ``event.closures``.

        Raises:
            UsageError: ``event`` is no rollback of this coordinator, or was scheduled again
                before; or arguments are not kept any more. Nothing was scheduled.
            ClosedError: The coordinator is not running.

        Example:
            async for event in coordinator.events():
                if isinstance(event, psync.RollbackEvent):
                    coordinator.reschedule(event)
        """
        return self._running("reschedule").reschedule(event)

    # Nestings that type checkers know. Where another type is expected than comes, mypy tries the
    # next overload: the one to object ends that, before the last one, which takes any nesting.
    @overload
    async def fetch(self, structure: NamedFields) -> Any: ...
    @overload
    async def fetch(self, structure: RemoteValue[T]) -> T: ...
    @overload
    async def fetch(self, structure: tuple[RemoteValue[A], RemoteValue[B]]) -> tuple[A, B]: ...
    @overload
    async def fetch(
        self, structure: tuple[RemoteValue[A], RemoteValue[B], RemoteValue[C]]
    ) -> tuple[A, B, C]: ...
    @overload
    async def fetch(
        self,
        structure: tuple[RemoteValue[A], RemoteValue[B], RemoteValue[C], RemoteValue[D]],
    ) -> tuple[A, B, C, D]: ...
    @overload
    async def fetch(self, structure: tuple[RemoteValue[T], ...]) -> tuple[T, ...]: ...
    @overload
    async def fetch(self, structure: list[RemoteValue[T]]) -> list[T]: ...
    @overload
    async def fetch(self, structure: dict[K, RemoteValue[T]]) -> dict[K, T]: ...
    @overload
    async def fetch(self, structure: Sequence[RemoteValue[T]]) -> Sequence[T]: ...
    @overload
    async def fetch(self, structure: Mapping[K, RemoteValue[T]]) -> Mapping[K, T]: ...
    @overload
    async def fetch(
        self,
        structure: RemoteValue[Any] | Sequence[RemoteValue[Any]] | Mapping[Any, RemoteValue[Any]],
    ) -> object: ...
    @overload
    async def fetch(self, structure: list[list[RemoteValue[T]]]) -> list[list[T]]: ...
    @overload
    async def fetch(self, structure: list[dict[K, RemoteValue[T]]]) -> list[dict[K, T]]: ...
    @overload
    async def fetch(self, structure: dict[K, list[RemoteValue[T]]]) -> dict[K, list[T]]: ...
    @overload
    async def fetch(self, structure: dict[K, dict[L, RemoteValue[T]]]) -> dict[K, dict[L, T]]: ...
    @overload
    async def fetch(self, structure: Any) -> Any: ...
    async def fetch(self, structure: Any) -> Any:
        """Return ``structure`` with each RemoteValue replaced by its value.

        If one has failed, this collects the error as ``join`` does: it is raised when nothing is
        running any more and nothing is queued, and the next closures run normally.

        Args:
            structure: A RemoteValue, or any nesting of dicts, lists and tuples.

        Raises:
            Exception: As ``RemoteValue.fetch``, of the first in the structure that failed; its
                cause or a note names the first error of all, if that is another one.

        Cancellation: Safe.
        """
        coordinator = self._coordinator
        if coordinator is not None and asyncio._get_running_loop() is not coordinator.loop:
            raise other_loop("fetch")
        try:
            return await fetch_all(structure)
        except Exception as exc:
            if self._coordinator is not None:
                await self._coordinator.collect_into(exc)
            raise


def _checked(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step.

    Raises:
        SerializationError: They are not a tuple and a dict.
    """
    if isinstance(args, RemoteValue) or not isinstance(args, tuple | list):
        raise SerializationError(
            f"args: expected a tuple, got {type(args).__name__}",
            hint="schedule(step, args=(value,))",
        )
    if kwargs is not None:
        checked_kind("kwargs: expected a dict", kwargs, dict, error=SerializationError)
    return tuple(args), dict(kwargs or {})
