from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from asked import Reply
from inside import handlers_of, pool_of, pushes_of, work_of
from memory_cluster import until
from ps_cluster import OTHER, PsCluster, hold, pull, push
from psync.client import ps_client
from psync.errors import (
    ClosedError,
    ConfigurationError,
    RemoteProtocolError,
    UnknownVariableError,
    ValueMismatchError,
)
from psync.net.connection import Handler
from psync.numerics.rules import SGD
from psync.specs import ShardSpec, VariableSpec
from psync.wire.codec import Message
from psync.wire.messages import Done, Pull, Pulled, Push

LARGE = 1 << 18  # elements of float32: 1 MiB, beyond what is applied at once

pytestmark = pytest.mark.asyncio


class TestPlans:
    async def test_a_plan_is_made_once_and_the_least_recently_used_goes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ps_client, "MAX_PLANS", 2)
        async with PsCluster() as cluster:
            a, b, c = [await cluster.create(name, np.float32(1)) for name in "abc"]
            client = cluster.chief
            first, second = client.plan((a,)), client.plan((b,))
            assert client.plan((a,)) is first
            client.plan((c,))
            assert client.plan((a,)) is first
            assert client.plan((b,)) is not second
            assert (await client.pull(second))[0] == 1  # who still has it may use it


class TestArrays:
    async def test_they_may_be_the_callers_own(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.arange(6, dtype=np.float32), shards=2)
            w = await cluster.create("w", np.full(LARGE, 3, np.float32))
            x = await cluster.create("x", np.ones(2, np.int64))
            out = np.empty(6, np.float32)
            mine = np.empty(LARGE, np.float32)
            taken: list[int] = []
            pool = pool_of(cluster.chief)
            take = pool.take
            pool.take = lambda n: (taken.append(n), take(n))[1]  # type: ignore[method-assign]
            got = await pull(cluster.chief, v, w, x, out=[out, mine, None])
            assert (got[0] is out, got[1] is mine) == (True, True)
            assert out.tolist() == [0, 1, 2, 3, 4, 5]
            assert (mine == 3).all()
            assert got[2].tolist() == [1, 1]
            assert LARGE * 4 not in taken


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        (Pull, Reply(Pulled([]), [bytes(8)]), "sent wrong sizes for .*: expected 12 bytes, got 8"),
        (Pull, Reply(Pulled([]), []), "sent wrong sizes for .*: expected 12 bytes, got 0"),
        (Pull, Reply(Done(), [bytes(12)]), "answered a pull with Done"),
        (Push, Reply(Done()), "answered an update with Done"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused(
    kind: type[Message], answer: Reply, text: str
) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(3, np.float32))
        handlers_of(cluster.ps[0])[kind] = Handler(lambda request: request.answer(*answer))
        with pytest.raises(RemoteProtocolError, match=f"^/job:ps/task:0 {text}"):
            await (pull(cluster.chief, v) if kind is Pull else push(cluster.chief, (v,), (1.0,)))


class TestPushes:
    async def test_a_push_that_does_not_fit_is_refused_by_the_ps(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            with pytest.raises(
                ValueMismatchError, match=r"expected shape \(3,\) float32 \(12 bytes\)"
            ):
                await push(cluster.chief, (v,), (np.zeros(3, np.float16),))
            shard = ShardSpec("u", 7, 0, 0, (3,), "float32", 0)
            unknown = VariableSpec("u", 7, (3,), "float32", True, (shard,), "")
            with pytest.raises(UnknownVariableError, match="no shard 0 of variable 7"):
                await pull(cluster.chief, unknown)

    async def test_an_optimizer_is_sent_until_a_ps_has_taken_it(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            await push(cluster.client(OTHER), (v,), (1.0,))
            client = cluster.client()
            for _ in range(2):  # and not silently taken for the other one the second time
                with pytest.raises(ConfigurationError, match=r"optimizer 1 .* is already defined"):
                    await push(client, (v,), (1.0,), config=SGD(0.1).to_config())
            await push(client, (v,), (1.0,))
            assert (await pull(client, v))[0].tolist() == [-1, -1, -1]

    async def test_closing_ends_those_that_wait(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client = cluster.client()
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(client, (v,), (2.0,)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            await client.close()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            assert not pushes_of(client)
            with pytest.raises(ClosedError):
                await pull(client, v)
            release()
            gc.collect()
