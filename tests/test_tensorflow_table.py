"""docs/howto/tensorflow.md: the names of its lists and tables exist, and name their tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


def is_there(test: str) -> bool:
    """Whether there is a test, such as "test_reads.py::test_it", or a file of tests."""
    file, _, name = test.partition("::")
    return name in names_in(file) if name else bool(names_in(file))


def test_there_are_rows() -> None:
    assert len(ROWS) > 70
    assert len({row.tensorflow for row in ROWS}) == len(ROWS)


def test_each_row_names_tests_that_are_there() -> None:
    missing = []
    for row in ROWS:
        tests = CODE.findall(row.test)
        assert tests, row
        assert row.test == ", ".join(f"`{test}`" for test in tests)
        missing += [(row.tensorflow, test) for test in tests if not is_there(test)]
    assert missing == []


def lists() -> list[tuple[str, str]]:
    """The lists of names without a difference: where they are in psync, and one name each."""
    bullets = re.findall(r"^- (?:In|Of) `(psync[\w.]*)`: ((?:.|\n  )*)", DOCUMENT, re.M)
    return [(place, name) for place, names in bullets for name in CODE.findall(names)]


def test_each_group_of_lists_names_its_tests_in_a_comment() -> None:
    comments = re.findall(r"^<!-- tests: (.*) -->$", DOCUMENT, re.M)
    assert len(comments) == len(re.findall(r"\n\n- (?:In|Of) `psync", DOCUMENT))
    assert [test for test in ", ".join(comments).split(", ") if not is_there(test)] == []


def is_name_of_psync(name: str) -> bool:
    first, *rest = name.removeprefix("psync.").split(".")
    found = getattr(psync, first) if first in psync.__all__ else None
    for part in rest:
        if part in getattr(found, "__annotations__", {}):  # a field without a default
            return True
        if re.search(rf"Attributes:\n(.*\n)*? +{part}: ", found.__doc__ or ""):
            return True
        found = getattr(found, part, None)
    return found is not None


def test_each_name_of_psync_is_there() -> None:
    named = set(re.findall(r"\bpsync(?:\.[A-Za-z_]\w*)+", DOCUMENT))
    listed = {f"{place}.{name.partition('(')[0].rpartition('.')[2]}" for place, name in lists()}
    assert len(named) > 100
    assert len(listed) > 60
    assert sorted(name for name in named | listed if not is_name_of_psync(name)) == []
