"""The side channel: descriptors arrive before who needs them, and its end is told once."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from open_files import descriptors, num_fds
from psync.errors import RemoteProtocolError
from psync.net.shared.doors import SideChannel, ran_out
from psync.net.shared.regions import Mapping, make_region
from psync.testing import settle
from psync.testing.seams import fresh_process

MIB = 1 << 20


Ends = tuple[SideChannel, SideChannel]
Hostile = tuple[SideChannel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = SideChannel(ours), SideChannel(theirs)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    """A channel, and a socket at its other end that says anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SideChannel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def filled(number: int, nbytes: int = MIB) -> Mapping:
    made = make_region(number, nbytes)
    made[:] = bytes([number]) * nbytes
    return made


# --- regions ---------------------------------------------------------------------------------


def test_regions_arrive_at_once_and_in_order(ends: Ends) -> None:
    ours, theirs = ends
    assert list(theirs.take()) == []
    made = [filled(number) for number in (1, 2, 3)]
    assert all(ours.give(each.region) for each in made)
    taken = dict(theirs.take())
    assert list(taken) == [1, 2, 3]
    assert all(memory[5] == number for number, memory in taken.items())
    assert list(theirs.take()) == []
    assert theirs.give(made[0].region)  # both directions are alike
    assert [number for number, _ in ours.take()] == [1]


def test_when_the_queue_is_full_regions_are_not_given(ends: Ends) -> None:
    ours, theirs = ends
    made = filled(1, 4096)
    before, count = num_fds(), 0
    while ours.give(made.region):
        count += 1
        assert count < 100_000
    assert count > 10
    assert num_fds() == before
    assert len(list(theirs.take())) == count
    assert ours.give(made.region)
    theirs.close()
    gc.collect()
    assert not ours.give(made.region)
    assert num_fds() == before - 1


@pytest.mark.parametrize("free", [0, 1])  # a mapping has a descriptor of its own
def test_whoever_has_no_descriptor_for_a_region_says_so_and_shares_no_more(
    free: int, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = ends
    made = [filled(number) for number in (1, 2)]
    assert all(ours.give(each.region) for each in made)
    before = num_fds()
    with fresh_process(), descriptors(free):
        assert not ran_out().is_set()
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match=r"no descriptor|Too many open files"):
                next(theirs.take())
        assert ran_out().is_set()
    assert not ran_out().is_set()
    assert num_fds() == before
    (record,) = caplog.records
    assert "raise `ulimit -n`" in record.getMessage()


def test_what_arrives_is_not_passed_on_to_processes(ends: Ends) -> None:
    ours, theirs = ends
    made = filled(1)
    ours.give(made.region)
    taken = list(theirs.take())
    of_regions = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:psync"):
                of_regions.append(fd)
    assert len(of_regions) == 3  # the descriptor, and those of both mappings
    assert not any(map(os.get_inheritable, of_regions))
    assert len(taken) == 1


# --- junk ------------------------------------------------------------------------------------


def say(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


GIVEN = struct.pack("<QQ", 1, 4096)


@pytest.mark.parametrize("data", [b"x", GIVEN[:-1], GIVEN + b"x", GIVEN * 3])
@pytest.mark.parametrize("fds", [0, 1, 2])
def test_other_words_are_no_region(data: bytes, fds: int, hostile: Hostile) -> None:
    channel, sock = hostile
    made = make_region(1, 4096)
    before = num_fds()
    say(sock, data, [made.region.fd] * fds)
    with pytest.raises(RemoteProtocolError, match="something that is no region"):
        list(channel.take())
    assert num_fds() == before


@pytest.mark.parametrize("fds", [0, 2, 3, 200])
def test_a_region_has_one_descriptor(fds: int, hostile: Hostile) -> None:
    channel, sock = hostile
    made = make_region(1, 4096)
    before = num_fds()
    say(sock, GIVEN, [made.region.fd] * fds)
    with pytest.raises(RemoteProtocolError, match="something that is no region"):
        list(channel.take())
    assert num_fds() == before


def test_nobody_waits_for_it_whatever_the_peer_does_to_their_common_socket(ends: Ends) -> None:
    """Who made the pair may have kept a copy of the end that it gave away."""
    ours, theirs = ends
    for channel in ends:
        os.set_blocking(channel._sock.fileno(), True)
    assert list(ours.take()) == []
    made = filled(1, 4096)
    while ours.give(made.region):
        continue
    assert next(theirs.take())[1][0] == 1


@pytest.mark.parametrize("kind", ["pipe", "socket", "disk", "channel itself"])
def test_a_descriptor_of_something_else_is_closed(
    kind: str, hostile: Hostile, tmp_path: os.PathLike[str]
) -> None:
    channel, sock = hostile
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            ends = os.pipe()
            fd = ends[0]
            for end in ends:
                stack.callback(os.close, end)
        elif kind == "disk":
            file = stack.enter_context(open(os.path.join(tmp_path, "x"), "wb"))
            file.write(bytes(4096))
            fd = file.fileno()
        elif kind == "socket":
            fd = stack.enter_context(socket.socket()).fileno()
        else:
            fd = sock.fileno()
        before = num_fds()
        say(sock, GIVEN, [fd])
        with pytest.raises(RemoteProtocolError, match="cannot be mapped"):
            list(channel.take())
        assert num_fds() == before


def test_what_was_taken_before_the_junk_is_good(hostile: Hostile) -> None:
    channel, sock = hostile
    made = filled(1, 4096)
    say(sock, GIVEN, [made.region.fd])
    say(sock, b"junk", [])
    taking = channel.take()
    assert next(taking)[1][0] == 1
    with pytest.raises(RemoteProtocolError):
        next(taking)


# --- the end ---------------------------------------------------------------------------------


def test_after_the_end_nothing_is_taken_or_given(ends: Ends) -> None:
    ours, theirs = ends
    made = filled(1)
    assert ours.give(made.region)
    ours.end()
    ours.end()
    assert not ours.give(made.region)
    assert [number for number, _ in theirs.take()] == [1]
    assert list(theirs.take()) == []
    assert theirs.give(made.region)  # the other direction goes on


def test_what_was_given_is_there_although_the_giver_has_closed_and_not_read_ours(
    ends: Ends,
) -> None:
    """The kernel says so first, by a connection that was reset."""
    ours, theirs = ends
    made = filled(3)
    assert ours.give(made.region)
    assert theirs.give(made.region)
    ours.close()
    assert [number for number, _ in theirs.take()] == [3]
    assert list(theirs.take()) == []


def test_closing_twice_does_no_harm(ends: Ends) -> None:
    ours, _ = ends
    ours.close()
    ours.close()
    ours.end()
    assert not ours.give(filled(1).region)
    assert list(ours.take()) == []


async def ended(channel: SideChannel) -> asyncio.Event:
    event = asyncio.Event()
    channel.when_ended(event.set)
    return event


@pytest.mark.parametrize("how", ["end", "close"])
async def test_the_end_is_told_once_whatever_is_in_the_queue(how: str, ends: Ends) -> None:
    ours, theirs = ends
    made = filled(1)
    before = num_fds()
    told: list[int] = []
    event = asyncio.Event()

    def then() -> None:
        told.append(num_fds())
        event.set()

    theirs.when_ended(then)
    for _ in range(20):
        assert ours.give(made.region)
    assert told == []
    getattr(ours, how)()
    await event.wait()
    assert told == [before - (how == "close")]  # what was given and never taken is closed
    getattr(ours, how)()
    await settle()
    assert len(told) == 1


async def test_regions_are_no_end(ends: Ends) -> None:
    ours, theirs = ends
    event = await ended(theirs)
    ours.give(filled(1).region)
    await settle()
    assert not event.is_set()
    theirs.close()
    ours.close()
    await settle()
    assert not event.is_set()  # nobody wants to know any more


async def test_an_end_that_was_there_already_is_told(ends: Ends) -> None:
    ours, theirs = ends
    ours.close()
    event = await ended(theirs)
    await event.wait()


async def test_a_killed_process_has_ended(ends: Ends) -> None:
    """Whatever it held: the kernel closes its end, and gives its memory back."""
    ours, theirs = ends
    code = "import sys; sys.stdin.read()"
    end = ours._sock.fileno()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[end])
    ours.close()
    event = await ended(theirs)
    await settle()
    assert not event.is_set()
    process.kill()
    await event.wait()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_channel_whose_loop_is_closed_can_be_closed() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SideChannel(first)

    async def look() -> None:
        channel.when_ended(lambda: None)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(look())
    loop.close()
    channel.close()
    second.close()
