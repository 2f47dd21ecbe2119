"""Endpoints: who gets in, who is waited for, what is said about it, and what is left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from endpoints import (
    PLACES,
    PS,
    SECRET,
    WORKER,
    Handlers,
    connected,
    done,
    is_deserted,
    new_endpoint,
    places,
    wait_deserted,
)
from psync.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    FencedError,
    RemoteProtocolError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.secret import Secret
from psync.net.transport import SocketNetwork
from psync.testing import MemoryNetwork, settle
from psync.wire.limits import Limits
from psync.wire.messages import AskStatistics, Done, Hello, Pulled, Read, Refused
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("closed_at_the_end")

OTHER_SECRET = Secret(b"the secret of another cluster")
SERVED: Handlers = {AskStatistics: Handler(done)}


class FromElsewhere:
    """A network in memory on which each connection comes from the address named last."""

    def __init__(self) -> None:
        self.below = MemoryNetwork()
        self.source = "192.0.2.1"

    async def connect(self, address: str, factory: Any) -> Any:
        return await self.below.connect(address, factory)

    async def listen(self, address: str, factory: Any) -> Any:
        def accept() -> asyncio.BufferedProtocol:
            protocol: Any = factory()
            made, source = protocol.connection_made, self.source

            def connection_made(transport: Any) -> None:
                extra = {"peername": (source, 4711)}
                usual = transport.get_extra_info
                transport.get_extra_info = lambda name, default=None: extra.get(
                    name, usual(name, default)
                )
                made(transport)

            protocol.connection_made = connection_made
            return protocol  # type: ignore[no-any-return]

        return await self.below.listen(address, accept)


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("psync")]


async def both(network: Any, *, worker: int = 1, **options: Any) -> tuple[Endpoint, Endpoint]:
    """A ps that listens, with these options, and a worker of this incarnation."""
    ps = new_endpoint(network, PS, SERVED, **options)
    await ps.listen("ps0:1")
    return ps, new_endpoint(network, WORKER, incarnation=worker)


# --- listening -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_tasks_find_each_other(place: str, tmp_path: Path) -> None:
    network, address = places(tmp_path)[place]()
    async with connected(network, SERVED, address=address, lane="bulk") as pair:
        assert (pair.peer.task, pair.peer.incarnation, pair.peer.lane) == (PS, 1, "bulk")
        assert (pair.back.task, pair.back.incarnation, pair.back.lane) == (WORKER, 2, "bulk")
        assert pair.client.peers == [pair.peer]
        assert pair.server.peers == [pair.back]
        assert (await pair.peer.call(AskStatistics())).message == Done()


@pytest.mark.parametrize("secret", [SECRET, None])
async def test_a_cluster_may_run_without_a_secret(secret: Secret | None) -> None:
    network = MemoryNetwork()
    ps = new_endpoint(network, PS, SERVED, secret=secret)
    worker = new_endpoint(network, WORKER, secret=secret)
    await ps.listen("ps0:1")
    peer = await worker.connect("ps0:1", PS)
    assert (await peer.call(AskStatistics())).message == Done()


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_an_address_in_use_is_told_with_a_remedy(place: str, tmp_path: Path) -> None:
    network, address = places(tmp_path)[place]()
    async with connected(network, address=address) as pair:
        other = new_endpoint(SocketNetwork(), "/job:ps/task:1")
        with pytest.raises(ConfigurationError) as caught:
            await other.listen(pair.address)
        assert caught.value.message == (
            f"/job:ps/task:1 cannot listen on {pair.address}: address already in use"
        )
        assert caught.value.hint == (
            "is another process listening there, such as a task of an earlier run? is it an "
            "address of this machine?"
        )
        await other.close()
        await pair.peer.ping()
    assert not (tmp_path / "ps0").exists()


async def test_an_address_of_another_machine_is_told() -> None:
    endpoint = new_endpoint(SocketNetwork())
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192.0.2.1:2222: cannot"):
        await endpoint.listen("192.0.2.1:2222")


# --- connecting, once ------------------------------------------------------------------------


class NamedLater(MemoryNetwork):
    """Knows no name before its time."""

    def __init__(self, known_at: float) -> None:
        super().__init__()
        self.known_at = known_at

    async def listen(self, address: str, factory: Any) -> Any:
        if asyncio.get_running_loop().time() < self.known_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await super().listen(address, factory)


@pytest.mark.virtual_time
async def test_the_name_at_which_a_task_listens_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pod of Kubernetes has none in the DNS yet when it begins."""
    now = asyncio.get_running_loop().time()
    ps = new_endpoint(NamedLater(now + 20))
    listener = await ps.listen("train-ps-0.train:8470")
    assert listener.address == "train-ps-0.train:8470"
    assert 20 <= asyncio.get_running_loop().time() - now <= 25
    assert texts(caplog) == [
        f"{PS} cannot listen on train-ps-0.train:8470 yet, and retries for 60 s: the name "
        "cannot be resolved (Name or service not known)"
    ]


@pytest.mark.virtual_time
async def test_a_name_that_nobody_knows_is_an_error_after_a_minute() -> None:
    ps = new_endpoint(NamedLater(math.inf))
    with pytest.raises(ConfigurationError, match="cannot listen on tpyo:1: the name cannot be re"):
        async with asyncio.timeout(70):
            await ps.listen("tpyo:1")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", f"{PS} at 127.0.0.1:1: connection refused"),
        ("unix:/nowhere/ps0", f"{PS} at unix:/nowhere/ps0: no such file or directory"),
        ("no.such.invalid:1", f"{PS} at no.such.invalid:1: the name cannot be resolved ("),
    ],
)
async def test_nobody_there(address: str, told: str) -> None:
    worker = new_endpoint(SocketNetwork(), WORKER)
    with pytest.raises(ConnectFailed) as caught:
        await worker.connect(address, PS)
    assert caught.value.message.startswith(told)
    assert is_deserted(worker)


class HangsUp(Recorder):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["silent", "unreachable", "hangs up"])
async def test_somebody_who_does_not_answer(how: str) -> None:
    network = MemoryNetwork()
    listener = await network.listen("ps0:1", HangsUp if how == "hangs up" else Recorder)
    if how == "unreachable":
        network.partition("ps0:1")
    worker = new_endpoint(network, WORKER)
    with pytest.raises(ConnectFailed) as caught:
        await worker.connect("ps0:1", PS)
    if how == "hangs up":
        assert caught.value.message in (
            f"{PS} at ps0:1: the connection was closed",
            f"{PS} at ps0:1: connection reset by peer",
        )
    else:
        assert caught.value.message == f"{PS} at ps0:1: no answer within 5 s"
        assert asyncio.get_running_loop().time() == 5.0
    assert is_deserted(worker)
    listener.close()


@pytest.mark.parametrize("place", PLACES)
async def test_somebody_who_is_not_psync(place: str, tmp_path: Path) -> None:
    network, address = places(tmp_path)[place]()
    strangers: list[Recorder] = []

    def greet() -> Recorder:
        strangers.append(Recorder(b"220 mail.example.org ESMTP ready, what can I do?\r\n"))
        return strangers[-1]

    listener = await network.listen(address, greet)
    worker = new_endpoint(network, WORKER)
    with pytest.raises(RemoteProtocolError) as caught:
        await worker.connect_retrying(listener.address, PS)
    assert caught.value.message == (
        f"{PS} at {listener.address}: "
        "expected a psync frame, which starts with b'PSYN', got b'220 '"
    )
    listener.close()
    await listener.wait_closed()
    await worker.close()
    await strangers[0].until_event("lost")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (SECRET, OTHER_SECRET, f"{PS} does not have the same secret as this task"),
        (SECRET, None, f"this task has a secret, but {PS} has none"),
        (None, SECRET, f"the peer refused the connection: {PS} has a secret, the peer has none"),
    ],
)
async def test_another_secret_is_no_reason_to_wait(
    place: str,
    ours: Secret | None,
    theirs: Secret | None,
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "psync.net.endpoint")
    network, address = places(tmp_path)[place]()
    ps = new_endpoint(network, PS, SERVED, secret=theirs)
    worker = new_endpoint(network, WORKER, secret=ours)
    listener = await ps.listen(address)
    with pytest.raises(AuthenticationError) as caught:
        await worker.connect_retrying(listener.address, PS)
    assert caught.value.message == told
    assert caught.value.hint is not None
    assert "PSYNC_SECRET" in caught.value.hint
    if theirs is OTHER_SECRET:  # nobody can tell it from one that has died half-way
        await wait_deserted(ps)
        (text,) = texts(caplog)
        assert text.startswith(f"{PS}: {WORKER} (")
        assert text.endswith(") left before its handshake was over")


@pytest.mark.virtual_time
async def test_a_connection_that_was_begun_under_an_earlier_incarnation_does_not_open() -> None:
    network = MemoryNetwork()

    def admit(hello: Hello) -> Refused | None:
        worker.incarnation = 5  # it learns that while it waits for the answer
        return None

    ps, worker = await both(network, worker=4, admit=admit)
    with pytest.raises(ConnectFailed, match="begun under incarnation 4, which is 5 by now"):
        await worker.connect("ps0:1", PS)
    assert worker.peers == []
    peer = await worker.connect("ps0:1", PS)
    await settle()
    assert [back.incarnation for back in ps.peers] == [5]
    assert (await peer.call(AskStatistics())).message == Done()


@pytest.mark.virtual_time
async def test_a_fenced_incarnation_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "psync.net.endpoint")

    def admit(hello: Hello) -> Refused | None:
        if hello.incarnation < 5:
            return Refused("fenced", f"incarnation {hello.incarnation} was replaced")
        return None

    network = MemoryNetwork()
    _, worker = await both(network, worker=4, admit=admit)
    with pytest.raises(FencedError) as caught:
        await worker.connect_retrying("ps0:1", PS)
    assert caught.value.message == f"{PS} refused the connection: incarnation 4 was replaced"
    await settle()
    assert texts(caplog) == [f"{PS} refused {WORKER} (client#0): incarnation 4 was replaced"]
    worker.incarnation = 5
    assert (await worker.connect("ps0:1", PS)).is_open


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(4))
async def test_connecting_can_be_cancelled_at_any_point(seed: int) -> None:
    for delay in [step / 100 for step in range(25)]:
        network = MemoryNetwork(seed, latency=(0.01, 0.05))
        ps, worker = await both(network)
        connecting = asyncio.create_task(worker.connect("ps0:1", PS))
        await asyncio.sleep(delay)
        was_done = connecting.done()
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled() is not was_done
        await asyncio.sleep(1)
        assert len(worker.peers) == len(ps.peers) == was_done
        assert ps.statistics()["handshakes"] == 0
        peer = await worker.connect("ps0:1", PS)
        assert (await peer.call(AskStatistics())).message == Done()
        await worker.close()
        await ps.close()


@pytest.mark.virtual_time
async def test_connecting_cancelled_when_it_has_just_succeeded_leaves_nothing_open() -> None:
    network = MemoryNetwork()
    ps, worker = await both(network)
    connecting = asyncio.create_task(worker.connect("ps0:1", PS))
    while not worker.peers:  # noqa: ASYNC110  # the very turn is what matters
        await asyncio.sleep(0)
    assert not connecting.done()
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled()
    await settle()
    assert is_deserted(worker)
    assert is_deserted(ps)


# --- connecting, until it works --------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_task_that_comes_up_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    ps, worker = new_endpoint(network), new_endpoint(network, WORKER)
    connecting = asyncio.create_task(worker.connect_retrying("ps0:1", PS))
    await asyncio.sleep(60)
    await ps.listen("ps0:1")
    peer = await connecting
    assert peer.is_open
    said = texts(caplog)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(said)
    assert 3 <= len(said) <= 5, "less and less often"
    assert said[0] == (
        f"{WORKER} has been waiting for a connection for 5 s: {PS} at ps0:1: connection refused"
    )


@pytest.mark.virtual_time
@pytest.mark.parametrize("seconds", [15, 0])  # 0: one attempt
async def test_waiting_ends_with_the_last_reason(seconds: float) -> None:
    network = MemoryNetwork()
    ps, worker = new_endpoint(network), new_endpoint(network, WORKER)
    loop = asyncio.get_running_loop()
    with pytest.raises(ConnectFailed) as caught:
        await worker.connect_retrying("ps0:1", PS, timeout_s=seconds)
    assert loop.time() == pytest.approx(seconds)
    assert caught.value.message == (
        f"no connection within {seconds} s: {PS} at ps0:1: connection refused"
    )
    assert caught.value.hint == f"is {PS} running, and is this its address?"
    assert isinstance(caught.value.__cause__, ConnectFailed)
    await ps.listen("ps0:1")
    assert (await worker.connect_retrying("ps0:1", PS, timeout_s=seconds)).is_open


@pytest.mark.virtual_time
async def test_waiting_ends_at_any_time_of_the_clock() -> None:
    """What is left of the time may be less than the clock can count."""
    worker = new_endpoint(MemoryNetwork(), WORKER)
    for _ in range(100):
        await asyncio.sleep(0.1)
        with pytest.raises(ConnectFailed):
            await worker.connect_retrying("ps0:1", PS, timeout_s=2)


@pytest.mark.virtual_time
@pytest.mark.parametrize("by", ["cancellation", "closing"])
async def test_waiting_for_another_task_can_be_ended(by: str) -> None:
    worker = new_endpoint(MemoryNetwork(), WORKER)
    connecting = asyncio.create_task(worker.connect_retrying("ps0:1", PS))
    await asyncio.sleep(10)
    if by == "cancellation":
        connecting.cancel()
    else:
        await worker.close()
    await asyncio.wait([connecting])
    assert connecting.cancelled() is (by == "cancellation")
    assert connecting.cancelled() or isinstance(connecting.exception(), ClosedError)
    assert is_deserted(worker)


# --- strangers, and too many of them ---------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_stranger_that_says_nothing_is_left_after_five_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    ps = new_endpoint(network)
    await ps.listen("ps0:1")
    stranger = Recorder()
    await network.connect("ps0:1", lambda: stranger)
    await asyncio.sleep(4.9)
    assert "lost" not in stranger.events
    assert ps.statistics()["handshakes"] == 1
    await asyncio.sleep(0.2)
    assert "lost" in stranger.events
    assert is_deserted(ps)
    assert stranger.received == b"", "it has said nothing, so it is told nothing"
    assert texts(caplog) == [
        f"{PS} lost a stranger (client#0): the handshake was not over within 5 s"
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: ps0\r\n\r\n" * 5, bytes(range(256)) * 9]
)
async def test_garbage_costs_one_clear_line_and_nothing_else(
    place: str, words: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network, address = places(tmp_path)[place]()
    async with connected(network, SERVED, address=address) as pair:
        stranger = Recorder(words)
        await network.connect(pair.address, lambda: stranger)
        await stranger.until_event("lost")
        assert (await pair.peer.call(AskStatistics())).message == Done(), "the task lives on"
    (line,) = texts(caplog)
    assert line.startswith(f"{PS} lost a stranger (")
    assert line.endswith(
        f": expected a psync frame, which starts with b'PSYN', got {words[:4]!r} "
        "(something that is not psync is talking to this port)"
    )
    assert "\n" not in line


@pytest.mark.promise("input.connections-bounded")
@pytest.mark.virtual_time
async def test_only_so_many_strangers_at_once_and_the_oldest_makes_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    network = MemoryNetwork()
    _, worker = await both(network, limits=Limits(handshakes=2))
    strangers = [Recorder() for _ in range(3)]
    for stranger in strangers:
        await network.connect("ps0:1", lambda stranger=stranger: stranger)  # type: ignore[misc]
    await settle()
    assert ["lost" in stranger.events for stranger in strangers] == [True, False, False]
    assert caplog.records[0].levelno == logging.INFO, "it may be a member, which comes again"
    assert texts(caplog) == [
        f"{PS} refused a stranger (client#0): its place was needed for a newer connection"
    ]
    start = asyncio.get_running_loop().time()
    assert (await worker.connect("ps0:1", PS)).is_open
    assert asyncio.get_running_loop().time() == start
    assert ["lost" in stranger.events for stranger in strangers] == [True, True, False]


@pytest.mark.virtual_time
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this machine", "one address"])
async def test_members_that_come_all_at_once_find_places_one_after_the_other(
    elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    network = FromElsewhere() if elsewhere else MemoryNetwork(1, latency=(0.001, 0.005))
    ps = new_endpoint(network, limits=Limits(handshakes=8 if elsewhere else 4))
    await ps.listen("ps0:1")
    workers = [new_endpoint(network, f"/job:worker/task:{n}") for n in range(40)]
    peers = await asyncio.gather(*(w.connect_retrying("ps0:1", PS) for w in workers))
    assert asyncio.get_running_loop().time() < 5
    assert all(peer.is_open for peer in peers)
    assert texts(caplog) == [], "nothing is wrong"
    with pytest.raises(ConnectFailed) as caught:
        await asyncio.gather(*(w.connect("ps0:1", PS, "bulk") for w in workers))
    assert caught.value.message == (
        f"{PS} at ps0:1: the peer refused the connection: its place was needed for a newer "
        "connection"
    )
    for worker in workers:
        await worker.close()


@pytest.mark.virtual_time
async def test_lines_about_strangers_are_limited_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()  # as on a loopback address, whose failures are not limited
    ps = new_endpoint(network)
    await ps.listen("ps0:1")
    for _ in range(100):
        stranger = Recorder(b"x" * 32)
        await network.connect("ps0:1", lambda stranger=stranger: stranger)  # type: ignore[misc]
        await stranger.until_event("lost")
    assert len(texts(caplog)) == 20
    await asyncio.sleep(60)
    assert texts(caplog)[20:] == [
        f"{PS}: 80 more messages about unknown peers in the last minute were suppressed"
    ]
    for _ in range(30):
        stranger = Recorder(b"x" * 32)
        await network.connect("ps0:1", lambda stranger=stranger: stranger)  # type: ignore[misc]
        await stranger.until_event("lost")
    assert len(texts(caplog)) == 41
    await ps.close()
    assert texts(caplog)[41:] == [
        f"{PS}: 10 more messages about unknown peers in the last minute were suppressed"
    ], "what is left out shows at the end, too"


@pytest.mark.parametrize("place", PLACES)
async def test_only_so_many_connections(place: str, tmp_path: Path) -> None:
    network, address = places(tmp_path)[place]()
    ps = new_endpoint(network, limits=Limits(connections=3))
    worker = new_endpoint(network, WORKER)
    listener = await ps.listen(address)
    peers = [await worker.connect(listener.address, PS) for _ in range(3)]
    with pytest.raises(ConnectFailed) as caught:
        await worker.connect(listener.address, PS)
    assert caught.value.message == (
        f"{PS} at {listener.address}: the peer refused the connection: it has 3 connections"
    )
    first = ps.peers[0]
    peers[0].close()
    await first.wait_closed()
    await (await worker.connect(listener.address, PS)).ping()
    assert ps.statistics()["connections"] == 3


async def test_lines_that_are_left_out_are_counted_at_their_own_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ps, worker = await both(MemoryNetwork(), limits=Limits(connections=1))
    await worker.connect("ps0:1", PS)
    for _ in range(25):
        with pytest.raises(ConnectFailed, match="it has 1 connections"):
            await worker.connect("ps0:1", PS)
    await ps.close()
    assert "5 more messages about unknown peers" in texts(caplog)[-1]
    assert {record.levelname for record in caplog.records} == {"INFO"}


# --- addresses from which too many fail -----------------------------------------------------------


async def fail(network: FromElsewhere, count: int, words: bytes = b"x" * 32) -> list[bytes]:
    """Let strangers say something; return what they hear."""
    heard = []
    for _ in range(count):
        stranger = Recorder(words)
        await network.connect("ps0:1", lambda stranger=stranger: stranger)  # type: ignore[misc]
        await settle()
        if not words:
            stranger.transport.close()
        await stranger.until_event("lost")
        heard.append(stranger.received)
    return heard


@pytest.mark.promise("input.connections-bounded")
@pytest.mark.virtual_time
async def test_an_address_from_which_too_many_fail_is_not_heard_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = FromElsewhere()
    ps, worker = await both(network)
    heard = await fail(network, 30)
    assert [words != b"" for words in heard] == [True] * 10 + [False] * 20
    told = texts(caplog)
    assert len(told) == 11  # not one for each
    assert told[-1] == (
        f"{PS}: 10 handshakes with 192.0.2.1 have failed; most connections from there are closed "
        "at once, until that ends"
    )
    assert is_deserted(ps)
    with pytest.raises(ConnectFailed, match=r"connection reset|was closed"):
        await worker.connect("ps0:1", PS)
    network.source = "192.0.2.2"  # others are heard
    assert (await worker.connect("ps0:1", PS)).is_open
    network.source = "192.0.2.1"  # and it is, too, six seconds later
    before = asyncio.get_running_loop().time()
    assert (await worker.connect_retrying("ps0:1", PS)).is_open
    assert 5 <= asyncio.get_running_loop().time() - before <= 12
    # Who proves himself there clears the account.
    assert [words != b"" for words in await fail(network, 12)] == [True] * 10 + [False] * 2


@pytest.mark.virtual_time
@pytest.mark.parametrize("secret", [OTHER_SECRET, None], ids=["another", "none"])
async def test_a_task_with_another_secret_counts_as_failed(secret: Secret | None) -> None:
    network = FromElsewhere()
    ps = new_endpoint(network, limits=Limits(handshake_failures=3))
    worker = new_endpoint(network, WORKER, secret=secret)
    await ps.listen("ps0:1")
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            await worker.connect("ps0:1", PS)
        await settle()
    with pytest.raises(ConnectFailed):
        await worker.connect("ps0:1", PS)


@pytest.mark.virtual_time
@pytest.mark.parametrize("leaves", [False, True], ids=["slow", "leaves"])
async def test_a_stranger_who_says_nothing_counts_as_failed(leaves: bool) -> None:
    network = FromElsewhere()
    ps = new_endpoint(network, limits=Limits(handshake_failures=2, handshake_seconds=2))
    await ps.listen("ps0:1")
    start = asyncio.get_running_loop().time()
    if leaves:
        await fail(network, 2, words=b"")
    else:
        await network.connect("ps0:1", Recorder)
        await network.connect("ps0:1", Recorder)
        await wait_deserted(ps)
        assert asyncio.get_running_loop().time() - start == 2.0
    assert await fail(network, 1) == [b""]


@pytest.mark.virtual_time
@pytest.mark.parametrize("why", ["full", "early", "fenced"])
async def test_peers_that_are_refused_for_another_reason_do_not_count(why: str) -> None:
    """Whoever holds the secret is no stranger, even if he must come again later."""

    def admit(hello: Hello) -> Refused | None:
        return Refused(why, "not now") if hello.incarnation == 1 and why != "full" else None

    network = FromElsewhere()
    limits = Limits(handshake_failures=1, connections=1)
    _, worker = await both(network, limits=limits, admit=admit)
    if why == "full":
        peer = await worker.connect("ps0:1", PS)
    for _ in range(5):
        with pytest.raises((ConnectFailed, FencedError), match=r"not now|it has 1 connections"):
            await worker.connect("ps0:1", PS)
        await settle()
    if why == "full":
        peer.close()
        await settle()
    worker.incarnation = 2
    assert (await worker.connect("ps0:1", PS)).is_open


@pytest.mark.promise("input.connections-bounded")
@pytest.mark.virtual_time
@pytest.mark.parametrize("hosts", [2, 6, 40], ids=lambda hosts: f"{hosts} addresses")
async def test_the_silent_keep_nobody_out_from_however_many_addresses(hosts: int) -> None:
    """They come again as soon as they are dropped, and hold every place they can have."""
    network = FromElsewhere()
    ps, worker = await both(network, limits=Limits(handshakes=8))
    loop = asyncio.get_running_loop()
    for minute in range(3):
        for number in range(80):
            network.source = f"198.51.100.{number % hosts}"
            stranger = Recorder()
            await network.connect("ps0:1", lambda stranger=stranger: stranger)  # type: ignore[misc]
        await settle()
        network.source = "192.0.2.2"
        start = loop.time()
        peer = await worker.connect("ps0:1", PS)
        assert loop.time() == start
        assert ps.statistics()["handshakes"] <= 8
        peer.close()
        await asyncio.sleep(60 * minute + 60 - loop.time())


@pytest.mark.virtual_time
async def test_a_flood_of_strangers_leaves_places_to_addresses_that_have_proved_themselves() -> (
    None
):
    network = FromElsewhere()
    _, worker = await both(network, limits=Limits(handshakes=8))
    network.source = "192.0.2.2"
    (await worker.connect("ps0:1", PS)).close()
    slow = Recorder()  # of the worker's host
    await network.connect("ps0:1", lambda: slow)
    for number in range(200):
        network.source = f"198.51.100.{number}"
        await network.connect("ps0:1", Recorder)
    await settle()
    assert "lost" not in slow.events


# --- closing ---------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_closing_fails_the_calls_and_cancels_the_handlers() -> None:
    ended: list[str] = []

    async def handle(request: Request[Any]) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(3)
            ended.append("handler")
        raise AssertionError

    async with connected(server={AskStatistics: Handler(handle)}) as pair:
        call = asyncio.create_task(pair.peer.call(AskStatistics()))
        await settle()
        await pair.server.close()
        assert ended == ["handler"], "it is waited for"
        await asyncio.wait([call])
        error = call.exception()
        assert isinstance(error, ConnectionLost)
        assert error.message == f"the connection to {PS} was closed"


@pytest.mark.virtual_time
async def test_a_handler_may_close_its_own_endpoint() -> None:
    closed = asyncio.Event()

    async def handle(request: Request[Any]) -> None:
        await pair.server.close()
        closed.set()
        request.answer(Done())

    async with connected(server={AskStatistics: Handler(handle)}) as pair:
        with pytest.raises(ConnectionLost):
            await pair.peer.call(AskStatistics())
        await closed.wait()
        await settle()


@pytest.mark.virtual_time
@pytest.mark.parametrize("reads", [True, False])
async def test_closing_lets_a_peer_read_what_was_said_but_not_for_ever(reads: bool) -> None:
    def values(request: Request[Read]) -> None:
        request.answer(Pulled([]), [bytes(1 << 20)])

    network = MemoryNetwork(chunk=(65_536, 65_536))
    loop = asyncio.get_running_loop()
    async with connected(network, {Read: Handler(values)}) as pair:
        (link,) = network.links()
        link.to_client.stall()
        call = asyncio.create_task(pair.peer.call(Read(0)))
        await settle()
        closing = asyncio.create_task(pair.server.close())
        await settle()
        assert not closing.done()
        if reads:
            link.to_client.flow()
        start = loop.time()
        await closing
        assert loop.time() - start == (0.0 if reads else 1.0)
        link.to_client.flow()
        await asyncio.wait([call])
        if reads:
            assert len(call.result().segments[0]) == 1 << 20
        else:
            assert isinstance(call.exception(), ConnectionLost)


@pytest.mark.virtual_time
async def test_a_closed_endpoint_does_nothing_more() -> None:
    endpoint = new_endpoint(MemoryNetwork())
    await endpoint.listen("ps0:1")
    await endpoint.close()
    await endpoint.close()
    for attempt in (
        endpoint.listen("ps0:2"),
        endpoint.connect("ps0:1", PS),
        endpoint.connect_retrying("ps0:1", PS),
    ):
        with pytest.raises(ClosedError) as caught:
            await attempt  # type: ignore[misc]
        assert caught.value.message == f"{PS} has closed its connections and opens no new ones"


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(5))
async def test_either_side_may_close_in_the_middle_of_a_handshake(seed: int) -> None:
    for delay in [step / 100 for step in range(0, 25, 2)]:
        for side in (0, 1):
            network = MemoryNetwork(seed, latency=(0.01, 0.05))
            ps, worker = await both(network)
            connecting = asyncio.create_task(worker.connect("ps0:1", PS))
            await asyncio.sleep(delay)
            await (ps, worker)[side].close()
            await asyncio.wait([connecting])
            assert isinstance(connecting.exception(), ConnectFailed | ClosedError | None)
            await worker.close()
            await ps.close()
            await asyncio.sleep(1)
            assert not network.links()
            assert is_deserted(ps)
            assert is_deserted(worker)


@pytest.mark.parametrize("place", ["tcp", "unix", "one host", "one host, unix"])
async def test_a_connection_that_arrives_while_we_close_is_left(place: str, tmp_path: Path) -> None:
    loop = type(asyncio.get_running_loop()).__module__
    if "host" not in place and "uvloop" not in loop and sys.version_info < (3, 13):
        pytest.skip("the stock loop forgets what it accepts while its server closes")
    for turns in range(12):
        network, address = places(tmp_path)[place]()
        ps, worker = new_endpoint(network), new_endpoint(network, WORKER)
        listener = await ps.listen(address)
        connecting = asyncio.create_task(worker.connect(listener.address, PS))
        for _ in range(turns):
            await asyncio.sleep(0)
        await ps.close()
        await asyncio.wait([connecting])
        assert isinstance(connecting.exception(), ConnectFailed | None)
        await worker.close()


# --- bookkeeping -----------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_statistics_count_what_connections_have_carried_also_those_that_are_gone() -> None:
    async with connected(server=SERVED) as pair:
        await pair.peer.call(AskStatistics())
        here, there = pair.client.statistics(), pair.server.statistics()
        assert here["connections"] == there["connections"] == 1
        assert here["bytes_sent"] == there["bytes_received"] > 200
        assert here["bytes_received"] == there["bytes_sent"] > 100
        pair.peer.close()
        await pair.peer.wait_closed()
        assert pair.client.statistics() == {**here, "connections": 0}


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_ended", [False, True], ids=["breaks", "is ended"])
async def test_an_open_connection_that_breaks_is_logged_by_who_found_out_unless_he_ended_it(
    is_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as pair:
        end = pair.peer.abort if is_ended else pair.peer.fail
        end(ConnectionLost("nonsense came"))
        await pair.peer.wait_closed()
        await pair.back.wait_closed()
    assert texts(caplog) == ([] if is_ended else [f"{WORKER} lost {PS} (ps0:1): nonsense came"])


@pytest.mark.virtual_time
async def test_a_listener_for_peers_that_fails_costs_that_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    ps, worker = new_endpoint(network), new_endpoint(network, WORKER)

    def fail(peer: Connection) -> None:
        raise ZeroDivisionError("oops")

    ps.on_peer.append(fail)
    await ps.listen("ps0:1")
    with contextlib.suppress(ConnectFailed):  # or it opens, and is closed in the same turn
        peer = await worker.connect("ps0:1", PS)
        await peer.wait_closed()
    assert texts(caplog) == [f"a message of {WORKER} failed"]
    assert caplog.records[0].exc_info is not None
