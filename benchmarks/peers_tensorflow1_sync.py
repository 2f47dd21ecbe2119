"""TensorFlow's parameter servers on the work of ``psync bench sync-async --parts peers``.

    pip install tensorflow-cpu==2.21.0        # in an environment of its own
    python benchmarks/peers_tensorflow1_sync.py sync 0.04 300 2

Arguments: ``sync`` or ``async``, the size of the model in MiB, steps to time, number of workers.
Prints one line of JSON: updates, and the seconds that they took. An update is the mean of one
gradient from each worker (``SyncReplicasOptimizer``), or one gradient.

Two ps tasks and the workers are processes of their own, joined by gRPC on loopback, in
TensorFlow 1's way: a graph, a ``MonitoredTrainingSession``, variables placed by
``replica_device_setter``. Worker 0 takes the time, and reads off the global step what all have
done. The others go on until they are killed: a worker that outlives the chief of synchronous
training waits for ever.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

NUM_PS = NUM_VARIABLES = 2
RATE = 1e-3
WARM_UP_STEPS = 5
LIMIT_S = 110


def launch(mode, mib, steps, num_workers):
    """Start all tasks, and print what worker 0 prints."""
    counts = {"ps": NUM_PS, "worker": int(num_workers)}
    with contextlib.ExitStack() as sockets:
        taken = {
            job: [sockets.enter_context(socket.socket()) for _ in range(count)]
            for job, count in counts.items()
        }
        for each in (*taken["ps"], *taken["worker"]):
            each.bind(("127.0.0.1", 0))
        cluster = {
            job: [f"127.0.0.1:{each.getsockname()[1]}" for each in many]
            for job, many in taken.items()
        }
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    tasks = []
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit("stopped"))  # ends in the finally below
    try:
        for job, count in counts.items():
            for index in range(count):
                task = {"cluster": cluster, "job": job, "index": index}
                timed = job == "worker" and index == 0
                tasks.append(
                    subprocess.Popen(
                        [sys.executable, __file__, mode, mib, steps, num_workers],
                        env=environ | {"BENCH_TASK": json.dumps(task)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE if timed else subprocess.DEVNULL,
                    )
                )
        signal.alarm(LIMIT_S)
        chief, *others = tasks[NUM_PS:]
        chief.stdout.readline()  # its session has begun
        for other in others:
            other.stdin.close()
        print(chief.stdout.readline().decode().strip() or sys.exit("the chief has failed"))
    finally:
        for task in tasks:
            task.kill()
        for task in tasks:
            task.wait()


def serve(task, mode, mib, steps, num_workers):
    """Be one of the tasks."""
    import tensorflow as tf

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
                optimizer, replicas_to_aggregate=num_workers, total_num_replicas=num_workers
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
        while mode == "async" and session.run(global_step) < WARM_UP_STEPS * num_workers:
            time.sleep(0.01)
        before, began = session.run(global_step), time.perf_counter()
        done = 0
        while done < steps or not is_chief:
            session.run(train)
            done += 1
        seconds = time.perf_counter() - began
        updates = int(session.run(global_step) - before)
        print(json.dumps({"updates": updates, "seconds": seconds}), flush=True)
        os._exit(0)  # leaving the session would wait for a thread that waits for gradients


def main():
    if len(sys.argv) != 5:
        sys.exit(f"expected 4 arguments\n\n{__doc__}")
    mode, mib, steps, num_workers = sys.argv[1:]
    task = os.environ.get("BENCH_TASK")
    if task is None:
        launch(mode, mib, steps, num_workers)
    else:
        serve(json.loads(task), mode, float(mib), int(steps), int(num_workers))


if __name__ == "__main__":
    main()
