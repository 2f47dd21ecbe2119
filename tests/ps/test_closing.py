"""A ps that ends: what it has lent stays as it is, whatever is applied meanwhile."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from inside import endpoint_of, handlers_of, peers_of, store_of
from memory_cluster import until
from ps_cluster import assign, pull
from psync.net.connection import Handler
from psync.numerics.rules import SGD
from psync.wire.messages import MeasureStep
from sync_cluster import SyncCluster

CHUNK = (1 << 16, 1 << 20)


async def test_a_step_that_is_applied_while_connections_are_closed_spares_what_is_lent() -> None:
    """The other ps measures late, and who reads slowly keeps this one from being closed at once."""
    may_measure, asked = asyncio.Event(), asyncio.Event()
    async with SyncCluster(2, shares_memory=True, chunk=CHUNK, kernel_bytes=1000) as cluster:
        cluster.places = itertools.cycle([0, 0, 1, 0])
        first, second, other, small = [
            await cluster.create(name, np.ones(size, np.float32))
            for name, size in (("a", 8 << 20), ("b", 1 << 20), ("c", 1 << 17), ("d", 15_000))
        ]
        cluster.configure(1, optimizer={**SGD(1.0).to_config(), "global_clipnorm": 1e9})
        handlers = handlers_of(cluster.ps[1])
        at_once = handlers[MeasureStep]

        async def late(request):
            asked.set()
            await may_measure.wait()
            at_once.serve(request)

        handlers[MeasureStep] = Handler(late, at_once.prepare)
        program, reader = cluster.client("/job:worker/task:1"), cluster.client("/job:worker/task:2")
        for variable in (first, second):
            await assign(program, variable, np.ones(variable.shape, np.float32))
        (kept,) = await pull(program, second)
        assert not kept.flags.writeable
        pushing = asyncio.ensure_future(
            cluster.replica().push((first, second, other), [5.0, 5.0, 5.0])
        )
        await asked.wait()
        await pull(reader, small)
        reading = asyncio.ensure_future(pull(reader, small))
        await asyncio.sleep(0)
        for peer in peers_of(reader.links[0]):
            peer.pause_reading()
        closing = asyncio.ensure_future(cluster.ps[0].close())
        await until(lambda: endpoint_of(cluster.ps[0])._closed)
        for _ in range(20):
            await asyncio.sleep(0)
        may_measure.set()
        store = store_of(cluster.ps[0])
        await until(lambda: store.busy(first.shards[0].key))  # the second one comes after it
        for peer in peers_of(reader.links[0]):
            peer.abort()
        await closing
        pushing.cancel()
        reading.cancel()
        await asyncio.gather(pushing, reading, return_exceptions=True)
        assert store.version(second.shards[0].key) == 3
        assert (kept == 1.0).all()
