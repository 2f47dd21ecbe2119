"""Faults of one connection, and what each side gets to know of them."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from psync.testing import MemoryNetwork, run_virtual
from recorder import Recorder, end, pair
from turns import Turns, linked


@pytest.mark.parametrize("num_bytes", [1, 999, 1000])
def test_cut_after_delivers_exactly_so_many_bytes(turns: Turns, num_bytes: int) -> None:
    client, server, link = linked()
    data = random.Random(1).randbytes(1000)
    link.to_server.cut_after(num_bytes)
    client.transport.write(data)
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert server.received == data[:num_bytes]
    assert isinstance(client.lost, ConnectionResetError)


def test_a_stalled_direction_builds_up_back_pressure(turns: Turns) -> None:
    client, server, link = linked(kernel_bytes=1000)
    link.to_server.stall()
    client.transport.write(bytes(600))
    client.transport.write(bytes(600))
    turns.settle()
    assert client.transport.get_write_buffer_size() == 600  # the kernel has the other 600
    client.transport.write(bytes(65_000))
    assert client.events == ["made", "pause"]
    server.transport.write(b"the other direction flows")
    turns.settle()
    assert len(client.received) == 25
    assert server.received == b""
    link.to_server.flow()
    turns.settle()
    assert len(server.received) == 66_200
    assert client.events == ["made", "pause", "data", "resume"]


def test_a_partition_is_silent_and_heals_without_loss(turns: Turns) -> None:
    client, server, link = linked()
    link.partition()
    assert link.is_partitioned
    client.transport.write(b"ping")
    server.transport.write(b"pong")
    turns.settle()
    assert client.received == server.received == b""
    assert client.transport.get_write_buffer_size() == 0  # as far as the client knows it was sent
    link.heal()
    turns.settle()
    assert (client.received, server.received) == (b"pong", b"ping")
    assert client.events == server.events == ["made", "data"]


def test_behind_a_partition_nobody_learns_that_the_other_side_is_gone(turns: Turns) -> None:
    client, server, link = linked()
    link.partition()
    client.transport.abort()
    turns.settle()
    assert client.events[-1] == "lost"
    server.transport.write(b"are you there?")
    turns.settle()
    assert server.events == ["made"]
    assert link.is_live
    link.heal()
    turns.settle()
    assert server.events[-1] == "lost"
    assert not link.is_live


def test_an_abort_shows_as_an_end_or_as_a_reset(turns: Turns) -> None:
    def ending(seed: int) -> tuple[bool, bytes]:
        client, server, link = linked(seed=seed)
        link.to_server.stall()
        client.transport.write(b"in the kernel")
        turns.settle()
        client.transport.abort()
        link.to_server.flow()
        turns.settle()
        assert server.events[-1] == "lost"
        return server.lost is None, bytes(server.received)

    endings = {ending(seed) for seed in range(20)}
    assert endings == {(True, b"in the kernel"), (False, b"")}


def test_bytes_for_a_closed_socket_are_answered_with_a_reset(turns: Turns) -> None:
    client, server, link = linked()
    link.to_client.stall()
    server.transport.write(b"never read")
    client.transport.close()
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert isinstance(server.lost, ConnectionResetError)
    assert str(server.lost) == "[Errno 104] the peer has closed the connection"
    assert client.received == b""


@pytest.mark.parametrize("chunk", [(1, 1), (7, 7), (3, 50)])
def test_pieces_have_the_sizes_that_were_asked_for(turns: Turns, chunk: tuple[int, int]) -> None:
    client, server, _ = linked(chunk=chunk)
    client.transport.write(bytes(500))
    turns.settle()
    assert len(server.received) == 500
    *sizes, last = server.sizes
    assert min(sizes) >= chunk[0]
    assert max(sizes) <= chunk[1]
    assert last <= chunk[1]


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_each_side_gets_a_prefix_of_what_the_other_wrote(seed: int) -> None:
    draw = random.Random(seed)
    reports: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        network = MemoryNetwork(
            seed,
            latency=draw.choice([(0.0, 0.0), (0.0, 0.1)]),
            chunk=draw.choice([(1, 65_536), (1, 100)]),
            kernel_bytes=draw.choice([0, 1000, 65_536]),
        )
        half_open = lambda: Recorder(keep_open=draw.random() < 0.5)  # noqa: E731
        client, server, _ = await pair(network, server=half_open, client=half_open)
        (link,) = network.links()
        sides, directions = (client, server), (link.to_server, link.to_client)
        sent = {client: b"", server: b""}
        ended = False

        def write(side: Recorder) -> None:
            data = bytearray(draw.randbytes(draw.choice([1, 100, 30_000])))
            out = side.transport._out
            before = out.written_bytes
            with contextlib.suppress(RuntimeError):  # after write_eof()
                side.transport.write(data)
            if out.written_bytes > before:
                sent[side] += data

        harmless = [
            lambda: write(draw.choice(sides)),
            lambda: write(draw.choice(sides)),
            lambda: draw.choice(sides).transport.pause_reading(),
            lambda: draw.choice(sides).transport.resume_reading(),
            lambda: draw.choice(directions).stall(),
            lambda: draw.choice(directions).flow(),
            link.partition,
            link.heal,
        ]
        ending = [
            link.cut,
            lambda: draw.choice(sides).transport.close(),
            lambda: draw.choice(sides).transport.abort(),
            lambda: draw.choice(sides).transport.write_eof(),
            lambda: draw.choice(directions).cut_after(draw.randrange(2000)),
        ]
        for _ in range(draw.randrange(60)):
            draw.choice(harmless)()
            if draw.random() < 0.05:
                ended = True
                draw.choice(ending)()
            if draw.random() < 0.5:
                await asyncio.sleep(draw.choice([0.0, 0.05]))

        link.heal()
        for side, direction in zip(sides, directions, strict=True):
            side.transport.resume_reading()
            direction.flow()
        await asyncio.sleep(10.0)
        network.check()
        for side, other in ((client, server), (server, client)):
            assert sent[other].startswith(side.received)
            assert ended or sent[other] == side.received
            assert side.events.count("lost") == side.transport.is_lost
            assert "lost" not in side.events[:-1]
            flow = [event for event in side.events if event in ("pause", "resume")]
            assert flow[::2] == ["pause"] * len(flow[::2])
            assert flow[1::2] == ["resume"] * len(flow[1::2])
            if not (client.transport.is_closing() and server.transport.is_closing()):
                assert side.transport.get_write_buffer_size() == 0  # see test_network.py
        await end(client, server)
        await asyncio.sleep(1.0)
        assert network.links() == []

    run_virtual(main, seed=seed)
    assert reports == []
