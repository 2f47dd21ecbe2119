"""Every public name has a place in the reference, and a program there that uses it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from types import ModuleType
from typing import Any

import psync
from pages import ROOT, blocks
from psync import rules

PAGES = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
PROGRAMS = "\n".join(
    block.text for page in PAGES for block in blocks(page) if block.kind == "run"
)  # what is hidden, too


def is_error(name: str) -> bool:
    value = getattr(psync, name)
    return inspect.isclass(value) and issubclass(value, BaseException)


NAMES = [name for name in psync.__all__ if not is_error(name)]


def test_a_program_uses_each_name() -> None:
    def is_used(name: str) -> bool:
        last = "" if inspect.ismodule(getattr(psync, name)) else name
        uses = rf"\bpsync\.{name}\b|from psync(\.{name})? import .*{last}"
        return bool(re.search(uses, PROGRAMS))

    assert [name for name in NAMES if not is_used(name)] == []


def test_each_names_docstring_is_in_the_reference() -> None:
    def is_shown(name: str) -> bool:
        module = inspect.ismodule(getattr(psync, name))
        directive = "automodule" if module else "auto(class|function)"
        return bool(re.search(rf"^\.\. {directive}:: psync\.{name}$", TEXT, re.MULTILINE))

    assert [name for name in NAMES if not is_shown(name)] == []


def test_all_errors_are_in_the_reference() -> None:
    assert ".. automodule:: psync.errors" in TEXT
    for name in set(psync.__all__) - set(NAMES):
        assert getattr(psync, name).__module__ in ("psync.errors", "psync.serialization.captures")


# --- members ------------------------------------------------------------------------------------

SERVED = {"torch": "PSModule", "jax": "PSPytree", "keras": "PSModel"}

ALIASES = {"psync.RemoteValue": {"result"}}
"""Names until 0.2, which work and are not shown."""

OF_RULES = rules.UpdateRule.__mro__[1]
"""What ps tasks call on a rule; a rule of the user's own overrides ``update`` alone."""


def public_classes() -> dict[str, type]:
    """Classes that users meet by their public names; errors left out."""
    found: dict[str, Any] = {}
    for name in NAMES:
        value = getattr(psync, name)
        if not inspect.ismodule(value):
            found[f"psync.{name}"] = value
        elif value is not psync.testing:  # a network in memory, and its parts
            own = [each for each in vars(value) if vars(value)[each] in classes_of(value)]
            found |= {f"psync.{name}.{each}": getattr(value, each) for each in own}
    os.environ.setdefault("KERAS_BACKEND", "jax")
    for library, name in SERVED.items():
        if importlib.util.find_spec(library) is not None:
            home = f"psync.integrations.{library}"
            found[f"{home}.{name}"] = getattr(importlib.import_module(home), name)
    return {name: each for name, each in found.items() if inspect.isclass(each)}


def classes_of(module: ModuleType) -> list[type]:
    """The classes that automodule shows of a module."""
    names = getattr(module, "__all__", None)
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and not name.startswith("_")
        and (value.__module__ == module.__name__ if names is None else name in names)
    ]


def shown_classes() -> dict[type, set[str]]:
    """The classes on the pages, and the options with which their members are shown."""
    directives = re.finditer(r"^\.\. auto(class|module):: (\S+)\n((?:   :.*\n)*)", TEXT, re.M)
    found = {}
    for kind, name, text in (match.groups() for match in directives):
        options = set(re.findall(r":([\w-]+):", text))  # "members" is the default: docs/conf.py
        home, _, last = name.rpartition(".")
        if kind == "module":
            shown = classes_of(importlib.import_module(name))
        else:
            shown = [getattr(importlib.import_module(home), last)]
        if "no-members" not in options:
            found |= {each: options | found.get(each, set()) for each in shown}
    return found


CLASSES = public_classes()
SHOWN = shown_classes()


def members_of(class_: type) -> dict[str, type]:
    """What a user sees of a class in an editor, and which class of psync it comes from."""
    found = {}
    for name in dir(class_):
        owner = next(each for each in class_.__mro__ if name in vars(each) or each is object)
        if not name.startswith("_") and owner.__module__.startswith("psync"):
            found[name] = owner
    return found


def is_described(class_: type, name: str) -> bool:
    """Whether a member has a docstring, or a line of its class's."""
    value = inspect.getattr_static(class_, name)
    if inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod):
        return bool(inspect.getdoc(getattr(class_, name)))
    bases = [each for each in class_.__mro__ if each.__module__.startswith("psync")]
    return any(has_line(each, name) for each in bases) or has_comment(class_, name)


def has_line(class_: type, name: str) -> bool:
    """Whether a class's docstring has a line on an attribute or argument."""
    line = rf"^ +(\w+, )*{name}(, \w+)*: \S"
    return bool(re.search(line, class_.__doc__ or "", re.M))


def has_comment(class_: type, name: str) -> bool:
    """Whether a string follows an attribute, which the reference shows."""
    texts = [inspect.getsource(each) for each in class_.__mro__ if "psync" in each.__module__]
    return any(re.search(rf'^    {name}\b.*\n    """', text, re.M) for text in texts)


def shows(class_: type, owner: type) -> bool:
    """Whether the reference shows, at a class, what it has of this class."""
    options = SHOWN.get(class_)
    inherits = issubclass(class_, owner) and "inherited-members" in (options or ())
    return options is not None and (class_ is owner or inherits)


def test_what_an_editor_shows_of_a_class_is_in_the_reference() -> None:
    undescribed, missing = [], []
    for name, class_ in CLASSES.items():
        members = members_of(class_)
        for alias in ALIASES.get(name, set()):
            assert members.pop(alias), "an alias has gone: take it off the list"
        for each, owner in members.items():
            if hasattr(OF_RULES, each) or each in getattr(class_, "__members__", ()):
                continue
            if not is_described(class_, each):
                undescribed.append(f"{name}.{each}")
            shown = any(shows(base, owner) for base in class_.__mro__) or has_line(class_, each)
            if not shown and not name.startswith("psync.integrations."):  # a how-to has those
                missing.append(f"{name}.{each}")
    assert undescribed == [], "no docstring: write one, or begin the name with an underscore"
    assert missing == [], "not on a page: name the base there, or show inherited members"


def test_aliases_are_not_shown() -> None:
    for name, aliases in ALIASES.items():
        for alias in aliases:
            directive = rf"^\.\. autoclass:: {name}\n(   :.*\n)*   :exclude-members: .*\b{alias}\b"
            assert re.search(directive, TEXT, re.M)
