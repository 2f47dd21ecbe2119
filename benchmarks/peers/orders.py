"""What every program here does: it says who it is, then answers orders until there are no more.

``psync bench peers`` starts the programs and talks to them by lines of JSON; see its module for the
form of orders. One can be run by hand as well:

    echo '{"work": "pull", "mib": 64, "steps": 8}' | python benchmarks/peers/torch_rpc.py
"""

import functools
import importlib.util
import json
import os
import socket
import sys

NUM_PS = NUM_WORKERS = 2
SMALL, SMALL_SHAPE = 100, (64, 64)
ROWS, COLUMNS, IDS = 1_000_000, 64, 4096
WARM_UP_STEPS = 5
RATE = 1e-3


@functools.cache
def _answers():
    """Return what answers go to: stdout, to which nothing else is printed from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(**answer):
    """Write one answer."""
    print(json.dumps(answer), file=_answers(), flush=True)


def require(module):
    """End the program, and say why, if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        say(missing=module)
        sys.exit()


def answer_orders(name, version, works):
    """Answer orders from stdin.

    Args:
        name: Of the system.
        version: Of its library.
        works: Functions by work. Each takes the steps of each worker and MiB, and returns what all
            workers have done together, and the seconds that it took.
    """
    say(name=name, version=version, works=list(works))
    for line in sys.stdin:
        order = json.loads(line)
        try:
            done, seconds = works[order["work"]](order["steps"], order["mib"])
        except Exception as exc:
            say(error=f"{type(exc).__name__}: {exc}")
        else:
            say(done=done, seconds=seconds)


def free_addresses(count):
    """Return addresses on loopback that were free just now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses
