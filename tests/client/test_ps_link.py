from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from asked import frame_of
from inside import endpoint_of
from ps_cluster import PsCluster, pull
from psync.client import ps_link
from psync.client.ps_link import Call, always, expect, together
from psync.errors import (
    LocalProtocolError,
    ParameterServerLost,
    RemoteProtocolError,
)
from psync.net.connection import Connection
from psync.wire.codec import Message
from psync.wire.messages import AskStatistics, Done, Pull, Pulled, Statistics

pytestmark = pytest.mark.asyncio


class TestLost:
    async def test_a_loop_that_stood_still_takes_nobody_for_lost(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            await link.call(always(AskStatistics()))
            link.away_for_s = 0.05
            endpoint, blocked = endpoint_of(link), []
            connect = endpoint.connect

            async def connect_late(*where: str) -> Connection:
                if not blocked:
                    blocked.append(where)
                    time.sleep(0.15)  # noqa: ASYNC251  a step of the program, say
                return await connect(*where)

            endpoint.connect = connect_late  # type: ignore[method-assign]
            cluster.network.cut("ps0:1")
            await link.call(always(AskStatistics()))
            assert blocked

    @pytest.mark.virtual_time
    @pytest.mark.parametrize("turns", range(6))
    async def test_one_that_is_given_up_just_as_it_is_revived_is_lost(self, turns: int) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            cluster.network.partition("ps0:1")
            calling = asyncio.create_task(link.call(always(AskStatistics())))
            await asyncio.sleep(1)
            link.revive()
            for _ in range(turns):
                await asyncio.sleep(0)
            link.give_up("is not started again")
            with pytest.raises(ParameterServerLost, match="is not started again"):
                await calling

    async def test_a_message_that_the_ps_would_never_take_costs_one_connection(self) -> None:
        async with PsCluster() as cluster:
            client = cluster.client()
            link = client.links[0]
            made = []

            def wrong(peer: Connection) -> Message:
                made.append(peer)
                return Pull("one", None, -1, "")  # type: ignore[arg-type]

            for send in (link.call(wrong), together([Call(link, wrong, Pulled, "a pull")])):
                with pytest.raises(LocalProtocolError, match=r"Pull\.\w+: expected int, got 'o"):
                    await send
                assert len(made) == 1
                await link.call(lambda _: AskStatistics())  # the next one has a new connection
                made.clear()


async def test_a_connection_that_knows_too_many_sets_makes_way_for_one_that_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ps_link, "SETS_PER_CONNECTION", 3)
    async with PsCluster() as cluster:
        variables = [await cluster.create(f"v{i}", np.float32(i)) for i in range(5)]
        client = cluster.client()
        for _ in range(2):
            got = await asyncio.gather(*(pull(client, v) for v in variables))
            assert [float(value) for (value,) in got] == [0, 1, 2, 3, 4]


async def test_an_answer_of_another_kind_is_named_with_who_gave_it() -> None:
    received = frame_of(Done())
    assert expect(received, Done, "a ps", "a pull") is received.message
    with pytest.raises(RemoteProtocolError, match=r"^a ps answered a pull with Done"):
        expect(received, Statistics, "a ps", "a pull")
