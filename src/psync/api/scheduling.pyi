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

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, TypeVarTuple, overload

from psync.api.pulls import NamedFields
from psync.chief.watch import RollbackEvent
from psync.closures.closure import Identity
from psync.coordinator import Coordinator
from psync.serialization.remote_value import RemoteValue

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
    _coordinator: Coordinator | None

    def _running(self, operation: str) -> Coordinator: ...
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
        kwargs: Mapping[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self,
        fn: Callable[..., Coroutine[Any, Any, T] | T],
        args: tuple[Any, ...] | list[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        *,
        kwargs: Mapping[str, Any] | None,
    ) -> RemoteValue[T]: ...
    @overload
    def schedule(
        self, fn: Callable[..., Coroutine[Any, Any, T] | T], *, kwargs: Mapping[str, Any] | None
    ) -> RemoteValue[T]: ...
    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]: ...
    def _schedule_shard(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, identity: Identity
    ) -> RemoteValue[Any]: ...
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

def checked_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
