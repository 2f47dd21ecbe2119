"""What a ps and a worker count themselves, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of
from psync.errors import ConfigurationError
from psync.status.exposition import task_exposition
from psync.status.task_metrics import serving_metrics

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")


class Task:
    """A worker of which one number is known."""

    task = "/job:worker/task:0"

    def statistics(self) -> dict[str, Any]:
        return {"network": {"connections": 2, "bytes_received": 10, "bytes_sent": 20}, "work": {}}


async def test_nothing_is_served_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync")
    async with serving_metrics(Task(), {}):
        pass
    assert caplog.text == ""


async def test_what_is_no_address_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r'metrics: expected "HOST:PORT", got "?\'9400'):
        async with serving_metrics(Task(), {"PSYNC_TASK_METRICS": "9400"}):
            raise AssertionError


async def test_it_is_asked_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync")
    async with serving_metrics(Task(), {"PSYNC_TASK_METRICS": "127.0.0.1:0"}):
        found = re.search(
            r"/job:worker/task:0: metrics at (http://127.0.0.1:\d+/metrics)", caplog.text
        )
        assert found is not None
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(found[1]).read().decode())
    assert 'psync_task_sent_bytes_total{task="/job:worker/task:0"} 20.0' in text
    for name in ("cpu_seconds_total", "start_time_seconds", "resident_memory_bytes", "open_fds"):
        assert f"\nprocess_{name} " in text


async def test_ps_and_worker_tell_what_they_have_done() -> None:
    async with cluster_of(num_ps=1, num_workers=1) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(8, np.float32), name="w")
            sgd = psync.optimizers.SGD(0.5)

            async def step() -> None:
                value = await psync.pull(w)
                await asyncio.sleep(1)
                await sgd.apply_gradients([(value, w)])

            tasks = list(cluster.tasks.values())
            for task in tasks:  # seconds are counted while somebody reads them
                task.statistics()
            for _ in range(3):
                coordinator.schedule(step)
            await coordinator.join()
            lines = "".join(
                task_exposition(task.task, task.statistics()) for task in tasks
            ).splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    ps, worker = 'task="/job:ps/task:0"', 'task="/job:worker/task:0"'
    assert float(found[f"psync_task_pushes_total{{{ps}}}"]) == 3
    assert float(found[f"psync_task_pulls_total{{{ps}}}"]) == 3
    assert float(found[f"psync_task_bytes{{{ps}}}"]) == 32
    assert float(found[f'psync_task_pushes_by_staleness_total{{staleness="0",{ps}}}']) >= 1
    assert float(found[f'psync_task_work_seconds_total{{kind="compute",{worker}}}']) >= 3
