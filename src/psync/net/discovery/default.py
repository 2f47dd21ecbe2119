"""The default resolver: a table of surroundings, of which the first that applies is believed.

Order: what was opened in this program comes before what its launcher says, and an inner launcher
before an outer one, for each passes its own environment on: ``psync run`` (TF_CONFIG) may be called
by hand inside all others, torchrun is started by SLURM and in pods, and srun in neither.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psync.cluster_roles import TRAINING_JOBS
from psync.errors import ConfigurationError
from psync.net.discovery.kubernetes import KubernetesClusterResolver
from psync.net.discovery.slurm import SlurmClusterResolver
from psync.net.discovery.torchrun import TorchrunClusterResolver
from psync.net.resolvers import ClusterResolver, TFConfigClusterResolver, cluster_of_context

logger = logging.getLogger(__name__)

Environ = Mapping[str, str]

SLURM_PORT = 8888
KUBERNETES_PORT = 8470


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One row of the table.

    Attributes:
        name: For people.
        find: Returns the resolver, or None: this process is not there.
        advice: Returns what is missing where it nearly is; empty: it is elsewhere.
    """

    name: str
    find: Callable[[Environ], ClusterResolver | None]
    advice: Callable[[Environ], str] = lambda environ: ""


def resolve_cluster(environ: Environ | None = None) -> ClusterResolver:
    """Return the resolver of the cluster that this process is in.

    The first of these that applies:

    1. An open cluster of this program: a ``LocalCluster``, or one of ``psync.integrations``,
       between its start and its stop; inside ``psync.run``, the resolver it was given or has found.
    2. ``TF_CONFIG``, which ``psync run`` sets as well.
    3. torchrun (``TORCHELASTIC_RUN_ID``): rank 0 is the chief.
    4. SLURM: a job step of several tasks, as started by srun.
    5. Kubernetes: ``PSYNC_SERVICE`` names the headless service, as in the manifests of ``psync
       launch kubernetes``.

    The last three use two more variables:

    - ``PSYNC_JOBS``, the number of tasks of each job: ``ps=2,worker=4``. There is one chief unless
      it says ``chief=0``. Under torchrun and SLURM the total is known; by default there is one ps,
      and the remaining tasks are workers.
    - ``PSYNC_PORT``, the port of each task; under SLURM the port of the first task of each node.

    Args:
        environ: Mapping of environment variables; None: the environment of this process, and the
            open clusters of this program.

    Raises:
        ConfigurationError: None applies (with a hint), or the variables of one are malformed.

    Example:
        resolver = psync.resolve_cluster()
        print(resolver.source, resolver.task_type, resolver.task_id)
    """
    if environ is None:
        if (open_one := cluster_of_context()) is not None:
            return open_one
        environ = os.environ
    for row in SURROUNDINGS:
        if (resolver := row.find(environ)) is not None:
            logger.debug("the cluster is described by %s", row.name)
            return resolver
    tried = ", ".join(row.name for row in SURROUNDINGS)
    advice = [text for row in SURROUNDINGS if (text := row.advice(environ))]
    script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"  # of a command, or none
    advice += [
        f"to train on this machine: psync run {script} --ps 1 --workers 2",
        "or open a psync.LocalCluster(1, 2) in the program, and start that by asyncio.run",
    ]
    raise ConfigurationError(
        f"this process belongs to no cluster: none is open in the program, and no variables of "
        f"{tried} describe one",
        hint="; ".join(advice),
    )


def _tf_config(environ: Environ) -> ClusterResolver | None:
    if not environ.get("TF_CONFIG"):
        return None
    return TFConfigClusterResolver(environ=environ)


def _torchrun(environ: Environ) -> ClusterResolver | None:
    if not environ.get("TORCHELASTIC_RUN_ID"):
        return None
    # One for the process: tasks meet once, and each of them listens at one address.
    variables = TorchrunClusterResolver.variables_of(environ)
    return _one_torchrun(variables, environ.get("PSYNC_JOBS", ""))


@functools.cache
def _one_torchrun(variables: tuple[tuple[str, str], ...], jobs: str) -> ClusterResolver:
    environ = dict(variables)
    number = environ.get("WORLD_SIZE", "")
    known = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
    return TorchrunClusterResolver(jobs_of(jobs, known or None, "torchrun"), environ=environ)


def _slurm(environ: Environ) -> ClusterResolver | None:
    number = environ.get("SLURM_STEP_NUM_TASKS", "")
    if number in ("", "1"):  # 1: a shell, as of `srun --pty bash`
        return None
    known = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
    jobs = jobs_of(environ.get("PSYNC_JOBS", ""), known or None, "SLURM")
    return SlurmClusterResolver(jobs, _port(environ, SLURM_PORT), environ=dict(environ))


def _kubernetes(environ: Environ) -> ClusterResolver | None:
    service = environ.get("PSYNC_SERVICE")
    if not service:
        return None
    return KubernetesClusterResolver(
        jobs=jobs_of(environ.get("PSYNC_JOBS", ""), None, "Kubernetes"),
        service=service,
        namespace=environ.get("PSYNC_NAMESPACE") or None,
        tf_server_port=_port(environ, KUBERNETES_PORT),
        environ=environ,
    )


def _slurm_advice(environ: Environ) -> str:
    if "SLURM_JOB_ID" not in environ:
        return ""
    return "in a SLURM job, start the tasks with srun: srun --ntasks=4 python train.py"


def _kubernetes_advice(environ: Environ) -> str:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    return (
        "in a pod, set PSYNC_SERVICE to the headless service and PSYNC_JOBS to the numbers of "
        "tasks, as the manifests of psync launch kubernetes do"
    )


SURROUNDINGS = (
    Surroundings("TF_CONFIG", _tf_config),
    Surroundings("torchrun", _torchrun),
    Surroundings("SLURM", _slurm, _slurm_advice),
    Surroundings("Kubernetes", _kubernetes, _kubernetes_advice),
)
"""What a launcher may have said, in the order in which it is believed."""


def jobs_of(text: str, num_tasks: int | None, source: str) -> dict[str, int]:
    """Return the number of tasks of each job, as ``PSYNC_JOBS`` has it; jobs of none are left out.

    Args:
        text: As in ``chief=1,ps=2,worker=4``; what it does not name has its default: one chief,
            one ps, and as many workers as are left.
        num_tasks: How many the launcher has started; None: the text has to name the workers.
        source: The launcher, for messages.

    Raises:
        ConfigurationError: It is malformed, or there are more or fewer tasks.
    """
    given: dict[str, int] = {}
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"([a-z]+)=([0-9]{1,7})", piece)
        if match is None or match[1] not in TRAINING_JOBS or match[1] in given:
            raise ConfigurationError(
                f"PSYNC_JOBS: expected numbers of tasks as in chief=1,ps=2,worker=4, got {text!r}"
            )
        given[match[1]] = int(match[2])
    jobs = {"chief": 1, "ps": 1, **given}
    if "worker" not in jobs:
        if num_tasks is None:
            raise ConfigurationError(
                f"PSYNC_JOBS: expected the number of workers, which {source} does not tell, got "
                f"{text!r}",
                hint="PSYNC_JOBS=ps=2,worker=4",
            )
        jobs["worker"] = max(num_tasks - sum(jobs.values()), 0)
    total = sum(jobs.values())
    if num_tasks not in (None, total) or not jobs["worker"]:
        needed = f"{jobs['chief']} chief, {jobs['ps']} ps and at least 1 worker"
        expected = f"{total} tasks" if "worker" in given else needed
        raise ConfigurationError(
            f"PSYNC_JOBS: expected {expected}, and {source} has started {num_tasks} tasks",
            hint="PSYNC_JOBS=ps=2 for two ps tasks; all that are left are workers",
        )
    return {job: count for job, count in jobs.items() if count}


def _port(environ: Environ, default: int) -> int:
    text = environ.get("PSYNC_PORT", "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ConfigurationError(f"PSYNC_PORT: expected a port, 1 to 65535, got {text!r}")
    return int(text)
