"""Types of ``pull`` and ``empty_like``: nestings that checkers know; the last one is any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

import numpy as np

from psync.api.variables import Handle
from psync.numerics.compression import Compression

V = TypeVar("V", bound=Handle)
W = TypeVar("W", bound=Handle)
X = TypeVar("X", bound=Handle)
Y = TypeVar("Y", bound=Handle)
K = TypeVar("K")
L = TypeVar("L")
M = TypeVar("M")

class NamedFields(Protocol):
    """A named tuple, to type checkers: with values in its fields they know no name for its type."""

    def _asdict(self) -> dict[str, Any]: ...

class Options(TypedDict, total=False):
    """Keyword arguments of ``pull``."""

    copy: bool
    out: Any
    consistent: bool
    compression: Compression | None

@overload
async def pull(tree: V, **options: Unpack[Options]) -> np.ndarray: ...
@overload
async def pull(tree: NamedFields, **options: Unpack[Options]) -> Any: ...
@overload
async def pull(tree: tuple[V, W], **options: Unpack[Options]) -> tuple[np.ndarray, np.ndarray]: ...
@overload
async def pull(
    tree: tuple[V, W, X], **options: Unpack[Options]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
@overload
async def pull(
    tree: tuple[V, W, X, Y], **options: Unpack[Options]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
@overload
async def pull(tree: tuple[V, ...], **options: Unpack[Options]) -> tuple[np.ndarray, ...]: ...
@overload
async def pull(tree: list[V], **options: Unpack[Options]) -> list[np.ndarray]: ...
@overload
async def pull(tree: dict[K, V], **options: Unpack[Options]) -> dict[K, np.ndarray]: ...
@overload
async def pull(
    tree: list[tuple[V, W]], **options: Unpack[Options]
) -> list[tuple[np.ndarray, np.ndarray]]: ...
@overload
async def pull(tree: list[list[V]], **options: Unpack[Options]) -> list[list[np.ndarray]]: ...
@overload
async def pull(tree: list[dict[K, V]], **options: Unpack[Options]) -> list[dict[K, np.ndarray]]: ...
@overload
async def pull(
    tree: dict[K, tuple[V, W]], **options: Unpack[Options]
) -> dict[K, tuple[np.ndarray, np.ndarray]]: ...
@overload
async def pull(tree: dict[K, list[V]], **options: Unpack[Options]) -> dict[K, list[np.ndarray]]: ...
@overload
async def pull(
    tree: dict[K, dict[L, V]], **options: Unpack[Options]
) -> dict[K, dict[L, np.ndarray]]: ...
@overload
async def pull(
    tree: dict[K, dict[L, dict[M, V]]], **options: Unpack[Options]
) -> dict[K, dict[L, dict[M, np.ndarray]]]: ...
@overload
async def pull(tree: Any, **options: Unpack[Options]) -> Any: ...
@overload
def empty_like(tree: V) -> np.ndarray: ...
@overload
def empty_like(tree: NamedFields) -> Any: ...
@overload
def empty_like(tree: tuple[V, ...]) -> tuple[np.ndarray, ...]: ...
@overload
def empty_like(tree: list[V]) -> list[np.ndarray]: ...
@overload
def empty_like(tree: dict[K, V]) -> dict[K, np.ndarray]: ...
@overload
def empty_like(tree: Any) -> Any: ...
def leaves(tree: Any, kind: Any = Handle) -> list[Any]: ...
def mapped(tree: Any, value_of: Callable[[Any], Any], kind: Any = Handle) -> Any: ...
def is_flat(tree: Any, kind: Any = Handle) -> bool: ...
def pairs(tree: Any, other: Any, what: str) -> Iterator[tuple[Any, Any]]: ...
