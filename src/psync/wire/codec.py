"""The codec: messages to msgpack headers and back.

A header is the msgpack array ``[code, field, field, …]``. What comes from the wire is checked field
by field against the class's annotations while an object is made of it: a peer can send a wrong
value, never one of a wrong type. ``msgspec`` does both.
"""

from __future__ import annotations

import functools
import operator
import re
import reprlib
import typing
from typing import Any, ClassVar, NoReturn

import msgspec

from psync.errors import LocalProtocolError, RemoteProtocolError

_BY_CODE: dict[int, type[Message]] = {}
SHORT_BYTES = 4096  # what is wrong with a longer header is told without decoding it once more


def _plain(value: Any) -> Any:
    """Return a text or number of another class, as numpy has them, as one that msgspec knows."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is no type of fields")


to_header = msgspec.msgpack.Encoder(enc_hook=_plain).encode
# Returns the header of a message; of one that has none ``encode`` says so.

UNENCODABLE = (ValueError, OverflowError, TypeError, RecursionError)  # raised by ``to_header``

replace = msgspec.structs.replace
"""Returns a message with other values in some fields, as that of ``dataclasses``."""


@typing.dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _MessageType(msgspec.StructMeta):
    """Makes a frozen struct of every subclass of ``Message``, and knows them by their codes."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], code: int | None = None
    ) -> Any:
        if code in _BY_CODE:
            raise TypeError(f"message code {code} is taken by {_BY_CODE[code].__name__}")
        made: Any = super().__new__(
            mcs, name, bases, namespace, tag=code, array_like=True, frozen=True,
            forbid_unknown_fields=True,
        )  # fmt: skip
        if code is not None:
            made.code = code
            _BY_CODE[code] = made
            header_decoder.cache_clear()
        return made


class Message(msgspec.Struct, metaclass=_MessageType):
    """Base of all messages: ``class Proof(Message, code=3)``, with a number from 1 of its own.

    Without a number a subclass is a base of messages.
    """

    code: ClassVar[int]


@functools.cache
def header_decoder() -> Any:
    """Return the function that decodes all messages; its errors are for ``undecodable``."""
    classes = functools.reduce(operator.or_, _BY_CODE.values())
    return msgspec.msgpack.Decoder(classes, ext_hook=_refuse_ext).decode


def _refuse_ext(code: int, _: memoryview) -> NoReturn:
    raise ValueError(f"extension type {code}")


def encode(message: Message) -> bytes:
    """Return the header of ``message``.

    Raises:
        LocalProtocolError: If a field holds what msgpack cannot carry.
    """
    try:
        return to_header(message)
    except UNENCODABLE as exc:
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
    try:
        return header_decoder()(header)  # type: ignore[no-any-return]
    except Exception as exc:  # also RecursionError, or UnicodeDecodeError
        raise undecodable(header, exc) from exc


def undecodable(header: bytes, error: Exception) -> RemoteProtocolError:
    """Say what is wrong with a header, given what ``header_decoder`` raised; texts may be long."""
    if len(header) > SHORT_BYTES:
        return RemoteProtocolError(f"a header of {len(header)} bytes: {reprlib.repr(str(error))}")
    try:
        values = msgspec.msgpack.decode(header, ext_hook=_refuse_ext)
    except Exception as exc:
        return RemoteProtocolError(f"header is not valid msgpack: {type(exc).__name__}")
    if type(values) is not list:
        return RemoteProtocolError(f"header: expected an array, got {type(values).__name__}")
    kind = _BY_CODE.get(values[0]) if values and type(values[0]) is int else None
    if kind is None:
        return RemoteProtocolError(f"unknown message {reprlib.repr(values)}")
    names, place = kind.__struct_fields__, re.search(r"`\$\[(\d+)\]", str(error))
    if place is None:
        return RemoteProtocolError(
            f"{kind.__name__}: expected {len(names)} fields, got {len(values) - 1}"
        )
    at = int(place[1])
    annotation = typing.get_type_hints(kind)[names[at - 1]]
    expected = annotation.__name__ if type(annotation) is type else str(annotation)
    return RemoteProtocolError(
        f"{kind.__name__}.{names[at - 1]}: expected {expected}, got {reprlib.repr(values[at])}"
    )
