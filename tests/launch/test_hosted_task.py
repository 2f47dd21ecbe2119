"""A task in a thread of a process that is not its own, and a network of tasks that have moved."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ports import claimed_ports
from psync.errors import ConfigurationError
from psync.launch.hosted_task import HostedTask, MovedTasks, Order, join_address
from psync.net.transport import SocketNetwork

SECRET = b"correct horse battery staple"


def order(job: str = "ps", name: str | None = None, names: list[str] | None = None) -> Order:
    return Order(job, 0, SECRET, name, names or [], {}, {"PSYNC_LAUNCHED": "1"})


async def knocks(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_it_listens_on_the_interface_that_it_is_given_until_it_is_stopped() -> None:
    task = HostedTask(order(), "127.0.0.7")
    address = await task.begin()
    assert address.startswith("127.0.0.7:")
    assert await knocks(address)
    assert not task.has_ended
    await task.stop()
    assert (task.has_ended, await task.ended()) == (True, "")
    assert not await knocks(address)


async def test_a_worker_leaves_and_one_that_is_stopped_at_once_ends() -> None:
    worker = HostedTask(order("worker"), "127.0.0.1")
    await worker.begin()
    await worker.leave()
    assert await worker.ended() == ""
    await worker.leave()  # it has left
    hasty = HostedTask(order(), "127.0.0.1")
    beginning = asyncio.ensure_future(hasty.begin())
    await asyncio.sleep(0)
    await hasty.stop()
    await beginning
    assert await hasty.ended() == ""


async def test_a_task_that_cannot_listen_says_where() -> None:
    task = HostedTask(order(), "192.0.2.77")
    with pytest.raises(ConfigurationError, match=r"ps-0 cannot listen on 192\.0\.2\.77"):
        await task.begin()
    assert task.has_ended
    assert "cannot listen" in await task.ended()


async def test_it_does_not_listen_at_the_name_of_another_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with claimed_ports(1) as (port,):
        create, ports = socket.create_server, [port, 0]
        monkeypatch.setattr(
            socket, "create_server", lambda at, **more: create((at[0], ports.pop(0)), **more)
        )
        task = HostedTask(order(names=[f"127.0.0.1:{port}"]), "127.0.0.1")
        assert await task.begin() != f"127.0.0.1:{port}"
    assert ports == []
    await task.stop()


def test_an_order_shows_no_secret() -> None:
    assert "correct" not in f"{order()!r} {(order(),)}"


async def test_a_name_leads_to_where_the_task_is_now() -> None:
    network = MovedTasks(SocketNetwork(), "127.0.0.9", {})

    class Silent(asyncio.BufferedProtocol):
        def get_buffer(self, sizehint: int) -> bytearray:
            return bytearray(64)

    listener = await network.listen("192.0.2.1:0", Silent)
    assert listener.address.startswith("127.0.0.9:")  # here, and not where its name says
    network.places = {"192.0.2.1:4711": listener.address}
    transport, _ = await network.connect("192.0.2.1:4711", Silent)
    host, port = transport.get_extra_info("peername")
    assert f"{host}:{port}" == listener.address
    transport.close()
    listener.close()
    await listener.wait_closed()


def test_addresses_of_both_families() -> None:
    assert join_address("10.0.0.1", 80) == "10.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"
