"""Sockets: listening, connecting, and why it did not work."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from endpoints import connected, new_endpoint, places, transport_of, wait_deserted
from ports import claimed_ports
from psync.errors import ConfigurationError
from psync.net.transport import (
    UNIX_BUFFER_BYTES,
    USER_TIMEOUT_MS,
    SocketNetwork,
    reason,
    set_options,
)
from recorder import Accepting, Recorder


async def greeted(network: SocketNetwork, address: str) -> bytes:
    """Connect, and return the first thing that is heard."""
    _, peer = await network.connect(address, Recorder)
    assert isinstance(peer, Recorder)
    await peer.until_event("data")
    peer.transport.close()
    await peer.until_event("lost")
    return bytes(peer.received)


def greeting(words: bytes = b"hello") -> Accepting:
    return Accepting(lambda: Recorder(words))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
async def test_port_0_becomes_the_port_that_was_bound(host: str) -> None:
    network, greeters = SocketNetwork(), greeting()
    listener = await network.listen(f"{host}:0", greeters)
    name, _, port = listener.address.rpartition(":")
    assert name == host
    assert int(port) > 0
    assert await greeted(network, listener.address) == b"hello"
    await greeters.wait_lost()
    listener.close()
    await listener.wait_closed()


async def test_an_empty_host_listens_on_all_interfaces() -> None:
    network, greeters = SocketNetwork(), greeting()
    with claimed_ports(1) as (port,):
        listener = await network.listen(f":{port}", greeters)
    assert listener.address == f":{port}"
    assert await greeted(network, f"127.0.0.1:{port}") == b"hello"
    await greeters.wait_lost()
    listener.close()
    await listener.wait_closed()


def test_a_reason_without_a_number_is_told_in_its_own_words() -> None:
    assert reason(OSError("Multiple exceptions: …")) == "Multiple exceptions: …"


async def test_what_is_no_address_is_refused() -> None:
    for attempt in (SocketNetwork().listen, SocketNetwork().connect):
        with pytest.raises(ConfigurationError, match="expected a port"):
            await attempt("nowhere", Recorder)


# --- sockets that a launcher passed on -------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_socket_that_was_passed_on_is_taken_over(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "ps0"
    if kind == "tcp":
        bound = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    else:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(path))
        bound.listen()
        address = f"unix:{path}"
    network, greeters = SocketNetwork({address: bound}), greeting()
    early = asyncio.ensure_future(greeted(network, address))  # before the task listens
    listener = await network.listen(address, greeters)
    assert listener.address == address
    assert await early == b"hello"
    await greeters.wait_lost()
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await network.connect(address, Recorder)
    assert kind == "tcp" or path.exists(), "it is its launcher's"


# --- Unix sockets ----------------------------------------------------------------------------


async def test_a_unix_socket_is_for_its_owner_alone_and_goes_with_the_listener(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ps0"
    network, greeters = SocketNetwork(), greeting()
    listener = await network.listen(f"unix:{path}", greeters)
    assert listener.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await greeted(network, listener.address) == b"hello"
    await greeters.wait_lost()
    listener.close()
    assert not path.exists()
    listener.close()
    await listener.wait_closed()


async def test_a_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    listener = await SocketNetwork().listen(f"unix:{tmp_path}/ps0", Recorder)
    (tmp_path / "ps0").unlink()
    listener.close()
    await listener.wait_closed()


async def test_what_a_dead_task_left_behind_makes_way(tmp_path: Path) -> None:
    path = tmp_path / "ps0"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    network, greeters = SocketNetwork(), greeting()
    listener = await network.listen(f"unix:{path}", greeters)
    assert await greeted(network, listener.address) == b"hello"
    await greeters.wait_lost()
    listener.close()
    await listener.wait_closed()


async def test_a_unix_socket_with_a_full_backlog_is_alive(tmp_path: Path) -> None:
    path = str(tmp_path / "ps0")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting: list[socket.socket] = []
        while True:
            sock = socket.socket(socket.AF_UNIX)
            waiting.append(sock)
            sock.setblocking(False)
            try:
                sock.connect(path)
            except BlockingIOError:
                break
        with pytest.raises(OSError, match="in use"):
            await SocketNetwork().listen(f"unix:{path}", Recorder)
        for sock in waiting:
            sock.close()


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("ps0", Path.touch, errno.EADDRINUSE),
        ("ps0", Path.mkdir, errno.EADDRINUSE),
        ("nowhere/ps0", None, errno.ENOENT),
    ],
)
async def test_what_is_no_socket_is_an_error_and_never_removed(
    tmp_path: Path, name: str, make: Callable[[Path], None] | None, error: int
) -> None:
    path = tmp_path / name
    if make is not None:
        make(path)
    with pytest.raises(OSError, match=r"in use|No such file") as caught:
        await SocketNetwork().listen(f"unix:{path}", Recorder)
    assert caught.value.errno == error
    assert path.exists() is (make is not None)


async def test_a_listener_that_could_not_start_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, mode: int) -> None:
        raise PermissionError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "chmod", fail)
    with pytest.raises(PermissionError):
        await SocketNetwork().listen(f"unix:{tmp_path}/ps0", Recorder)
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as wrong:
        with pytest.raises((ValueError, OSError)):
            await SocketNetwork({f"unix:{tmp_path}/ps1": wrong}).listen(
                f"unix:{tmp_path}/ps1", Recorder
            )


# --- options of connections ---------------------------------------------------------------------


async def test_the_kernel_is_asked_to_find_dead_hosts() -> None:
    async with connected(SocketNetwork(), address="127.0.0.1:0") as pair:
        for peer in (pair.peer, pair.back):
            sock = transport_of(peer).get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            host, port = peer.peername.rsplit(":", 1)
            assert host == "127.0.0.1"
            assert int(port) > 0


def test_what_a_system_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    with socket.socket() as sock:
        set_options(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4


async def test_unix_sockets_get_room(tmp_path: Path) -> None:
    network, address = places(tmp_path)["unix"]()
    async with connected(network, address=address) as pair:
        sock = transport_of(pair.peer).get_extra_info("socket")
        with socket.socket(socket.AF_UNIX) as untouched:
            default = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            untouched.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
            most = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == most >= default
        assert pair.back.peername == "a Unix socket"


async def test_a_peer_that_is_gone_at_once_does_no_harm() -> None:
    """It has reset the connection by the time that is accepted, or its options are set."""
    accepted = asyncio.Semaphore(0)

    def nonce(nbytes: int) -> bytes:
        accepted.release()
        return bytes(nbytes)

    endpoint = new_endpoint(SocketNetwork(), random_bytes=nonce)
    listener = await endpoint.listen("127.0.0.1:0")
    port = int(listener.address.rsplit(":", 1)[1])
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(100):
        await accepted.acquire()
    await wait_deserted(endpoint)
    await endpoint.close()
