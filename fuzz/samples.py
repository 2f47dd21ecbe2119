"""Messages to begin with, made from what their classes declare; and values that fit nowhere."""

from __future__ import annotations

import typing
from typing import Any

from psync.wire import messages
from psync.wire.codec import Message

CLASSES: list[type[Message]] = sorted(
    {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and hasattr(kind, "code")
    },
    key=lambda kind: kind.code,
)

INTEGERS = (
    0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 100, -1, -2, 7, 255, 4096, 65_535, 1 << 20, 1 << 31, -(1 << 31),
    1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1,
)  # fmt: skip
FLOATS = (0.0, 0.5, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("nan"), 3.0)
TEXTS = (
    "", "v", "float32", "assign", "add", "sub", "min", "sgd", "/job:ps/task:0",
    "/job:worker/task:0", "/job:chief/task:0", "\n", "\x00", "x" * 300, "../../etc/passwd",
    "é", "bool",
)  # fmt: skip
BYTES = (b"", b"\x00", b"\x01", b"key", bytes(32), bytes(4), b"\xff" * 300)
WRONG = (None, True, -1, 2.5, "text", b"raw", [], [[]], {}, {"key": [1]}, [1, "a", None])


class Draw:
    """Choices that bytes make; 0 when they have run out."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """Return a number from 0 to below ``limit``, which is at most 65536."""
        piece = self._data[self._at : self._at + (1 if limit <= 256 else 2)]
        self._at += len(piece)
        return int.from_bytes(piece, "little") % limit

    def of(self, choices: typing.Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def rest(self) -> bytes:
        return self._data[self._at :]


def sample(annotation: Any) -> Any:
    """Return a value of the annotated type, not empty where that is possible."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return [sample(args[0])]
    if origin is tuple:
        return [sample(arg) for arg in args]
    if origin is dict:
        return {"key": sample(args[1])}
    if args:  # a union
        return sample(args[0])
    return {int: 3, float: 0.5, str: "text", bytes: b"raw", bool: True}.get(annotation, [1, None])


def drawn(annotation: Any, draw: Draw) -> Any:
    """Return a value of the annotated type, as the bytes choose: the odd ones, too."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return [drawn(args[0], draw) for _ in range(draw.below(4))]
    if origin is tuple:
        return [drawn(arg, draw) for arg in args]
    if origin is dict:
        return {draw.of(TEXTS): drawn(args[1], draw) for _ in range(draw.below(3))}
    if args:  # a union
        return drawn(draw.of(args), draw)
    choices = {int: INTEGERS, float: FLOATS, str: TEXTS, bytes: BYTES, bool: (False, True)}
    return draw.of(choices.get(annotation, WRONG))


def fields_of(kind: type[Message]) -> dict[str, Any]:
    """Return the annotations of a class's fields."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def sample_of(kind: type[Message]) -> Message:
    return kind(*map(sample, fields_of(kind).values()))


def drawn_of(kind: type[Message], draw: Draw) -> Message:
    return kind(*(drawn(annotation, draw) for annotation in fields_of(kind).values()))


def changed(content: Any, draw: Draw) -> Any:
    """Return JSON-like data with a few parts replaced, removed or repeated, as the bytes choose."""
    for _ in range(1 + draw.below(3)):
        content = _changed_once(content, draw, draw.below(8))
    return content


def _changed_once(content: Any, draw: Draw, depth: int) -> Any:
    if depth and isinstance(content, dict) and content:
        key = sorted(content, key=str)[draw.below(min(len(content), 256))]
        inner = content[key]
        rest = {name: value for name, value in content.items() if name != key}
        if depth == 1 and draw.below(4) == 0:
            return rest
        return {**rest, key: _changed_once(inner, draw, depth - 1)}
    if depth and isinstance(content, list | tuple) and content:
        at = draw.below(min(len(content), 256))
        if depth == 1 and draw.below(2):
            return [*content[:at], *content[at + 1 :]] if draw.below(2) else [*content, content[at]]
        return [*content[:at], _changed_once(content[at], draw, depth - 1), *content[at + 1 :]]
    return draw.of((*WRONG, *INTEGERS, *FLOATS, *TEXTS))
