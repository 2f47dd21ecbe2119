"""What a task sends, and what it sends again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from ps_cluster import OTHER, WORKER, PsCluster
from psync.client.accumulator_client import AccumulatorClient, Place
from psync.errors import ConfigurationError
from psync.wire.messages import DefineAccumulator, GradientApplied
from psync.wire.tensors import to_bytes_view

pytestmark = pytest.mark.virtual_time

PLACE = Place(DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0), 1)


class Scene:
    """Two ps tasks, an accumulator on the second one, and two workers."""

    def __init__(self, cluster: PsCluster) -> None:
        self.cluster = cluster
        self.links_of_a = cluster.client(WORKER, 1000, host="a")
        self.a = AccumulatorClient(self.links_of_a)
        self.b = AccumulatorClient(cluster.client(OTHER, 1000, host="b"))

    async def apply(
        self, client: AccumulatorClient, value: float, closure: int = -1
    ) -> GradientApplied:
        array = np.full(2, value, np.float32)
        return await client.apply(
            PLACE, [to_bytes_view(array)], [2], None, local_step=0, weight=1.0, closure=closure,
            ordinal=0,
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.cluster.ps[1].statistics()["accumulators"]
        return counters


@pytest.fixture
async def scene(clean_loop: None) -> AsyncIterator[Scene]:
    async with PsCluster(2) as cluster:
        yield Scene(cluster)


async def test_another_one_of_that_name_is_refused_at_each_use(scene):
    await scene.a.state(PLACE)
    other = Place(DefineAccumulator("g", "dense", "float64", None, "MEAN", "", False, 0), 1)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="other parameters than at first"):
            await scene.b.state(other)
