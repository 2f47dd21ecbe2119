"""The variables that tell psync what launchers leave open: ``PSYNC_JOBS`` and ``PSYNC_PORT``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from psync.cluster import TRAINING_JOBS
from psync.errors import ConfigurationError


def jobs_of(environ: Mapping[str, str], number: str, source: str) -> dict[str, int]:
    """Return the number of tasks of each job, as ``PSYNC_JOBS`` has it; jobs of none are left out.

    What it does not name has its default: one chief, one ps, and as many workers as are left.

    Args:
        environ: Has ``PSYNC_JOBS``, as in ``chief=1,ps=2,worker=4``.
        number: How many tasks the launcher has started; unless it is a number above 0, the variable
            has to name the workers.
        source: The launcher, for messages.

    Raises:
        ConfigurationError: It is malformed, or there are more or fewer tasks.
    """
    text = environ.get("PSYNC_JOBS", "")
    num_tasks = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
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
        if not num_tasks:
            raise ConfigurationError(
                f"PSYNC_JOBS: expected a number of workers, which {source} does not provide, got "
                f"{text!r}",
                hint="PSYNC_JOBS=ps=2,worker=4",
            )
        jobs["worker"] = max(num_tasks - sum(jobs.values()), 0)
    total = sum(jobs.values())
    if num_tasks not in (0, total) or not jobs["worker"]:
        needed = f"{jobs['chief']} chief, {jobs['ps']} ps and at least 1 worker"
        expected = f"{total} tasks" if "worker" in given else needed
        raise ConfigurationError(
            f"PSYNC_JOBS: expected {expected}, but {source} has started {num_tasks} tasks",
            hint="set PSYNC_JOBS=ps=2 for two ps tasks; the remaining tasks are workers",
        )
    return {job: count for job, count in jobs.items() if count}


def port_of(environ: Mapping[str, str], default: int) -> int:
    """Return the port that ``PSYNC_PORT`` names. Raises ConfigurationError: it is malformed."""
    text = environ.get("PSYNC_PORT", "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ConfigurationError(f"PSYNC_PORT: expected a port, 1 to 65535, got {text!r}")
    return int(text)
