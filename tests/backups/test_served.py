"""What a process says of itself to the next coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backups import W, back_up, create, promote, say, take_over
from inside import is_deposed
from memory_cluster import until
from ps_cluster import CHIEF, PsCluster, assign, pull
from psync.client.ps_client import PsClient
from psync.errors import FencedError, UsageError
from psync.ps.succession import RANGE
from psync.store.reattach import Holding
from psync.wire.codec import Message
from psync.wire.messages import (
    AskServed,
    AttachPs,
    BackUp,
    DescribeShards,
    Done,
    EndFormer,
    Promote,
    ServedHere,
)

FIRST = 100  # incarnation of the coordinator that there is at first
NEXT = FIRST + RANGE


async def ask(client: PsClient, ps: int, message: Message) -> Any:
    return (await client.links[ps].call(lambda _: message)).message


async def served(client: PsClient, ps: int) -> tuple[list[Any], list[Any]]:
    """What a process says of itself."""
    answer = await ask(client, ps, AskServed())
    assert isinstance(answer, ServedHere)
    return [tuple(each) for each in answer.primaries], [tuple(each) for each in answer.copies]


def served_at(cluster: PsCluster) -> str:
    """Where the backup of ps 0 serves."""
    return cluster.chief.links[0].address


async def attach(client: PsClient, ps: int, incarnation: int) -> None:
    await ask(client, ps, AttachPs(incarnation, ["ps0:1", "ps1:1"], 15.0, keep=True))


async def test_one_that_was_replaced_is_not_told_and_of_no_life() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        worker = cluster.client()
        await promote(cluster)
        adding = asyncio.create_task(assign(worker, w, W, "add"))
        await until(lambda: is_deposed(cluster.ps[0]))
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        newer = cluster.client(CHIEF, NEXT)
        assert await served(newer, 0) == ([], [])
        await attach(newer, 0, NEXT)
        received = await newer.links[0].call(lambda _: DescribeShards())
        assert Holding.from_bytes(b"".join(received.segments)).lineage == 0


async def test_from_the_question_on_no_backup_of_before_is_made_or_begins_to_serve() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        newer = cluster.client(CHIEF, NEXT)
        await ask(newer, 1, AskServed())
        with pytest.raises(FencedError, match="serves a newer coordinator"):
            await say(cluster, 1, Promote(0, 9, FIRST, []))
        with pytest.raises(UsageError, match="serves a newer coordinator"):
            await say(cluster, 0, BackUp(2, "/job:ps/task:1", "ps1:1", False))
        (value,) = await pull(cluster.chief, w)  # for it was not replaced
        assert value.tobytes() == W.tobytes()


async def test_a_backup_that_cannot_be_reached_under_a_newer_coordinator_replaces_nobody() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        newer = cluster.client(CHIEF, NEXT)
        await attach(newer, 1, NEXT)  # its process refuses all that comes from before
        with pytest.raises(Exception, match="its backup is not complete"):
            await say(cluster, 0, BackUp(2, "/job:ps/task:1", "ps1:1", False))
        assert not is_deposed(cluster.ps[0])
        (value,) = await pull(cluster.chief, w)
        assert value.tobytes() == W.tobytes()


async def test_the_end_takes_what_was_replaced_and_spares_what_was_attached() -> None:
    """ps 0 serves twice: at home, where nobody knows, and as a backup that was promoted."""
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        await take_over(cluster)
        newer = cluster.client(CHIEF, NEXT)
        home = cluster.client(CHIEF, NEXT)
        newer.links[0].address = served_at(cluster)
        for ps in (0, 1):
            await attach(newer, ps, NEXT)
        for ps in (0, 1):
            assert await ask(home, ps, EndFormer()) == Done()
        assert await served(home, 0) == ([], [])
        assert [each[:3] for each in (await served(home, 1))[0]] == [
            (0, served_at(cluster), NEXT),
            (1, "", NEXT),
        ]
        await until(lambda: not cluster.ps[0].statistics()["store"]["shards"])
        await attach(newer, 0, NEXT)  # it is there


@pytest.mark.parametrize("message", [AskServed(), EndFormer()])
async def test_an_earlier_coordinator_and_others_are_refused(message: Message) -> None:
    async with PsCluster(2) as cluster:
        await ask(cluster.client(CHIEF, NEXT), 1, AskServed())
        with pytest.raises(FencedError, match="serves a newer coordinator"):
            await ask(cluster.chief, 1, message)
        with pytest.raises(UsageError, match="is not a coordinator"):
            await ask(cluster.client(), 1, message)
