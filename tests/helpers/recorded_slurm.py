"""Environments that SLURM's jobs have printed, as people have reported them; names are changed.

Sources: an issue of TheHPXProject/hpx (692: srun -N1 -n4), a thread of the Open MPI users' list
(salloc and srun on two nodes), and reports of interactive sessions of 2026.
"""

from __future__ import annotations

ONE_NODE = {  # srun -N1 -n4, in a batch job; rank 1
    "SLURMD_NODENAME": "t-cn0117",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_JOBID": "901593",
    "SLURM_JOB_CPUS_PER_NODE": "4",
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NODELIST": "t-cn0117",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "t-cn0117",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "t-cn0117",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}

INTERACTIVE = {  # a shell that salloc has opened, in a step of its own
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "1720714",
    "SLURM_JOB_NODELIST": "gpu71",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu71",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "8",
}

SHELL = {  # srun --pty, one task
    "SLURM_JOB_ID": "22902023",
    "SLURM_JOB_NODELIST": "sh04-10n05",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "sh04-10n05",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}


def two_nodes(rank: int) -> dict[str, str]:
    """Return what srun gives a rank of two nodes with two tasks each."""
    node = rank // 2
    return {
        "SLURMD_NODENAME": f"node{node + 1}",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_GTIDS": f"{2 * node},{2 * node + 1}",
        "SLURM_JOB_ID": "23",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NNODES": "2",
        "SLURM_NODEID": str(node),
        "SLURM_NODELIST": "node[1-2]",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": str(rank),
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
