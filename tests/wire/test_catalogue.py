"""All messages that exist, and what holds for every one of them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest

import psync.wire
from psync.wire import catalogue
from psync.wire.codec import Message, decode, encode
from wire_tools import kinds_of

MODULES = [module for module in vars(catalogue).values() if isinstance(module, ModuleType)]
CLASSES = [kind for module in MODULES for kind in kinds_of(module)]


def test_every_module_of_messages_is_in_the_catalogue() -> None:
    files = Path(psync.wire.__path__[0]).glob("*messages.py")
    assert {f"psync.wire.{path.stem}" for path in files} == {module.__name__ for module in MODULES}


def test_no_number_is_there_twice() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES) > 100


def test_who_reads_frames_can_decode_every_message() -> None:
    program = (
        "import sys, msgpack, psync.wire.protocol\n"
        "from psync.wire.codec import decode\n"
        "for code in sys.argv[1:]:\n"
        "    try: decode(msgpack.packb([int(code)]))\n"
        "    except Exception as exc:\n"
        "        if 'unknown message' in str(exc): print(exc)\n"
    )
    codes = [str(kind.code) for kind in CLASSES]
    done = subprocess.run([sys.executable, "-c", program, *codes], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def sample(annotation: typing.Any) -> typing.Any:
    """A value of the annotated type, not empty where that is possible."""
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


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back(kind: type[Message]) -> None:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    message = kind(*(sample(hints[field.name]) for field in fields))
    assert decode(encode(message)) == message


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_message_is_explained_and_has_a_number(kind: type[Message]) -> None:
    assert kind.__doc__
    assert kind.code > 0
    assert not hasattr(kind(*[0] * len(dataclasses.fields(kind))), "__dict__")  # type: ignore[arg-type]
