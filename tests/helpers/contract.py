"""Which tests are the contract: they hold whatever is inside, because they import nothing of it.

A test file is in ``make contract`` if it and its helpers import public modules of psync only, the
wire and ``psync.testing``, name no internal module in a text, and read no private attribute of
another object::

    python tests/helpers/contract.py
    tests/api/test_strategy.py
    …
    python tests/helpers/contract.py --others
    tests/api/test_registry.py: psync.api.optimizers
    …
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from law import MODULES, TESTS

PUBLIC = (
    "psync psync.errors psync.specs psync.cluster psync.schedules psync.partitioners "
    "psync.accumulators psync.optimizers psync.gradients psync.metrics psync.data psync.rules "
    "psync.callbacks psync.blocking psync.net.platform psync.net.secret"
).split()

PUBLIC_PACKAGES = ("psync.wire.", "psync.testing.", "psync.integrations.")

ELSEWHERE = ("bench", "fuzz", "integrations", "packaging", "pages", "processes", "typing")
"""Folders whose tests need other libraries, real processes or minutes, or are about the source."""

HELPERS = {path.stem: path for path in (TESTS / "helpers").glob("*.py")}

TEXT = re.compile(r"psync(?:\.\w+)+")


def is_public(module: str) -> bool:
    """Whether a module may be imported by a test of the contract."""
    return module in PUBLIC or f"{module}.".startswith(PUBLIC_PACKAGES)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports, or names in a text, as ``monkeypatch`` takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name.removeprefix("psync.") in MODULES else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if TEXT.fullmatch(node.value):
                yield from (
                    f"psync.{module}"
                    for module in MODULES
                    if f"{node.value}.".startswith(f"psync.{module}.") and "." in module
                )
        elif isinstance(node, ast.Attribute) and is_private(node):
            yield f"psync's {node.attr}"


def is_private(node: ast.Attribute) -> bool:
    """Whether an attribute is private and of another object than the test's own."""
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")
    usual = node.attr.endswith("_") or node.attr in ("_asdict", "_replace", "_fields")
    return node.attr.startswith("_") and not usual and not own


@functools.cache
def used_by(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the internals that a file uses itself, and its helpers."""
    names = set(names_in(ast.parse(path.read_text())))
    internals = {name for name in names if name.startswith("psync") and not is_public(name)}
    return frozenset(internals), frozenset(HELPERS[name] for name in names & HELPERS.keys())


def internals_of(path: Path) -> set[str]:
    """Return the internals that a file uses, itself or through its helpers; none: the contract."""
    found: set[str] = set()
    looked_at, ahead = {path}, [path]
    while ahead:
        internals, helpers = used_by(ahead.pop())
        found |= internals
        ahead += helpers - looked_at
        looked_at |= helpers
    return found


def is_contract(path: Path) -> bool:
    """Whether the tests of a file are the contract."""
    folder, *below = path.relative_to(TESTS).parts
    return bool(below) and folder not in ELSEWHERE and not internals_of(path)


def main() -> None:
    """List the files of the contract, or what keeps others out."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if is_contract(path) != ("--others" in sys.argv):
            why = ", ".join(sorted(internals_of(path)))
            print(path.relative_to(TESTS.parent), why, sep=": " if why else "")


if __name__ == "__main__":
    main()
