"""The import law of helpers/law.py, and other rules about where things stand in the source."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from law import IMPURE, LAW, MODULES, PURE, TESTS, imports_in, is_pure, own_imports_in, row_of

MAX_CIRCLE = 6
"""How many files may name each other in a circle; for that, one has to know the others' types."""

# Arrays become bytes in wire/tensors.py. The others handle memory that is bytes already.
BYTES_ALLOWED = {
    "wire.tensors": "the border itself",
    "wire.frames": "cuts what was received without copying it",
    "net.transport": "hands the buffers of segments to the loop",
    "net.tls": "hands bytes to TLS, and takes them from it",
    "net.connection": "gathers the small segments of a reply in one buffer",
    "net.shared.regions": "makes the memory that tasks of one host share",
    "net.shared.windows": "maps that memory a second time",
    "net.shared.bodies": "finds where in that memory a buffer lies",
    "numerics.memory": "memory of shards is cut into blocks of bytes",
    "numerics.rows": "blocks that lie in one mapping of memory",
    "testing.link": "finds memory that is changed while it is in flight",
    "testing.memory_sharing": "lends memory as regions do",
}
BYTES_CALL = re.compile(r"\.tobytes\(|\bfrombuffer\(|\bmemoryview\((?!b\")")


def graph(*, typed: bool = True) -> dict[str, set[str]]:
    return {
        module: {name for _, name in own_imports_in(path, typed=typed)}
        for module, path in MODULES.items()
    }


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


def test_the_design_page_says_why_a_module_or_class_of_the_core_is_wide() -> None:
    page = (TESTS.parent / "docs" / "design.md").read_text()
    table = page.partition("A module of the core (")[2].partition("## Tasks and connections")[0]
    named = set(re.findall(r"`([\w.]+)`", table))

    def is_core(module: str) -> bool:
        return module.split(".")[0] not in ("__init__", "testing", "bench", "integrations")

    core = {name: path for name, path in MODULES.items() if is_core(name)}
    wide = {
        name
        for name, path in core.items()
        if len({each for _, each in own_imports_in(path) if is_core(each)}) > 12
    }
    for path in core.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if hasattr(each, "args")}
                wide |= {node.name} if len(methods) > 25 else set()
    assert wide <= named, f"docs/design.md does not say why: {sorted(wide - named)}"


def test_a_package_knows_the_packages_of_rows_before_its_own() -> None:
    breaches = [
        f"{path}:{line}: {LAW[row_of(module)]!r} must not import psync.{name}, "
        f"of {LAW[row_of(name)]!r}"
        for module, path in MODULES.items()
        for line, name in own_imports_in(path)
        if row_of(name) > row_of(module)
    ]
    assert not breaches, "\n".join(breaches)


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(graph(typed=False)).prepare()
    except CycleError as exc:
        pytest.fail(f"these import each other: {' -> '.join(exc.args[1])}")


def test_few_files_name_each_others_types() -> None:
    """Imports for types count. A circle stays in its row, since each file obeys the law above."""
    imported, reached = graph(), {}
    for module in MODULES:
        seen, waiting = set[str](), [module]
        while waiting:
            new = imported[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[module] = seen
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in MODULES
    }
    breaches = [", ".join(circle) for circle in circles if len(circle) > MAX_CIRCLE]
    assert not breaches, "\n".join(["these import each other, types included:", *breaches])


def test_rules_are_pure() -> None:
    breaches = []
    for module in filter(is_pure, MODULES):
        for line, name in imports_in(MODULES[module], typed=False):
            place, own = f"{MODULES[module]}:{line}", name.removeprefix("psync.")
            if name.split(".")[0] in IMPURE:
                breaches.append(f"{place}: imports {name}")
            elif own in MODULES and not is_pure(own):
                breaches.append(f"{place}: imports psync.{own}, which is not in PURE")
    assert not breaches, "\n".join(breaches)


def test_what_is_called_pure_is_there() -> None:
    assert [name for name in PURE if name not in MODULES] == []


def test_a_package_says_what_it_is() -> None:
    packages = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_arrays_become_bytes_in_one_place() -> None:
    breaches = [
        f"{path}:{number}: only wire/tensors.py turns arrays into bytes"
        for module, path in MODULES.items()
        if module not in BYTES_ALLOWED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BYTES_CALL.search(line)
    ]
    assert not breaches, "\n".join(breaches)
