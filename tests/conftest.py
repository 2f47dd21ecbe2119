"""What holds for every test: both event loops, a time limit, and nothing left behind.

- A coroutine test runs on uvloop and on the stock loop; one marked ``virtual_time`` runs once, on
  the loop of ``psync.testing`` whose clock is virtual.
- A test fails that leaves an asyncio task, a file descriptor, a child process or a changed logger
  behind, that lets an error reach the loop's exception handler, or that takes longer than 60 s
  (another limit: ``@pytest.mark.timeout(seconds)``).
- ``make test`` runs each test once, on uvloop, but for those marked ``slow`` and not ``smoke``;
  ``make test-more`` runs these, and all others on the stock loop. Those marked ``full`` are in
  ``make test-full``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from turns import Turns

TIMEOUT_S = 60.0

# Opened once in a process by libraries and kept: not a leak of the test that happens to be first.
KEPT_FILES = ("/dev/null", "/dev/urandom")


def pytest_configure() -> None:
    """Hear signals, as do tasks that tests start, in the background of a shell, too."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


# --- which tests run -------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="1/1", help="2/3: the second of three parts of all test files"
    )


def is_more(item: pytest.Item) -> bool:
    """Whether a test is in ``make test-more``; most others are in ``make test``."""
    slow = item.get_closest_marker("slow") and not item.get_closest_marker("smoke")
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    on_stock_loop = any(value is asyncio.new_event_loop for value in values)
    return bool(slow) or on_stock_loop


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    files = set(sorted({item.path for item in items})[part - 1 :: parts])
    items[:] = [item for item in items if item.path in files]
    for item in items:
        if is_more(item) and not item.get_closest_marker("full"):
            item.add_marker("more")
        if isinstance(item, pytest.Function) and item.get_closest_marker("asyncio"):
            # Set up before the test's own fixtures, so that those stop their tasks before it looks.
            names = item.fixturenames
            names.insert(names.index("nothing_left_behind") + 1, "clean_loop")


# --- event loops -----------------------------------------------------------------------------


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        from psync.testing import VirtualClockLoop

        return {"virtual": VirtualClockLoop}
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
async def clean_loop(nothing_left_behind: None) -> AsyncIterator[None]:
    """Fail the test if a task outlives it, or an error reaches the loop's exception handler."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    for _ in range(3):  # what the test closed or cancelled last needs a turn of the loop to end
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not tasks, f"tasks left running: {tasks}"
    gc.collect(1)  # a task whose error nobody has seen speaks up when it is collected
    assert not unhandled, f"the loop's exception handler was called: {unhandled}"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """For a test without a loop: what asks for the running one gets turns that the test makes."""
    from turns import Turns

    turns = Turns()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: turns)
    return turns


# --- file descriptors and processes ----------------------------------------------------------


def open_files() -> dict[int, str]:
    """The open file descriptors of this process and what they stand for."""
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            files[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return files


def child_processes() -> set[str]:
    """The process ids of this process's children, zombies among them."""
    children: set[str] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # the thread has ended meanwhile
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                children.update(file.read().split())
    return children


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_suite() -> Iterator[None]:
    """Fail the suite if a process is left that a fixture of wider scope than a test has started."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # opens libuv's pipe for signals, once and for ever
    yield
    assert not child_processes(), f"processes left behind: {child_processes()}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test if a file, socket or process is still there when all else is torn down."""
    files_before, children_before = set(open_files().items()), child_processes()
    yield

    def left() -> list[str]:
        files = [
            f"fd {fd}: {target}"
            for fd, target in sorted(set(open_files().items()) - files_before)
            if target not in KEPT_FILES
        ]
        return files + [f"process {pid}" for pid in sorted(child_processes() - children_before)]

    found = left()
    if found:
        gc.collect()  # held by a cycle only, such as the traceback of an error that was expected
        found = left()
    assert not found, f"left behind: {found}"


# --- loggers ---------------------------------------------------------------------------------


def handlers_of(logger: logging.Logger) -> list[logging.Handler]:
    """Those of the root come and go with pytest's own."""
    return [] if logger is logging.root else logger.handlers


def loggers() -> dict[str, tuple[object, ...]]:
    """What has been set of the loggers of this process whose messages tests look at."""
    names = {name for name in logging.root.manager.loggerDict if name.startswith("psync")}
    return {
        logger.name: (logger.level, logger.propagate, logger.disabled, *handlers_of(logger))
        for logger in map(logging.getLogger, sorted(names | {"root", "asyncio"}))
    }


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Fail the test if it leaves a variable of psync behind: processes of other tests get it."""

    def variables() -> dict[str, str]:
        prefixes = ("PSYNC_", "TF_CONFIG", "JAX_", "KERAS_", "CUDA_")
        return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}

    before = variables()
    yield
    assert variables() == before, "the environment is not what it was before the test"


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Fail the test if it leaves a logger with another level than it found: others hear of it."""
    before, disabled = loggers(), logging.root.manager.disable
    yield
    untouched = (logging.NOTSET, True, False)
    changed = {name: now for name, now in loggers().items() if now != before.get(name, untouched)}
    assert not changed, f"changed loggers: {changed}"
    assert logging.root.manager.disable == disabled


@pytest.fixture
def own_log() -> Iterator[None]:
    """For a test in whose process a command begins: what that sets of psync's log ends with it."""
    log = logging.getLogger("psync")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


# --- time limit ------------------------------------------------------------------------------


class TooLate(KeyboardInterrupt):
    """Raised by the alarm. Both loops let a KeyboardInterrupt through, and uvloop nothing else."""


def on_alarm(signum: int, frame: object) -> None:
    with contextlib.suppress(RuntimeError):  # no loop runs
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)
    raise TooLate


@contextlib.contextmanager
def time_limit(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0]) if marker else TIMEOUT_S
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TooLate as exc:
        raise TimeoutError(f"{item.nodeid} took longer than {seconds:g} s") from exc
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)
