"""Compressed pushes and pulls of a client, to real ps tasks on a network in memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from memory_cluster import until
from ps_cluster import CONFIG, OTHER, WORKER, PsCluster, heard, hold, pull
from psync import IndexedSlices
from psync.client.compression import ErrorFeedback, pull_compressed
from psync.client.ps_client import PsClient
from psync.errors import ClosedError, RemoteProtocolError, ValueMismatchError
from psync.numerics.compression import Compression, narrow_dtype
from psync.numerics.rules import SGD
from psync.specs import VariableSpec
from psync.wire.messages import Pull, Push, Pushed

pytestmark = pytest.mark.asyncio

RATE_1 = SGD(1.0).to_config()
LARGE = 1 << 19  # elements: 2 MiB, beyond what is applied at once
TINY = 2.0**-9  # beside 1 bfloat16 has no room for it
KINDS: tuple[Compression, ...] = ("bf16", "f16")

each_kind = pytest.mark.parametrize("kind", KINDS)


class Worker:
    """A task that pushes compressed."""

    def __init__(self, client: PsClient, kind: Compression = "bf16") -> None:
        self.client = client
        self.feedback = ErrorFeedback(client)
        self.kind: Compression = kind
        self.ordinal = 0

    async def push(
        self,
        variables: Sequence[VariableSpec],
        gradients: Sequence[Any],
        *,
        closure: int = -1,
        optimizer: int = 1,
    ) -> list[Pushed]:
        self.ordinal += 1
        given = [
            gradient if isinstance(gradient, IndexedSlices) else np.asarray(gradient, spec.dtype)
            for spec, gradient in zip(variables, gradients, strict=True)
        ]
        send = functools.partial(
            self.client.push, optimizer=optimizer, config=RATE_1, elsewhere={}, closure=closure,
            ordinal=self.ordinal,
        )  # fmt: skip
        plan = self.client.plan(variables)
        return await self.feedback.push(plan, given, send, kind=self.kind, optimizer=optimizer)


async def value_of(cluster: PsCluster, spec: VariableSpec) -> list[float]:
    return (await pull(cluster.chief, spec))[0].tolist()  # type: ignore[no-any-return]


@each_kind
async def test_large_gradients_are_widened_block_by_block(kind: Compression) -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(LARGE, np.float32), shards=2)
        worker = Worker(cluster.client(WORKER), kind)
        gradient = np.random.default_rng(0).normal(size=LARGE).astype(np.float32)
        await worker.push((v,), (gradient,))
        expected = -gradient.astype(narrow_dtype(kind)).astype(np.float32)
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], expected)


class TestErrorFeedback:
    async def test_a_push_that_was_not_applied_leaves_what_was_owed(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(1, np.float32))
            first, worker = Worker(cluster.client(OTHER)), Worker(cluster.client(WORKER))
            await worker.push((v,), ([1 + TINY],))
            worker.ordinal = 0
            await first.push((v,), ([0],), closure=7)
            (answer,) = await worker.push((v,), ([100 + 0.25],), closure=7)
            assert answer.outcome == "duplicate"
            rows = IndexedSlices(np.ones(1, np.float32), np.array([9]))
            w = await cluster.create("w", np.zeros(1, np.float32))
            with pytest.raises(ValueMismatchError, match="row 9 does not exist"):
                await worker.push((v, w), ([100], rows))
            await worker.push((v,), ([0],))
            assert await value_of(cluster, v) == [-1 - TINY]

    async def test_pushes_at_the_same_time_are_owed_together(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(1, np.float32))
            worker = Worker(cluster.client(WORKER))
            await asyncio.gather(*(worker.push((v,), ([1 + TINY],)) for _ in range(4)))
            await worker.push((v,), ([0],))
            assert await value_of(cluster, v) == [-4 - 4 * TINY]

    async def test_a_push_whose_caller_was_cancelled_goes_on_and_counts(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(1, np.float32))
            worker = Worker(cluster.client(WORKER))
            release = hold(cluster.ps[0], v)
            pushing = asyncio.ensure_future(worker.push((v,), ([1 + TINY],)))
            await asyncio.sleep(0.01)
            pushing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pushing
            release()
            await worker.client.outgoing.drain()
            await worker.push((v,), ([0],))
            assert await value_of(cluster, v) == [-1 - TINY]

    async def test_a_rollback_leaves_nothing(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(1, np.float32))
            worker = Worker(cluster.client(WORKER))
            await worker.push((v,), ([1 + TINY],))
            worker.client.begin_timeline(1)
            await worker.push((v,), ([1 + TINY],))
            # One that is under way when it happens is sent again as it was, and leaves nothing.
            pushes, release = heard(cluster.ps[0], Push), hold(cluster.ps[0], v)
            pushing = asyncio.ensure_future(worker.push((v,), ([0.5 + TINY / 2],)))
            await until(lambda: pushes)
            worker.client.begin_timeline(2)
            release()
            await pushing
            await worker.push((v,), ([0],))
            # It was 0.5 and 1.5 TINY, which is nearer to 2 TINY than to 0; -TINY / 2 would be left.
            assert await value_of(cluster, v) == [-2.5 - 2 * TINY]

    async def test_after_the_end_nothing_is_begun(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(1, np.float32))
            worker = Worker(cluster.client(WORKER))
            await worker.client.close()
            with pytest.raises(ClosedError):
                await worker.push((v,), ([1],))


class TestPulls:
    @each_kind
    @pytest.mark.parametrize("size", [3, LARGE])
    async def test_float32_is_rounded_and_all_else_is_exact(
        self, kind: Compression, size: int
    ) -> None:
        async with PsCluster(2) as cluster:
            rng = np.random.default_rng(0)
            values = [
                rng.normal(size=size).astype(np.float32), np.arange(5), rng.normal(size=3),
                np.float32(1 + TINY),
            ]  # fmt: skip
            specs = [
                await cluster.create(f"v{i}", value, shards=1 + (i == 0))
                for i, value in enumerate(values)
            ]
            client = cluster.client(WORKER)
            messages = [heard(task, Pull) for task in cluster.ps]
            plan = client.plan(specs)
            for _ in range(2):
                got = await pull_compressed(client, plan, kind)
                for value, array in zip(values, got, strict=True):
                    exact = np.asarray(value)
                    narrow = exact.dtype == np.float32
                    expected = exact.astype(narrow_dtype(kind)) if narrow else exact
                    assert (array.dtype, array.shape) == (exact.dtype, exact.shape)
                    np.testing.assert_array_equal(array, expected.astype(exact.dtype))
                    assert not array.flags.writeable
            assert all(len(of_ps) == 2 and of_ps[1].members is None for of_ps in messages)

    async def test_into_arrays_of_the_caller_and_copies(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.full(3, 1 + TINY, np.float32))
            n = await cluster.create("n", np.arange(4))
            client = cluster.client(WORKER)
            plan = client.plan((v, n))
            out = [np.empty(3, np.float32), np.empty(4, np.int64)]
            got = await pull_compressed(client, plan, "bf16", out=out)
            assert (got[0] is out[0], got[1] is out[1]) == (True, True)
            assert [array.tolist() for array in out] == [[1, 1, 1], [0, 1, 2, 3]]
            first, second = await pull_compressed(client, plan, "bf16", writable=True)
            first += 1
            second += 1
            again = await pull_compressed(client, plan, "bf16", out=[None, out[1]])
            assert (again[0].tolist(), again[1] is out[1]) == ([1, 1, 1], True)

    async def test_they_wait_for_a_busy_shard_and_read_one_version(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.full(LARGE, 1, np.float32))
            client = cluster.client(WORKER)
            release = hold(cluster.ps[0], v)
            pulling = asyncio.ensure_future(
                pull_compressed(client, client.plan((v,)), "f16", seen=None)
            )
            await asyncio.sleep(0.01)
            assert not pulling.done()
            release()
            await asyncio.sleep(0)  # what is read is being rounded
            plan = cluster.chief.plan((v,))
            adding = cluster.chief.assign(
                plan, [np.full(LARGE, 1, np.float32)], op="add", closure=-1, ordinal=0
            )
            (got,), _ = await asyncio.gather(pulling, adding)
            assert len(set(got.tolist())) == 1

    async def test_slots_are_pulled_as_they_are(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(3, np.float32))
            client = cluster.client(WORKER)
            await client.define_optimizer(1, {**CONFIG, "momentum": 0.9})
            with pytest.raises(RemoteProtocolError, match="slots are not pulled compressed"):
                await client.pull(client.plan((v,), "bf16"), optimizer=1, slot="momentum")
