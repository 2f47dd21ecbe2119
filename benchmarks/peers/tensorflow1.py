"""TensorFlow 1's parameter servers: synchronous and asynchronous training of a model.

    pip install tensorflow-cpu==2.21.0        # in an environment of its own

Two ps tasks and two workers are processes of their own, joined by gRPC on loopback, in TensorFlow
1's way: a graph, a ``MonitoredTrainingSession``, variables placed by ``replica_device_setter``.
Every step reads all variables and pushes dense gradients; an update is the mean of one gradient of
each worker (``SyncReplicasOptimizer``), or one gradient. Worker 0 takes the time, and reads off the
global step what all have done. The others go on until they are killed: a worker that outlives the
chief of synchronous training waits for ever. So each order has processes of its own.
"""

import json
import os
import subprocess
import sys
import threading
import time

from orders import (
    NUM_PS,
    NUM_WORKERS,
    RATE,
    WARM_UP_STEPS,
    answer_orders,
    free_addresses,
    require,
)

require("tensorflow")

NUM_VARIABLES = 2
LIMIT_S = 110


def trained(mode):
    """Return what measures a mode."""

    def run(steps, mib):
        addresses = free_addresses(NUM_PS + NUM_WORKERS)
        cluster = {"ps": addresses[:NUM_PS], "worker": addresses[NUM_PS:]}
        tasks = [
            start({"cluster": cluster, "job": job, "index": index, "mode": mode, "mib": mib,
                   "steps": steps})
            for job, those in cluster.items()
            for index in range(len(those))
        ]  # fmt: skip
        ending = threading.Timer(LIMIT_S, lambda: [task.kill() for task in tasks])
        ending.start()
        try:
            chief, *others = tasks[NUM_PS:]
            chief.stdout.readline()  # its session has begun
            for other in others:
                other.stdin.close()
            line = chief.stdout.readline()
            if not line:
                raise RuntimeError("worker 0 has failed, or took too long")
            return json.loads(line)
        finally:
            ending.cancel()
            for task in tasks:
                task.kill()
            for task in tasks:
                task.wait()
                task.stdout.close()

    return run


def start(task):
    return subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ
        | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "BENCH_TASK": json.dumps(task)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def serve(task):
    """Be one of the tasks."""
    import tensorflow as tf

    mode, mib, steps = task["mode"], task["mib"], task["steps"]
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    cluster = v1.train.ClusterSpec(task["cluster"])
    server = v1.train.Server(cluster, job_name=task["job"], task_index=task["index"])
    if task["job"] == "ps":
        server.join()
    own = f"/job:worker/task:{task['index']}"
    is_chief = task["index"] == 0
    rows = int(mib * (1 << 20) / 4 / 10 / NUM_VARIABLES)
    with v1.device(v1.train.replica_device_setter(worker_device=own, cluster=cluster)):
        global_step = v1.train.get_or_create_global_step()
        zeros = v1.zeros_initializer()
        weights = [
            v1.get_variable(f"w{n}", [rows, 10], initializer=zeros) for n in range(NUM_VARIABLES)
        ]
        loss = tf.add_n([tf.reduce_sum(tf.square(weight - 1.0)) for weight in weights])
        optimizer, hooks = v1.train.GradientDescentOptimizer(RATE), []
        if mode == "sync":
            optimizer = v1.train.SyncReplicasOptimizer(
                optimizer, replicas_to_aggregate=NUM_WORKERS, total_num_replicas=NUM_WORKERS
            )
            hooks = [optimizer.make_session_run_hook(is_chief, num_tokens=0)]
        train = optimizer.minimize(loss, global_step=global_step)
    config = v1.ConfigProto(device_filters=["/job:ps", own])
    if not is_chief:
        sys.stdin.read()  # until the chief has begun: TensorFlow would look again after 30 s
    with v1.train.MonitoredTrainingSession(
        master=server.target, is_chief=is_chief, hooks=hooks, config=config
    ) as session:
        if is_chief:
            print("ready", flush=True)
        for _ in range(WARM_UP_STEPS):
            session.run(train)
        # Nobody synchronous gets here alone, and only pushes make the global step grow there.
        while mode == "async" and session.run(global_step) < WARM_UP_STEPS * NUM_WORKERS:
            time.sleep(0.01)
        before, began = session.run(global_step), time.perf_counter()
        done = 0
        while done < steps or not is_chief:
            session.run(train)
            done += 1
        seconds = time.perf_counter() - began
        updates = int(session.run(global_step) - before)
        print(json.dumps([updates, seconds]), flush=True)
        os._exit(0)  # leaving the session would wait for a thread that waits for gradients


if __name__ == "__main__":
    if "BENCH_TASK" in os.environ:
        serve(json.loads(os.environ["BENCH_TASK"]))
    else:
        from tensorflow import __version__

        works = {"synchronous": trained("sync"), "asynchronous": trained("async")}
        answer_orders("TensorFlow 1 API", __version__, works)
