"""Doors: who is let in, who is not, and that the address is always there."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from open_files import descriptors, num_fds
from ports import claimed_ports
from psync.net.shared import doors, regions
from psync.net.shared.door_names import door_beside, name_of_door, shut
from psync.net.shared.doors import Door, SideChannel, doors_of, shares_memory, through_door
from psync.net.shared.regions import make_region
from psync.net.transport import SocketNetwork
from psync.testing import settle
from psync.testing.seams import fresh_process
from recorder import Recorder, end


class Sharer(Recorder):
    """A protocol that gets a side channel."""

    channel: SideChannel | None = None

    def share(self, channel: SideChannel) -> None:
        assert self.events == []  # before anything else
        self.channel = channel


async def finish(*sharers: Sharer) -> None:
    await end(*sharers)
    for sharer in sharers:
        if sharer.channel is not None:
            sharer.channel.close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


class Sharers:
    """A factory of those who were let in."""

    def __init__(self) -> None:
        self._made: asyncio.Queue[Sharer] = asyncio.Queue()

    def __call__(self) -> Sharer:
        sharer = Sharer()
        self._made.put_nowait(sharer)
        return sharer

    async def next(self) -> Sharer:
        async with asyncio.timeout(10):
            sharer = await self._made.get()
        await sharer.until_event("made")
        return sharer

    def all(self) -> Iterator[Sharer]:
        while not self._made.empty():
            yield self._made.get_nowait()


class Accepted(Sharers):
    """A door, and those who came through it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.name = sock.getsockname().decode()
        self.door = Door(sock, self)


@pytest.fixture
async def accepted(listening: socket.socket) -> AsyncIterator[Accepted]:
    sock = door_beside(listening)
    assert sock is not None
    made = Accepted(sock)
    yield made
    made.door.close()
    await made.door.wait_closed()
    assert not list(made.all()), "somebody was let in"


async def left(sock: socket.socket) -> None:
    """Wait until the other side has closed."""
    async with asyncio.timeout(10):
        assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""


# --- where it is ----------------------------------------------------------------------------


async def test_who_connects_finds_it_by_the_address_or_as_one_for_all() -> None:
    here = [name_of_door("127.0.0.1", 7), name_of_door("*", 7)]
    assert await doors_of("127.0.0.1", 7) == here
    assert await doors_of("192.0.2.1", 7) == [name_of_door("192.0.2.1", 7)]


def test_a_name_that_is_too_long_is_none() -> None:
    assert doors._connected(["\0" + "x" * 300]) is None


@pytest.mark.parametrize(
    ("where", "missing"),
    [
        (socket, "SO_PEERCRED"),
        (socket, "send_fds"),
        (os, "memfd_create"),
        (fcntl, "F_ADD_SEALS"),
    ],
)
def test_a_system_that_lacks_something_shares_no_memory(
    where: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares_memory({})
    monkeypatch.delattr(where, missing)
    assert not shares_memory({})


def test_a_system_that_cannot_seal_memory_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SEALS", 0x4000)
    assert not shares_memory({})


# --- through it ------------------------------------------------------------------------------


async def test_both_ends_get_a_channel_and_can_talk(accepted: Accepted) -> None:
    made = await through_door([name_of_door("127.0.0.1", 1), accepted.name], Sharer)
    assert made is not None
    transport, client = made
    assert isinstance(client, Sharer)
    server = await accepted.next()
    assert client.channel is not None
    assert server.channel is not None
    region = make_region(1, 4096)
    assert client.channel.give(region.region)
    assert [number for number, _ in server.channel.take()] == [1]
    assert server.channel.give(region.region)
    assert [number for number, _ in client.channel.take()] == [1]
    transport.write(b"hello")  # type: ignore[attr-defined]
    await server.until_received(5)
    assert server.received == b"hello"  # and not what was said first
    server.transport.write(b"hello yourself")
    await client.until_received(14)
    await finish(client, server)


async def test_a_connection_that_is_given_up_at_once_leaves_no_socket(accepted: Accepted) -> None:
    class GivenUp(Sharer):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.abort()

    made = await through_door([accepted.name], GivenUp)
    assert made is not None
    await finish(made[1], await accepted.next())  # type: ignore[arg-type]
    del made
    gc.collect()  # a socket that is not closed would be reported


async def test_where_there_is_none_nobody_waits(listening: socket.socket) -> None:
    assert await through_door([], Sharer) is None
    assert await through_door([name_of_door("127.0.0.1", 1)], Sharer) is None


async def test_a_full_one_is_passed_by() -> None:
    with socket.socket(socket.AF_UNIX) as door, contextlib.ExitStack() as stack:
        door.bind(f"\0psync-test/{os.getpid()}")
        door.listen(0)
        name = door.getsockname().decode()
        while (sock := doors._connected([name])) is not None:
            stack.enter_context(sock)
        assert await through_door([name], Sharer) is None


async def test_one_that_was_shut_lets_nobody_in(listening: socket.socket) -> None:
    door = door_beside(listening)
    assert door is not None
    name = door.getsockname().decode()
    with door.dup():  # that of the launcher
        shut(door)
        assert await through_door([name], Sharer) is None


async def test_another_users_is_passed_by(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abstract names have no permissions: anybody may have bound it first."""
    monkeypatch.setattr(doors.os, "geteuid", lambda: 4321)
    assert await through_door([accepted.name], Sharer) is None


@pytest.mark.promise("memory.same-user-only")
async def test_another_user_is_not_let_in(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        monkeypatch.setattr(doors.os, "geteuid", lambda: 4321)
        sock.connect(accepted.name)
        await left(sock)


async def test_one_that_closes_at_once_is_an_error_of_the_network(
    listening: socket.socket,
) -> None:
    door = door_beside(listening)
    assert door is not None
    before = num_fds()
    connected = doors._connected

    def gone(names: Any) -> Any:
        sock = connected(names)
        door.close()
        return sock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doors, "_connected", gone)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            await through_door([door.getsockname().decode()], Sharer)
    gc.collect()
    assert num_fds() == before - 1


async def test_without_descriptors_it_is_the_address(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(24, "too many open files")

    before = num_fds()
    monkeypatch.setattr(doors.socket, "socketpair", fails)
    assert await through_door([accepted.name], Sharer) is None
    assert num_fds() == before


async def test_a_task_that_could_not_take_a_region_shares_no_more(accepted: Accepted) -> None:
    launcher = accepted.door._sock.dup()
    with fresh_process():
        before = await through_door([accepted.name], Sharer)
        assert before is not None
        let_in = await accepted.next()
        doors.ran_out().set()
        assert await through_door([accepted.name], Sharer) is None
        with socket.socket(socket.AF_UNIX) as sock:  # of a task that does not know
            sock.setblocking(False)
            sock.connect(accepted.name)
            await left(sock)
        await finish(before[1], let_in)  # type: ignore[arg-type]
    assert await through_door([accepted.name], Sharer) is None  # it is shut
    again = Door(launcher, Sharer)  # of the process that comes after
    await settle()
    assert launcher.fileno() < 0
    again.close()


async def test_a_task_with_one_descriptor_left_is_reached_by_its_address(
    accepted: Accepted,
) -> None:
    """The connection gets it, and there is none for the side channel."""
    with fresh_process(), socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(accepted.name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            socket.send_fds(sock, [doors.PREAMBLE], [theirs.fileno()])
        with descriptors(1):
            await left(sock)
        assert doors.ran_out().is_set()
    assert await through_door([accepted.name], Sharer) is None


async def through_last(accepted: Accepted) -> None:
    """Who connected before was let in, or not."""
    made = await through_door([accepted.name], Sharer)
    assert made is not None
    client = made[1]
    assert isinstance(client, Sharer)
    client.transport.write(b"the last one")
    async with asyncio.timeout(10):
        while True:
            sharer = await accepted.next()
            await sharer.until(lambda self: bool(self.received) or "lost" in self.events)
            if sharer.received:
                break
            assert sharer.channel is not None
            sharer.channel.close()
    await finish(client, sharer)


async def test_connecting_can_be_cancelled_in_any_turn(accepted: Accepted) -> None:
    """Nothing stays open: that is looked at after each test."""
    for turns in range(6):
        made: list[Sharer] = []

        def factory(made: list[Sharer] = made) -> Sharer:
            made.append(Sharer())
            return made[-1]

        connecting = asyncio.ensure_future(through_door([accepted.name], factory))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        if not connecting.cancelled():
            await finish(*made)
        await through_last(accepted)
        for sharer in accepted.all():
            await sharer.until_event("lost")
            assert sharer.channel is not None
            sharer.channel.close()
        await accepted.door.wait_closed()


# --- strangers -------------------------------------------------------------------------------


def of(kind: Callable[[], socket.socket]) -> Callable[[contextlib.ExitStack], list[int]]:
    return lambda stack: [stack.enter_context(kind()).fileno()]


def pipe(stack: contextlib.ExitStack) -> list[int]:
    ends = os.pipe()
    for fd in ends:
        stack.callback(os.close, fd)
    return [ends[0]]


def disk(stack: contextlib.ExitStack) -> list[int]:
    return [stack.enter_context(tempfile.TemporaryFile()).fileno()]


def channel(stack: contextlib.ExitStack) -> list[int]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [stack.enter_context(sock).fileno() for sock in pair][:1]


def two_channels(stack: contextlib.ExitStack) -> list[int]:
    return channel(stack) + channel(stack)


def many(stack: contextlib.ExitStack) -> list[int]:
    return channel(stack) * 100


def stream(stack: contextlib.ExitStack) -> list[int]:
    return [stack.enter_context(sock).fileno() for sock in socket.socketpair()][:1]


JUNK: dict[str, tuple[bytes, Callable[[contextlib.ExitStack], list[int]]]] = {
    "no descriptor": (doors.PREAMBLE, lambda stack: []),
    "another word": (b"x", channel),
    "another word, alone": (b"GET / HTTP/1.1\r\n\r\n", lambda stack: []),
    "a frame of psync": (b"PSYN" + bytes(28), lambda stack: []),
    "a pipe": (doors.PREAMBLE, pipe),
    "a file": (doors.PREAMBLE, disk),
    "a region": (doors.PREAMBLE, lambda stack: [stack.enter_context(region()).fileno()]),
    "a TCP socket": (doors.PREAMBLE, of(socket.socket)),
    "a stream": (doors.PREAMBLE, stream),
    "datagrams": (doors.PREAMBLE, of(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))),
    "two channels": (doors.PREAMBLE, two_channels),
    "many channels": (doors.PREAMBLE, many),
    "a channel and a pipe": (doors.PREAMBLE, lambda stack: channel(stack) + pipe(stack)),
}


def region() -> Any:
    return os.fdopen(os.memfd_create("x"), "rb")


@pytest.mark.parametrize("kind", JUNK)
async def test_who_says_something_else_is_left_and_nothing_stays_open(
    kind: str, accepted: Accepted
) -> None:
    said, make = JUNK[kind]
    with contextlib.ExitStack() as stack:
        fds = make(stack)
        before = num_fds()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(accepted.name)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            sock.sendmsg([said], [rights] if fds else [])
            with contextlib.suppress(ConnectionResetError):  # it has not read all of that
                await left(sock)
        await accepted.door.wait_closed()
        gc.collect()
        assert num_fds() == before


async def test_a_channel_that_leads_nowhere_lends_nothing(accepted: Accepted) -> None:
    """It looks like one."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as loose,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.connect(accepted.name)
        socket.send_fds(sock, [doors.PREAMBLE], [loose.fileno()])
        server = await accepted.next()
        assert server.channel is not None
        assert not server.channel.give(make_region(1, 4096).region)
        assert list(server.channel.take()) == []
    await server.until_event("lost")
    server.channel.close()


async def test_who_says_nothing_is_left_in_time(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "PREAMBLE_S", 0.01)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(20)]
        for sock in silent:
            sock.setblocking(False)
            sock.connect(accepted.name)
        made = await through_door([accepted.name], Sharer)  # others are let in meanwhile
        assert made is not None
        await finish(made[1], await accepted.next())  # type: ignore[arg-type]
        for sock in silent:
            await left(sock)


async def test_who_leaves_at_once_leaves_nothing(accepted: Accepted) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(accepted.name)
    made = await through_door([accepted.name], Sharer)
    assert made is not None
    await finish(made[1], await accepted.next())  # type: ignore[arg-type]
    await accepted.door.wait_closed()


async def test_only_so_many_stand_in_it(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "BACKLOG", 2)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for sock in silent:
            sock.setblocking(False)
            sock.connect(accepted.name)
        await left(silent[2])
        assert len(accepted.door._welcoming) == 2


async def test_without_descriptors_it_waits_and_opens_again(
    accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "AGAIN_S", 0.01)
    tries: asyncio.Queue[int] = asyncio.Queue()
    accept = Door._accept

    def counted(self: Door) -> None:
        tries.put_nowait(1)
        accept(self)

    monkeypatch.setattr(Door, "_accept", counted)
    accepted.door._look()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(accepted.name)
        taken = os.open("/dev/null", os.O_RDONLY)  # the first that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
        try:
            await tries.get()
            assert accepted.door._again is not None
            await tries.get()  # after a while
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(taken)
        sock.send(b"x")
        await left(sock)


async def test_closing_it_leaves_those_who_stand_in_it(listening: socket.socket) -> None:
    sock = door_beside(listening)
    assert sock is not None
    made = Accepted(sock)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.setblocking(False)
        silent.connect(made.name)
        last = await through_door([made.name], Sharer)  # who comes later is let in
        assert last is not None
        await finish(last[1], await made.next())  # type: ignore[arg-type]
        made.door.close()
        made.door.close()
        await made.door.wait_closed()
        await left(silent)
    assert await through_door([made.name], Sharer) is None


# --- beside addresses ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
@pytest.mark.parametrize("sharing", [(True, True), (True, False), (False, True), (False, False)])
async def test_both_must_want_to_share(host: str, sharing: tuple[bool, bool]) -> None:
    """And who does not is reached by the address."""
    listens, connects = (SocketNetwork(shares_memory=shares) for shares in sharing)
    sharers = Sharers()
    with claimed_ports(1) as (port,):
        listener = await listens.listen(f"{host}:{port}", sharers)
    _, client = await connects.connect(f"{host or '127.0.0.1'}:{port}", Sharer)
    server = await sharers.next()
    assert isinstance(client, Sharer)
    assert (client.channel is not None) is (server.channel is not None) is all(sharing)
    await finish(client, server)
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await connects.connect(f"127.0.0.1:{port}", Sharer)


@pytest.mark.parametrize("shares", [True, False])
async def test_an_inherited_one_is_taken_over_or_shut(shares: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        door = door_beside(listening)
        assert door is not None
        with door.dup():  # the launcher's
            inherited = {address: listening.dup()}, {address: door}
            sharers = Sharers()
            network = SocketNetwork(*inherited, shares_memory=shares)
            listener = await network.listen(address, sharers)
            _, client = await SocketNetwork(shares_memory=True).connect(address, Sharer)
            assert isinstance(client, Sharer)
            assert (client.channel is not None) is shares
            await finish(client, await sharers.next())
            listener.close()
            await listener.wait_closed()
