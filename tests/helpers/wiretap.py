"""What arrives at a task of a cluster in memory, message by message, as it stands on the wire.

A test hears messages, lets something happen before one is handed over, or keeps one back; the task
itself knows nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psync.testing import MemoryHost, MemoryListener
from psync.wire.codec import Message, decode
from psync.wire.frames import PREFIX, PREFIX_BYTES, Kind

Listener = Callable[[Message], object]
"""Told of a message before the task gets it. If it returns False, the message is lost; what is
awaitable is awaited first, while other messages pass; a function is called afterwards."""


class TappedHost:
    """A host in a network in memory whose listener can be listened to; it shares no memory."""

    def __init__(self, host: MemoryHost) -> None:
        self.connect = host.connect
        self.listeners: list[Listener] = []
        self._host = host

    async def listen(
        self, address: str, factory: Callable[[], asyncio.BufferedProtocol]
    ) -> MemoryListener:
        """Listen; what comes in passes by the listeners."""
        return await self._host.listen(address, lambda: _Tapped(factory(), self.listeners))

    @contextlib.contextmanager
    def hearing(self, *kinds: type[Message]) -> Iterator[list[Any]]:
        """Yield a list to which messages of these kinds are added as they come."""
        heard: list[Any] = []

        def note(message: Message) -> None:
            if isinstance(message, kinds):
                heard.append(message)

        self.listeners.append(note)
        try:
            yield heard
        finally:
            self.listeners.remove(note)

    @contextlib.contextmanager
    def at(self, kind: type[Message], do: Callable[[], object]) -> Iterator[asyncio.Event]:
        """Do something when a message of a kind comes; see ``Listener`` for what that returns.

        Yields:
            What is set when it came.
        """
        reached = asyncio.Event()

        def act(message: Message) -> object:
            if not isinstance(message, kind):
                return True
            reached.set()
            return do()

        self.listeners.append(act)
        try:
            yield reached
        finally:
            self.listeners.remove(act)


@dataclass
class _Tapped(asyncio.BufferedProtocol):
    """Hands whole frames to the protocol of a task, those that its listeners let through."""

    inner: Any
    listeners: list[Listener]

    def __post_init__(self) -> None:
        self._came = bytearray()
        self._room = memoryview(bytearray(1 << 18))
        self._held: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._held:
            task.cancel()
        self.inner.connection_lost(exc)

    def eof_received(self) -> Any:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._came += self._room[:nbytes]
        while (length := self._frame_length()) is not None:
            frame = bytes(self._came[:length])
            del self._came[:length]
            said = self._said_to(frame)
            if first := [each for each in said if isinstance(each, Awaitable)]:
                self._held.add(asyncio.create_task(self._hand_over_after(first, frame)))
            elif False not in said:
                self._hand_over(frame)
            for each in said:
                if callable(each):
                    each()

    async def _hand_over_after(self, first: Sequence[Awaitable[object]], frame: bytes) -> None:
        for each in first:
            await each
        self._hand_over(frame)

    def _frame_length(self) -> int | None:
        """Return the length of the first frame if it is there whole."""
        if len(self._came) < PREFIX_BYTES:
            return None
        *_, header, count, body = PREFIX.unpack_from(self._came)
        length = PREFIX_BYTES + 8 * count + header + body
        return length if len(self._came) >= length else None

    def _said_to(self, frame: bytes) -> list[object]:
        """Tell the listeners of a message; return what they return."""
        _, _, kind, _, _, header, count, _ = PREFIX.unpack_from(frame)
        if kind not in (Kind.REQUEST, Kind.NOTIFY) or not self.listeners:
            return []
        start = PREFIX_BYTES + 8 * count
        message = decode(frame[start : start + header])
        return [listener(message) for listener in list(self.listeners)]

    def _hand_over(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest and not self._transport.is_closing():
            room = self.inner.get_buffer(-1)
            nbytes = min(len(room), len(rest))
            room[:nbytes] = rest[:nbytes]
            rest = rest[nbytes:]
            self.inner.buffer_updated(nbytes)
