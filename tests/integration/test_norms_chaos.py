"""Norms of the mean of synchronous steps while connections are lost at random, from a seed.

Whatever is lost and sent again, and whenever: the variables are, bit for bit, those of one process
that sums, clips and applies.

One seed again: ``pytest "…/test_norms_chaos.py::test_what_is_lost_does_not_show[17]"``.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from psync.failpoints import Failpoints
from psync.layerwise_rules import Lamb
from psync.moment_rules import Adam
from psync.rule_options import RuleOptions
from psync.testing import run_virtual
from psync.update_rules import SGD
from tests.norm_training import Training
from tests.ps_cluster import pull
from tests.sync_cluster import SyncCluster

NUM_STEPS = 6
POINTS = (
    "ps0.step.decided", "ps.step.measured", "ps0.step.measured", "ps.step.applied",
    "ps0.step.applied",
)  # fmt: skip


class Cuts:
    """Breaks connections of ps tasks, between any two moments of a step and at any other time."""

    def __init__(self, cluster: SyncCluster, points: Failpoints, rng: random.Random) -> None:
        self._network = cluster.network
        self._hosts = [f"ps{index}:1" for index in range(len(cluster.ps))]
        self._rng = rng
        self._points = points
        for name in POINTS:
            self._arm(name)

    def _arm(self, name: str) -> None:
        def act() -> None:
            self._arm(name)
            if self._rng.random() < 0.5:
                self._cut()

        self._points.arm(name, act)

    def _cut(self) -> None:
        for link in self._network.links(self._rng.choice(self._hosts)):
            if self._rng.random() < 0.7:
                link.cut()

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            await asyncio.sleep(self._rng.uniform(0, 0.1))
            self._cut()


async def simulate(seed: int) -> None:
    rng = random.Random(seed)
    values = np.random.default_rng(seed)
    option = rng.choice(({"clipnorm": 0.5}, {"global_clipnorm": 0.5}))
    rule = rng.choice((SGD, Adam, Lamb))(0.25).with_options(RuleOptions(**option))
    num_ps, num_replicas = rng.choice((2, 3)), rng.choice((1, 2, 3))
    columns = rng.choice((3, 3, 9_000, 200_000))  # together; staged; measured in pieces
    points = Failpoints()
    cluster = SyncCluster(
        num_ps, failpoints=points, seed=seed, latency=(0.0005, 0.005), chunk=(1 << 14, 1 << 20)
    )
    async with cluster:
        begin = [values.standard_normal(s).astype(np.float32) for s in ((5, columns), (2,))]
        w = await cluster.create("w", begin[0], shards=rng.choice((2, 5)))
        b = await cluster.create("b", begin[1])
        cluster.configure(num_replicas, deterministic=True, optimizer=rule.to_config())
        training = Training(rule, begin, (w, b))
        replicas = [cluster.replica(index) for index in range(num_replicas)]
        cutting = asyncio.create_task(Cuts(cluster, points, rng).run())
        for step in range(NUM_STEPS):
            gradients = [
                [values.standard_normal(v.shape).astype(np.float32) for v in (w, b)]
                for _ in replicas
            ]
            training.step(gradients)
            answers = await asyncio.gather(
                *(r.push((w, b), g, step) for r, g in zip(replicas, gradients, strict=True))
            )
            assert {(answer.outcome, answer.token) for answer in answers} == {
                ("accepted", step + 1)
            }
        cutting.cancel()
        for i, got in enumerate(await pull(cluster.chief, w, b)):
            assert got.tobytes() == training.read(i).tobytes()
        assert await cluster.global_step() == NUM_STEPS
        assert cluster.staged_bytes() == [0] * num_ps


@pytest.mark.parametrize("seed", range(40))
def test_what_is_lost_does_not_show(seed: int) -> None:
    run_virtual(simulate, seed, seed=seed)
