"""The promises of GUARANTEES.md, and the tests that carry their marks.

    python tests/helpers/promises.py
    schedule.never-blocks
        tests/api/test_cluster_coordinator.py::test_schedule_never_blocks_and_…

A test names its promises by ``@pytest.mark.promise("schedule.never-blocks", …)``. The marks are
read from the source: nothing is imported, so tests whose libraries are missing count, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^(?:- |\| )`([a-z]+\.[a-z0-9]+(?:-[a-z0-9]+)*)`(?::| \|) \S", re.MULTILINE)


def promises() -> list[str]:
    """Return the ids of all promises, in the order of the page."""
    return ENTRY.findall((ROOT / "GUARANTEES.md").read_text())


def named_in(nodes: list[ast.expr]) -> list[str]:
    """Return the ids of the promise marks within expressions."""
    calls = [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [
        ast.literal_eval(argument)
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.promise"
        for argument in call.args
    ]


def marked(body: list[ast.stmt], place: str) -> Iterator[tuple[str, str]]:
    """Yield (id, test) for each promise mark; a ``pytestmark`` counts for the place around it."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            test = f"{place}::{node.name}"
            yield from ((name, test) for name in named_in(node.decorator_list))
            if isinstance(node, ast.ClassDef):
                yield from marked(node.body, test)
        elif isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            test = place if target == "pytestmark" else f"{place}::{target}"
            yield from ((name, test) for name in named_in([node.value]))


def by_promise() -> dict[str, list[str]]:
    """Return the tests of each promise, including ids that only a mark knows."""
    found: dict[str, list[str]] = {name: [] for name in promises()}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for name, test in marked(tree.body, str(path.relative_to(ROOT))):
            found.setdefault(name, []).append(test)
    return found


if __name__ == "__main__":
    for name, tests in by_promise().items():
        print(name, *tests, sep="\n    ")
