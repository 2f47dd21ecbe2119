"""Tasks in processes of an engine, and psync run --on; with Ray and Dask: test_ray, test_dask."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import psync
from psync.cli.main import main
from psync.errors import ConfigurationError
from psync.integrations import engines
from psync.integrations.engines import (
    HostedTask,
    MovedTasks,
    Order,
    SeatLost,
    TasksOnEngine,
)
from psync.launch.cluster import Host, TaskCluster
from psync.net.transport import SocketNetwork
from psync.testing import settle

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


class ThreadSeat:
    """A seat in this process, which can be lost."""

    def __init__(self) -> None:
        self.task: HostedTask | None = None
        self.orders: list[Order] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()  # where it listens, each time
        self.lost = asyncio.Event()
        self.is_gone_for_good = False

    async def begin(self, order: Order) -> str:
        if self.is_gone_for_good:
            raise SeatLost("nobody sits here any more", is_final=True)
        self.lost.clear()
        self.orders.append(order)
        self.task = HostedTask(order, "127.0.0.1")
        address = await self.task.begin()
        self.begun.put_nowait(address)
        return address

    async def ended(self) -> str:
        assert self.task is not None
        waits = [asyncio.ensure_future(w) for w in (self.lost.wait(), self.task.ended())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self.lost.is_set():
            raise SeatLost("its process was killed")
        return self.task.done.result()

    async def know(self, places: Mapping[str, str]) -> None:
        assert self.task is not None
        self.task.know(places)

    async def leave(self) -> None:
        assert self.task is not None
        await self.task.leave()

    async def close(self) -> None:
        assert self.task is not None
        await self.task.stop()

    async def abandon(self) -> None:
        pass

    async def lose(self) -> None:
        """Let the process be gone, from one moment to the next."""
        assert self.task is not None
        self.lost.set()
        await self.task.stop()


class ThreadEngine:
    chief = "127.0.0.1"

    def __init__(self) -> None:
        self.seats: dict[tuple[str, int], ThreadSeat] = {}

    async def check(self, num_workers: int) -> None:
        if num_workers > 5:
            raise ConfigurationError("there are five chairs")

    async def seat(self, job: str, index: int) -> ThreadSeat:
        seat = self.seats[job, index] = ThreadSeat()
        return seat


class ThreadCluster(TaskCluster):
    """A cluster on that engine."""

    def __init__(self, num_ps: int, num_workers: int, max_restarts: int = 3) -> None:
        super().__init__(num_ps, num_workers, ())
        self.engine = ThreadEngine()
        self._max_restarts = max_restarts

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        host = TasksOnEngine(self.engine, {"PSYNC_LIMIT_CONNECTIONS": "99"}, self._max_restarts)
        resources.push_async_callback(host.close)
        return host


@contextlib.asynccontextmanager
async def counting(
    cluster: ThreadCluster, **options: str
) -> AsyncIterator[tuple[psync.ClusterCoordinator, psync.Variable]]:
    """A coordinator and a variable, one shard of which is on each ps."""
    strategy = psync.ParameterServerStrategy(None, psync.FixedShardsPartitioner(2), **options)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros(4), name="v")
        yield coordinator, v


async def count(coordinator: psync.ClusterCoordinator, v: psync.Variable, times: int) -> None:
    async def step() -> None:
        await v.assign_add(np.ones(4))

    for _ in range(times):
        coordinator.schedule(step)
    await coordinator.join()


async def test_tasks_train_where_the_engine_runs_them() -> None:
    with pytest.raises(ConfigurationError, match=r"^PSYNC_CHIEF_TIMEOUT"):
        TasksOnEngine(ThreadEngine(), {"PSYNC_CHIEF_TIMEOUT": "-3"}, 3)
    async with ThreadCluster(2, 2) as cluster, counting(cluster) as (coordinator, v):
        await count(coordinator, v, 20)
        assert (await v.read() == 20).all()
        spec = cluster.resolver.cluster_spec()
        for seat, address in (
            (cluster.engine.seats["ps", 1], spec.task_address("ps", 1)),
            (cluster.engine.seats["worker", 0], spec.task_address("worker", 0)),
        ):
            [order] = seat.orders
            assert order.name is None
            assert order.environ["PSYNC_LIMIT_CONNECTIONS"] == "99"
            assert address.startswith("127.0.0.1:")
        assert f"runs at {address}" in cluster._repr_html_()


async def test_a_ps_that_is_begun_elsewhere_is_found_there_and_counts_are_exact() -> None:
    async with (
        ThreadCluster(2, 2) as cluster,
        counting(cluster, ps_recovery="backup") as (coordinator, v),
    ):
        await count(coordinator, v, 10)
        before = cluster.resolver.cluster_spec().task_address("ps", 1)
        seat = cluster.engine.seats["ps", 1]
        assert await seat.begun.get() == before
        await seat.lose()
        await count(coordinator, v, 10)
        assert (await v.read() == 20).all()
        assert await seat.begun.get() != before
        again = cluster.engine.seats["ps", 1].orders[1]
        assert again.name == before  # all know it by this
        await count(coordinator, v, 10)
        assert (await v.read() == 30).all()
        assert cluster.resolver.cluster_spec().task_address("ps", 1) == before


async def test_workers_come_and_leave_by_scale() -> None:
    async with ThreadCluster(1, 1) as cluster, counting(cluster) as (coordinator, v):
        await cluster.scale(3)
        await count(coordinator, v, 10)
        await cluster.scale(1)
        await count(coordinator, v, 10)
        assert (await v.read() == 20).all()
        assert cluster.engine.seats["worker", 2].task.done.result() == ""
        with pytest.raises(ConfigurationError, match="five chairs"):
            await cluster.scale(6)


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_a_task_that_is_lost_too_often_is_given_up(max_restarts: int) -> None:
    async with ThreadCluster(1, 2, max_restarts) as cluster:
        address = cluster.resolver.cluster_spec().task_address("worker", 1)
        given_up, seat = cluster.resolver.platform.given_up, cluster.engine.seats["worker", 1]
        gone: asyncio.Queue[str] = asyncio.Queue()
        given_up.listen(lambda at, reason: gone.put_nowait(f"{at}: {reason}"))
        for _ in range(max_restarts + 1):
            await seat.begun.get()
            await settle()
            await seat.lose()
        said = await gone.get()
        assert said.startswith(f"{address}: its process was killed, and is not started again (")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('never')")
    return str(path)


@pytest.mark.parametrize(
    "option", [["--evaluator"], ["--quiet"], ["--chief-restarts", "2"], ["--report", "x.html"]]
)
def test_what_needs_a_launcher_is_refused(
    script: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "ray", *option, script]) == 2
    assert "--on does not support --evaluator" in capsys.readouterr().err


def test_an_address_needs_an_engine(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--address", "head:6379", script]) == 2
    assert "--address needs --on ray or --on dask" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_an_engine_that_is_not_installed_is_named(
    script: str,
    engine: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == package else found(name))
    assert main(["run", "--on", engine, script]) == 2
    said = capsys.readouterr().err
    assert f"--on {engine} needs the package {package}, which is not installed here" in said
    assert f"pip install 'psync[{engine}]'" in said
