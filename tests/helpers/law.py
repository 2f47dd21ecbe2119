"""The import law: which package of psync knows which, and what is pure.

This table is its only place. ``tests/test_law.py`` enforces it; ``make coverage`` asks it which
tests have to reach every branch of what is pure::

    python tests/helpers/law.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "psync"
TESTS = ROOT / "tests"

# A row imports rows before it, and itself. A name stands for a package, or for a file at the top.
LAW = (
    "errors specs cluster cluster_roles",
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
    "sync",
    "chief",
    "ps_task",
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
    "errors specs cluster cluster_roles wire partitioners schedules "
    "numerics accumulators store closures net.handshake_limits client.numbers client.pulled_steps "
    "worker.element_specs checkpoints.manifest ps.life "
    "backups.pairing backups.fingerprint backups.locate_ps "
    "sync.tokens sync.pushes sync.group sync.steps sync.staging sync.staleness "
    "chief.recovery_rule compat.session_members status.model status.rates status.exposition "
    "status.diagnosis status.units client.work_meter "
    "status.guard status.dashboard.history status.dashboard.view"
    " net.tracing.readings net.tracing.clocks net.tracing.lanes net.tracing.chrome"
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


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions too, except what stands under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from runtime_nodes(node)


def imports_of(module: str) -> list[tuple[int, str]]:
    """What a module imports when it runs: (line, dotted name)."""
    path = MODULES[module]
    found: list[tuple[int, str]] = []
    for node in runtime_nodes(ast.parse(path.read_text(), str(path))):
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


def own_imports_of(module: str) -> list[tuple[int, str]]:
    """The modules of psync that a module imports when it runs: (line, name)."""
    return [
        (line, name.removeprefix("psync").lstrip(".") or "__init__")
        for line, name in imports_of(module)
        if name.split(".")[0] == "psync"
    ]


def main() -> None:
    """Print the arguments with which pytest covers what is pure."""
    for name in PURE:
        *folders, last = name.split(".") if "." in name else ("top", name)
        in_folder, in_file = TESTS / name, TESTS.joinpath(*folders, f"test_{last}.py")
        tests = in_folder if in_folder.is_dir() else in_file
        print(f"--cov=psync.{name}", tests.relative_to(ROOT))


if __name__ == "__main__":
    main()
