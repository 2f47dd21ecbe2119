"""That Prometheus's own parser reads the metrics of a real coordinator."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import numpy as np
import pytest

import psync

parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.processes


def fetched(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text: str = answer.read().decode()
        return text


async def test_it_reads_them_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psync")
    async with psync.LocalCluster(2, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver, psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy, metrics="127.0.0.1:0") as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(100, np.float32), name="w")
            sgd = psync.optimizers.SGD(0.5)

            async def step() -> None:
                await sgd.apply_gradients([(await psync.pull(w), w)])

            for _ in range(30):
                coordinator.schedule(step)
            await coordinator.join()
            found = re.search(r"metrics at (http://127.0.0.1:\d+/metrics)", caplog.text)
            assert found is not None
            text = await asyncio.to_thread(fetched, found[1])
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert len(families) == text.count("# TYPE")  # no name stands for two
    assert samples["psync_closures_total", "finished"] == 30
    assert samples["psync_global_step",] == 30
    assert samples["psync_ps_bytes", "/job:ps/task:0"] == 200
    assert samples["psync_ps_pushes_total", "/job:ps/task:1"] == 30
    assert samples["psync_worker_state", "idle", "/job:worker/task:0"] == 1
