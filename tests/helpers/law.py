"""The import law: which package of psync knows which, and what is pure.

This table is its only place. ``tests/test_law.py`` enforces it. ``make coverage`` asks it for the
rule suite, which reaches every branch of what is pure: all test files that import nothing else::

    python tests/helpers/law.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "psync"
TESTS = ROOT / "tests"

# A row imports rows before it, and itself. A name stands for a package, or for a file at the top.
LAW = (
    "errors specs cluster",
    "wire",
    "partitioners",
    "schedules",
    "numerics",
    "accumulators",
    "store",
    "closures",
    "net",
    "serialization",
    "client",
    "replicas",
    "worker",
    "checkpoints",
    "ps",
    "backups",
    "sync backups.primary",
    "chief",
    "compat.board",
    "ps_task backups.host ps.snapshots ps.succession",
    "worker_task",
    "coordinator",
    "status",
    "api",
    "compat",
    "optimizers gradients metrics data rules",
    "training callbacks",
    "integrations",
    "testing",
    "launch",
    "integrations.ssh integrations.engines "
    "integrations.ray integrations.ray_data integrations.dask integrations.dask_tasks "
    "integrations.dask_data",
    "blocking",
    "__init__",
    "bench",
    "cli",
    "__main__",
    "testing.sabotage testing.chaos testing.simulation",
)

# Rules, and what reads bytes: tested without an event loop, every branch of them.
PURE = (
    "errors specs cluster wire partitioners schedules "
    "numerics accumulators store closures net.handshake_limits client.counters "
    "checkpoints.manifest ps.life "
    "backups.pairing backups.locate_ps "
    "sync.steps sync.staging sync.staleness "
    "chief.recovery_rule status.model status.exposition "
    "status.diagnosis status.units "
    "status.dashboard.view"
    " net.trace_file"
).split()

# What is pure is given these as a value.
IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "random", "secrets", "select",
    "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time", "uvloop",
}  # fmt: skip


def module_of(path: Path) -> str:
    """The module's name without the leading ``psync.``; ``__init__`` is psync itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def row_of(module: str) -> int:
    """The row of the law in which a module stands; -1: none."""
    names = [module.rsplit(".", at)[0] for at in range(module.count(".") + 1)]
    return next(
        (number for name in names for number, row in enumerate(LAW) if name in row.split()), -1
    )


def is_pure(module: str) -> bool:
    """Whether a module, or the package that it is in, is pure."""
    return any(module == name or module.startswith(f"{name}.") for name in PURE)


def nodes_of(tree: ast.AST, *, typed: bool) -> Iterator[ast.AST]:
    """All nodes, those in functions too; ``typed``: also what stands under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if typed or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes_of(node, typed=typed)


@cache
def imports_in(path: Path, *, typed: bool = True) -> list[tuple[int, str]]:
    """What a file imports: (line, dotted name); ``typed``: also for types alone."""
    found: list[tuple[int, str]] = []
    for node in nodes_of(ast.parse(path.read_text(), str(path)), typed=typed):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute in psync"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix("psync.") in MODULES
                found.append((node.lineno, name if is_module else node.module))
    return found


def own_imports_in(path: Path, *, typed: bool = True) -> list[tuple[int, str]]:
    """The modules of psync that a file imports: (line, name)."""
    return [
        (line, name.removeprefix("psync").lstrip(".") or "__init__")
        for line, name in imports_in(path, typed=typed)
        if name.split(".")[0] == "psync"
    ]


def rule_suite() -> Iterator[Path]:
    """Yield the test files of rules: those that import pure modules, and no others of psync.

    Where a file imports none of psync, its helpers' imports count. ``psync.rules``, the base class
    of users' update rules, counts as pure: they are given to rules.
    """
    for path in sorted(TESTS.rglob("test_*.py")):
        helpers = [TESTS / "helpers" / f"{name}.py" for _, name in imports_in(path)]
        own = own_imports_in(path, typed=False) or [
            each
            for helper in filter(Path.exists, helpers)
            for each in own_imports_in(helper, typed=False)
        ]
        if own and all(is_pure(name) or name == "rules" for _, name in own):
            yield path.relative_to(ROOT)


if __name__ == "__main__":
    print(*(f"--cov=psync.{name}" for name in PURE), *rule_suite())
