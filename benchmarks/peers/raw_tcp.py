"""A floor: bytes through bare sockets, TCP on loopback; ``floor.py`` says how.

A push is sent and answered, and nothing is computed. In a synchronous step the answer comes when
both workers have pushed. Training pulls, then pushes.
"""

import sys
from pathlib import Path

from orders import NUM_PS, NUM_WORKERS, answer_orders

sys.path.insert(0, str(Path(__file__).parent.parent))
from floor import Floor


def works_of(floor):
    """Return what a floor can do, by the name of the work."""

    def work(**options):
        def run(steps, mib):
            nbytes = int(mib * (1 << 20)) // NUM_PS * NUM_PS
            seconds = floor.measure(nbytes, steps, **options)
            return steps * (1 if options.get("together") else NUM_WORKERS), seconds

        return run

    return {
        "pull": work(pull=True, push=False),
        "push": work(pull=False, push=True),
        "synchronous": work(pull=True, push=True, together=True),
        "asynchronous": work(pull=True, push=True),
    }


def main(name, family):
    import uvloop

    with Floor(NUM_PS, NUM_WORKERS, family=family) as floor:
        answer_orders(name, f"uvloop {uvloop.__version__}", works_of(floor))


if __name__ == "__main__":
    main("raw TCP", "tcp")
