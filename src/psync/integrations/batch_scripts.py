"""Batch scripts of SLURM: what ``psync launch slurm`` prints.

On SLURM one job step has all tasks, and ``SlurmClusterResolver`` finds them. SLURM starts no single
task again: a worker that dies is missed, a job whose ps or chief dies begins anew from its newest
checkpoint, when it is requeued. Signals are told apart on purpose: USR1, which SLURM sends before
the time limit, and before a preemption if it is configured so, requeues the job; TERM, which
``scancel`` sends, does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

NOTICE_S = 120
"""Before the time limit: for closures that run, and for SLURM, which may be a minute late."""


@dataclass(frozen=True)
class Batch:
    """What was asked for.

    Attributes:
        name: Of the job.
        command: What runs the script, with its arguments.
        num_ps: Number of ps tasks.
        num_workers: Number of workers.
        cpus_per_task: Cores of each task; None: as SLURM decides.
        time: Limit, as sbatch takes it; None: the partition's.
        options: Further options of sbatch, as they stand on its command line.
        setup: Lines of shell before the tasks start.
    """

    name: str
    command: Sequence[str]
    num_ps: int
    num_workers: int
    cpus_per_task: int | None = None
    time: str | None = None
    options: Sequence[str] = ()
    setup: Sequence[str] = ()


def script(batch: Batch) -> str:
    """Return the script."""
    options = [
        f"--job-name={batch.name}",
        f"--ntasks={1 + batch.num_ps + batch.num_workers}",
        *([f"--cpus-per-task={batch.cpus_per_task}"] if batch.cpus_per_task else []),
        *([f"--time={batch.time}"] if batch.time else []),
        f"--output={batch.name}-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{NOTICE_S}",
        *batch.options,
    ]
    cpus = f" --cpus-per-task={batch.cpus_per_task}" if batch.cpus_per_task else ""
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        setup="".join(f"{line}\n" for line in batch.setup),
        jobs=f"chief=1,ps={batch.num_ps},worker={batch.num_workers}",
        cpus=cpus,
        command=shlex.join(batch.command),
    )


_SCRIPT = """\
#!/bin/bash
{options}

{setup}# A secret of this job alone; srun hands it on in the environment, not on a command line.
PSYNC_SECRET=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
export PSYNC_SECRET
export PSYNC_JOBS={jobs}
# Where the first task of each node listens; other jobs on these nodes have other ports.
export PSYNC_PORT=$((20000 + SLURM_JOB_ID % 120 * 100))
export PSYNC_RESTART_COUNT="${{SLURM_RESTART_COUNT:-0}}"

# Ranks are given out node by node; no task takes the others with it when it ends.
srun --distribution=block --kill-on-bad-exit=0 --wait=0{cpus} {command} &
step=$!
asked_to=
# USR1 comes before the time limit: start again, from the newest checkpoint.
trap 'asked_to=requeue; kill -TERM "$step"' USR1
trap 'asked_to=end; kill -TERM "$step"' TERM
while :; do
  wait "$step"
  code=$?
  # A signal ends the wait, too, and not the step.
  kill -0 "$step" 2> /dev/null || break
done
if [ "$asked_to" = requeue ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
