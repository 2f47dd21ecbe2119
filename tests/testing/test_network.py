"""The network in memory and the one of sockets keep the same contract, on every event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from psync.errors import ConfigurationError, UsageError
from psync.net.transport import SocketNetwork
from psync.testing import MemoryNetwork, run_virtual, settle
from recorder import Accepting, Recorder, end, pair

HELPERS = str(Path(__file__).parents[1] / "helpers")

WHO = contextvars.ContextVar("WHO", default="nobody")

CONTRACT = []


def contract(scenario):
    """Run a scenario on both networks and on all loops."""
    CONTRACT.append(scenario)
    return scenario


@contract
async def every_byte_comes_back_in_order(network):
    draw = random.Random(7)
    client, server, listener = await pair(network, server=lambda: Recorder(echo=True))
    sent = bytearray()
    for size in (0, 1, 2, 100, 4096, 65_537, 1 << 20):
        data = draw.randbytes(size)
        sent += data
        while data:
            cut = draw.randint(1, len(data))
            client.transport.write(data[:cut])
            data = data[cut:]
        await client.until_received(len(sent))
    assert client.received == server.received == sent
    await end(client, server)
    listener.close()
    await listener.wait_closed()


@contract
async def buffers_of_every_kind_are_joined_in_order(network):
    client, server, listener = await pair(network)
    listener.close()
    client.transport.writelines([b"ab", b"", bytearray(b"cd"), memoryview(b"efgh")[1:3]])
    client.transport.write(b"!")
    await server.until_received(7)
    assert server.received == b"abcdfg!"
    await end(client, server)


@contract
async def addresses_are_resolved_and_told(network):
    client, server, listener = await pair(network)
    host, port = listener.address.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert client.transport.get_extra_info("peername") == (host, int(port))
    assert server.transport.get_extra_info("sockname") == (host, int(port))
    other = await network.listen("127.0.0.1:0", Recorder)
    assert other.address != listener.address
    other.close()
    listener.close()
    await end(client, server)


@contract
async def an_address_is_taken_until_its_listener_closes(network):
    listener = await network.listen("127.0.0.1:0", Recorder)
    with pytest.raises(OSError, match=r"\d") as caught:
        await network.listen(listener.address, Recorder)
    assert caught.value.errno == errno.EADDRINUSE
    listener.close()
    await listener.wait_closed()
    again = await network.listen(listener.address, Recorder)
    assert again.address == listener.address
    again.close()


@contract
async def nobody_listening_is_a_refusal(network):
    listener = await network.listen("127.0.0.1:0", Recorder)
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await network.connect(listener.address, Recorder)


@contract
async def a_closed_listener_leaves_its_connections_open(network):
    client, server, listener = await pair(network)
    listener.close()
    client.transport.write(b"still here")
    await server.until_received(10)
    await end(client, server)


@contract
async def close_sends_everything_first(network):
    client, server, listener = await pair(network)
    listener.close()
    data = random.Random(1).randbytes(1 << 20)
    client.transport.write(data)
    client.transport.close()
    assert client.transport.is_closing()
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    assert server.received == data
    assert client.events[-1] == "lost"
    assert server.events == ["made", "data", "eof", "lost"]
    assert client.lost is server.lost is None


@contract
async def abort_ends_both_sides_and_sends_a_prefix_at_most(network):
    client, server, listener = await pair(network)
    listener.close()
    data = random.Random(2).randbytes(1 << 20)
    server.transport.pause_reading()
    client.transport.write(data)
    client.transport.abort()
    await client.until_event("lost")
    server.transport.resume_reading()
    await server.until_event("lost")
    assert client.lost is None
    assert server.lost is None or isinstance(server.lost, ConnectionResetError)
    assert data.startswith(server.received)
    assert client.transport.get_write_buffer_size() == 0


@contract
async def two_sides_that_close_with_much_to_send_wait_for_each_other(network):
    # A transport that closes reads no more. Only abort() gets them out of it.
    client, server, listener = await pair(network)
    listener.close()
    for side in (client, server):
        side.transport.pause_reading()
        side.transport.write(bytes(16 << 20))
    for side in (client, server):
        side.transport.close()
    await settle()
    assert client.events == server.events == ["made", "pause"]
    await end(client, server)


@contract
async def one_stream_may_end_before_the_other(network):
    client, server, listener = await pair(network, server=lambda: Recorder(keep_open=True))
    listener.close()
    assert client.transport.can_write_eof()
    client.transport.write(b"question")
    client.transport.write_eof()
    await server.until_event("eof")
    assert server.received == b"question"
    server.transport.write(b"answer")
    await client.until_received(6)
    server.transport.close()
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    assert client.events == ["made", "data", "eof", "lost"]


@contract
async def a_receiver_that_pauses_stops_the_writer(network):
    client, server, listener = await pair(network)
    listener.close()
    client.transport.set_write_buffer_limits(high=100_000, low=50_000)
    assert client.transport.get_write_buffer_limits() == (50_000, 100_000)
    server.transport.pause_reading()
    server.transport.pause_reading()
    written = 0
    while "pause" not in client.events:
        client.transport.write(bytes(60_000))
        written += 60_000
        await settle()
        assert written < 64 << 20
    assert client.transport.get_write_buffer_size() > 100_000
    assert "resume" not in client.events
    server.transport.resume_reading()
    await client.until_event("resume")
    assert client.transport.get_write_buffer_size() <= 50_000
    await server.until_received(written)
    assert client.events == ["made", "pause", "resume"]
    assert client.transport.get_write_buffer_size() == 0
    await end(client, server)


@contract
async def nothing_arrives_while_reading_is_paused(network):
    client, server, listener = await pair(network)
    listener.close()
    server.transport.pause_reading()
    assert not server.transport.is_reading()
    client.transport.write(b"wait")
    await settle()
    assert server.received == b""
    server.transport.resume_reading()
    assert server.transport.is_reading()
    await server.until_received(4)
    await end(client, server)


@contract
async def a_failing_protocol_loses_its_connection(network):
    class Failing(Recorder):
        def buffer_updated(self, nbytes: int) -> None:
            raise ZeroDivisionError("a bug in the protocol")

    reports = []
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    client, server, listener = await pair(network, server=Failing)
    listener.close()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    client.transport.write(b"x")
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    loop.set_exception_handler(handler)
    assert isinstance(server.lost, ZeroDivisionError)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]


@contract
async def a_writer_learns_that_its_peer_is_gone(network):
    client, server, listener = await pair(network, server=lambda: Recorder(keep_open=True))
    listener.close()
    client.transport.close()
    await server.until_event("eof")
    await client.until_event("lost")
    while "lost" not in server.events:  # a first write may still find a kernel that takes it
        server.transport.write(bytes(1000))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await server.until_event("lost")
    assert isinstance(server.lost, (ConnectionResetError, BrokenPipeError))


@contract
async def protocols_run_in_their_own_context(network):
    seen = {}

    class Curious(Recorder):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def buffer_updated(self, nbytes: int) -> None:
            seen[self.name] = WHO.get()
            super().buffer_updated(nbytes)

    async def connect(accepting):
        WHO.set("the client's task")
        client, server = await accepting.connect(network, lambda: Curious("client"))
        client.transport.write(b"hello")
        return client, server

    accepting = await Accepting(lambda: Curious("server")).listen(network)
    client, server = await asyncio.create_task(connect(accepting))
    await server.until_received(5)
    WHO.set("the server's task")
    server.transport.write(b"hello")
    await client.until_received(5)
    assert seen == {"server": "nobody", "client": "the client's task"}
    accepting.listener.close()
    await end(client, server)


each_scenario = pytest.mark.parametrize("scenario", CONTRACT, ids=lambda entry: entry.__name__)


@pytest.mark.parametrize("make", [MemoryNetwork, SocketNetwork])
@each_scenario
async def test_contract(scenario, make) -> None:
    await scenario(make())


@pytest.mark.parametrize("seed", [None, 1, 2])
@each_scenario
def test_contract_on_a_virtual_clock(scenario, seed) -> None:
    network = MemoryNetwork(seed or 0, latency=(0.0, 0.0) if seed is None else (0.001, 0.05))
    run_virtual(scenario, network, seed=seed)
    network.check()


# What only the network in memory can do. Faults of single links: see test_link.py.


async def test_links_tells_which_are_live_and_where_they_end() -> None:
    network = MemoryNetwork()
    ps, worker = network.host("ps0"), network.host("worker0")
    accepting = await Accepting().listen(ps, "ps0:2222")
    first = await accepting.connect(network)
    second = await accepting.connect(worker)
    links = network.links()
    assert [repr(link) for link in links] == [
        "<link 0 from client to ps0:2222>",
        "<link 1 from worker0 to ps0:2222>",
    ]
    assert network.links("worker0") == links[1:]
    assert network.links("ps0:2222") == network.links("ps0") == links
    assert network.links("ps1") == []
    second[0].transport.write(b"12345")
    await second[1].until_received(5)
    assert links[1].to_server.written_bytes == links[1].to_server.delivered_bytes == 5
    assert links[1].to_client.written_bytes == 0
    await end(*first)
    assert network.links() == links[1:]
    await end(*second)
    assert network.links() == []


async def test_cut_loses_the_connections_of_a_host_at_both_ends() -> None:
    network = MemoryNetwork()
    accepting = await Accepting().listen(network, "ps0:2222")
    worker = await accepting.connect(network.host("worker0"))
    other = await accepting.connect(network.host("worker1"))
    network.cut("worker0")
    for recorder in worker:
        await recorder.until_event("lost")
        assert isinstance(recorder.lost, ConnectionResetError)
        assert recorder.lost.errno == errno.ECONNRESET
    assert str(worker[0].lost) == "[Errno 104] the connection was cut"
    other[0].transport.write(b"unhurt")
    await other[1].until_received(6)
    await end(*other)


async def test_a_partition_between_two_hosts_leaves_the_others_alone() -> None:
    network = MemoryNetwork()
    accepting = await Accepting().listen(network.host("ps0"), "ps0:2222")
    lonely = await accepting.connect(network.host("worker0"))
    other = await accepting.connect(network.host("worker1"))
    network.partition("ps0", "worker0")
    for client in (lonely[0], other[0]):
        client.transport.write(b"hello")
    await other[1].until_received(5)
    await settle()
    assert lonely[1].received == b""
    assert "lost" not in lonely[0].events + lonely[1].events
    network.heal("ps0", "worker0")
    await lonely[1].until_received(5)
    await end(*lonely, *other)


async def test_one_direction_between_two_hosts_may_be_closed() -> None:
    network = MemoryNetwork()
    accepting = await Accepting().listen(network.host("ps0"), "ps0:2222")
    client, server = await accepting.connect(network.host("worker0"))
    network.deafen("worker0", "ps0")
    client.transport.write(b"lost for now")
    server.transport.write(b"hello")
    await client.until_received(5)
    await settle()
    assert server.received == b""
    connecting = asyncio.create_task(accepting.connect(network.host("worker0")))
    await settle()
    assert not connecting.done()
    network.undeafen("worker0", "ps0")
    await server.until_received(12)
    await end(client, server, *await connecting)


def test_a_machine_that_has_died_answers_nobody_until_it_is_back() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        accepting = await Accepting().listen(network.host("ps0"), "ps0:2222")
        client, _ = await accepting.connect(network.host("worker0"))
        network.crash("ps0", silently=True)
        connecting = asyncio.create_task(network.connect("ps0:2222", Recorder))
        await asyncio.sleep(10)
        assert not connecting.done()
        assert "lost" not in client.events
        network.revive("ps0")
        with pytest.raises(ConnectionRefusedError):  # nobody listens there yet
            await connecting
        await client.until(lambda client: "lost" in client.events)
        assert asyncio.get_running_loop().time() < 16  # it did not take the kernel's patience

    run_virtual(main)


async def test_connecting_through_a_partition_waits_until_it_heals() -> None:
    network = MemoryNetwork()
    accepting = await Accepting().listen(network, "ps0:2222")
    network.partition("worker0")
    connecting = asyncio.create_task(accepting.connect(network.host("worker0")))
    await settle()
    await end(*await accepting.connect(network.host("worker1")))
    network.partition("worker1")  # wakes who waits, and worker0 is still cut off
    network.heal("worker1")
    await settle()
    assert not connecting.done()
    network.heal("worker0")
    await end(*await connecting)


def test_healing_what_was_not_partitioned_is_an_error() -> None:
    with pytest.raises(UsageError, match="no partition between ps0 and worker0"):
        MemoryNetwork().heal("ps0", "worker0")
    with pytest.raises(UsageError, match="no partition between ps0 and everybody"):
        MemoryNetwork().heal("ps0")


async def test_a_connect_that_is_cancelled_leaves_nothing_open() -> None:
    def cancel_soon() -> Recorder:  # after the link was made, before its sides are started
        asyncio.get_running_loop().call_soon(connecting.cancel)
        return Recorder()

    network = MemoryNetwork()
    accepting = await Accepting().listen(network, "ps0:2222")
    connecting = asyncio.create_task(network.connect("ps0:2222", cancel_soon))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await settle()
    assert network.links() == []
    assert [server.events[-1] for server in accepting.servers] == ["lost"]


async def test_a_connection_cut_before_it_is_there_is_a_reset() -> None:
    def cut_soon() -> Recorder:
        asyncio.get_running_loop().call_soon(network.cut, "ps0:2222")
        return Recorder()

    network = MemoryNetwork()
    accepting = await Accepting().listen(network, "ps0:2222")
    with pytest.raises(ConnectionResetError, match="the connection was cut before it was there"):
        await network.connect("ps0:2222", cut_soon)
    assert accepting.servers == []


async def test_a_server_factory_that_fails_costs_the_connection() -> None:
    def fail() -> Recorder:
        raise ZeroDivisionError("a bug in the factory")

    network = MemoryNetwork()
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    await network.listen("ps0:2222", fail)
    with contextlib.suppress(ConnectionResetError):
        _, client = await network.connect("ps0:2222", Recorder)
        await client.until_event("lost")
    assert [report["message"] for report in reports] == ["the factory of ps0:2222 failed"]
    assert network.links() == []


def test_latency_is_virtual_time_and_nothing_overtakes() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(3, latency=(1.0, 2.0))
        client, server, _ = await pair(network)
        assert 1.0 <= loop.time() <= 2.0  # to be connected
        started = loop.time()
        data = bytes(range(100))
        for value in data:
            client.transport.write(bytes([value]))
        await server.until_received(1)
        assert 1.0 <= loop.time() - started <= 2.0
        await server.until_received(100)
        assert loop.time() - started <= 2.0
        assert server.received == data
        client.transport.close()
        await server.until_event("lost")
        assert loop.time() - started <= 4.0

    run_virtual(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency": (2.0, 1.0)}, r"expected 0 <= latency\[0\] <= latency\[1\], got \(2.0, 1.0\)"),
        (
            {"latency": (-1.0, 1.0)},
            r"expected 0 <= latency\[0\] <= latency\[1\], got \(-1.0, 1.0\)",
        ),
        ({"chunk": (0, 5)}, r"expected 1 <= chunk\[0\] <= chunk\[1\], got \(0, 5\)"),
        ({"chunk": (6, 5)}, r"expected 1 <= chunk\[0\] <= chunk\[1\], got \(6, 5\)"),
        ({"kernel_bytes": -1}, "expected kernel_bytes >= 0, got -1"),
        ({"spread": -1.0}, "expected spread >= 0, got -1.0"),
    ],
)
def test_impossible_settings_are_refused(options, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryNetwork(**options)


def trace(seed: int) -> list[tuple[int, str, int, float]]:
    """Everything that three connections deliver, as it comes."""
    pieces: list[tuple[int, str, int, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(seed, latency=(0.0, 0.01))
        network.trace_deliveries(
            lambda link, direction, size: pieces.append((link.number, direction, size, loop.time()))
        )
        accepting = await Accepting(lambda: Recorder(echo=True)).listen(network)

        async def talk(size: int) -> None:
            client, server = await accepting.connect(network)
            client.transport.write(bytearray(size))
            await client.until_received(size)
            await end(client, server)

        async with asyncio.TaskGroup() as group:
            for size in (10, 10_000, 100_000):
                group.create_task(talk(size))

    run_virtual(main, seed=seed)
    return pieces


def test_the_same_seed_delivers_the_same_pieces_at_the_same_times() -> None:
    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def digest(seed: int) -> int:
    return zlib.crc32(repr(trace(seed)).encode())


def test_a_seed_means_the_same_in_another_process() -> None:
    # Hashes of strings, and with them the order of sets, differ from process to process.
    done = subprocess.run(
        [sys.executable, "-c", "import test_network; print(test_network.digest(5))"],
        env={
            **os.environ,
            "PYTHONHASHSEED": "1",
            "PYTHONPATH": os.pathsep.join((os.path.dirname(__file__), HELPERS)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == digest(5)
