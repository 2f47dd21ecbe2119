"""Whole variables measured over several ps tasks. What is refused is in test_measure_service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps_cluster import PsCluster
from psync import IndexedSlices
from psync.client.optimizer_client import trust_ratios
from psync.client.plans import Plan
from psync.numerics.rules import SGD, Lamb, UpdateRule

pytestmark = pytest.mark.asyncio


async def test_nothing_is_asked_for_that_no_push_needs() -> None:
    ones = np.ones((4, 2), np.float32)
    rows = IndexedSlices(ones[:1], np.array([0]))
    async with PsCluster(2) as cluster:
        whole = cluster.chief.plan((await cluster.create("whole", ones),))
        cut = cluster.chief.plan((await cluster.create("cut", ones, shards=2),))

        async def ratios(rule: UpdateRule, plan: Plan, gradient: Any) -> list[float] | None:
            return await trust_ratios(
                cluster.chief, rule, plan, [gradient],
                optimizer=1, config=rule.to_config(), elsewhere={},
            )  # fmt: skip

        assert await ratios(Lamb(), whole, ones) is None
        assert await ratios(Lamb(), cut, rows) is None
        assert await ratios(SGD(), cut, ones) is None
        assert await ratios(Lamb(), cut, ones) == [pytest.approx(1, rel=1e-4)]
