"""Training sessions as ps 0 serves them, seen by clients."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asked import Asked
from endpoints import PS, connected
from ps_by_hand import COORDINATOR, A, PsByHand
from ps_cluster import CHIEF, OTHER, WORKER, PsCluster, assign
from psync.client.ps_client import PsClient
from psync.cluster_roles import ENQUIRER
from psync.compat.session_members import GRACE_S
from psync.compat.session_service import SessionService, check_shards
from psync.errors import (
    ConfigurationError,
    ConnectionLost,
    FencedError,
    UsageError,
)
from psync.net.connection import Connection
from psync.specs import ShardSpec
from psync.store.store import ShardStore
from psync.sync.staleness_service import ClockService
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStatistics,
    AwaitEnd,
    CheckShards,
    Declared,
    Done,
    EndTraining,
    EnterSession,
    LeaveSession,
    ReplicaFailed,
    SessionEntered,
    Statistics,
    TrainingOver,
)

OPEN = Declared(False, 0)


async def ask(client: PsClient, message: Message) -> Message:
    return (await client.links[0].call(lambda _: message)).message


def later(client: PsClient, message: Message) -> asyncio.Task[Message]:
    return asyncio.get_running_loop().create_task(ask(client, message))


async def session_of(client: PsClient) -> dict[str, object]:
    statistics = await ask(client, AskStatistics())
    assert isinstance(statistics, Statistics)
    return statistics.counters["session"]


async def enter(cluster: PsCluster, task: str = WORKER) -> PsClient:
    """Enter as a worker; return the client that it has then."""
    answer = await ask(cluster.client(task, ENQUIRER), EnterSession(50))
    assert isinstance(answer, SessionEntered)
    client = cluster.client(task, answer.incarnation)
    for link in client.links:
        await link.peer("control")
    return client


async def test_the_chief_hears_when_all_its_workers_are_there() -> None:
    async with PsCluster() as cluster:
        opening = later(cluster.chief, Declared(False, 2))
        first = later(cluster.client(WORKER, ENQUIRER), EnterSession(50))
        while (await session_of(cluster.chief)).get("asking") != [WORKER]:
            pass
        assert not opening.done()
        second = later(cluster.client(OTHER, ENQUIRER), EnterSession(50))
        assert await opening == Done()
        assert [await first, await second] == [SessionEntered(101)] * 2


async def test_a_worker_that_stops_waiting_is_forgotten() -> None:
    async with PsCluster() as cluster:
        entering = later(cluster.client(WORKER, ENQUIRER), EnterSession(50))
        while (await session_of(cluster.chief)).get("asking") != [WORKER]:
            pass
        entering.cancel()
        while (await session_of(cluster.chief))["asking"]:
            pass


async def test_only_workers_enter_and_only_the_chief_declares() -> None:
    ps = PsByHand()
    endpoint: Any = SimpleNamespace(peers=[], on_peer=[])
    check = ps.peer(COORDINATOR)

    def check_coordinator(peer: Connection) -> None:
        if peer is not check:
            raise FencedError(f"{peer.task} is not the coordinator that it serves")

    handlers = SessionService(endpoint, lambda: ps.services, check_coordinator).handlers()

    async def said(peer: Any, message: Message) -> None:
        served = handlers[type(message)].run(Asked(peer, message))
        if inspect.isawaitable(served):
            await served

    with pytest.raises(UsageError, match="/job:chief/task:0 is not a worker"):
        await said(check, EnterSession(50))
    with pytest.raises(FencedError):
        await said(ps.peer(A), OPEN)
    older = ps.peer((CHIEF, 99))
    for message in (OPEN, EndTraining("", False), LeaveSession()):
        with pytest.raises(FencedError, match="is not the coordinator that it serves"):
            await said(older, message)


@pytest.mark.virtual_time
async def test_a_chief_that_is_gone_before_its_declaration_is_dealt_with_is_lost() -> None:
    async with connected() as pair:
        services = SimpleNamespace(
            coordinator=pair.back.incarnation, closer=None,
            clocks=ClockService(PS, lambda *_: None, frozenset),
        )  # fmt: skip
        service = SessionService(pair.server, lambda: cast(Any, services), lambda peer: None)
        answer = service.handlers()[Declared].run(Asked(pair.back, OPEN))
        pair.peer.abort()
        await pair.back.wait_closed()
        assert inspect.isawaitable(answer)
        await answer
        await asyncio.sleep(GRACE_S + 1)
    assert service.statistics()["over"] == f"the chief, {pair.back.task}, was lost"
    service.close()


async def test_sessions_are_the_business_of_ps_0() -> None:
    async with PsCluster(2) as cluster:
        peer = await cluster.client().links[1].peer("control")
        with pytest.raises(ConnectionLost):
            await peer.call(EnterSession(50))


@pytest.mark.virtual_time
async def test_who_has_no_connection_for_a_while_is_fenced_on_every_ps() -> None:
    async with PsCluster(2) as cluster:
        values = [await cluster.create(name, np.zeros(2, np.float32)) for name in "ab"]
        await ask(cluster.chief, OPEN)
        worker, other = await enter(cluster), await enter(cluster, OTHER)
        cut_off = worker.links[1]  # it goes on talking to the other ps
        await worker.links[0].close()
        await asyncio.sleep(GRACE_S - 1)
        assert (await session_of(cluster.chief))["missing"] == []
        await asyncio.sleep(2)
        session = await session_of(cluster.chief)
        assert (session["members"], session["missing"]) == ([OTHER], [WORKER])
        plan = worker.plan((values[1],))
        assert plan.requests[0].ps == cut_off.index
        with pytest.raises(FencedError):
            await assign(worker, values[1], np.ones(2, np.float32))
        await assign(other, values[1], np.ones(2, np.float32))


@pytest.mark.virtual_time
async def test_one_of_several_connections_may_go() -> None:
    async with PsCluster() as cluster:
        await ask(cluster.chief, OPEN)
        worker = await enter(cluster)
        bulk = await worker.links[0].peer("bulk")
        bulk.close()
        await asyncio.sleep(GRACE_S + 1)
        assert (await session_of(cluster.chief))["members"] == [WORKER]


async def test_the_end_reaches_all_and_the_chief_waits_for_those_who_are_left() -> None:
    async with PsCluster() as cluster:
        await ask(cluster.chief, OPEN)
        worker, other = await enter(cluster), await enter(cluster, OTHER)
        watching = later(other, AwaitEnd())
        assert await ask(worker, EndTraining("step 5 is reached", False)) == Done()
        assert await watching == TrainingOver("step 5 is reached", False, None)
        leaving = later(cluster.chief, LeaveSession())
        await ask(worker, LeaveSession())
        assert not leaving.done()
        await ask(other, LeaveSession())
        assert await leaving == TrainingOver("step 5 is reached", False, None)


async def test_the_error_by_which_a_replica_leaves_ends_training_and_reaches_the_chief() -> None:
    error = ("NameError", "name 'typo' is not defined", "Traceback …")
    over = TrainingOver(f"{WORKER} failed: NameError: {error[1]}", True, (WORKER, *error))
    async with PsCluster() as cluster:
        await ask(cluster.chief, OPEN)
        worker, other = await enter(cluster), await enter(cluster, OTHER)
        watching = later(other, AwaitEnd())
        assert await ask(worker, ReplicaFailed(*error)) == Done()
        received = await watching
        assert isinstance(received, TrainingOver)
        assert (received.reason, received.failed) == (over.reason, over.failed)
        assert received.error is not None
        assert tuple(received.error) == over.error
        await ask(other, LeaveSession())
        assert (await session_of(cluster.chief))["over"] == over.reason
        assert await ask(cluster.chief, LeaveSession()) == received


# --- declarations ------------------------------------------------------------------------------


def store_with(*specs: ShardSpec) -> ShardStore:
    store = ShardStore("/job:ps/task:0")
    for spec in specs:
        store.create(spec)
    return store


HELD = ShardSpec("w", 0, 0, 0, (2, 3), "float32", 0)


def test_what_the_chief_has_declared_too_is_right() -> None:
    said = CheckShards([("w", 0, 0, 0, [2, 3], "float32")])
    check_shards(store_with(HELD), said)


@pytest.mark.parametrize(
    "other",
    [
        ("v", 0, 0, 0, [2, 3], "float32"),
        ("w", 0, 0, 2, [2, 3], "float32"),
        ("w", 0, 0, 0, [3, 2], "float32"),
        ("w", 0, 0, 0, [2, 3], "float64"),
    ],
    ids=["name", "offset", "shape", "dtype"],
)
def test_another_declaration_than_the_chiefs_is_an_error(
    other: tuple[str, int, int, int, list[int], str],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_shards(store_with(HELD), CheckShards([other]))
    name, _, _, _, shape, dtype = other
    assert str(caught.value) == (
        'the chief has declared variable "w" (float32, shard 0 of shape (2, 3)), but this task '
        f'declared variable "{name}" ({dtype}, shard 0 of shape {tuple(shape)})\nhint: every task '
        "must declare the same variables in the same order, before its session"
    )


def test_what_the_chief_has_not_declared_is_an_error() -> None:
    said = CheckShards([("more", 1, 0, 0, [2], "float32")])
    with pytest.raises(ConfigurationError, match='did not declare variable "more"'):
        check_shards(store_with(HELD), said)
