"""The figures that may only fall: how much code there is, and how much of it an operation runs.

    python tests/helpers/figures.py           all of them
    python tests/helpers/figures.py sync      bytecodes and calls of one operation, by function

Calls are Python frames under a task of psync, its own and those of what it calls, except the event
loop's, for one operation of a warm cluster in memory (2 ps tasks, one float32 variable of 40 KB,
cut in two); bytecodes are what these frames execute. Under the virtual clock they are the same in
every run of one version of Python. Speed follows the bytecodes: fewer calls of longer functions
save little.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import os
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import psync
from endpoints import connected, done
from psync.net.connection import Handler
from psync.testing import MemoryNetwork, run_virtual
from psync.wire.messages import AskStatistics

SOURCE = Path(__file__).parents[2] / "src" / "psync"
TESTS = Path(__file__).parents[1]
BESIDE = {"testing", "bench", "integrations"}
"""Packages that are not of the core."""

ROOT = os.path.dirname(psync.__file__) + os.sep
UNCOUNTED = (os.path.dirname(asyncio.__file__), ROOT + "testing", str(TESTS))
TIMES = 20
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Count the lines that are no docstring, comment or blank."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            code.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def sizes() -> dict[str, int]:
    """Return code lines by package, of the core and of all, syntax nodes of all, test lines."""
    found: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        text, parts = path.read_text(), path.relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "top"
        lines = code_lines(text)
        found[package] += lines
        found["src"] += lines
        found["core"] += lines if package not in BESIDE else 0
        found["nodes"] += sum(1 for _ in ast.walk(ast.parse(text)))
    found["tests"] = sum(len(path.read_text().splitlines()) for path in TESTS.rglob("*.py"))
    return dict(found)


class Calls:
    """Counts while it is entered: Python calls and bytecodes by function, and calls into C."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.bytecodes: Counter[str] = Counter()
        self.native = 0

    def __enter__(self) -> Calls:
        gc.collect()
        gc.disable()  # what other tests have left is not of this operation
        threading.setprofile(self._count_native)
        threading.settrace(self._count_call)
        sys.setprofile(self._count_native)
        self._traced = sys.gettrace()
        sys.settrace(self._count_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._traced)
        sys.setprofile(None)
        threading.settrace(None)  # type: ignore[arg-type]
        threading.setprofile(None)
        gc.enable()

    def _count_native(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "c_call" and name.startswith(ROOT) and not name.startswith(UNCOUNTED):
            self.native += 1

    def _count_call(self, frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        own = name.startswith(ROOT)
        if name.startswith(UNCOUNTED) or not (own or _is_called_by_psync(frame)):
            return None
        function = f"{name.removeprefix(ROOT)}:{frame.f_code.co_qualname}"
        self.functions[function] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def count(_: FrameType, event: str, __: Any) -> Callable[..., Any]:
            self.bytecodes[function] += event == "opcode"
            return count

        return count


def _is_called_by_psync(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith((ROOT, *UNCOUNTED)):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(UNCOUNTED)


async def counted(run: Callable[[int], Awaitable[None]], times: int = TIMES) -> Calls:
    """Count the calls of so many repetitions: a run of twice as many less one of so many."""
    for _ in range(3):
        await run(5)
    with Calls() as few:
        await run(times)
    with Calls() as many:
        await run(2 * times)
    many.functions.subtract(few.functions)
    many.bytecodes.subtract(few.bytecodes)
    many.native -= few.native
    return many


async def message() -> Calls:
    """Count an echo, both ends; half of that is a message. Each is read whole, as from a socket."""
    network = MemoryNetwork(chunk=(65_536, 65_536))
    async with connected(network, {AskStatistics: Handler(done)}) as pair:

        async def run(times: int) -> None:
            for _ in range(times):
                await pair.peer.call(AskStatistics())

        return await counted(run)


async def operation(name: str) -> Calls:
    """Count one operation of a cluster."""
    workers = 2 if name in ("sync", "replica") else 1
    recovery = "backup" if name == "replica" else "checkpoint"
    async with psync.LocalCluster(2, workers, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(
            cluster.resolver, psync.FixedShardsPartitioner(2), ps_recovery=recovery
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros((100, 100), np.float32), name="w")
                step = psync.get_or_create_global_step()
            sgd = psync.optimizers.SGD(0.1)
            synchronous = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.1), workers)
            pairs = [(np.ones((100, 100), np.float32), w)]

            async def loop(times: int) -> None:
                for _ in range(times):
                    if name == "pull":
                        await psync.pull(w)
                    elif name == "push":
                        await sgd.apply_gradients(pairs)
                    elif name == "push_pull":
                        await sgd.push_pull(pairs, pull=w)
                    else:
                        await psync.pull(w)
                        await synchronous.apply_gradients(pairs, step)

            async def nothing() -> int:
                return 1

            async def run(times: int) -> None:
                if name == "closure":
                    for _ in range(times):
                        await coordinator.fetch(coordinator.schedule(nothing))
                else:
                    for _ in range(workers):
                        coordinator.schedule(loop, args=(times,))
                    await coordinator.join()

            return await counted(run)


OPERATIONS = ("message", "closure", "pull", "push", "push_pull", "sync", "replica")


def calls_of(name: str) -> Calls:
    """Count the calls of one operation, times ``TIMES`` (a message: twice that)."""
    return run_virtual(message if name == "message" else lambda: operation(name))


def per_operation(name: str) -> tuple[float, float, float]:
    """Return the bytecodes and Python calls of one operation, and its calls into C."""
    found, times = calls_of(name), TIMES * (2 if name == "message" else 1)
    return found.bytecodes.total() / times, found.functions.total() / times, found.native / times


def main(chosen: list[str]) -> None:
    """Print figures."""
    for name in chosen:
        found = calls_of(name)
        for function, times in found.bytecodes.most_common():
            if times:
                print(f"{times / TIMES:8.1f} {found.functions[function] / TIMES:8.2f}  {function}")
    if not chosen:
        for name, size in sorted(sizes().items(), key=lambda item: item[1]):
            print(f"{name:14} {size:8}")
        for name in OPERATIONS:
            figures = "{:8.0f} bytecodes, {:6.1f} Python calls, {:6.1f} into C"
            print(f"{name:14}", figures.format(*per_operation(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
