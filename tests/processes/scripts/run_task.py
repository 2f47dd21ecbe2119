"""Serves as a task of a cluster that the command line describes, without TF_CONFIG.

run_task.py CLUSTER JOB INDEX; the cluster as JSON.
"""

import asyncio
import json
import logging
import sys

import psync

cluster, job, index = sys.argv[1:]
resolver = psync.SimpleClusterResolver(
    psync.ClusterSpec(json.loads(cluster)), task_type=job, task_id=int(index)
)
logging.basicConfig(level=logging.INFO)
asyncio.run(psync.run_task(resolver))
