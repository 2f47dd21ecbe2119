"""docs/howto/tensorflow.md: the names of its lists and tables exist, and name their tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import psync

TESTS = Path(__file__).parent
DOCUMENT = (TESTS.parent / "docs" / "howto" / "tensorflow.md").read_text()


class Row(NamedTuple):
    tensorflow: str
    psync: str
    differs: str
    test: str


def rows() -> list[Row]:
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {4}
    headings = [["TensorFlow", "psync", "differs", "test"], ["---"] * 4]
    return [Row(*row) for row in cells if row not in headings]


ROWS = rows()
CODE = re.compile(r"`([^`]+)`")


@cache
def names_in(file: str) -> set[str]:
    """The names of a file's test functions."""
    (path,) = TESTS.rglob(file)
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def assert_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert names_in(file), file
    assert not name or name in names_in(file), test


def test_there_are_rows() -> None:
    assert len(ROWS) > 70
    assert len({row.tensorflow for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.tensorflow)
def test_each_row_names_tests_that_are_there(row: Row) -> None:
    tests = CODE.findall(row.test)
    assert tests
    assert row.test == ", ".join(f"`{test}`" for test in tests)
    for test in tests:
        assert_there(test)


def lists() -> list[tuple[str, str]]:
    """The lists of names without a difference: where they are in psync, and one name each."""
    bullets = re.findall(r"^- (?:In|Of) `(psync[\w.]*)`: ((?:.|\n  )*)", DOCUMENT, re.M)
    return [(place, name) for place, names in bullets for name in CODE.findall(names)]


@pytest.mark.parametrize(("place", "name"), lists())
def test_each_name_of_a_list_is_there(place: str, name: str) -> None:
    last = name.partition("(")[0].rpartition(".")[2]
    assert_name_is_there(f"{place}.{last}")


def test_each_group_of_lists_names_its_tests_in_a_comment() -> None:
    comments = re.findall(r"^<!-- tests: (.*) -->$", DOCUMENT, re.M)
    assert len(comments) == len(re.findall(r"\n\n- (?:In|Of) `psync", DOCUMENT))
    for test in ", ".join(comments).split(", "):
        assert_there(test)


def public_names() -> set[str]:
    return set(re.findall(r"\bpsync(?:\.[A-Za-z_]\w*)+", DOCUMENT))


def assert_name_is_there(name: str) -> None:
    first, *rest = name.removeprefix("psync.").split(".")
    assert first in psync.__all__
    found = getattr(psync, first)
    for part in rest:
        if part in getattr(found, "__annotations__", {}):  # a field without a default
            return
        if re.search(rf"Attributes:\n(.*\n)*? +{part}: ", found.__doc__ or ""):
            return
        found = getattr(found, part)


@pytest.mark.parametrize("name", sorted(public_names()))
def test_each_name_of_psync_is_there(name: str) -> None:
    assert_name_is_there(name)
