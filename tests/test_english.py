"""What users read is plain English: pages, help texts, docstrings of public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

import click

import psync
from english import PHRASES
from pages import ROOT, all_pages
from psync.cli.main import psync as command

# A clause stands where the noun should: "What is larger than 64 KiB does not go ...".
NO_NOUN = re.compile(r"^(What|Who|Whom|Whose) (?!.*\?$)")
PREPOSITIONS = re.compile(
    r"^(As|At|Behind|Beside|Between|By|During|For|From|In|Into|Of|On|Over|Through|To|Under|With|"
    r"Within|Without)\b"
)
MAX_WORDS = 40
FIRST_SCREEN = 40

# Pages on mechanism: the sentences below their first screens are rewritten with what they describe.
MECHANISM = {"docs/design.md"}
EXCEPTIONS: set[str] = set()
"""Texts that are right as they are."""

PAGES = [*all_pages(), *(ROOT / name for name in ("GUARANTEES.md", "SECURITY.md", "CHANGELOG.md"))]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown or a docstring, without code, tables, links and lists."""
    text = re.sub(r"<!--.*?-->|^```.*?^```|^:::.*?^:::", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``?[^`]+``?", "code", text)
    paragraphs: list[str] = [""]
    in_list = False
    for line in text.splitlines():
        if re.match(r"\s*([-*+]|\d+\.) ", line):
            in_list = True
        elif not line.strip() or not line.startswith((" ", "\t")):
            in_list = False
        if in_list or not line.strip() or line.lstrip().startswith(("|", "#", ">>>", ".. ")):
            paragraphs.append("")
        else:
            paragraphs[-1] += " " + line.strip()
    for paragraph in paragraphs:
        yield from filter(None, re.split(r"(?<=[.!?])[\"')]?\s+", paragraph.strip("* ")))


def faults(text: str) -> list[str]:
    """Return what is wrong with a text, by sentence; forbidden phrases also in tables and lists."""
    found = [f'"{match[0]}": …{text[max(0, match.start() - 40) : match.end() + 30]!r}'
             for match in PHRASES.finditer(text)]  # fmt: skip
    for sentence in sentences(text):
        if NO_NOUN.match(sentence):
            found.append(f"a clause for a noun: {sentence}")
        if len(words := sentence.split()) > MAX_WORDS:
            found.append(f"{len(words)} words: {sentence}")
    return [each for each in found if not any(one in each for one in EXCEPTIONS)]


def all_faults(texts: Mapping[str, str]) -> list[str]:
    return [f"{name}: {fault}" for name, text in texts.items() for fault in faults(text)]


def test_pages_are_plain() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    for name in MECHANISM:
        assert not PHRASES.search(texts[name])
        texts[name] = "\n".join(texts[name].splitlines()[:FIRST_SCREEN])
    found = all_faults(texts)
    assert not found, "\n".join(found)


def helps(group: click.Command, name: str) -> Iterator[tuple[str, str]]:
    yield name, group.help or ""
    for param in group.params:
        if isinstance(param, click.Option) and param.help:
            yield f"{name} {param.opts[0]}", param.help
    if isinstance(group, click.Group):
        for sub, each in group.commands.items():
            if not each.hidden:
                yield from helps(each, f"{name} {sub}")


def test_help_texts_are_plain() -> None:
    texts = dict(helps(command, "psync"))
    assert len(texts) > 100
    found = all_faults({name: text.replace("\b\n", "\n\n") for name, text in texts.items()})
    assert not found, "\n".join(found)


def documented() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of all that is public: names, their methods, what modules hold."""
    seen: set[int] = set()
    waiting = [(f"psync.{name}", getattr(psync, name)) for name in psync.__all__]
    while waiting:
        name, value = waiting.pop()
        value = value.fget if isinstance(value, property) else value
        own = getattr(value, "__module__", getattr(value, "__name__", "")) or ""
        if id(value) in seen or not own.startswith("psync") or not hasattr(value, "__doc__"):
            continue
        seen.add(id(value))
        doc = value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")
        if doc:
            yield name, inspect.cleandoc(doc)
        if inspect.isclass(value):
            members = vars(value)
        elif inspect.ismodule(value):
            members = {each: getattr(value, each) for each in getattr(value, "__all__", dir(value))}
        else:
            continue
        for each, member in members.items():
            if not each.startswith("_"):
                waiting.append((f"{name}.{each}", getattr(member, "__func__", member)))


def faults_of_docstring(doc: str) -> Iterator[str]:
    first, *rest = re.split(r"^(?:Args|Attributes|Returns|Raises|Example|Source|Yields):", doc,
                            flags=re.MULTILINE)  # fmt: skip
    if PREPOSITIONS.match(first):
        yield "the first line begins with a preposition"
    yield from faults(re.sub(r"^    .*$", "", first, flags=re.MULTILINE))
    for argument, text in re.findall(r"^    (\*{0,2}\w+): (.*)$", "\n".join(rest), re.MULTILINE):
        if PREPOSITIONS.match(text):
            yield f"{argument} begins with a preposition"
    yield from (f'"{match[0]}"' for match in PHRASES.finditer(doc))


def test_public_docstrings_are_plain() -> None:
    texts = dict(documented())
    assert len(texts) > 500
    found = [f"{name}: {each}" for name, doc in texts.items() for each in faults_of_docstring(doc)]
    assert not found, "\n".join(found)
