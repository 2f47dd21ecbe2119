"""A parameter server written as Ray actors: 2 ps actors, 2 worker actors.

    pip install ray numpy

Each variable is cut in two, one half on each ps. A push subtracts a tenth of the gradient there.
"""

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
    require,
)

require("ray")

import numpy as np
import ray


@ray.remote
class Ps:
    def __init__(self):
        self.values = {}

    def define(self, names, shape):
        self.values.update({name: np.zeros(shape, np.float32) for name in names})

    def get(self, names):
        return [self.values[name] for name in names]

    def push(self, names, gradients):
        for name, gradient in zip(names, gradients, strict=True):
            self.values[name] -= np.float32(0.1) * gradient

    def rows(self, name, ids):
        return self.values[name][ids]


@ray.remote
class Worker:
    def __init__(self, ps):
        self.ps = ps

    def nothing(self):
        return 1

    def move(self, names_of, shape, pulls, pushes, steps):
        """Pull, push, or both, again and again; ``names_of`` are the variables on each ps."""
        gradients = [[np.full(shape, 0.1, np.float32) for _ in names] for names in names_of]
        for _ in range(steps):
            if pulls:
                ray.get([ps.get.remote(names) for ps, names in zip(self.ps, names_of, strict=True)])
            if pushes:
                ray.get(
                    [
                        ps.push.remote(names, own)
                        for ps, names, own in zip(self.ps, names_of, gradients, strict=True)
                    ]
                )

    def look_up(self, steps):
        rng = np.random.default_rng()
        for _ in range(steps):
            ids = rng.integers(0, ROWS // NUM_PS, IDS // NUM_PS)
            ray.get([ps.rows.remote("table", ids) for ps in self.ps])


def main():
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
        object_store_memory=1 << 30,
    )  # fmt: skip
    ps = [Ps.remote() for _ in range(NUM_PS)]
    workers = [Worker.remote(ps) for _ in range(NUM_WORKERS)]
    ray.get([worker.nothing.remote() for worker in workers])

    def closures(steps, mib):
        began = time.perf_counter()
        ray.get([workers[i % NUM_WORKERS].nothing.remote() for i in range(steps)])
        return steps, time.perf_counter() - began

    def moved(names_of, shape, pulls, pushes, steps):
        ray.get(
            [each.define.remote(names, shape) for each, names in zip(ps, names_of, strict=True)]
        )
        began = time.perf_counter()
        ray.get([w.move.remote(names_of, shape, pulls, pushes, steps) for w in workers])
        return steps * NUM_WORKERS, time.perf_counter() - began

    def large(pulls, pushes):
        def run(steps, mib):
            shape = (int(mib * (1 << 20)) // 4 // NUM_PS,)
            return moved([[str(mib)]] * NUM_PS, shape, pulls, pushes, steps)

        return run

    def variables(steps, mib):
        names_of = [[str(n) for n in range(i, SMALL, NUM_PS)] for i in range(NUM_PS)]
        return moved(names_of, SMALL_SHAPE, True, True, steps)

    def lookup(steps, mib):
        ray.get([each.define.remote(["table"], (ROWS // NUM_PS, COLUMNS)) for each in ps])
        began = time.perf_counter()
        ray.get([worker.look_up.remote(steps) for worker in workers])
        return steps * NUM_WORKERS, time.perf_counter() - began

    answer_orders(
        "Ray actors",
        ray.__version__,
        {
            "closures": closures,
            "pull": large(True, False),
            "push": large(False, True),
            "variables": variables,
            "lookup": lookup,
        },
    )


if __name__ == "__main__":
    main()
