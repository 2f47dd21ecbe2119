"""What callback code asks of an event loop, done when a test says so: none has to run."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

from endpoints import PS, SECRET, WORKER, Handlers
from psync.net.connection import Connection
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.testing import MemoryNetwork
from psync.testing.link import Ends, Fabric, Link
from psync.wire.codec import Message
from psync.wire.frames import VERSION, Frame, Sink
from psync.wire.handshake import ClientHandshake, ServerHandshake
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import Challenge, Hello
from recorder import Recorder


class Call:
    """A callback that is to come, in place of ``asyncio.Handle``."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Turns:
    """The callbacks and the clock of a loop, see the fixture ``turns``.

    ``reports`` has what its exception handler got.
    """

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self._now = 0.0
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Call]] = []  # a heap

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Call:
        return self.call_at(self._now, callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Call:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Call:
        context = contextvars.copy_context() if context is None else context
        call = Call(lambda: context.run(callback, *args))
        heapq.heappush(self._calls, (when, next(self._order), call))
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.Task(work, loop=cast(Any, self))

    def get_debug(self) -> bool:  # asked by futures
        return False

    def call_exception_handler(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    def turn(self) -> None:
        """Do what is due, and not yet what comes of it."""
        calls, self._calls = self._calls, []
        for each in sorted(calls):
            if each[0] > self._now:
                heapq.heappush(self._calls, each)
            elif not each[2].is_cancelled:
                self._do(each[2])

    def settle(self) -> None:
        """Do all that is due, and what comes of it."""
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, and do what is due meanwhile, in order."""
        end = self._now + seconds
        while self._calls and self._calls[0][0] <= end:
            when, _, call = heapq.heappop(self._calls)
            self._now = max(self._now, when)
            if not call.is_cancelled:
                self._do(call)
        self._now = end

    def _do(self, call: Call) -> None:
        """Tasks of Python 3.14 go on in the running loop alone, which is this one meanwhile."""
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", self))
        try:
            call.callback()
        finally:
            asyncio._set_running_loop(running)


def linked(
    client: Callable[[], Any] = Recorder,
    server: Callable[[], Any] = Recorder,
    *,
    seed: int = 0,
    latency: tuple[float, float] = (0.0, 0.0),
    chunk: tuple[int, int] = (1, 65_536),
    check_buffers: bool = True,
    kernel_bytes: int = 65_536,
) -> tuple[Any, Any, Link]:
    """Two protocols and the link between them, as a ``MemoryNetwork`` makes it."""
    fabric = Fabric(seed, latency, chunk, check_buffers, kernel_bytes)
    contexts = contextvars.copy_context(), contextvars.copy_context()
    link = Link(0, Ends("", "", "ps0:1"), fabric, *contexts)
    ends = client(), server()
    link.server.start(ends[1])
    link.client.start(ends[0])
    return *ends, link


@dataclass
class Owner:
    """Whose connection it is, as an endpoint, but for what an endpoint does with connections."""

    handlers: Handlers
    pool: BlockPool
    platform: Platform
    spawn: Callable[..., Any]
    opened: Callable[[Connection], None]

    def made(self, peer: Connection, peername: object) -> None: ...

    def gone(self, peer: Connection) -> None: ...


@dataclass
class Peers:
    """A ps and a worker with one connection."""

    peer: Connection  # the ps, as the worker sees it
    back: Connection  # the worker, as the ps sees it
    link: Link
    pool: BlockPool  # of the worker
    _turns: Turns

    def ask(
        self, message: Message, segments: Sequence[Any] = (), into: Sink | None = None
    ) -> Frame:
        """What the ps answers, or raises."""
        got: list[Frame | Exception] = []
        self.peer.ask(message, segments, got.append, into)
        self._turns.settle()
        (answer,) = got
        if isinstance(answer, Exception):
            raise answer
        return answer


def _nothing(*_: object) -> None: ...


def peered(
    turns: Turns,
    server: Handlers | None = None,
    client: Handlers | None = None,
    *,
    lane: str = "control",
    limits: Limits = DEFAULT_LIMITS,
    server_opened: Callable[[Connection], None] = _nothing,
    client_opened: Callable[[Connection], None] = _nothing,
    before: Callable[[Connection], None] = _nothing,
    **options: Any,
) -> Peers:
    """Two peers on a link with these ``options``; ``before`` it is there the worker's is shown."""

    def end_of(
        handshake: Any, handlers: Handlers | None, pool: BlockPool, opened: Any
    ) -> Connection:
        platform = Platform(MemoryNetwork(), limits=limits)
        owner = Owner(handlers or {}, pool, platform, turns.create_task, opened)
        return Connection(handshake, owner)  # type: ignore[arg-type]

    pool, nonce = BlockPool(), bytes(32)
    challenge = Challenge(VERSION, PS, 1, nonce, True, b"")
    hello = Hello(VERSION, VERSION, WORKER, 2, lane, nonce, True)
    serving = ServerHandshake(SECRET.value, challenge)
    calling = ClientHandshake(SECRET.value, hello, PS)
    back = end_of(serving, server, BlockPool(), server_opened)
    peer = end_of(calling, client, pool, client_opened)
    before(peer)
    *_, link = linked(lambda: peer, lambda: back, **options)
    turns.settle()
    return Peers(peer, back, link, pool, turns)
