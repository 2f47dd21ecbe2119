"""What mypy and pyright find in programs of users, and what they do not.

Both are installed by ``make lint``, which runs this file; elsewhere its first tests are skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import psync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # not in make test; mypy may begin anew

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHECKERS = ("mypy", "pyright")

# Programs without annotations are checked as well, but for the demand for annotations.
MISSING_ANNOTATIONS = ("no-untyped-def", "no-untyped-call")


def programs_of(page: Path, folder: Path) -> Iterator[Path]:
    """Write the programs on a page to files, each a code block that can be run as it is."""
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        if "import psync\n" in block and "__main__" in block:
            path = folder / f"{page.stem}_{number}.py"
            path.write_text(block)
            yield path


def can_be_imported(path: Path) -> bool:
    """Whether all that a program imports is installed: without an extra, its types are unknown."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in names)


def run(*command: str) -> str:
    """Return what a checker prints; codes above 1 are its own errors."""
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # asks for no newer one
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr}"
    return done.stdout


def mypy(paths: list[str]) -> list[tuple[str, int, str]]:
    """Return file, line and text of all errors."""
    lines = run("mypy", "--strict", "--output=json", *paths).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        (item["file"], item["line"], item["message"])
        for item in found
        if item["severity"] == "error" and item["code"] not in MISSING_ANNOTATIONS
    ]


def pyright(paths: list[str]) -> list[tuple[str, int, str]]:
    """Return file, line and text of all errors and warnings."""
    printed = run("pyright", "--outputjson", "--pythonpath", sys.executable, *paths)
    return [
        (item["file"], item["range"]["start"]["line"] + 1, item["message"])
        for item in json.loads(printed)["generalDiagnostics"]
    ]


@pytest.fixture(scope="module", params=CHECKERS)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, str]]]:
    """What a checker says, by the name of the file; files without an error are there, too."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: make lint")
    paths = [HERE / "mistakes.py", HERE / "program.py"]
    paths += filter(can_be_imported, sorted((ROOT / "examples").glob("*.py")))
    paths += sorted((ROOT / "examples" / "gallery").glob("*.py"))
    paths += programs_of(ROOT / "README.md", tmp_path_factory.mktemp("programs"))
    said: dict[str, list[tuple[int, str]]] = {path.name: [] for path in paths}
    checker = {"mypy": mypy, "pyright": pyright}[request.param]
    for file, line, text in checker([str(path) for path in paths]):
        said.setdefault(Path(file).name, []).append((line, text))
    return said


def test_ten_mistakes_are_found_and_nothing_else(found: dict[str, list[tuple[int, str]]]) -> None:
    lines = (HERE / "mistakes.py").read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if "  # mistake: " in line}
    assert len(mistakes) == 10
    assert {line for line, _ in found["mistakes.py"]} == mistakes, found["mistakes.py"]


def test_programs_without_a_mistake_pass(found: dict[str, list[tuple[int, str]]]) -> None:
    assert {"program.py", "digits.py", "README_0.py"} <= found.keys()
    said = {name: texts for name, texts in found.items() if texts and name != "mistakes.py"}
    assert said == {}


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; of generic classes of psync, without their arguments."""
    origin, of = get_origin(kind) or kind, get_args(kind)
    if kind is None or kind is Any:
        return kind is Any or value is None
    if not isinstance(value, origin):
        return False
    if origin is list or of[1:] == (...,):
        return all(is_a(item, of[0]) for item in value)
    if origin is tuple:
        return len(value) == len(of) and all(map(is_a, value, of))
    if origin is dict:
        return all(is_a(key, of[0]) and is_a(item, of[1]) for key, item in value.items())
    return True


async def test_the_typed_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asserted = []

    def assert_type(value: Any, kind: Any) -> None:
        assert is_a(value, kind), f"expected {kind}, got {value!r}"
        asserted.append(kind)

    monkeypatch.setattr(typing, "assert_type", assert_type)
    async with psync.LocalCluster(1, 2, processes=False) as cluster:
        main = runpy.run_path(str(HERE / "program.py"))["main"]
        await main(psync.ParameterServerStrategy(cluster.resolver))
    assert len(asserted) > 40
