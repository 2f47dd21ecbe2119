"""JSON from disk or network, read as a type and nothing else; and written.

A type says what the JSON must be. Whatever does not fit is a CheckpointCorrupt that names its place
in it, such as ``shards[0].version``.

    type                       JSON
    int, Signed                a whole number of 64 bits, from 0; of either sign
    bool                       true or false
    float                      a number
    str                        text that is not empty
    bytes                      its hexadecimal digits
    list[X], tuple[X, …]       a list
    tuple[X, Y], a NamedTuple  a list of as many
    dict[str, X]               an object
    a dataclass                an object with its fields; those with a default may be missing
    X | None                   null, too
    Any                        anything
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import reprlib
import types
import typing
from binascii import unhexlify  # bytes.fromhex passes over spaces
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, NewType, TypeVar

from psync.errors import CheckpointCorrupt, CheckpointError

T = TypeVar("T")

Signed = NewType("Signed", int)
"""A whole number that may be below 0."""

_MOST = 1 << 63

_repr = reprlib.Repr()  # of any depth, quickly
_repr.maxlist = _repr.maxtuple = _repr.maxstring = _repr.maxother = _repr.maxlong = 80


def read_json(data: bytes, kind: type[T], where: str, head: tuple[str, int] | None = None) -> T:
    """Return what a JSON text says.

    Args:
        data: Anything.
        kind: What it must be.
        where: For messages: the file, or what is in it.
        head: What "format" and "version" must be, which are looked at first.

    Raises:
        CheckpointCorrupt: It is something else.
        CheckpointError: It is of a newer version.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise CheckpointCorrupt(f"{where}: damaged: it is not JSON: {exc}") from exc
    try:
        if head is not None:
            found = _READERS.read(_Head, value)
            if found.format != head[0]:
                raise wrong(where, "format", repr(head[0]), found.format)
            if found.version != head[1]:
                raise CheckpointError(
                    f"{where}: format version {found.version}, this psync reads {head[1]}",
                    hint="install a newer psync",
                )
        return typing.cast(T, _READERS.read(kind, value))
    except Misfit as exc:
        raise _damaged(where, exc) from None


def to_json(value: object, indent: int | None = None) -> bytes:
    """Return a value as ``read_json`` reads it."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators, default=_plain).encode()


def wrong(where: str, what: str, expected: str, got: object) -> CheckpointCorrupt:
    """Return the error for a value that is not what it must be."""
    return _damaged(where, Misfit(expected, got, what))


def _damaged(where: str, misfit: Misfit) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{where}: damaged: {misfit}",
        hint="use an older checkpoint; this one was changed or damaged after saving",
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


class Misfit(Exception):
    """A value is not of its type; ``place`` grows on the way out."""

    def __init__(self, expected: str, got: object, place: str = "") -> None:
        self.expected, self.got, self.place = expected, got, place

    def __str__(self) -> str:
        shown = _repr.repr(self.got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"{self.place.lstrip('.') or 'it'}: expected {self.expected}, got {shown}"


@dataclasses.dataclass
class _Head:
    format: str
    version: int


_Reader = Callable[[Any], Any]


class Readers:
    """What checks values, and makes of them what their types say.

    Args:
        simple: Readers of the types that are not made of others.
    """

    def __init__(self, simple: Mapping[Any, _Reader]) -> None:
        self._known = dict(simple)

    def read(self, kind: Any, value: Any) -> Any:
        """Return what a value stands for.

        Raises:
            Misfit: It is not of this type.
        """
        return self._of(kind)(value)

    def _of(self, kind: Any) -> _Reader:
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._made(kind)
        return known

    def _made(self, kind: Any) -> _Reader:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is types.UnionType:
            read = self._of(args[0])
            return lambda value: None if value is None else read(value)
        if origin in (dict, Mapping):
            return functools.partial(_mapping, self._of(args[1]))
        if origin is list or (origin is tuple and args[-1] is ...):
            return functools.partial(_listed, origin, self._of(args[0]))
        if origin is tuple:
            return functools.partial(_row, tuple, dict(enumerate(map(self._of, args))))
        fields = {name: self._of(hint) for name, hint in typing.get_type_hints(kind).items()}
        if issubclass(kind, tuple):
            return functools.partial(_row, kind._make, fields)
        optional = {
            each.name
            for each in dataclasses.fields(kind)
            if not each.default is each.default_factory is dataclasses.MISSING
        }
        return functools.partial(_object, kind, fields, optional)


def _taken(
    steps: Iterable[int | str], reads: Iterable[_Reader], values: Collection[Any]
) -> list[Any]:
    """Return what is made of each value; one that does not fit says at which step that was."""
    made = []
    for step, read, value in zip(steps, reads, values, strict=False):
        try:
            made.append(read(value))
        except Misfit as exc:
            exc.place = (f"[{step}]" if isinstance(step, int) else f".{step}") + exc.place
            raise
    return made


def _listed(make: Callable[[Iterable[Any]], Any], read: _Reader, value: Any) -> Any:
    if not isinstance(value, list):
        raise Misfit("a list", value)
    return make(_taken(itertools.count(), itertools.repeat(read), value))


def _row(make: Callable[[Iterable[Any]], Any], columns: Mapping[Any, _Reader], value: Any) -> Any:
    if not isinstance(value, list) or len(value) != len(columns):
        raise Misfit(f"a list of {len(columns)} entries", value)
    return make(_taken(columns, columns.values(), value))


def _mapping(read: _Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Misfit("an object", value)
    made = _taken(value, itertools.repeat(read), value.values())
    return dict(zip(value, made, strict=True))


def _object(
    make: Callable[..., Any], fields: Mapping[str, _Reader], optional: Set[str], value: Any
) -> Any:
    if not isinstance(value, dict):
        raise Misfit("an object", value)
    names = [name for name in fields if name in value or name not in optional]
    made = _taken(names, [fields[name] for name in names], list(map(value.get, names)))
    return make(**dict(zip(names, made, strict=True)))


def only(fits: Callable[[Any], bool], expected: str) -> _Reader:
    """Return a reader of values that fit."""

    def read(value: Any) -> Any:
        if fits(value):
            return value
        raise Misfit(expected, value)

    return read


_text = only(lambda value: isinstance(value, str) and value != "", "text")


def _bytes(value: Any) -> bytes:
    try:
        return unhexlify(_text(value))
    except ValueError:
        raise Misfit("bytes as hexadecimal digits", value) from None


_READERS = Readers({
    Any: lambda value: value,
    bool: only(lambda value: isinstance(value, bool), "true or false"),
    bytes: _bytes,
    float: only(lambda value: isinstance(value, int | float), "a number"),
    int: only(lambda value: type(value) is int and 0 <= value < _MOST, "a whole number from 0"),
    Signed: only(lambda value: type(value) is int and -_MOST <= value < _MOST, "a whole number"),
    str: _text,
})  # fmt: skip
