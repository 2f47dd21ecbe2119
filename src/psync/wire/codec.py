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

Check = Callable[[Any], bool]
Known = dict[tuple[type, ...], tuple[tuple[int, Check], ...]]
"""By the types of a row: the items that must be opened, and what must hold of each."""

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

    __slots__ = ("check", "cls", "getter", "known", "names", "types")

    def __init__(self, cls: type[Message]) -> None:
        hints = typing.get_type_hints(cls)
        self.cls = cls
        self.names = tuple(field.name for field in fields(cls))
        self.types = tuple(hints[name] for name in self.names)
        self.known: Known = {}
        self.check = _row_check(self.types, self.known)  # of all fields at once
        # attrgetter of one name returns the value and not a tuple.
        self.getter = operator.attrgetter("code", *self.names)


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
    to_open = form.known.get((*map(type, values),))
    if to_open is None:
        if not form.check(values):
            raise _misfit(form, values)
    else:
        for index, content_fits in to_open:
            if not content_fits(values[index]):
                raise _misfit(form, values)
    return form.cls(*values)


def _misfit(form: _Form, values: list[Any]) -> RemoteProtocolError:
    """Say which field is wrong."""
    name = form.cls.__name__
    if len(values) != len(form.types):
        return RemoteProtocolError(f"{name}: expected {len(form.types)} fields, got {len(values)}")
    checks = map(_check_of, form.types)
    wrong = next(index for index, check in enumerate(checks) if not check(values[index]))
    annotation = form.types[wrong]
    expected = annotation.__name__ if type(annotation) is type else str(annotation)
    return RemoteProtocolError(
        f"{name}.{form.names[wrong]}: expected {expected}, got {reprlib.repr(values[wrong])}"
    )


# Checks from annotations.


def _parts(annotation: Any) -> tuple[frozenset[type], dict[type, Check]]:
    """Return the types that alone decide that a value fits; predicates for what is in others."""
    is_union = typing.get_origin(annotation) is types.UnionType
    plain: set[type] = set()
    contents: dict[type, Check] = {}
    for option in typing.get_args(annotation) if is_union else (annotation,):
        if option in (int, str, bytes, bool, types.NoneType):
            plain.add(option)
        elif option is float:
            plain |= {float, int}
        elif option is not Any:
            kind, fits = _container(option)
            contents[kind] = _either(contents[kind], fits) if kind in contents else fits
    return frozenset(plain), contents


def _either(one: Check, other: Check) -> Check:
    return lambda value: one(value) or other(value)


def _row_check(annotations: Sequence[Any], known: Known) -> Check:
    """Return the predicate for a list whose items have an annotation each.

    Rows of the same types as one that fitted, which are put into ``known``, fit too, but for what
    must be opened.
    """
    checks = tuple(map(_check_of, annotations))
    contents = [_parts(annotation)[1] for annotation in annotations]

    def fits(row: list[Any]) -> bool:
        kinds = tuple(map(type, row))
        to_open = known.get(kinds)
        if to_open is not None:
            for index, content_fits in to_open:
                if not content_fits(row[index]):
                    return False
            return True
        if len(row) != len(checks) or not all(map(operator.call, checks, row)):
            return False
        known[kinds] = tuple(
            (index, contents[index][kind])
            for index, kind in enumerate(kinds)
            if kind in contents[index]
        )
        return True

    return fits


def _check_of(annotation: Any) -> Check:
    """Return the predicate for one annotation; the small set that messages use."""
    if annotation is Any:
        return lambda value: True
    plain, contents = _parts(annotation)
    return lambda value: (
        type(value) in plain or (type(value) in contents and contents[type(value)](value))
    )


def _container(annotation: Any) -> tuple[type, Check]:
    """Return what a list, tuple or dict is unpacked as, and the predicate for what is in it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return list, _row_check(args, {})
    if origin is list:
        return list, _all_check(args[0])
    if origin is dict and args[0] is str:
        all_fit = _all_check(args[1])
        return (
            dict,
            lambda value: _ONLY_STR.issuperset(map(type, value)) and all_fit(value.values()),
        )
    raise TypeError(f"messages have no fields of type {annotation}")


_ONLY_STR, _ONLY_LIST = frozenset([str]), frozenset([list])


def _all_check(annotation: Any) -> Callable[[Iterable[Any]], bool]:
    """Return the predicate for many values of one annotation.

    Tuples are checked by columns and lists as one long list, which takes no call for each
    item: closures and their results come in such lists, and checking them item by item took
    a fifth of what an empty closure costs.
    """
    if annotation is Any:
        return lambda values: True
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        all_items_fit = _all_check(args[0])

        def lists_fit(values: Iterable[Any]) -> bool:
            lists = list(values)
            return _ONLY_LIST.issuperset(map(type, lists)) and all_items_fit(
                itertools.chain.from_iterable(lists)
            )

        return lists_fit
    if origin is tuple:
        widths = frozenset([len(args)])
        columns = tuple(map(_all_check, args))
        alike, opened = _parts(args[0]) if len(set(args)) == 1 else (None, {})

        def rows_fit(values: Iterable[Any]) -> bool:
            rows = list(values)
            if not _ONLY_LIST.issuperset(map(type, rows)) or not widths.issuperset(map(len, rows)):
                return False
            if alike and not opened:
                return alike.issuperset(map(type, itertools.chain.from_iterable(rows)))
            return all(map(operator.call, columns, zip(*rows, strict=True)))

        return rows_fit
    plain, contents = _parts(annotation)
    if plain and not contents:
        return lambda values: plain.issuperset(map(type, values))
    check = _check_of(annotation)
    return lambda values: all(check(value) for value in values if type(value) not in plain)
