"""One task's way into a training session, against real ps tasks on a network in memory."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from memory_cluster import MemoryCluster, session_cluster
from ps_cluster import PsCluster
from psync.chief.declarations import Declaration
from psync.compat.session_links import SessionLinks
from psync.errors import AuthenticationError, ConfigurationError, ConnectFailed, TrainingEnded
from psync.net.secret import Secret

WORKER = "/job:worker/task:0"
CHIEF_TASK = "/job:chief/task:0"


def links_of(
    cluster: MemoryCluster,
    task: str = WORKER,
    *,
    num_ps: int = 1,
    timeout_s: float = 5.0,
    boot: int = 0,
) -> SessionLinks:
    platform = cluster.platform(host="worker-0" if task == WORKER else "chief-0")
    if boot:
        platform = dataclasses.replace(platform, new_incarnation=lambda: boot)
    return SessionLinks(
        platform,
        task,
        [f"ps-{index}:1" for index in range(num_ps)],
        [],
        origin="origin",
        connect_timeout_s=timeout_s,
        ps_timeout_s=15.0,
    )


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("task", "stopped", "said"),
    [
        (
            WORKER,
            "",
            "the chief has not begun a training session within 5 s\n"
            "hint: is the chief running, and does it wait for others?",
        ),
        (WORKER, "ps-0", "no connection to /job:ps/task:0 at ps-0:1 with"),
        (
            CHIEF_TASK,
            "ps-1",
            "no connection within 5 s to /job:ps/task:1 at ps-1:1\n"
            "hint: are these tasks running, and are these their addresses?",
        ),
    ],
    ids=["worker without chief", "worker without ps", "chief without ps"],
)
async def test_who_misses_another_task_says_which(task: str, stopped: str, said: str) -> None:
    async with session_cluster(2) as cluster:
        if stopped:
            await cluster.stop(stopped)
        links = links_of(cluster, task, num_ps=2)
        with pytest.raises(ConnectFailed) as caught:
            await (links.attach(trains=True) if task == CHIEF_TASK else links.enter())
        assert str(caught.value).startswith(said)
        await links.close()


@pytest.mark.virtual_time
async def test_a_chief_whose_workers_do_not_come_says_who_has() -> None:
    async with session_cluster() as cluster:
        chief, worker = links_of(cluster, CHIEF_TASK), links_of(cluster, timeout_s=100)
        entering = asyncio.get_running_loop().create_task(worker.enter())
        await chief.attach(trains=True)
        with pytest.raises(ConnectFailed) as caught:
            await chief.declare(2, trains=True)
        assert str(caught.value) == (
            f"2 workers were to take part in training, and within 5 s there came {WORKER}\n"
            "hint: check that each of them runs this program: psync.run(main, on_workers=True)"
        )
        await chief.end_training("the chief failed: no luck", failed=True)
        with pytest.raises(TrainingEnded, match="the chief failed: no luck"):
            await entering
        await chief.close()
        await worker.close()


async def test_another_secret_is_an_error_at_once() -> None:
    async with session_cluster() as cluster:
        cluster.secret = Secret(b"another secret of the whole cluster")
        for task in (WORKER, CHIEF_TASK):
            links = links_of(cluster, task)
            with pytest.raises(AuthenticationError):
                await (links.attach(trains=True) if task == CHIEF_TASK else links.enter())
            await links.close()


async def test_a_worker_whose_clock_is_behind_is_served_all_the_same() -> None:
    async with session_cluster() as cluster:
        worker, chief = links_of(cluster, boot=1), links_of(cluster, CHIEF_TASK, boot=1000)
        runtime = await chief.attach(trains=False)
        await chief.declare(0, trains=False)
        entered = await worker.enter()
        assert worker.ps.links[0].incarnation is not None  # it was let in
        assert (entered.in_session, runtime.in_session) == (True, False)
        await worker.leave()
        (end,) = worker.ends()
        assert (await end).reason == "all replicas have left"
        await chief.leave()
        await worker.close()
        await chief.close()


# --- declarations ------------------------------------------------------------------------------


def declaration(cluster: PsCluster, name: str, shape: tuple[int, ...]) -> Declaration:
    """What a worker has declared, as its strategy numbers it."""
    spec = cluster.declare(name, np.zeros(shape, np.float32), shards=2)
    return Declaration(spec, None)


async def test_a_worker_that_declares_more_than_the_chief_is_told_every_time() -> None:
    async with PsCluster(2) as cluster:
        known = declaration(cluster, "known", (4,))
        await cluster.creation.ensure()
        links = links_of(MemoryCluster())
        links.declared += [known, declaration(cluster, "more", (4,))]
        links.ps = cluster.client()
        for _ in range(2):
            with pytest.raises(ConfigurationError, match='did not declare variable "more"'):
                await links.compare()
