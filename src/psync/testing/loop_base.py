"""The parts of an event loop without a clock, and operations that virtual time does not offer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

_log = logging.getLogger("asyncio")  # where the other loops report too


class RealWorldError(RuntimeError):
    """Code under a virtual clock tried to use a socket, a process, a signal or a thread."""


class _Fenced:
    """A method that raises; it learns its own name from the class body."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: object, owner: type) -> Callable[..., Any]:
        name = self._name

        def fenced(*args: Any, **kwargs: Any) -> Any:
            raise RealWorldError(
                f"{name}() reaches out of a loop with a virtual clock: sockets, processes, pipes "
                "and signals follow another clock; give the code a MemoryNetwork, or run this "
                "test on a real loop"
            )

        return fenced


class Fence(asyncio.AbstractEventLoop):
    """The part of ``AbstractEventLoop`` that uses real resources; all of it raises."""

    getaddrinfo: Any = _Fenced()
    getnameinfo: Any = _Fenced()
    create_connection: Any = _Fenced()
    create_server: Any = _Fenced()
    create_unix_connection: Any = _Fenced()
    create_unix_server: Any = _Fenced()
    create_datagram_endpoint: Any = _Fenced()
    connect_accepted_socket: Any = _Fenced()
    start_tls: Any = _Fenced()
    sendfile: Any = _Fenced()
    connect_read_pipe: Any = _Fenced()
    connect_write_pipe: Any = _Fenced()
    subprocess_shell: Any = _Fenced()
    subprocess_exec: Any = _Fenced()
    add_reader: Any = _Fenced()
    remove_reader: Any = _Fenced()
    add_writer: Any = _Fenced()
    remove_writer: Any = _Fenced()
    sock_recv: Any = _Fenced()
    sock_recv_into: Any = _Fenced()
    sock_recvfrom: Any = _Fenced()
    sock_recvfrom_into: Any = _Fenced()
    sock_sendall: Any = _Fenced()
    sock_sendto: Any = _Fenced()
    sock_connect: Any = _Fenced()
    sock_accept: Any = _Fenced()
    sock_sendfile: Any = _Fenced()
    add_signal_handler: Any = _Fenced()
    remove_signal_handler: Any = _Fenced()


class LoopBase(Fence):
    """Futures and tasks, asynchronous generators, error reports and the debug flag."""

    def __init__(self) -> None:
        self._closed = False
        self._debug = False
        self._task_factory: Any = None
        self._exception_handler: ExceptionHandler | None = None
        # By number, since the order of a WeakSet differs from run to run.
        self._asyncgens: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = (
            weakref.WeakValueDictionary()
        )
        self._asyncgen_numbers = itertools.count()

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that belongs to this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        **kwargs: Any,
    ) -> asyncio.Task[_T]:
        """Start a task."""
        self._check_open()
        task: asyncio.Task[_T]
        if self._task_factory is not None:
            task = self._task_factory(self, coro, **kwargs)
        else:
            task = asyncio.Task(coro, loop=self, **kwargs)
        return task

    def set_task_factory(self, factory: Any) -> None:
        """Set the factory of tasks; None: ``asyncio.Task``."""
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        """Return the factory of tasks."""
        return self._task_factory

    # Errors and debugging.

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Set the handler of errors that no task awaits; None: they are logged."""
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        """Return the handler of errors that no task awaits."""
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an error under the logger ``asyncio``."""
        lines = [str(context.get("message") or "unhandled exception in the event loop")]
        lines += [
            f"{key}: {value!r}"
            for key, value in sorted(context.items())
            if key not in ("message", "exception")
        ]
        _log.error("\n".join(lines), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that no task awaits."""
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as exc:
            self.default_exception_handler(
                {"message": "the exception handler failed", "exception": exc, "context": context}
            )

    def get_debug(self) -> bool:
        """Whether handles and futures record the place of their creation."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """Set whether handles and futures record the place of their creation."""
        self._debug = enabled

    # Being closed.

    def is_closed(self) -> bool:
        """Whether the loop is closed."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that are still open. Cancellation: Safe."""
        generators = list(self._asyncgens.values())
        self._asyncgens.clear()
        results = await asyncio.gather(*(g.aclose() for g in generators), return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                self.call_exception_handler(
                    {
                        "message": f"an error occurred while closing {generator!r}",
                        "exception": result,
                        "asyncgen": generator,
                    }
                )

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing, because there are no threads."""

    def _asyncgen_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[next(self._asyncgen_numbers)] = generator

    def _asyncgen_collected(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())
