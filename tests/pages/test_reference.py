"""Every public name has a place in the reference, and a program there that uses it."""

from __future__ import annotations

import inspect
import re

import pytest

import psync
from pages import ROOT, blocks

PAGES = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
PROGRAMS = "\n".join(
    block.text for page in PAGES for block in blocks(page) if block.kind == "run"
)  # what is hidden, too


def is_error(name: str) -> bool:
    value = getattr(psync, name)
    return inspect.isclass(value) and issubclass(value, BaseException)


NAMES = [name for name in psync.__all__ if not is_error(name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_uses_it(name: str) -> None:
    module = inspect.ismodule(getattr(psync, name))
    uses = rf"\bpsync\.{name}\b|from psync(\.{name})? import .*{'' if module else name}"
    assert re.search(uses, PROGRAMS)


@pytest.mark.parametrize("name", NAMES)
def test_its_docstring_is_in_the_reference(name: str) -> None:
    module = inspect.ismodule(getattr(psync, name))
    directive = "automodule" if module else "auto(class|function)"
    assert re.search(rf"^\.\. {directive}:: psync\.{name}$", TEXT, re.MULTILINE)


def test_all_errors_are_in_the_reference() -> None:
    assert ".. automodule:: psync.errors" in TEXT
    for name in set(psync.__all__) - set(NAMES):
        assert getattr(psync, name).__module__ in ("psync.errors", "psync.serialization.captures")
