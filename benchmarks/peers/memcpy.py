"""The floor of floors: one copy of the bytes within a process, by numpy.

A pull or push copies the variable once from memory to memory; nothing travels.
"""

import time

import numpy as np
from orders import NUM_WORKERS, answer_orders


def copy(steps, mib):
    source = np.ones(int(mib * (1 << 20)), np.uint8)
    target = np.empty_like(source)
    target[:] = source
    began = time.perf_counter()
    for _ in range(steps * NUM_WORKERS):
        target[:] = source
    return steps * NUM_WORKERS, time.perf_counter() - began


answer_orders("memcpy", np.__version__, {"pull": copy, "push": copy})
