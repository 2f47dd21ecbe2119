"""The cluster: what training needs of it, and who is who."""

from __future__ import annotations

from typing import Any

import pytest

from psync import id_in_cluster, is_chief, worker_count
from psync.cluster import ClusterSpec
from psync.cluster_roles import validate_for_training, with_chief
from psync.errors import ConfigurationError

FULL = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}
SPARSE = {"ps": ["p0:1", "p1:1"], "worker": {1: "w1:1", 4: "w4:1"}}


@pytest.mark.parametrize(
    ("task_type", "task_id"),
    [("chief", 0), ("worker", 2), ("ps", 1), (None, None), (None, 3)],
)
def test_complete_cluster_suits_every_task(task_type: str | None, task_id: int | None) -> None:
    spec = ClusterSpec(FULL)
    assert validate_for_training(spec, task_type, task_id) == (spec, task_type, task_id)


def test_cluster_without_chief_suits_a_program_that_is_no_task() -> None:
    spec = ClusterSpec({"ps": ["p:1"], "worker": ["w:1"]})
    assert validate_for_training(spec, None, None) == (spec, None, None)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id"),
    [
        ({"ps": ["p0:1"], "worker": {3: "w3:1"}}, "worker", 3),
        ({"worker": {3: "w3:1"}}, "worker", 3),
        ({"ps": {1: "p1:1"}}, "ps", 1),
    ],
)
def test_worker_and_ps_may_know_only_themselves(
    cluster: dict[str, Any], task_type: str, task_id: int
) -> None:
    spec = ClusterSpec(cluster)
    assert validate_for_training(spec, task_type, task_id) == (spec, task_type, task_id)


def test_index_may_be_left_out_where_the_job_has_one_task() -> None:
    spec = ClusterSpec(FULL)
    assert validate_for_training(spec, "chief", None) == (spec, "chief", 0)


def test_master_is_accepted_for_chief() -> None:
    master = ClusterSpec({"master" if job == "chief" else job: FULL[job] for job in FULL})
    chief = ClusterSpec(FULL)
    assert with_chief(master) == chief
    assert with_chief(chief) is chief
    assert validate_for_training(master, "master", 0) == (chief, "chief", 0)


def test_evaluator_is_left_out_of_the_training_cluster() -> None:
    spec = ClusterSpec({**FULL, "evaluator": ["e:1"]})
    for task_type in ("chief", "evaluator"):
        assert validate_for_training(spec, task_type, 0) == (ClusterSpec(FULL), task_type, 0)


def test_evaluator_need_not_be_listed() -> None:
    spec = ClusterSpec(FULL)
    assert validate_for_training(spec, "evaluator", 0) == (spec, "evaluator", 0)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({}, "worker", 0, "cluster is missing or empty"),
        (
            {**FULL, "gpu": []},
            "worker",
            0,
            "cluster.gpu: expected the jobs 'chief', 'worker', 'ps' or 'evaluator', got 'gpu'",
        ),
        (
            {**FULL, "master": ["m:1"]},
            "chief",
            0,
            "cluster: the cluster has both a 'chief' and a 'master', which are the same job",
        ),
        (
            {**FULL, "chief": ["c:1", "d:1"]},
            "chief",
            0,
            "cluster.chief: expected at most one chief, got 2",
        ),
        (
            {**FULL, "evaluator": ["c:2", "d:2"]},
            "chief",
            0,
            "cluster.evaluator: expected at most one evaluator, got 2",
        ),
        ({"worker": ["w:1"]}, None, None, "cluster.ps: expected at least one ps, got none"),
        (
            {"chief": ["c:1"], "ps": ["p:1"], "worker": []},
            "chief",
            0,
            "cluster.worker: expected at least one worker, got none",
        ),
        (
            FULL,
            "foobar",
            0,
            "task.type: expected 'chief', 'worker', 'ps' or 'evaluator', got 'foobar'",
        ),
        (SPARSE, "chief", 0, "task.type is 'chief', but the cluster has only 'ps', 'worker'"),
        (FULL, "ps", 2, "task.index is 2, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", -1, "task.index is -1, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", None, "task.index is missing, and the job 'ps' has tasks 0 to 1"),
        (SPARSE, "worker", 0, "task.index is 0, and the job 'worker' has tasks 1, 4"),
        (
            {**FULL, "evaluator": ["e:1"]},
            "evaluator",
            1,
            "task.index is 1, and the job 'evaluator' has only task 0",
        ),
    ],
)
def test_unfit_cluster_is_an_error_that_names_the_field(
    cluster: dict[str, Any], task_type: str | None, task_id: int | None, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate_for_training(ClusterSpec(cluster), task_type, task_id, source="TF_CONFIG")
    assert caught.value.message == f"TF_CONFIG: {message}"


@pytest.mark.parametrize(("task_type", "task_id"), [(1, 0), ("ps", "0")])
def test_task_of_the_wrong_python_type_is_a_type_error(task_type: Any, task_id: Any) -> None:
    with pytest.raises(TypeError) as caught:
        validate_for_training(ClusterSpec(FULL), task_type, task_id)
    assert str(caught.value) == (
        "cluster: expected a task type (str) and a task index (int), or None, got "
        f"{task_type!r} and {task_id!r}"
    )


# --- who is who --------------------------------------------------------------------------------

WITHOUT_CHIEF = {job: FULL[job] for job in ("ps", "worker")}
EVALUATED = {**FULL, "evaluator": ["e:1"]}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "chief"),
    [
        (FULL, "chief", 0, True),
        (FULL, "master", None, True),
        (FULL, "worker", 0, False),
        (FULL, "ps", 0, False),
        (EVALUATED, "evaluator", 0, True),
        (FULL, "evaluator", 0, True),
        (WITHOUT_CHIEF, "worker", 0, True),
        (WITHOUT_CHIEF, "worker", 1, False),
        (WITHOUT_CHIEF, "ps", 0, False),
        (WITHOUT_CHIEF, None, None, False),
        ({"master": ["m:1"], **WITHOUT_CHIEF}, "worker", 0, False),
    ],
)
def test_the_chief_is_the_chief_or_worker_0(
    cluster: dict[str, Any], job: str | None, index: int | None, chief: bool
) -> None:
    assert is_chief(ClusterSpec(cluster), job, index) is chief


@pytest.mark.parametrize(
    ("cluster", "job", "count"),
    [
        (FULL, "worker", 4),
        (FULL, "chief", 4),
        (EVALUATED, "worker", 4),
        (EVALUATED, "evaluator", 1),
        (FULL, "evaluator", 0),
        (WITHOUT_CHIEF, "worker", 3),
        (SPARSE, "worker", 2),
    ],
)
def test_chief_and_workers_are_counted_and_evaluators_apart(
    cluster: dict[str, Any], job: str, count: int
) -> None:
    assert worker_count(ClusterSpec(cluster), job) == count


@pytest.mark.parametrize(
    ("cluster", "job", "index", "number"),
    [
        (FULL, "chief", 0, 0),
        (FULL, "worker", 0, 1),
        (FULL, "worker", 2, 3),
        (WITHOUT_CHIEF, "worker", 2, 2),
        (EVALUATED, "evaluator", 0, 0),
        (SPARSE, "worker", 4, 4),
    ],
)
def test_workers_are_numbered_after_the_chief(
    cluster: dict[str, Any], job: str, index: int, number: int
) -> None:
    assert id_in_cluster(ClusterSpec(cluster), job, index) == number


def test_a_ps_is_neither_counted_nor_numbered() -> None:
    spec = ClusterSpec(FULL)
    for ask in (lambda: worker_count(spec, "ps"), lambda: id_in_cluster(spec, "ps", 0)):
        with pytest.raises(ConfigurationError, match="expected 'chief', 'worker' or 'evaluator'"):
            ask()


def test_who_is_not_in_the_cluster_has_no_place_in_it() -> None:
    spec = ClusterSpec(FULL)
    with pytest.raises(ConfigurationError, match="the job 'worker' has tasks 0 to 2"):
        is_chief(spec, "worker", 3)
    with pytest.raises(ConfigurationError, match="got 'foobar'"):
        id_in_cluster(spec, "foobar", 0)
