"""Stands in for a training script, and for `psync task`: every task says that it is ready.

The chief reads commands from stdin, one a line: ``exit N``, ``abort``. A ps or worker sleeps until
it is stopped; with the argument ``workers-exit N`` workers exit at once. All end with the launcher.
"""

import json
import os
import signal
import sys

from psync.launch.process import watch_launcher

job = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
watch_launcher(grace_s=0.2)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, f"ready {os.getpid()}\n".encode())  # one write: other tasks' lines share the pipe
if job == "worker" and "workers-exit" in sys.argv:
    sys.exit(int(sys.argv[-1]))
if job == "chief":
    os.write(int(os.environ["PSYNC_MEMBER_FD"].partition(":")[0]), b"1")  # as psync.run does
    match sys.stdin.readline().split():
        case ["exit", code]:
            sys.exit(int(code))
        case ["abort"]:
            os.abort()
while True:
    signal.pause()
