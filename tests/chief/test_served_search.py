"""Where a chief that comes back finds the ps tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asked import Reply
from inside import handlers_of, host_of
from memory_cluster import MemoryCluster, cluster_of
from ps_cluster import heard
from psync.chief.enquiry import ServedSearch
from psync.cluster import CHIEF
from psync.errors import FencedError, RemoteProtocolError
from psync.net.connection import Handler
from psync.net.endpoint import Endpoint
from psync.wire.messages import AskServed, Done, EndFormer, LogTaken

pytestmark = pytest.mark.virtual_time

NUMBER = 1 << 40


@asynccontextmanager
async def searching(
    cluster: MemoryCluster, refused: Any = None
) -> AsyncIterator[tuple[ServedSearch, Endpoint]]:
    """A search by a chief that was granted ``NUMBER``."""

    async def too_late(*_: object) -> None:
        raise FencedError("a newer coordinator has come")

    endpoint = Endpoint(cluster.platform(host="chief-0"), CHIEF, NUMBER, {})
    processes = {f"/job:ps/task:{ps}": f"ps-{ps}:1" for ps in range(cluster.counts["ps"])}
    try:
        yield ServedSearch(endpoint, processes, refused or too_late, may_move=True), endpoint
    finally:
        await endpoint.close()


def answer_with(cluster: MemoryCluster, name: str, kind: Any, run: Any) -> None:
    handlers_of(cluster.tasks[name])[kind] = Handler(run)


async def test_who_does_not_answer_is_waited_for_and_named() -> None:
    async with cluster_of(2, 0) as cluster, searching(cluster) as (search, _):
        await cluster.stop("ps-1")
        running = asyncio.create_task(search.run())
        await asyncio.sleep(3)
        assert search.missing() == "/job:ps/task:1 at ps-1:1"
        await cluster.start("ps-1")
        assert len(await running) == 2


async def test_a_question_whose_connection_is_lost_is_asked_again() -> None:
    async with cluster_of(2, 0) as cluster, searching(cluster) as (search, _):
        for kind, ask in ((AskServed, search.run), (EndFormer, search.end_former)):
            handlers = handlers_of(cluster.tasks["ps-1"])
            before = handlers[kind]

            async def lose(*_: object) -> Reply:
                cluster.network.cut("ps-1:1")
                handlers[kind] = before  # noqa: B023
                return Reply(Done())

            answer_with(cluster, "ps-1", kind, lose)
            await ask()
            assert handlers[kind] is before


async def test_under_a_number_that_is_too_low_all_are_asked_again_under_a_higher_one() -> None:
    async with cluster_of(2, 0) as cluster:
        asked: list[tuple[int, str, str]] = []

        async def ask_again(*refused: Any) -> None:
            asked.append(refused)
            endpoint.incarnation = 2 * NUMBER

        host_of(cluster.tasks["ps-1"]).fence(NUMBER + 1)
        first = heard(cluster.tasks["ps-0"], AskServed)
        async with searching(cluster, ask_again) as (search, endpoint):
            await search.run()
        assert asked == [(NUMBER, "/job:ps/task:1", "ps-1:1")]
        assert len(first) == 2
        assert cluster.tasks["ps-0"].newest == 2 * NUMBER


async def test_who_is_too_late_is_told() -> None:
    async with cluster_of(2, 0) as cluster, searching(cluster) as (search, _):
        host_of(cluster.tasks["ps-1"]).fence(NUMBER + 1)
        with pytest.raises(FencedError):
            await search.run()
        with pytest.raises(FencedError):
            await search.end_former()


async def test_another_answer_is_nonsense() -> None:
    async with cluster_of(2, 0) as cluster, searching(cluster) as (search, _):
        for kind in (AskServed, EndFormer):
            answer_with(cluster, "ps-0", kind, lambda request: request.answer(LogTaken(1)))
        with pytest.raises(RemoteProtocolError, match="answered AskServed with LogTaken"):
            await search.run()
        with pytest.raises(RemoteProtocolError, match="answered EndFormer with LogTaken"):
            await search.end_former()
