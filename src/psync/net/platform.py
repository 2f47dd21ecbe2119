"""The platform of a task: network, randomness, clock and secret, given and never reached for.

A test gives an in-memory network, a seeded generator and a counter; the defaults are the
machine's. Time inside a loop is the loop's (``loop.time()``), which may be virtual. What belongs
to the whole process (``PerProcess``) is made here and nowhere else, so that a simulation can run in
a process as if nothing had run there before, and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import FileIO
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from psync.closures.scaling import Load
from psync.cluster import ClusterSpec
from psync.errors import check_fits
from psync.net.secret import Secret
from psync.wire.limits import HANDSHAKE_LIMITS, Limits

if TYPE_CHECKING:
    from psync.net.shared.regions import SharedMemory
    from psync.net.transport import Network

T = TypeVar("T")

MISPLACED = 78
"""Exit code of a worker of ``psync run`` that runs the program instead of serving: the launcher
says so, once for all of them."""

every: list[PerProcess[Any]] = []
"""All values of a process, so that a test can begin with fresh ones."""


class PerProcess(Generic[T]):
    """A value that each process has one of; call this for the one of here.

    Args:
        make: Returns the value with which a process begins.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.value = make()
        every.append(self)

    def __call__(self) -> T:
        return self.value


def inherited_file(variable: str) -> int | None:
    """Return the descriptor that a launcher has passed on under this name; it has one owner."""
    known = os.environ.pop(variable, None)
    if known is None:
        return None
    fd, _, inode = known.partition(":")
    with contextlib.suppress(OSError):
        # A process that the program has started has the variable, and another file there, or none.
        if os.fstat(int(fd)).st_ino == int(inode):
            return int(fd)
    return None


def named_file(file: FileIO) -> str:
    """Return how a process that inherits a file recognizes it."""
    return f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}"


@contextlib.contextmanager
def new_pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Return a context manager for both ends of a pipe, either of which may be closed before."""
    read_fd, write_fd = os.pipe()
    with FileIO(read_fd) as read_end, FileIO(write_fd, "w") as write_end:
        yield read_end, write_end


def is_deserted(path: str) -> bool:
    """Return whether nobody listens at the path of a Unix socket, or nothing is there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog would keep us waiting
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False


def flag(environ: Mapping[str, str], variable: str) -> bool | None:
    """Return whether a variable is 1; None: it is not set, or empty.

    Raises:
        ConfigurationError: If it is anything but 0 or 1: nobody should have to guess.
    """
    text = environ.get(variable, "")
    check_fits(text in ("", "0", "1"), f"{variable}: expected 0 or 1", text)
    return text == "1" if text else None


def number_in(text: str) -> float:
    """Return the number that a variable is; NaN: it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


FLAGS = (
    "PSYNC_CHECKPOINT_STREAM", "PSYNC_INSECURE", "PSYNC_SHARED_MEMORY", "PSYNC_STATUS",
    "PSYNC_SUPERVISED", "PSYNC_TLS_MUTUAL",
)  # fmt: skip
"""Variables that are 0 or 1."""

FIRST_CHIEF_S = 3600.0
"""How long a ps or worker waits for its first chief, which may stand in a queue, or load its data
before it connects."""

NEXT_CHIEF_S = 600.0
"""How long it waits for another chief when the last one has gone. One that ends, even by an error,
says so: this is for those that were killed, and whoever starts them again does it in minutes."""

Patience = tuple[float | None, float | None]
"""Seconds until the first chief, and until another one when the last has gone; None: for ever."""


def chief_timeouts(environ: Mapping[str, str], given: str | None = None) -> Patience:
    """Return how long a ps or worker waits for a chief.

    A task that a launcher has started ends with the launcher, and so waits for ever.

    Args:
        environ: ``PSYNC_CHIEF_TIMEOUT`` is seconds, for both, or ``none``.
        given: The same, from the command line, which wins.

    Raises:
        ConfigurationError: It is something else.
    """
    text = environ.get("PSYNC_CHIEF_TIMEOUT") if given is None else given
    if not text:
        return (None, None) if environ.get("PSYNC_LAUNCHED") else (FIRST_CHIEF_S, NEXT_CHIEF_S)
    if text.strip().lower() == "none":
        return None, None
    seconds = number_in(text)
    expected = "PSYNC_CHIEF_TIMEOUT (--chief-timeout): expected seconds above 0, or none"
    check_fits(0 < seconds < math.inf, expected, text)
    return seconds, seconds


def watchdog_timeout(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return after how many seconds of silence the watchdog reports; None: never.

    TensorFlow's variable is read where psync's own is not set. 0 or less turns the watchdog off.

    Raises:
        ConfigurationError: If the one that counts is no number.
    """
    for variable in ("PSYNC_WATCHDOG_TIMEOUT", "TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT"):
        text = environ.get(variable, "").strip()
        if not text:
            continue
        seconds = number_in(text)
        check_fits(math.isfinite(seconds), f"{variable}: expected seconds", text)
        return seconds if seconds > 0 else None
    return None


def limits_of(environ: Mapping[str, str]) -> Limits:
    """Return the limits, each of which ``PSYNC_LIMIT_<NAME>`` can set.

    Raises:
        ConfigurationError: One is no integer, or below the least that psync itself needs.
    """
    given: dict[str, int] = {}
    for each in dataclasses.fields(Limits):
        variable = f"PSYNC_LIMIT_{each.name.upper()}"
        if (text := environ.get(variable)) is None:
            continue
        least = HANDSHAKE_LIMITS.header_bytes if each.name == "header_bytes" else 1
        fits = re.fullmatch("[0-9]{1,18}", text) is not None and int(text) >= least
        check_fits(fits, f"{variable}: expected an integer from {least} (digits only)", text)
        given[each.name] = int(text)
    return dataclasses.replace(Limits(), **given)


class Follower(Protocol):
    """A coordinator that runs or is starting."""

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Take workers in (address by index), let others leave; return what does it.

        What comes is known, perhaps, and what leaves not: then nothing happens.
        """

    def load(self) -> Load:
        """Return what there is to do."""


class Workforce:
    """Workers that have come and left since the tasks of a cluster were started."""

    def __init__(self) -> None:
        self._added: dict[int, str] = {}  # address by index
        self._removed: set[int] = set()
        self._followers: dict[Follower, None] = {}  # the newest last

    def change(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Some workers are there now, others are to leave.

        Args:
            added: Where each of the new ones listens, by index. They may still be starting.
            removed: Indices of those that leave.

        Returns:
            What ends when coordinators that run have taken the new ones in, and those that leave
            have left; it raises nothing.
        """
        for index in removed:
            self._added.pop(index, None)
            self._removed.add(index)
        for index, address in added.items():
            self._removed.discard(index)
            self._added[index] = address
        followers = list(self._followers)
        return [task for each in followers for task in each.workers_changed(added, removed)]

    def follow(self, follower: Follower) -> Callable[[], object]:
        """Let a coordinator follow, what has changed before it started included.

        Returns:
            What ends that.
        """
        self._followers[follower] = None
        follower.workers_changed(self._added, self._removed)
        return lambda: self._followers.pop(follower, None)

    def present(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return a cluster with the workers that there are now, and not those of its strategy."""
        jobs = {
            job: {index: cluster.task_address(job, index) for index in cluster.task_indices(job)}
            for job in cluster.jobs
        }
        known = jobs.get("worker", {})
        there = {i: at for i, at in known.items() if i not in self._removed} | self._added
        return ClusterSpec({**jobs, "worker": dict(sorted(there.items()))})

    def load(self) -> Load:
        """Return what the coordinator that runs has to do; where none does, nothing."""
        return next((each.load() for each in reversed(self._followers)), Load())


workforce_of_launcher: PerProcess[Workforce] = PerProcess(Workforce)
"""That of the launcher which has started this process, a chief."""


entropy: ContextVar[Callable[[int], bytes]] = ContextVar("psync_entropy", default=os.urandom)
"""Random bytes for names that must differ from process to process; a simulation draws them."""


def random_hex(num_bytes: int) -> str:
    """Return a random name of twice as many hexadecimal digits."""
    return entropy.get()(num_bytes).hex()


class GivenUp:
    """Tasks that will not come back, by address: whoever started them does not start them again."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._listeners: dict[Callable[[str, str], None], None] = {}

    def note(self, address: str, reason: str) -> None:
        """The task at ``address`` is gone for good.

        Args:
            address: Where it listened.
            reason: What became of it, as in "exited with code 1 and is not started again".
        """
        self._reasons[address] = reason
        for listener in list(self._listeners):
            listener(address, reason)

    def forget(self, address: str) -> None:
        """Another task listens at ``address`` now."""
        self._reasons.pop(address, None)

    def reason(self, address: str) -> str | None:
        """Return what became of a task; None: it is there, or may come."""
        return self._reasons.get(address)

    def listen(self, listener: Callable[[str, str], None]) -> Callable[[], object]:
        """Call ``listener(address, reason)`` for each, also for those that are gone already.

        Returns:
            What ends that.
        """
        for address, reason in self._reasons.items():
            listener(address, reason)
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)


class Parts:
    """Which class is built where a test may want another one; see ``psync.testing.sabotage``."""

    def of(self, cls: type[T]) -> type[T]:
        """Return the class to build: ``cls``, or a subclass of it."""
        return cls


def _new_memory() -> SharedMemory:
    from psync.net.shared.regions import SharedMemory  # with numpy, which a launcher never loads

    return SharedMemory()


@dataclass(frozen=True)
class Platform:
    """The surroundings of one task."""

    network: Network
    secret: Secret | None = None  # None: the cluster runs without one
    limits: Limits = field(default_factory=Limits)
    parts: Parts = field(default_factory=Parts)
    random_bytes: Callable[[int], bytes] = os.urandom  # nonces
    uniform: Callable[[], float] = random.random  # jitter, in [0, 1)
    new_incarnation: Callable[[], int] = time.time_ns  # grows each time a task starts
    now: Callable[[], float] = time.monotonic  # seconds; uvloop's own clock counts milliseconds
    given_up: GivenUp = field(default_factory=GivenUp)  # told by whoever starts the tasks
    workforce: Workforce = field(default_factory=Workforce)  # likewise
    memory: SharedMemory = field(default_factory=_new_memory)  # of which others may read parts
    threads: bool = True  # whether user code may run in threads: not under a virtual clock
