"""Where a program without a resolver finds its cluster."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable
from typing import Any

import pytest

import psync
from psync import blocking
from psync.net.discovery.default import jobs_of, resolve_cluster
from psync.net.resolvers import opened
from recorded_slurm import INTERACTIVE, ONE_NODE, SHELL, two_nodes

TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]},
            "task": {"type": "worker", "index": 0},
        }
    )
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = two_nodes(3)
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-worker-1",
    "PSYNC_SERVICE": "train",
    "PSYNC_JOBS": "ps=1,worker=2",
}


@pytest.mark.parametrize(
    ("environ", "source", "task"),
    [
        (TF_CONFIG, "TF_CONFIG", ("worker", 0)),
        (TORCHRUN, "torchrun", ("worker", 0)),
        (SLURM, "SlurmClusterResolver", ("worker", 1)),
        (ONE_NODE, "SlurmClusterResolver", ("ps", 0)),
        (KUBERNETES, "KubernetesClusterResolver", ("worker", 1)),
        # Inner launchers come first: each passes its own environment on.
        ({**TORCHRUN, **TF_CONFIG}, "TF_CONFIG", ("worker", 0)),
        ({**SLURM, **TORCHRUN}, "torchrun", ("worker", 0)),
        ({**KUBERNETES, **TORCHRUN}, "torchrun", ("worker", 0)),
        ({**KUBERNETES, **TF_CONFIG}, "TF_CONFIG", ("worker", 0)),
        ({**SHELL, **KUBERNETES}, "KubernetesClusterResolver", ("worker", 1)),
    ],
)  # fmt: skip
def test_the_first_surroundings_that_apply_say_who_this_is(
    environ: dict[str, str], source: str, task: tuple[str, int]
) -> None:
    resolver = resolve_cluster(environ)
    assert (resolver.source, (resolver.task_type, resolver.task_id)) == (source, task)


def test_slurm_tasks_listen_from_the_port_that_is_given() -> None:
    environ = {**SLURM, "PSYNC_PORT": "2000", "PSYNC_JOBS": "ps=2"}
    assert resolve_cluster(environ).cluster_spec().as_dict() == {
        "chief": ["node1:2000"],
        "ps": ["node1:2001", "node2:2000"],
        "worker": ["node2:2001"],
    }


def test_pods_are_found_by_the_names_of_their_service() -> None:
    environ = {**KUBERNETES, "PSYNC_NAMESPACE": "team", "PSYNC_PORT": "2222"}
    assert resolve_cluster(environ).cluster_spec().as_dict() == {
        "chief": ["train-chief-0.train.team.svc:2222"],
        "ps": ["train-ps-0.train.team.svc:2222"],
        "worker": ["train-worker-0.train.team.svc:2222", "train-worker-1.train.team.svc:2222"],
    }


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({}, "psync run "),
        ({"TF_CONFIG": ""}, "psync.LocalCluster(1, 2)"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "srun --ntasks=4"),
        (INTERACTIVE, "srun --ntasks=4"),
        (SHELL, "srun --ntasks=4"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "set PSYNC_SERVICE to the headless service"),
    ],
)
def test_without_any_it_says_what_to_do(environ: dict[str, str], hint: str) -> None:
    with pytest.raises(psync.ConfigurationError, match="this process belongs to no cluster") as exc:
        resolve_cluster(environ)
    assert "variables of TF_CONFIG, torchrun, SLURM, Kubernetes" in exc.value.message
    assert hint in (exc.value.hint or "")


@pytest.mark.parametrize(
    ("text", "num_tasks", "jobs"),
    [
        ("", 4, {"chief": 1, "ps": 1, "worker": 2}),
        ("ps=2", 7, {"chief": 1, "ps": 2, "worker": 4}),
        ("chief=0, ps=1", 3, {"ps": 1, "worker": 2}),
        ("ps=2,worker=4", 7, {"chief": 1, "ps": 2, "worker": 4}),
        ("ps=2,worker=4", None, {"chief": 1, "ps": 2, "worker": 4}),
    ],
)
def test_jobs_that_are_not_named_are_counted(
    text: str, num_tasks: int | None, jobs: dict[str, int]
) -> None:
    assert jobs_of(text, num_tasks, "SLURM") == jobs


@pytest.mark.parametrize(
    ("text", "num_tasks", "told"),
    [
        ("ps", 4, "as in chief=1,ps=2,worker=4, got 'ps'"),
        ("ps=-1", 4, "as in chief=1,ps=2,worker=4"),
        ("ps=1,ps=2", 4, "as in chief=1,ps=2,worker=4"),
        ("server=1", 4, "as in chief=1,ps=2,worker=4"),
        ("ps=2", None, "expected a number of workers, which SLURM does not provide"),
        ("ps=3", 4, "expected 1 chief, 3 ps and at least 1 worker, but SLURM has started 4 tasks"),
        ("ps=1,worker=3", 4, "expected 5 tasks, but SLURM has started 4 tasks"),
    ],
)
def test_jobs_that_do_not_fit_are_told(text: str, num_tasks: int | None, told: str) -> None:
    with pytest.raises(psync.ConfigurationError, match=told):
        jobs_of(text, num_tasks, "SLURM")


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_a_port_that_is_none_is_told(port: str) -> None:
    with pytest.raises(psync.ConfigurationError, match="PSYNC_PORT: expected a port"):
        resolve_cluster({**SLURM, "PSYNC_PORT": port})


@pytest.mark.parametrize("number", ["x", "-4"])
def test_a_malformed_variable_of_slurm_is_the_resolvers_to_tell(number: str) -> None:
    with pytest.raises(psync.ConfigurationError):
        resolve_cluster({**SLURM, "SLURM_STEP_NUM_TASKS": number})


# Clusters that a program has opened.


def solo(name: str) -> psync.SimpleClusterResolver:
    jobs = {"chief": [f"{name}:1"], "ps": [f"{name}:2"], "worker": [f"{name}:3"]}
    return psync.SimpleClusterResolver(psync.ClusterSpec(jobs))


async def test_a_local_cluster_is_the_default_while_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    async with psync.LocalCluster(1, 2, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy()
        assert strategy.cluster_resolver is cluster.resolver
        async with psync.LocalCluster(2, 1, processes=False) as inner:
            assert psync.resolve_cluster() is inner.resolver
        assert psync.resolve_cluster() is cluster.resolver
    assert psync.resolve_cluster().source == "TF_CONFIG"


async def test_clusters_of_two_asyncio_tasks_are_not_mixed_up() -> None:
    both = asyncio.Barrier(2)

    async def program(num_workers: int) -> int:
        async with psync.LocalCluster(1, num_workers, processes=False):
            await both.wait()
            strategy = psync.ParameterServerStrategy()
            await both.wait()
            return strategy.cluster.num_tasks("worker")

    assert await asyncio.gather(program(1), program(2)) == [1, 2]


def test_cells_of_a_notebook_share_the_one_cluster_of_their_process() -> None:
    """Each cell runs in a context of its own."""

    def in_a_cell(function: Callable[[], Any]) -> Any:
        return contextvars.Context().run(function)

    one, other = opened(solo("a")), opened(solo("b"))
    in_a_cell(one.__enter__)
    assert in_a_cell(resolve_cluster).master("ps", 0) == "a:2"
    in_a_cell(other.__enter__)
    with pytest.raises(psync.ConfigurationError, match="several clusters are open"):
        in_a_cell(resolve_cluster)
    in_a_cell(lambda: other.__exit__(None, None, None))
    assert in_a_cell(resolve_cluster).master("ps", 0) == "a:2"
    in_a_cell(lambda: one.__exit__(None, None, None))


def test_plain_calls_find_their_cluster_too() -> None:
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        assert psync.ParameterServerStrategy().cluster_resolver is cluster.resolver
