"""The codec: messages to msgpack headers and back.

A header is the msgpack array ``[code, field, field, …]``. What comes from the wire is
checked field by field against the class's annotations before a class is made of it: a
peer can send a wrong value, never one of a wrong type.

Messages without fields, such as most answers, are not encoded at all: their header is a
constant.
"""

from __future__ import annotations

import functools
import itertools
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import msgpack

from psync.errors import LocalProtocolError, RemoteProtocolError

Check = frozenset[type] | Callable[[Any], bool]
"""Of what is in a list or table: the types that all items must have, or else a predicate.

Types are compared where they are needed, as a call for each list takes longer than the comparison.
"""

Opened = Sequence[tuple[int, Check]]
"""The fields that must be opened, and what must hold of what is in each."""

Known = dict[tuple[type, ...], Opened]
"""By the types of all fields, where these may be so."""

MAX_ARRAY_ITEMS = 65_536

MAX_MAP_ITEMS = 4096

SHORT_BYTES = 4096
"""A header of at most so many cannot have more items than these: it needs no bounds but its size,
which msgpack knows, and which took most of its time to be told."""

_unpack_short = functools.partial(msgpack.unpackb, max_ext_len=0)
_unpack_long = functools.partial(
    _unpack_short, max_map_len=MAX_MAP_ITEMS, max_str_len=1 << 20, max_bin_len=1 << 20
)

_packer = msgpack.Packer()  # one for all: it runs no Python code between its start and its end


class _Form:
    """What is known of one class of messages."""

    __slots__ = ("cls", "getter", "known", "names", "parts", "types")

    def __init__(self, cls: type[Message]) -> None:
        hints = typing.get_type_hints(cls)
        self.cls = cls
        self.names = tuple(field.name for field in fields(cls))
        self.types = tuple(hints[name] for name in self.names)
        self.parts = tuple(map(_parts, self.types))
        self.known: Known = {}
        # attrgetter of one name returns the value and not a tuple.
        self.getter = operator.attrgetter("code", *self.names)

    def learn(self, kinds: tuple[type, ...], values: list[Any]) -> Opened:
        """Return which of the values of these types must be opened; remember that they fit."""
        if len(kinds) != len(self.parts):
            raise RemoteProtocolError(
                f"{self.cls.__name__}: expected {len(self.parts)} fields, got {len(kinds)}"
            )
        opened: list[tuple[int, Check]] = []
        for index, (kind, (plain, contents)) in enumerate(zip(kinds, self.parts, strict=True)):
            if kind in contents:
                opened.append((index, contents[kind]))
            elif kind not in plain:
                raise self.misfit(index, values)
        self.known[kinds] = opened
        return opened

    def misfit(self, index: int, values: list[Any]) -> RemoteProtocolError:
        """Say which field is wrong."""
        annotation = self.types[index]
        expected = annotation.__name__ if type(annotation) is type else str(annotation)
        return RemoteProtocolError(
            f"{self.cls.__name__}.{self.names[index]}: expected {expected}, "
            f"got {reprlib.repr(values[index])}"
        )


_BY_CODE: dict[int, _Form] = {}
_BY_CLASS: dict[type[Message], _Form] = {}
_HEADER_OF: dict[type[Message], bytes] = {}  # of classes without fields
_BY_HEADER: dict[bytes, Message] = {}  # the same, the other way round


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _MessageType(type):
    """Makes a dataclass of every subclass of ``Message``.

    For a type checker it is frozen. It is not when it runs: to make a frozen one takes five times
    as long, and all that travels is made twice.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], code: int | None = None
    ) -> Any:
        made: Any = super().__new__(mcs, name, bases, namespace)
        if "__slots__" in namespace:  # ``Message``, or what ``dataclass`` makes of a subclass
            return made
        if code in _BY_CODE:
            raise TypeError(f"message code {code} is taken by {_BY_CODE[code].cls.__name__}")
        cls = dataclass(unsafe_hash=True, slots=True)(made)
        if code is not None:
            cls.code = code
            form = _BY_CODE[code] = _BY_CLASS[cls] = _Form(cls)
            if not form.names:
                header = _HEADER_OF[cls] = msgpack.packb([code])
                _BY_HEADER[header] = cls()
        return cls


class Message(metaclass=_MessageType):
    """Base of all messages: ``class Proof(Message, code=3)``, with a number from 1 of its own.

    Without a number a subclass is a base of messages.
    """

    __slots__: ClassVar[tuple[str, ...]] = ()
    code: ClassVar[int]


def encode(message: Message) -> bytes:
    """Return the header of ``message``.

    Raises:
        LocalProtocolError: If a field holds what msgpack cannot carry.
    """
    header = _HEADER_OF.get(type(message))
    if header is not None:
        return header
    try:
        return _packer.pack(_BY_CLASS[type(message)].getter(message))  # type: ignore[no-any-return]
    except (ValueError, OverflowError, TypeError, RecursionError) as exc:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {exc}") from exc


def check(message: Message) -> None:
    """Check what ``encode`` does not, as it would take as long again: the types of all fields.

    For whoever sees a connection end with a message, before sending it once more: the receiver
    ends the connection when a field is of a wrong type.

    Raises:
        LocalProtocolError: If the receiver of ``message`` would refuse it; names the field.
    """
    try:
        decode(encode(message))
    except RemoteProtocolError as exc:
        raise LocalProtocolError(f"the message itself is wrong: {exc.message}") from exc


def decode(header: bytes) -> Message:
    """Return the message that ``header`` encodes.

    Raises:
        RemoteProtocolError: If it is not msgpack, of an unknown code, or of wrong types.
    """
    if len(header) == 2 and (constant := _BY_HEADER.get(header)) is not None:
        return constant
    # An item takes at least a byte. Without these bounds 1 MiB of nested array headers
    # would ask for gigabytes of list slots.
    try:
        if len(header) <= SHORT_BYTES:
            values = _unpack_short(header)
        else:
            values = _unpack_long(header, max_array_len=min(len(header), MAX_ARRAY_ITEMS))
    except Exception as exc:  # msgpack raises ValueError, its own types, RecursionError, …
        # Its text may hold the whole header.
        raise RemoteProtocolError(f"header is not valid msgpack: {type(exc).__name__}") from exc
    if type(values) is not list:
        raise RemoteProtocolError(f"header: expected an array, got {type(values).__name__}")
    form = _BY_CODE.get(values[0]) if values and type(values[0]) is int else None
    if form is None:
        raise RemoteProtocolError(f"unknown message {reprlib.repr(values)}")
    del values[0]
    kinds = (*map(type, values),)
    opened = form.known.get(kinds)
    if opened is None:
        opened = form.learn(kinds, values)
    for index, check in opened:
        content = values[index]
        if type(check) is frozenset:
            fits = check.issuperset(map(type, content))
        else:
            fits = check(content)  # type: ignore[operator]
        if not fits:
            raise form.misfit(index, values)
    return form.cls(*values)


# Checks from annotations.

_PLAIN: frozenset[type] = frozenset([int, str, bytes, bool, types.NoneType])
_ANYTHING = _PLAIN | {float, list, dict}
_ONLY_STR, _ONLY_LIST = frozenset([str]), frozenset([list])


def _parts(annotation: Any) -> tuple[frozenset[type], dict[type, Check]]:
    """Return the types that alone decide that a value fits; predicates for what is in others."""
    is_union = typing.get_origin(annotation) is types.UnionType
    plain: set[type] = set()
    contents: dict[type, Check] = {}
    for option in typing.get_args(annotation) if is_union else (annotation,):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any:
            plain |= _ANYTHING
        elif option is float:
            plain |= {float, int}
        elif option in _PLAIN:
            plain.add(option)
        elif origin is list and list not in contents:
            contents[list] = _all_fit(args[0])
        elif origin is tuple and list not in contents:
            contents[list] = _row_check(_all_fit(option))
        elif origin is dict and args[0] is str:
            contents[dict] = _table_check(_all_fit(args[1]))
        else:
            raise TypeError(f"messages have no fields of type {annotation}")
    return frozenset(plain), contents


def _row_check(rows_fit: Check) -> Check:
    return lambda row: _fit(rows_fit, (row,))


def _table_check(all_fit: Check) -> Check:
    return lambda table: _ONLY_STR.issuperset(map(type, table)) and _fit(all_fit, table.values())


def _fit(check: Check, values: Iterable[Any]) -> bool:
    return check.issuperset(map(type, values)) if isinstance(check, frozenset) else check(values)


def _all_fit(annotation: Any) -> Check:
    """Return what must hold of many values of one annotation.

    Tuples are checked by columns and lists as one long list, which takes no call for each
    item: closures and their results come in such lists, and checking them item by item took
    a fifth of what an empty closure costs.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        all_items_fit = _all_fit(args[0])

        def lists_fit(values: Iterable[Any]) -> bool:
            lists = list(values)
            return _ONLY_LIST.issuperset(map(type, lists)) and _fit(
                all_items_fit, itertools.chain.from_iterable(lists)
            )

        return lists_fit
    if origin is tuple:
        widths = frozenset([len(args)])
        columns = tuple(map(_all_fit, args))
        alike = columns[0] if len(set(args)) == 1 and isinstance(columns[0], frozenset) else None

        def rows_fit(values: Iterable[Any]) -> bool:
            rows = list(values)
            if not _ONLY_LIST.issuperset(map(type, rows)) or not widths.issuperset(map(len, rows)):
                return False
            if alike is not None:
                return alike.issuperset(map(type, itertools.chain.from_iterable(rows)))
            for check, column in zip(columns, zip(*rows, strict=True), strict=False):
                if type(check) is frozenset:
                    fits = check.issuperset(map(type, column))
                else:
                    fits = check(column)  # type: ignore[operator]
                if not fits:
                    return False
            return True

        return rows_fit
    plain, contents = _parts(annotation)
    if not contents:
        return plain
    return lambda values: all(
        type(value) in contents and _fit(contents[type(value)], value)
        for value in values
        if type(value) not in plain
    )
