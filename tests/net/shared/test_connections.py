"""Tasks of one host over real connections: what is lent, what is not, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from endpoints import PS, WORKER, Pair, connected, is_writable, new_endpoint, pattern, transport_of
from memory_cluster import until
from open_files import num_fds
from psync.errors import ConnectionLost, LocalProtocolError
from psync.net.connection import WRITE_HIGH_BYTES, Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.shared import bodies, regions
from psync.net.shared.bodies import Sharing
from psync.net.transport import SocketNetwork
from psync.numerics.memory import Block, BlockPool
from psync.wire import frames
from psync.wire.handshake import BULK
from psync.wire.limits import Limits
from psync.wire.messages import AskStatistics, Done, Pulled, Read
from psync.wire.tensors import to_bytes_view

pytestmark = pytest.mark.usefixtures("closed_at_the_end")

MIB = 1 << 20


def pull(nbytes: int) -> Read:
    return Read(nbytes)


def values(request: Request[Read]) -> None:
    """Answer with as many bytes as the message asks for, or with those that came."""
    message, segments = request.message, request.segments
    request.answer(Pulled([]), segments or [to_bytes_view(pattern(message.plan))])


def keeping(request: Request[Any]) -> Sequence[memoryview]:
    assert request.borrowed is not None
    return request.borrowed.keep()


ECHO = {Read: Handler(values)}


def sharing_of(peer: Connection) -> Sharing:
    sharing = peer.sharing
    assert sharing is not None
    return sharing


async def all_is_back(pair: Pair) -> None:
    """Wait until what is to be given back has been: a ping comes behind it."""
    gc.collect(0)
    await pair.peer.ping()
    await pair.peer.ping()
    for peer in (pair.peer, pair.back):
        assert sharing_of(peer)._lent == {}
        assert sharing_of(peer)._copied_bytes == 0
        assert sharing_of(peer)._kept == {}


def sharings(endpoint: Endpoint) -> set[Sharing]:
    """With whom a task shares memory, open connections and others over which somebody reads."""
    found = {*endpoint._sharings, *(peer.sharing for peer in endpoint._peers)}
    return {each for each in found if each is not None and not each.is_over}


@contextlib.asynccontextmanager
async def sharing(server: Any = None, client: Any = None, **options: Any) -> AsyncIterator[Pair]:
    network = SocketNetwork(shares_memory=True)
    options.setdefault("address", "127.0.0.1:0")
    async with connected(network, server or ECHO, client, **options) as pair:
        yield pair
    assert not sharings(pair.server)
    assert not sharings(pair.client)


# --- what is lent ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_large_bodies_are_lent_both_ways_and_sockets_carry_their_heads(
    place: str, tmp_path: Path
) -> None:
    address = "127.0.0.1:0" if place == "tcp" else f"unix:{tmp_path}/ps0"
    async with sharing(address=address) as pair:
        sent = pattern(13 * MIB + 5)  # more than is copied at once
        answer = await pair.peer.call(pull(0), [to_bytes_view(sent)])
        assert np.array_equal(np.frombuffer(answer.segments[0], np.uint8), sent)
        for peer in (pair.peer, pair.back):
            assert peer.bytes_sent < 2000
            assert peer.bytes_received < 2000
            assert sharing_of(peer).bytes_lent == sharing_of(peer).bytes_borrowed == sent.nbytes
        await all_is_back(pair)


async def test_small_bodies_are_not() -> None:
    async with sharing() as pair:
        for nbytes in (1, 64 << 10):
            answer = await pair.peer.call(pull(0), [bytes(nbytes)])
            assert len(answer.segments[0]) == nbytes
        assert sharing_of(pair.peer).bytes_lent == sharing_of(pair.back).bytes_lent == 0
        await pair.peer.call(pull(0), [bytes((64 << 10) + 1)])
        assert sharing_of(pair.peer).bytes_lent == (64 << 10) + 1


async def test_a_body_that_is_kept_is_read_where_it_is() -> None:
    kept: list[memoryview] = []

    def run(request: Request[Read]) -> None:
        kept.extend(request.segments)
        request.answer(Pulled([]))

    async with sharing({Read: Handler(run, keeping)}) as pair:
        sent = pattern(MIB)
        await pair.peer.call(pull(0), [to_bytes_view(sent)])
        await pair.peer.ping()
        assert len(sharing_of(pair.peer)._lent) == 1
        assert kept[0].readonly
        assert np.array_equal(np.frombuffer(kept[0], np.uint8), sent)
        sent[:] = 0  # the caller has its answer: what is kept is not its memory
        assert np.array_equal(np.frombuffer(kept[0], np.uint8), pattern(MIB))
        kept.clear()
        await all_is_back(pair)


async def test_what_is_kept_outlives_the_connection_and_its_memory_is_held_until_then() -> None:
    kept: list[memoryview] = []

    def run(request: Request[Read]) -> None:
        kept.extend(request.segments)
        request.answer(Pulled([]))

    async with sharing({Read: Handler(run, keeping)}) as pair:
        sent = pattern(MIB)
        await pair.peer.call(pull(0), [to_bytes_view(sent)])
        lender, reader = sharing_of(pair.peer), sharing_of(pair.back)
        pair.peer.abort()
        await pair.back.wait_closed()
        await pair.peer.wait_closed()
        again = await pair.client.connect(pair.address, PS)
        for number in range(5):  # would be in the same memory
            await again.call(pull(0), [to_bytes_view(pattern(MIB, number))])
        assert len(lender._lent) == 1
        assert bytes(kept[0]) == sent.tobytes()
        assert {lender, reader} <= sharings(pair.client) | sharings(pair.server)
        kept.clear()
        await until(lambda: not lender._lent)
        assert lender not in sharings(pair.client)
        assert reader not in sharings(pair.server)
        await again.ping()
        assert sharing_of(again)._lent == {}


async def until_quiet() -> None:
    """Let the loop close what has been closed, which takes it some turns."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- what cannot be --------------------------------------------------------------------------


async def exchanged(pair: Pair, *, is_lent: bool, nbytes: int = MIB) -> None:
    """Bytes arrive both ways, over the memory or over the sockets."""
    before = pair.peer.bytes_sent, pair.back.bytes_sent
    answer = await pair.peer.call(pull(0), [to_bytes_view(pattern(nbytes))])
    assert np.array_equal(np.frombuffer(answer.segments[0], np.uint8), pattern(nbytes))
    after = pair.peer.bytes_sent, pair.back.bytes_sent
    assert [now - then < 2000 for now, then in zip(after, before, strict=True)] == [is_lent] * 2


@pytest.mark.parametrize("what", ["memfd_create", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EPERM])
async def test_without_memory_to_share_bytes_go_over_the_socket(
    what: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing() as pair:
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> None:
                raise OSError(number, os.strerror(number))

            patch.setattr(os, what, fails)
            await exchanged(pair, is_lent=False)
        await exchanged(pair, is_lent=number != errno.EPERM)


async def test_a_full_side_channel_sends_bytes_over_the_socket() -> None:
    async with sharing() as pair:
        region = regions.make_region(1 << 40, 4096).region
        for peer in (pair.peer, pair.back):
            while sharing_of(peer)._channel.give(region):
                continue
        await exchanged(pair, is_lent=False)


async def test_one_that_is_full_of_regions_that_nobody_names_is_a_breach() -> None:
    """They are looked at with the next message that names one."""
    async with sharing() as pair:
        await exchanged(pair, is_lent=True)
        region = regions.make_region(1 << 40, 4096).region
        for _ in range(3):
            assert sharing_of(pair.peer)._channel.give(region)
        with pytest.raises(ConnectionLost):
            await pair.peer.call(pull(0), [bytes(30 * MIB)])
        await pair.back.wait_closed()
        assert "got more regions of shared memory than may be" in str(pair.back.error)


async def test_what_is_too_large_to_be_sent_does_not_count_as_lent() -> None:
    async with sharing(limits=Limits(segment_bytes=MIB)) as pair:
        for _ in range(3):
            with pytest.raises(LocalProtocolError, match="at most 1048576 are allowed"):
                await pair.peer.call(pull(0), [bytes(MIB + 1)])
        assert sharing_of(pair.peer)._copied_bytes == 0
        await exchanged(pair, is_lent=True)
        await all_is_back(pair)


# --- order, and who waits --------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "COPY_BYTES", 10_000)


@pytest.mark.usefixtures("small_pieces")
async def test_large_messages_keep_their_order_whether_they_are_lent_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[int] = []

    def noted(request: Request[Read]) -> None:
        message, segments = request.message, request.segments
        assert all(set(segment) == {message.plan} for segment in segments)
        got.append(message.plan)

    lend = Sharing.lend
    async with sharing({Read: Handler(noted), AskStatistics: Handler(done)}) as pair:
        own = pair.client.platform.memory.take(MIB)

        def every_third(self: Sharing, *args: Any, **options: Any) -> Any:
            return lend(self, *args, **options) if len(sent) % 3 else None

        monkeypatch.setattr(Sharing, "lend", every_third)
        sent: list[int] = []
        for number in range(40):
            body: Any = bytes([number]) * (100_000 + 10_000 * number)
            if number % 5 == 1:
                own = pair.client.platform.memory.take(MIB)
                own[:] = number
                body = own.data
            pair.peer.notify(pull(number), [body])
            sent.append(number)
            if number % 7 == 3:
                await asyncio.sleep(0)
        assert not is_writable(pair.peer)
        await pair.peer.wait_writable()
        await pair.peer.call(AskStatistics())
        assert got == sent
        await all_is_back(pair)


def done(request: Request[Any]) -> None:
    request.answer(Done())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("lane", [BULK, "control"])
async def test_only_where_bodies_are_large_small_messages_overtake_one_that_is_being_copied(
    lane: str,
) -> None:
    served = {Read: Handler(values), AskStatistics: Handler(done)}
    async with sharing(served, lane=lane) as pair:
        order: list[str] = []

        async def call(name: str, message: Any, body: Sequence[bytes] = ()) -> None:
            await pair.peer.call(message, body)
            order.append(name)

        large = asyncio.ensure_future(call("large", pull(0), [bytes(MIB)]))
        await asyncio.sleep(0)
        assert not is_writable(pair.peer)
        await call("small", AskStatistics())
        await large
        assert order == (["small", "large"] if lane == BULK else ["large", "small"])
        assert is_writable(pair.peer)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("turns", range(12))
async def test_a_caller_may_give_up_in_any_turn_and_nothing_stays_lent(turns: int) -> None:
    """Before it is sent, while it is copied there, while the answer is copied here."""
    async with sharing() as pair:
        sent = pattern(35_000 + (64 << 10))
        for extra in (0, 5, 11):
            call = asyncio.ensure_future(pair.peer.call(pull(0), [to_bytes_view(sent)]))
            for _ in range(turns + extra):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await exchanged(pair, is_lent=True)
        await all_is_back(pair)


@pytest.mark.usefixtures("small_pieces")
async def test_reading_goes_on_when_both_the_copy_and_the_handlers_allow_it() -> None:
    """Bodies that handlers work on are bounded, lent ones as well."""
    gate, begun = asyncio.Event(), 0

    async def slow(request: Request[Read]) -> None:
        segments = request.segments
        nonlocal begun
        begun += 1
        await gate.wait()
        request.answer(Pulled([]), segments)

    async with sharing(
        {Read: Handler(slow)}, lane=BULK, limits=Limits(unfinished_bytes=MIB)
    ) as pair:
        calls = [
            asyncio.ensure_future(pair.peer.call(pull(0), [to_bytes_view(pattern(300_000, n))]))
            for n in range(20)
        ]
        await until(lambda: begun == 4)  # the fourth is more than is allowed
        await until_quiet()
        assert begun == 4
        assert pair.back._unfinished_bytes == 4 * 300_000
        gate.set()
        for number, call in enumerate(calls):
            body = np.frombuffer((await call).segments[0], np.uint8)
            assert np.array_equal(body, pattern(300_000, number))
        assert pair.back._unfinished_bytes == 0
        await all_is_back(pair)


async def test_a_peer_that_reads_nothing_costs_memory_up_to_a_limit_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "LENT_BYTES", 8 * MIB)
    async with sharing() as pair:
        transport_of(pair.back).pause_reading()
        calls = [
            asyncio.ensure_future(pair.peer.call(pull(0), [to_bytes_view(pattern(MIB, n))]))
            for n in range(30)
        ]
        await until(lambda: not pair.peer._writable)
        assert sharing_of(pair.peer)._copied_bytes <= 9 * MIB
        unsent = transport_of(pair.peer).get_write_buffer_size()
        assert unsent <= WRITE_HIGH_BYTES + 2 * MIB
        transport_of(pair.back).resume_reading()
        for number, call in enumerate(calls):
            body = np.frombuffer((await call).segments[0], np.uint8)
            assert np.array_equal(body, pattern(MIB, number))
        await all_is_back(pair)


# --- the end ---------------------------------------------------------------------------------


async def test_closing_sends_what_is_still_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[bytes] = []

    def noted(request: Request[Read]) -> None:
        got.extend(map(bytes, request.segments))

    async with sharing({Read: Handler(noted)}) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(frames, "COPY_BYTES", 10_000)
            for number in range(3):
                pair.peer.notify(pull(0), [to_bytes_view(pattern(MIB, number))])
        assert not is_writable(pair.peer)
        pair.peer.close()
        await pair.back.wait_closed()
        assert got == [pattern(MIB, number).tobytes() for number in range(3)]


@pytest.mark.parametrize("reads_on", [True, False])
async def test_what_is_kept_stays_as_it_is_where_a_task_ends_and_its_process_goes_on(
    reads_on: bool,
) -> None:
    kept: list[memoryview] = []

    def run(request: Request[Read]) -> None:
        kept.extend(request.segments)
        request.answer(Pulled([]))

    async with sharing({Read: Handler(run, keeping)}) as pair:
        memory = pair.client.platform.memory
        pool = BlockPool(source=memory.take)
        root, sent = pool.take(MIB), pattern(MIB)
        root[:] = sent
        block = Block(root, sent.dtype)
        del root
        await pair.peer.call(pull(0), [block.export()])
        lender = sharing_of(pair.peer)
        block.retire(pool)
        del block
        await pair.client.close(goes_on=True)
        others = [pool.take(MIB) for _ in range(3)]  # of others of this process
        for other in others:
            other.fill(7)
        assert bytes(kept[0]) == sent.tobytes()
        if reads_on:
            memory.end()
            assert bytes(kept[0]) == sent.tobytes()
            kept.clear()
        else:
            kept.clear()
            await until(lambda: lender.is_over)
        assert lender.is_over


async def test_what_a_task_lends_when_it_ends_is_read_although_it_never_read_ours() -> None:
    """Its end of the side channel is closed with regions of ours in it."""
    got: list[bytes] = []

    def noted(request: Request[Read]) -> None:
        got.extend(map(bytes, request.segments))

    async with sharing(ECHO, {Read: Handler(noted)}) as pair:
        transport_of(pair.back).pause_reading()
        pair.peer.notify(pull(0), [bytes(MIB)])
        await until(lambda: sharing_of(pair.peer).bytes_lent == MIB)
        pair.back.notify(pull(0), [to_bytes_view(pattern(MIB))])
        transport_of(pair.peer).pause_reading()
        await pair.server.close()
        transport_of(pair.peer).resume_reading()
        await pair.peer.wait_closed()
        assert got == [pattern(MIB).tobytes()]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("turns", range(10))
@pytest.mark.parametrize("who", ["peer", "back"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_connection_may_end_in_any_turn(turns: int, who: str, how: str) -> None:
    async with sharing() as pair:
        call = asyncio.ensure_future(pair.peer.call(pull(0), [to_bytes_view(pattern(100_000))]))
        for _ in range(3 * turns):
            await asyncio.sleep(0)
        getattr(getattr(pair, who), how)()
        with contextlib.suppress(ConnectionLost):
            answer = await call
            assert np.array_equal(np.frombuffer(answer.segments[0], np.uint8), pattern(100_000))
            del answer
        await pair.peer.wait_closed()
        await pair.back.wait_closed()
        await until(lambda: not sharings(pair.client) | sharings(pair.server))
        again = await pair.client.connect(pair.address, PS)
        answer = await again.call(pull(0), [to_bytes_view(pattern(100_000))])
        assert np.array_equal(np.frombuffer(answer.segments[0], np.uint8), pattern(100_000))


@pytest.mark.parametrize("turns", range(8))
async def test_connecting_may_be_cancelled_in_any_turn(turns: int) -> None:
    network = SocketNetwork(shares_memory=True)
    ps, worker = new_endpoint(network, PS, ECHO), new_endpoint(network, WORKER, incarnation=2)
    listener = await ps.listen("127.0.0.1:0")
    connecting = asyncio.ensure_future(worker.connect(listener.address, PS))
    for _ in range(turns):
        await asyncio.sleep(0)
    connecting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await connecting).abort()
    await until(lambda: not sharings(worker))
    peer = await worker.connect(listener.address, PS)
    await peer.call(pull(0), [bytes(MIB)])
    peer.abort()
    await until(lambda: not sharings(ps))


async def test_many_connections_leave_neither_memory_nor_descriptors() -> None:
    network = SocketNetwork(shares_memory=True)
    ps, worker = new_endpoint(network, PS, ECHO), new_endpoint(network, WORKER, incarnation=2)
    listener = await ps.listen("127.0.0.1:0")

    async def one(number: int) -> None:
        peer = await worker.connect(listener.address, PS)
        if number % 2:
            peer.notify(pull(0), [to_bytes_view(pattern(3 * MIB))])
            await asyncio.sleep(0)
        else:
            await peer.call(pull(0), [to_bytes_view(pattern(3 * MIB))])
        peer.abort()
        await peer.wait_closed()
        await until(lambda: not sharings(worker) | sharings(ps))

    await one(0)
    await until_quiet()
    files = num_fds()
    for number in range(20):
        await one(number)
    await until(lambda: num_fds() <= files)
    statistics = worker.platform.memory.statistics()
    assert statistics["shared_regions"] == 1
    assert statistics["shared_bytes"] == regions.SLAB_BYTES


async def test_a_stranger_behind_the_door_says_nothing_and_is_left() -> None:
    limits = Limits(handshake_seconds=0.05)
    ps = new_endpoint(SocketNetwork(shares_memory=True), PS, ECHO, limits=limits)
    listener = await ps.listen("127.0.0.1:0")
    port = listener.address.rpartition(":")[2]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(f"\0psync/{os.geteuid()}/127.0.0.1:{port}")
        socket.send_fds(sock, [b"P"], [theirs.fileno()])
        async with asyncio.timeout(20):
            received = b"x"
            while received:
                received = await asyncio.get_running_loop().sock_recv(sock, 1000)
    await until(lambda: not sharings(ps))
