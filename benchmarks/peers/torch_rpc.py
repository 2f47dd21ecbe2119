"""A parameter server on ``torch.distributed.rpc`` (TensorPipe): chief, 2 ps, 2 workers.

    pip install torch==2.13.0 numpy

Each variable is cut in two, one half on each ps. A push subtracts a tenth of the gradient there.
"""

import os
import time

from orders import (
    COLUMNS,
    IDS,
    NUM_PS,
    NUM_WORKERS,
    ROWS,
    SMALL,
    SMALL_SHAPE,
    answer_orders,
    free_addresses,
    require,
)

require("torch")

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing

PS = [f"ps{index}" for index in range(NUM_PS)]
WORKERS = [f"worker{index}" for index in range(NUM_WORKERS)]
values = {}  # of a ps, by name

# What runs on ps tasks.


def define(name, shape):
    values[name] = torch.zeros(shape)


def get(names):
    return [values[name] for name in names]


def push(names, gradients):
    torch._foreach_add_([values[name] for name in names], gradients, alpha=-0.1)


def rows(name, ids):
    return values[name][ids]


# What runs on workers.


def nothing():
    return 1


def all_of(futures):
    return [future.wait() for future in futures]


def move(names_of, shape, pulls, pushes, steps):
    """Pull, push, or both, again and again; ``names_of`` are the variables on each ps."""
    gradients = [[torch.full(shape, 0.1) for _ in names] for names in names_of]
    for _ in range(steps):
        if pulls:
            all_of([rpc.rpc_async(p, get, (n,)) for p, n in zip(PS, names_of, strict=True)])
        if pushes:
            all_of(
                [
                    rpc.rpc_async(ps, push, (names, own))
                    for ps, names, own in zip(PS, names_of, gradients, strict=True)
                ]
            )


def look_up(steps):
    for _ in range(steps):
        ids = torch.randint(0, ROWS // NUM_PS, (IDS // NUM_PS,))
        all_of([rpc.rpc_async(ps, rows, ("table", ids)) for ps in PS])


# The chief.


def on_all_workers(work, *args):
    began = time.perf_counter()
    all_of([rpc.rpc_async(worker, work, args, timeout=0) for worker in WORKERS])
    return args[-1] * NUM_WORKERS, time.perf_counter() - began


def defined(names_of, shape):
    all_of(
        [
            rpc.rpc_async(ps, define, (name, shape))
            for ps, names in zip(PS, names_of, strict=True)
            for name in names
        ]
    )


def closures(steps, mib):
    began = time.perf_counter()
    all_of([rpc.rpc_async(WORKERS[i % NUM_WORKERS], nothing) for i in range(steps)])
    return steps, time.perf_counter() - began


def large(pulls, pushes):
    def run(steps, mib):
        shape = (int(mib * (1 << 20)) // 4 // NUM_PS,)
        names_of = [[str(mib)]] * NUM_PS
        defined(names_of, shape)
        return on_all_workers(move, names_of, shape, pulls, pushes, steps)

    return run


def variables(steps, mib):
    names_of = [[str(n) for n in range(ps, SMALL, NUM_PS)] for ps in range(NUM_PS)]
    defined(names_of, SMALL_SHAPE)
    return on_all_workers(move, names_of, SMALL_SHAPE, True, True, steps)


def lookup(steps, mib):
    defined([["table"]] * NUM_PS, (ROWS // NUM_PS, COLUMNS))
    return on_all_workers(look_up, steps)


WORKS = {
    "closures": closures,
    "pull": large(True, False),
    "push": large(False, True),
    "variables": variables,
    "lookup": lookup,
}


def run(rank, address):
    """Be one of the processes; the first is the chief."""
    host, port = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    torch.set_num_threads(1)
    names = ["chief", *PS, *WORKERS]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        answer_orders("torch RPC", torch.__version__, WORKS)
    rpc.shutdown()


if __name__ == "__main__":
    [address] = free_addresses(1)
    context = torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=run, args=(rank, address), daemon=True)
        for rank in range(1, 1 + NUM_PS + NUM_WORKERS)
    ]
    for process in started:
        process.start()
    run(0, address)
    for process in started:
        process.join()
