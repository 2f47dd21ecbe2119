"""TensorFlow's ParameterServerStrategy and ClusterCoordinator: chief, 2 ps and 2 workers.

    pip install tensorflow-cpu==2.21.0        # in an environment of its own

A step is a ``tf.function`` that the coordinator schedules. Variables of 256 KiB and above are cut
in two, one half on each ps. A push is ``assign_sub``.
"""

import json
import os
import subprocess
import sys
import time

from orders import (
    COLUMNS,
    IDS,
    NUM_PS,
    NUM_WORKERS,
    ROWS,
    SMALL,
    SMALL_SHAPE,
    WARM_UP_STEPS,
    answer_orders,
    free_addresses,
    require,
)

require("tensorflow")
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")


def serve():
    """Be a ps or a worker."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()


def main():
    addresses = free_addresses(NUM_PS + NUM_WORKERS)
    cluster = {"ps": addresses[:NUM_PS], "worker": addresses[NUM_PS:]}
    tasks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ
            | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": i}})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for job, those in cluster.items()
        for i in range(len(those))
    ]
    try:
        coordinate(cluster)
    finally:
        for task in tasks:
            task.kill()
        for task in tasks:
            task.wait()


def coordinate(cluster):
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
            256 << 10, max_shards=NUM_PS
        ),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    steps_made = {}  # tf.functions, made once

    def timed(key, make, steps):
        """Schedule a step ``steps`` times for each worker; return what ``answer_orders`` wants."""
        if key not in steps_made:
            steps_made[key] = make()
            for _ in range(WARM_UP_STEPS * NUM_WORKERS):
                coordinator.schedule(steps_made[key])
            coordinator.join()
        began = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(steps_made[key])
        coordinator.join()
        return steps, time.perf_counter() - began

    def variable(shape):
        with strategy.scope():
            made = tf.Variable(tf.zeros(shape))
        return made, getattr(made, "variables", [made])

    def nothing():
        return tf.function(lambda: tf.constant(1))

    def pulling(mib):
        whole, _ = variable([int(mib * 1024), 256])

        @tf.function
        def pull():
            return tf.convert_to_tensor(whole)[0, 0]

        return pull

    def pushing(mib):
        _, parts = variable([int(mib * 1024), 256])

        @tf.function
        def push():
            for part in parts:
                part.assign_sub(tf.ones(part.shape) * 0.1)

        return push

    def small():
        each = [variable(SMALL_SHAPE)[0] for _ in range(SMALL)]

        @tf.function
        def pull_and_push():
            for one in each:
                one.assign_sub(tf.identity(one) * 0.001)

        return pull_and_push

    def looking_up():
        table, _ = variable([ROWS, COLUMNS])

        @tf.function
        def look_up():
            ids = tf.random.uniform([IDS], 0, ROWS, tf.int64)
            return tf.nn.embedding_lookup(table, ids)[0, 0]

        return look_up

    answer_orders(
        "TensorFlow 2",
        tf.__version__,
        {
            "closures": lambda steps, mib: timed("nothing", nothing, steps),
            "pull": lambda steps, mib: timed(
                ("pull", mib), lambda: pulling(mib), steps * NUM_WORKERS
            ),
            "push": lambda steps, mib: timed(
                ("push", mib), lambda: pushing(mib), steps * NUM_WORKERS
            ),
            "variables": lambda steps, mib: timed("variables", small, steps * NUM_WORKERS),
            "lookup": lambda steps, mib: timed("lookup", looking_up, steps * NUM_WORKERS),
        },
    )


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        serve()
    else:
        main()
