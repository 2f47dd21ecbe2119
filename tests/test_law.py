"""The import law of helpers/law.py, and other rules about where things stand in the source."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from law import (
    IMPURE,
    LAW,
    MODULES,
    PURE,
    SOURCE,
    TESTS,
    imports_of,
    is_pure,
    own_imports_of,
    row_of,
)

each_module = pytest.mark.parametrize("module", list(MODULES))
each_package = pytest.mark.parametrize(
    "package", [name for name, path in MODULES.items() if path.name == "__init__.py"]
)

WITHOUT_TEST_FILE = {
    "__main__": "two lines; the tests of cli start it as a process",
    "testing.chaos.__main__": "the command; tests/processes/test_chaos_command.py runs it",
}

# Arrays become bytes in wire/tensors.py. The others handle memory that is bytes already.
BYTES_ALLOWED = {
    "wire.tensors": "the border itself",
    "wire.frames": "cuts what was received without copying it",
    "wire.protocol": "the same, before a frame is complete",
    "net.transport": "hands the buffers of segments to the loop",
    "net.tls": "hands bytes to TLS, and takes them from it",
    "net.connection": "gathers the small segments of a reply in one buffer",
    "net.shared.regions": "makes the memory that tasks of one host share",
    "net.shared.views": "says what views of that memory refer to",
    "net.shared.windows": "maps that memory a second time",
    "net.shared.bodies": "finds where in that memory a buffer lies",
    "numerics.blocks": "memory of shards is cut into blocks of bytes",
    "numerics.row_blocks": "blocks that lie in one mapping of memory",
    "testing.segments": "finds memory that is changed while it is in flight",
    "testing.memory_sharing": "lends memory as regions do",
    "testing.memory_transport": "copies into the receiver's buffer, as a kernel does",
}
BYTES_CALL = re.compile(r"\.tobytes\(|\bfrombuffer\(|\bmemoryview\((?!b\")")


def test_every_module_has_its_row() -> None:
    assert [name for name in MODULES if row_of(name) < 0] == []


def test_the_design_page_lists_the_packages_in_the_order_of_the_law() -> None:
    page = (TESTS.parent / "docs" / "design.md").read_text()
    listed = page.partition("## Packages")[2].partition("Three rules")[0]
    heads = [line.partition(":")[0] for line in listed.splitlines() if line.startswith("- ")]
    names = {"psync": "__init__", "python -m psync": "__main__"}
    rows = [
        {row_of(names.get(name, name)) for name in re.findall("`([^`]+)`", head)} for head in heads
    ]
    assert sorted(set().union(*rows)) == list(range(len(LAW)))
    assert [min(row) for row in rows] == sorted(min(row) for row in rows)


@each_module
def test_a_package_knows_the_packages_of_rows_before_its_own(module: str) -> None:
    for line, name in own_imports_of(module):
        assert row_of(name) <= row_of(module), (
            f"{MODULES[module]}:{line}: {LAW[row_of(module)]!r} must not import psync.{name}, "
            f"of {LAW[row_of(name)]!r}"
        )


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(
            {module: [name for _, name in own_imports_of(module)] for module in MODULES}
        ).prepare()
    except CycleError as exc:
        pytest.fail(f"these import each other: {' -> '.join(exc.args[1])}")


@each_module
def test_rules_are_pure(module: str) -> None:
    if is_pure(module):
        for line, name in imports_of(module):
            assert name.split(".")[0] not in IMPURE, f"{MODULES[module]}:{line}: imports {name}"
            own = name.removeprefix("psync.")
            assert own not in MODULES or is_pure(own), (
                f"{MODULES[module]}:{line}: imports psync.{own}, which is not in PURE"
            )


def test_what_is_called_pure_is_there() -> None:
    assert [name for name in PURE if name not in MODULES] == []


@each_package
def test_a_package_says_what_it_is(package: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[package].read_text())), MODULES[package]


@each_module
def test_every_module_has_its_test_file(module: str) -> None:
    if (
        module in WITHOUT_TEST_FILE
        or MODULES[module].name == "__init__.py"
        or module.startswith("testing.simulation")  # tested as a whole
    ):
        return
    *folders, name = module.split(".")
    mirror = TESTS.joinpath(*folders or ["top"], f"test_{name}.py")
    assert mirror.exists(), f"{mirror} is missing"


@each_module
def test_arrays_become_bytes_in_one_place(module: str) -> None:
    if module not in BYTES_ALLOWED:
        for number, line in enumerate(MODULES[module].read_text().splitlines(), 1):
            assert not BYTES_CALL.search(line), (
                f"{MODULES[module]}:{number}: only wire/tensors.py turns arrays into bytes"
            )


def test_the_house_has_few_doors() -> None:
    files = list(SOURCE.glob("*.py"))
    packages = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    assert len(files) <= 19
    assert len(packages) <= 23
