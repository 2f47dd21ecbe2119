"""Roles of tasks in parameter-server training (chief, ps, worker, evaluator), validated."""

from __future__ import annotations

from psync.cluster import ClusterSpec, known_indices, listed
from psync.errors import ConfigurationError

TRAINING_JOBS = ("chief", "worker", "ps")

CHIEF = "/job:chief/task:0"
"""The name under which the chief speaks to the other tasks, whatever its task is called."""

ENQUIRER = 2**62
"""Incarnation of who asks for its own; above all that a clock of nanoseconds gives."""


def with_chief(spec: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the job ``master``, the chief's older name, called ``chief``.

    Raises:
        ConfigurationError: If it has both.
    """
    jobs = spec.as_dict()
    if "master" not in jobs:
        return spec
    if "chief" in jobs:
        raise ConfigurationError(
            "the cluster has both a 'chief' and a 'master', which are the same job"
        )
    return ClusterSpec({"chief" if job == "master" else job: jobs[job] for job in jobs})


def validate_for_training(
    spec: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    *,
    source: str = "cluster",
) -> tuple[ClusterSpec, str | None, int | None]:
    """Check that a parameter-server job can run on the cluster, and return what is used of it.

    Only the chief, and a program that is no task of the cluster (``task_type`` None), need the
    whole cluster; a ps, or a worker that joins late, may know only itself. ``master`` is accepted
    for ``chief``. An evaluator is not part of the training cluster: it is left out.

    Args:
        spec: The cluster, as configured.
        task_type: Job of this process, or None if it is not one of the tasks.
        task_id: Its index; may be None where the job has one task only.
        source: Where this came from, for messages: ``TF_CONFIG``.

    Returns:
        (cluster without evaluators, task type, task index).

    Raises:
        TypeError: If ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: If the cluster is empty, has an unknown job, more than one chief or
            evaluator, no ps or no worker; or if the own task is not in it.

    Source: TensorFlow ``ParameterServerStrategyV2`` and ``multi_worker_util``; there a listed
    evaluator is connected to like a worker, and training hangs.
    """
    if not isinstance(task_type, str | None) or not isinstance(task_id, int | None):
        raise TypeError(
            f"{source}: expected a task type (str) and a task index (int), or None, got "
            f"{task_type!r} and {task_id!r}"
        )
    try:
        jobs = with_chief(spec).as_dict()
    except ConfigurationError as exc:
        raise ConfigurationError(f"{source}: cluster: {exc.message}") from None
    if not jobs:
        raise ConfigurationError(
            f"{source}: cluster is missing or empty",
            hint="on one machine, start the program with: psync run SCRIPT --ps 2 --workers 2",
        )
    for job in jobs:
        if job not in (*TRAINING_JOBS, "evaluator"):
            raise ConfigurationError(
                f"{source}: cluster.{job}: expected the jobs 'chief', 'worker', 'ps' or "
                f"'evaluator', got {job!r}"
            )
        if job in ("chief", "evaluator") and len(jobs[job]) > 1:
            raise ConfigurationError(
                f"{source}: cluster.{job}: expected at most one {job}, got {len(jobs[job])}"
            )
    task_type = "chief" if task_type == "master" else task_type
    evaluators = jobs.pop("evaluator", [])
    training = ClusterSpec(jobs)
    for job in ("ps", "worker") if task_type in (None, "chief") else ():
        if not jobs.get(job):
            raise ConfigurationError(
                f"{source}: cluster.{job}: expected at least one {job}, got none"
            )
    if task_type is not None and (task_type != "evaluator" or evaluators):
        own = ClusterSpec({"evaluator": evaluators}) if task_type == "evaluator" else training
        task_id = _checked_task(own, task_type, task_id, source)
    return training, task_type, task_id


def _checked_task(spec: ClusterSpec, task_type: str, task_id: int | None, source: str) -> int:
    """Return the index of the own task."""
    if task_type not in (*TRAINING_JOBS, "evaluator"):
        raise ConfigurationError(
            f"{source}: task.type: expected 'chief', 'worker', 'ps' or 'evaluator', "
            f"got {task_type!r}"
        )
    if task_type not in spec.jobs:
        raise ConfigurationError(
            f"{source}: task.type is {task_type!r}, but the cluster has only {listed(spec.jobs)}"
        )
    indices = spec.task_indices(task_type)
    if task_id is None and len(indices) == 1:
        return indices[0]
    if task_id not in indices:
        what = "is missing" if task_id is None else f"is {task_id}"
        raise ConfigurationError(
            f"{source}: task.index {what}, and the job {task_type!r} has {known_indices(indices)}"
        )
    return task_id


# --- who is who --------------------------------------------------------------------------------


def is_chief(spec: ClusterSpec, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Return whether a task is the one that saves and logs for the whole cluster.

    This is the chief; in a cluster without a chief, worker 0. An evaluator is its own cluster and
    its own chief.

    Args:
        spec: The cluster.
        task_type: Job of the task. None: a program that is not a task, and not the chief.
        task_id: Index of the task; may be None if the job has only one task.

    Raises:
        TypeError: ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: The cluster is not one for training, or has no such task.

    Source: TensorFlow ``multi_worker_util.is_chief``.
    """
    _, job, index = validate_for_training(spec, task_type, task_id)
    first = "chief" not in with_chief(spec).jobs and (job, index) == ("worker", 0)
    return job in ("chief", "evaluator") or first


def worker_count(spec: ClusterSpec, task_type: str) -> int:
    """Return the number of chief and worker tasks; for an evaluator, the number of evaluators.

    Raises:
        ConfigurationError: The job is none of these: a ps does not compute.

    Source: TensorFlow ``multi_worker_util.worker_count``, which counts the chief as a worker. The
        chief of parameter-server training schedules, and computes nothing.
    """
    jobs = {"evaluator": ("evaluator",)}.get(task_type, ("chief", "worker"))
    if task_type not in ("master", "chief", "worker", "evaluator"):
        raise ConfigurationError(
            f"task_type: expected 'chief', 'worker' or 'evaluator', got {task_type!r}"
        )
    known = with_chief(spec)
    return sum(known.num_tasks(job) for job in jobs if job in known.jobs)


def id_in_cluster(spec: ClusterSpec, task_type: str, task_id: int | None = None) -> int:
    """Return a number that is unique among the tasks that ``worker_count`` counts.

    The chief is 0, workers follow it; evaluators are counted separately.

    Raises:
        TypeError: ``task_type`` is not a str or ``task_id`` not an int.
        ConfigurationError: The cluster is not one for training or has no such task; or the task is
            a ps, which has no such number.

    Source: TensorFlow ``multi_worker_util.id_in_cluster``.
    """
    _, job, index = validate_for_training(spec, task_type, task_id)
    if job is None or job == "ps":
        raise ConfigurationError(
            f"task_type: expected 'chief', 'worker' or 'evaluator', got {task_type!r}"
        )
    chiefs = "chief" in with_chief(spec).jobs and job == "worker"
    return (index or 0) + chiefs
