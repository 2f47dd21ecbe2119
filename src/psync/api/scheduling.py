"""Scheduling: ``submit``, ``schedule`` and ``fetch``, which are methods of a coordinator.

Their types, which differ by arguments, are in ``scheduling.pyi``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from psync.chief.watch import RollbackEvent
from psync.closures.closure import Identity
from psync.errors import SerializationError, other_loop
from psync.serialization.remote_value import RemoteValue, fetch_all
from psync.specs import checked_kind


class Scheduling:
    """The closure methods of ``ClusterCoordinator``: a base class of it; the stub has its types."""

    def submit(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Queue ``step(*args, **kwargs)`` to run on some worker; never blocks.

        The same as ``schedule``, with the signature of ``concurrent.futures``. Type checkers
        compare the arguments with the step's parameters and know the type of the result. A
        RemoteValue of the right type and a per-worker iterator pass as well:
        docs/reference/typing.md.

        Args:
            step: The step function; see ``fn`` of ``schedule``.
            args: Positional arguments; see ``schedule``.
            kwargs: Keyword arguments; see ``schedule``.

        Returns:
            The handle to the result.

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
        except SerializationError as error:
            # It is about the program, and begins where that has called.
            raise error.with_traceback(None) from error.__cause__

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue[Any]:
        """Queue ``fn(*args, **kwargs)`` to run on some worker; never blocks.

        The closure runs at least once: if its worker is lost, it runs again elsewhere. Its pushes
        are applied at most once. After an error, closures are cancelled when they are scheduled,
        until ``join`` has raised the error.

        A call takes some microseconds. A queued closure takes half a KiB, plus its arguments, until
        it has ended. A loop that schedules hundreds of thousands of closures should ``await
        asyncio.sleep(0)`` now and then: until it does, nothing is sent and no result arrives.

        Args:
            fn: A coroutine function, which runs on the worker's event loop, or a plain function,
                which runs in a thread there. It is pickled when it is first scheduled; workers see
                what it captured at that time.
            args: Arguments, captured by value now. A RemoteValue among them, at any depth, is
                waited for and replaced by its value on the worker. A per-worker iterator becomes
                the worker's own iterator.
            kwargs: Keyword arguments, treated the same way.

        Returns:
            The handle to the result.

        Raises:
            SerializationError: ``fn`` is not callable, or something cannot be sent to a worker;
                names it.
            ClosedError: The coordinator is not running.
        """
        if type(args) is not tuple or kwargs is not None:
            args, kwargs = checked_call(args, kwargs)
        try:
            return self._running("schedule").schedule(fn, args, kwargs or {})
        except SerializationError as error:
            raise error.with_traceback(None) from error.__cause__

    def _schedule_shard(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any],
        kwargs: Mapping[str, Any] | None,
        identity: Identity,
    ) -> RemoteValue[Any]:
        """Do as ``schedule``; another closure of the same identity may come later."""
        return self._running("schedule").schedule(fn, *checked_call(args, kwargs), identity)

    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]:
        """Schedule again, as new closures, the closures whose updates a rollback has undone.

        Function and arguments are the original ones. A per-worker iterator continues with the
        batches that come next; after a rollback these are the worker's first ones. If the
        checkpoint contains some of a closure's updates, the new closure makes all of them again.

        Not rescheduled are cancelled closures and replicas of ``strategy.run``. Closures of
        ``Trainer.fit`` are not either, since it trains undone steps again, nor are data shards of
        ``distribute_once``, which are pending again automatically.

        The coordinator keeps calls in memory, up to 256 MiB, from the end of their closures until
        no rollback can undo them any more. It keeps undone calls until they are scheduled again,
        until the next rollback, or until the second checkpoint after the rollback.

        Args:
            event: An event that ``events()`` has yielded.

        Returns:
            The handles to the results of the new closures, in the order of ``event.closures``.

        Raises:
            UsageError: ``event`` is not a rollback of this coordinator, was rescheduled before, or
                arguments are no longer kept. Nothing was scheduled.
            ClosedError: The coordinator is not running.

        Example:
            async for event in coordinator.events():
                if isinstance(event, psync.RollbackEvent):
                    coordinator.reschedule(event)
        """
        return self._running("reschedule").reschedule(event)

    async def fetch(self, structure: Any) -> Any:
        """Return ``structure`` with each RemoteValue replaced by its value.

        If a closure has failed, this collects the error as ``join`` does: the error is raised once
        nothing is running or queued, and the next closures run normally.

        Args:
            structure: A RemoteValue, or any nesting of dicts, lists and tuples.

        Raises:
            Exception: See ``RemoteValue.fetch``; the error of the first failed value in the
                structure. If another error was the first of all, its cause or a note names that
                one.

        Cancellation: Safe.
        """
        coordinator = self._coordinator
        if coordinator is not None and asyncio._get_running_loop() is not coordinator.loop:
            raise other_loop("fetch")
        try:
            return await fetch_all(structure)
        except Exception as exc:
            if self._coordinator is not None:
                await self._coordinator.joins.collect_into(exc)
            raise


def checked_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step, checked.

    Raises:
        SerializationError: They are not a tuple and a mapping.
    """
    if not isinstance(args, tuple | list):
        raise SerializationError(
            f"args: expected a tuple, got {type(args).__name__}", hint="args=(value,)"
        )
    if kwargs is not None:
        kind: Any = Mapping  # abstract, which a type[…] must not be
        checked_kind("kwargs: expected a mapping", kwargs, kind, error=SerializationError)
    return tuple(args), dict(kwargs or {})
