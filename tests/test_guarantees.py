"""GUARANTEES.md: every promise has a test, and the test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    line
    for line in (ROOT / "GUARANTEES.md").read_text().splitlines()
    if line.startswith("| ") and not re.fullmatch(r"\|( promise | dies | )?.*\| tests \|", line)
]


def names_in(path: Path) -> set[str]:
    """The tests of a file: functions, classes, and what hypothesis makes of a state machine."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}::{getattr(item, 'name', '')}" for item in node.body}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_there_are_promises() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_promise_names_tests_that_exist(row: str) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row.split("|")[-2])
    assert tests, "a promise without a test"
    for file, name in tests:
        assert name.lower().startswith("test"), name
        assert name in names_in(ROOT / file), f"{file} has no {name}"
