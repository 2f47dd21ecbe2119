"""A floor: what a step and its update compute, where nobody sends, waits or serves anything.

Two processes do the arithmetic of two workers and of two ps tasks, by numpy as psync's row does it:
a gradient into memory of its own, then SGD block by block into another version of the values, in
synchronous training with the mean of two gradients.
"""

import multiprocessing
import time

import numpy as np
from orders import NUM_WORKERS, RATE, WARM_UP_STEPS, answer_orders

BLOCK = 1 << 18  # elements
VERSIONS = 4


def gradient(values, out):
    """The loss is the sum of (w - 1)² over the model."""
    np.subtract(values, 1, out=out)
    out *= 2


def update(values, gradients, out):
    """Apply SGD with the mean of some gradients."""
    total, scaled = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for start in range(0, values.size, BLOCK):
        part = slice(start, start + BLOCK)
        mean = gradients[0][part]
        if len(gradients) > 1:
            mean = np.add(mean, gradients[1][part], out=total[: mean.size])
            mean /= len(gradients)
        np.multiply(mean, np.float32(RATE), out=scaled[: mean.size])
        np.subtract(values[part], scaled[: mean.size], out=out[part])


def work(name, steps, mib, barrier, ends):
    """Do the share of one worker and one ps."""
    size = int(mib * (1 << 20) / 4)
    versions = [np.zeros(size, np.float32) for _ in range(VERSIONS)]
    gradients = [np.zeros(size, np.float32) for _ in range(NUM_WORKERS)]
    half = size // NUM_WORKERS if name == "synchronous" else size
    for count in (WARM_UP_STEPS, steps):
        barrier.wait()
        began = time.perf_counter()
        for step in range(count):
            values, new = versions[step % VERSIONS], versions[(step + 1) % VERSIONS]
            if name != "push":
                gradient(values, gradients[0])
            parts = [each[:half] for each in gradients]
            update(values[:half], parts if name == "synchronous" else parts[:1], new[:half])
        seconds = time.perf_counter() - began
    ends.put(seconds)


def of_all(name):
    """Return what measures a work."""

    def run(steps, mib):
        context = multiprocessing.get_context("fork")
        barrier, ends = context.Barrier(NUM_WORKERS), context.Queue()
        args = name, steps, mib, barrier, ends
        processes = [context.Process(target=work, args=args) for _ in range(NUM_WORKERS)]
        for process in processes:
            process.start()
        seconds = max(ends.get() for _ in processes)
        for process in processes:
            process.join()
        return steps * (1 if name == "synchronous" else NUM_WORKERS), seconds

    return run


answer_orders(
    "arithmetic alone",
    np.__version__,
    {name: of_all(name) for name in ("push", "synchronous", "asynchronous")},
)
