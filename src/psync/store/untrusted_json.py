"""JSON from disk or network, read as a type and nothing else; and written.

A type says what the JSON must be. Whatever does not fit is a CheckpointCorrupt that names its place
in it, such as ``shards[0].version``.

    type                       JSON
    Whole, Signed              a whole number of 64 bits, from 0; of either sign
    Text                       text that is not empty
    Hex                        bytes, as hexadecimal digits
    a NamedTuple, tuple[X, Y]  a list of as many
    a dataclass                an object with its fields; those with a default may be missing
    others                     as ``msgspec`` reads them
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
import reprlib
from binascii import unhexlify  # bytes.fromhex passes over spaces
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from psync.errors import CheckpointCorrupt, CheckpointError

T = TypeVar("T")

Signed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

if TYPE_CHECKING:
    Hex = bytes
else:

    class Hex(metaclass=abc.ABCMeta):  # noqa: B024
        """Bytes: ``msgspec`` would read these as base64."""

    Hex.register(bytes)

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
    if head is not None:
        found = _converted(value, _Head, where)
        if found.format != head[0]:
            raise wrong(where, "format", repr(head[0]), found.format)
        if found.version != head[1]:
            raise CheckpointError(
                f"{where}: format version {found.version}, this psync reads {head[1]}",
                hint="install a newer psync",
            )
    return _converted(value, kind, where)


def to_json(value: object, indent: int | None = None) -> bytes:
    """Return a value as ``read_json`` reads it."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators, default=_plain).encode()


def wrong(where: str, what: str, expected: str, got: object) -> CheckpointCorrupt:
    """Return the error for a value that is not what it must be."""
    return _damaged(where, what, f"expected {expected}", got)


def _damaged(where: str, what: str, wrong: str, got: object) -> CheckpointCorrupt:
    shown = _repr.repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return CheckpointCorrupt(f"{where}: damaged: {what}: {wrong}, got {shown}")


@dataclasses.dataclass
class _Head:
    format: Text
    version: Whole


def _converted(value: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind, dec_hook=_unhexed)
    except ValueError as exc:  # of msgspec; or a text is no Unicode
        text, place, part = str(exc), "", value
    said, _, path = text.partition(" - at `$")
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.{3})\]", path):
        if index == "...":
            part, index = _wrong_item(value, part, kind, text)
        else:
            part = part[name or int(index)]
        place += f".{name}" if name else f"[{index}]"
    expected = said[0].lower() + said[1:].partition(", got ")[0]
    raise _damaged(where, place.lstrip(".") or "it", expected, part)


def _wrong_item(value: Any, part: dict[str, Any], kind: Any, text: str) -> tuple[Any, str]:
    """Return the item of a part of ``value`` with which that does not fit, and its key.

    Args:
        value: All of it.
        part: An object without fixed keys; its other items are removed.
        kind: What ``value`` must be.
        text: Of the error for it.
    """
    items = list(part.items())
    while len(items) > 1:
        half = len(items) // 2
        part.clear()
        part.update(items[:half])
        try:
            msgspec.convert(value, kind, dec_hook=_unhexed)
            is_there = False
        except ValueError as exc:
            is_there = str(exc) == text
        items = items[:half] if is_there else items[half:]
    part.clear()
    part.update(items)
    ((key, item),) = items
    return item, repr(key)


def _unhexed(_: type, value: Any) -> bytes:
    try:
        return unhexlify(value)
    except (TypeError, ValueError):
        raise ValueError("expected bytes as hexadecimal digits") from None


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
