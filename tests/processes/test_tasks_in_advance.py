"""ps and worker tasks that run before there is a chief, which connects from anywhere."""

from __future__ import annotations

import json

import pytest

from tasks_by_hand import ByHand, by_hand, ended, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAINED = (
    "[[20.0, 20.0], [20.0, 20.0], [20.0, 20.0], [20.0, 20.0]] 20\n"
    "/job:ps/replica:0/task:0/device:CPU:0 /job:ps/replica:0/task:1/device:CPU:0\n"
)


def described(cluster: ByHand, *jobs: str) -> str:
    return json.dumps({job: cluster.cluster[job] for job in jobs})


def connect(cluster: ByHand, description: str, *job: str) -> tuple[int, str, str]:
    """Run a program that is told of the cluster by its command line."""
    run = cluster.run(
        "chief", 0, script("connect_later.py", description, *job), environ={"TF_CONFIG": ""}
    )
    return run.code, run.out, run.err


def test_programs_that_are_none_of_its_tasks_train_on_a_cluster_one_after_the_other() -> None:
    with by_hand(num_ps=2, num_workers=2) as cluster:
        del cluster.cluster["chief"]
        tasks = cluster.serve_all()
        description = described(cluster, "ps", "worker")
        for _ in range(2):  # the second begins with variables of its own
            assert connect(cluster, description) == (0, TRAINED, "")
        for task in tasks:  # they wait for the next one, until they are told to stop
            assert task.poll() is None
            task.terminate()
            assert ended(task).code == 0


def test_tasks_need_no_tf_config_and_know_no_chief() -> None:
    with by_hand(num_ps=2, num_workers=1) as cluster:
        tasks = []
        for job, index in (("ps", 0), ("ps", 1), ("worker", 0)):
            # A worker learns the ps tasks' addresses from the coordinator.
            known = described(cluster, "ps") if job == "ps" else described(cluster, "worker")
            task = cluster.start(
                job,
                index,
                script("run_task.py", known, job, str(index)),
                environ={"TF_CONFIG": ""},
            )
            wait_for_line(task, " serves at ")
            tasks.append(task)
        whole = described(cluster, "chief", "ps", "worker")
        assert connect(cluster, whole, "chief") == (0, TRAINED, "")
        for task in tasks:
            assert task.poll() is None
