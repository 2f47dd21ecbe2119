"""A peer of this host that breaks the rules of shared memory: it loses its connection, and no more.

It holds the secret, or it would not be heard. Yet a mistake of one task, or of another version of
psync, must not take others down: a region that shrinks would kill its reader with a signal.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from endpoints import PS, Pair, connected, pattern
from memory_cluster import until
from open_files import num_fds
from psync.errors import ConnectionLost, RemoteProtocolError
from psync.net.connection import Handler, Request
from psync.net.shared.bodies import Loan
from psync.net.shared.regions import SEALS
from psync.net.transport import SocketNetwork
from psync.wire.frames import Extent, Kind
from psync.wire.messages import Pulled, Read
from psync.wire.tensors import to_bytes_view

MIB = 1 << 20


def pull() -> Read:
    return Read(0)


def echo(request: Request[Read]) -> None:
    request.answer(Pulled([]), request.segments)


def kept(request: Request[Any]) -> Sequence[memoryview]:
    lent = request.borrowed
    return [memoryview(bytearray(request.nbytes))] if lent is None else lent.keep()


@contextlib.asynccontextmanager
async def breach(told: str, keep: bool = False) -> AsyncIterator[Pair]:
    """What is done inside ends the connection with these words, and leaves nothing open."""
    handler = Handler(echo, kept if keep else None)
    network = SocketNetwork(shares_memory=True)
    async with connected(network, {Read: handler}, address="127.0.0.1:0") as pair:
        # The first one is well-behaved, and stays so.
        body = to_bytes_view(pattern(MIB))
        good = await pair.client.connect(pair.address, PS)
        assert bytes((await good.call(pull(), [body])).segments[0]) == bytes(body)
        await pair.peer.call(pull(), [body])
        files = num_fds()
        yield pair
        async with asyncio.timeout(10):
            await pair.back.wait_closed()
            await pair.peer.wait_closed()
        assert isinstance(pair.back.error, RemoteProtocolError), pair.back.error
        assert told in pair.back.error.message
        assert bytes((await good.call(pull(), [body])).segments[0]) == bytes(body)
        await until(lambda: num_fds() < files)


# --- extents ---------------------------------------------------------------------------------

HUGE = 2**64 - 1

EXTENTS: dict[str, tuple[list[Extent], int, str]] = {
    "an unknown region": ([Extent(7, 0, MIB)], MIB, "region 7 of shared memory was never given"),
    "too few": ([Extent(1, 0, MIB - 1)], MIB, "extents add up to other than 1048576 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXTENTS)
@pytest.mark.parametrize("keep", [False, True])
async def test_extents_that_lie_nowhere(kind: str, keep: bool) -> None:
    extents, nbytes, told = EXTENTS[kind]
    async with breach(told, keep) as pair:
        sharing = pair.peer.sharing
        assert sharing is not None
        sharing.lend = lambda *_, **__: Loan(extents, [], nbytes)  # type: ignore[method-assign]
        with contextlib.suppress(ConnectionLost):
            await pair.peer.call(pull(), [bytes(nbytes)])


async def test_the_same_memory_many_times_is_only_a_strange_body() -> None:
    async with connected(
        SocketNetwork(shares_memory=True), {Read: Handler(echo)}, address="127.0.0.1:0"
    ) as pair:
        await pair.peer.call(pull(), [bytes(MIB)])
        sharing = pair.peer.sharing
        assert sharing is not None
        extents = [Extent(1, number, 100) for number in range(1000)]
        sharing.lend = lambda *_, **__: Loan(extents, [], 100_000)  # type: ignore[method-assign]
        answer = await pair.peer.call(pull(), [bytes(100_000)])
        assert bytes(answer.segments[0]) == bytes(100_000)


async def test_extents_where_nothing_is_shared() -> None:
    async with connected(SocketNetwork(), {Read: Handler(echo)}, address="127.0.0.1:0") as pair:
        sharing: Any = type("Sharing", (), {})()
        sharing.has_to_say, sharing.bytes_lent, sharing.bytes_borrowed = False, 0, 0
        sharing.bytes_lent_now = sharing.bytes_kept_now = 0
        sharing.drop = lambda: None
        sharing.lend = lambda *_, **__: Loan([Extent(1, 0, MIB)], [], MIB)
        sharing.sent = sharing.close = lambda *_: None
        pair.peer.sharing = sharing
        with pytest.raises(ConnectionLost):
            await pair.peer.call(pull(), [bytes(MIB)])
        await pair.back.wait_closed()
        assert "unknown frame of kind 16 with flags 0x0001" in str(pair.back.error)


# --- words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "told"),
    [
        (Kind.RETURN, 0, "body 0 was given back, which is not lent"),
        (Kind.RETURN, 1, "body 1 was given back, which is not lent"),  # it was, before
        (Kind.RETURN, HUGE, f"body {HUGE} was given back, which is not lent"),
        (Kind.FORGET, 0, "region 0 of shared memory was never given"),
        (Kind.FORGET, 2, "region 2 of shared memory was never given"),
        (Kind.FORGET, HUGE, f"region {HUGE} of shared memory was never given"),
    ],
)
async def test_words_about_what_is_not_there(kind: Kind, number: int, told: str) -> None:
    async with breach(told) as pair:
        pair.peer.send(kind, number)


async def test_a_region_that_is_named_after_it_was_forgotten() -> None:
    async with breach("region 1 of shared memory was never given") as pair:
        pair.peer.send(Kind.FORGET, 1)
        with contextlib.suppress(ConnectionLost):
            await pair.peer.call(pull(), [bytes(MIB)])


async def test_a_word_with_a_body() -> None:
    async with breach("got a frame RETURN with a body") as pair:
        pair.peer.send(Kind.RETURN, 1, None, [b"x"])


@pytest.mark.parametrize("kind", [Kind.RETURN, Kind.FORGET])
async def test_words_where_nothing_is_shared(kind: Kind) -> None:
    async with connected(SocketNetwork(), {Read: Handler(echo)}, address="127.0.0.1:0") as pair:
        pair.peer.send(kind, 1)
        await pair.back.wait_closed()
        assert f"got a frame {kind.name} after the handshake" in str(pair.back.error)


# --- regions ---------------------------------------------------------------------------------


def memfd(nbytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def give(pair: Pair, fds: list[int], number: int = 99, nbytes: int = MIB) -> None:
    """Put something on the side channel."""
    sharing = pair.peer.sharing
    assert sharing is not None
    sock = sharing._channel._sock  # type: ignore[attr-defined]
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([struct.pack("<QQ", number, nbytes)], [rights] if fds else [])


async def name(pair: Pair, number: int = 99) -> None:
    """Lend something in a region."""
    sharing = pair.peer.sharing
    assert sharing is not None
    loan = Loan([Extent(number, 0, MIB)], [], MIB)
    sharing.lend = lambda *_, **__: loan  # type: ignore[method-assign]
    with contextlib.suppress(ConnectionLost):
        await pair.peer.call(pull(), [bytes(MIB)])


@pytest.mark.parametrize("keep", [False, True])
async def test_what_is_no_region(keep: bool) -> None:
    fd = memfd(MIB, seals=0)
    try:
        async with breach("is not sealed", keep) as pair:
            give(pair, [fd])
            await name(pair)
    finally:
        os.close(fd)


async def test_a_region_that_is_given_twice() -> None:
    fd = memfd(MIB)
    try:
        async with breach("got more regions of shared memory than may be") as pair:
            give(pair, [fd], 98)
            give(pair, [fd], 98)
            await name(pair)
    finally:
        os.close(fd)


async def test_a_region_whose_owner_writes_while_it_is_copied_harms_nobody() -> None:
    """Its owner's map stays writable: what is read may be torn, and is then only wrong."""
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, MIB)
    writable = mmap.mmap(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    async with connected(
        SocketNetwork(shares_memory=True), {Read: Handler(echo)}, address="127.0.0.1:0"
    ) as pair:
        give(pair, [fd])
        os.close(fd)
        writable[:] = b"y" * MIB
        await name(pair)
        assert pair.peer.is_open
    writable.close()


async def test_a_stopped_side_channel_is_no_reason_to_stop() -> None:
    """It is shut down at one end, or both: what is large goes over the socket."""
    async with connected(
        SocketNetwork(shares_memory=True), {Read: Handler(echo)}, address="127.0.0.1:0"
    ) as pair:
        sharing = pair.peer.sharing
        assert sharing is not None
        sharing._channel._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        for _ in range(2):
            answer = await pair.peer.call(pull(), [to_bytes_view(pattern(MIB))])
            assert bytes(answer.segments[0]) == pattern(MIB).tobytes()
        assert sharing.bytes_lent == sharing.bytes_borrowed == 0


async def test_a_breach_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "psync"):
        async with breach("body 7 was given back, which is not lent") as pair:
            pair.peer.send(Kind.RETURN, 7)
    lines = [record for record in caplog.records if "body 7" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].exc_info is None
