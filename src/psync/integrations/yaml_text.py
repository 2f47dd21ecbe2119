"""A text of YAML from plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z/$(][A-Za-z0-9_./$()+%=,*-]*( [A-Za-z0-9_./$()+%=,*-]+)*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # no text in YAML 1.1

Data = Mapping[str, "Data"] | Sequence["Data"] | str | int | bool


def dump(documents: Sequence[tuple[str, Data]]) -> str:
    """Return several documents as one text of YAML, in block style, plain words without quotes.

    It is a tenth of YAML, so that printing manifests needs no package. Whatever may be read as
    something else than text is quoted, as in JSON.

    Args:
        documents: A comment, and what is below it: maps, lists, texts and numbers.
    """
    parts = []
    for comment, data in documents:
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        parts.append("---\n" + head + "".join(f"{line}\n" for line in _block(data)))
    return "".join(parts)


def _block(data: Data) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _item(f"{_scalar(key)}:", value)
    else:
        assert isinstance(data, Sequence)
        assert not isinstance(data, str)
        for value in data:
            if isinstance(value, Mapping) and value:
                first, *others = _block(value)
                yield f"- {first}"
                yield from (f"  {line}" if line else "" for line in others)
            else:
                yield from _item("-", value)


def _item(head: str, value: Data) -> Iterator[str]:
    if isinstance(value, str) and _is_literal(value):
        yield f"{head} |" + ("" if value.endswith("\n") else "-")
        yield from (f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        yield head
        yield from (f"  {line}" if line else "" for line in _block(value))
    else:
        yield f"{head} {_scalar(value)}"


def _is_literal(text: str) -> bool:
    """Whether text is the same in lines of its own: its first line says how far these are indented.

    Of line ends after the last one only one is kept, or none, and others than ours become ours.
    """
    lines = text.removesuffix("\n").split("\n")
    first = next((line for line in lines if line), " ")
    if "\n" not in text or first[0].isspace() or not lines[-1].strip():
        return False
    return all(line.replace("\t", "").isprintable() for line in lines)


def _scalar(value: Data) -> str:
    if isinstance(value, str) and value.lower() not in _WORDS and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)
