"""The lifeline: how a process learns that its launcher has gone.

It is a pipe whose only write end the launcher holds, and whose other end every task reads: the end
of the launcher, in whatever way, is the end of the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""


def watch_lifeline(fd: int, *, grace_s: float = GRACE_S) -> None:
    """End this process when its launcher has gone, in whatever way that happened.

    A daemon thread reads the lifeline. At its end this process and all it has started get SIGTERM;
    if it is there ``grace_s`` seconds later, they are killed.

    Args:
        fd: Read end of the pipe, ``PSYNC_LIFELINE_FD``. Nobody else may use it from now on.
        grace_s: Seconds between SIGTERM and the end.
    """
    os.set_inheritable(fd, False)
    threading.Thread(
        target=_end_with_launcher, args=(fd, grace_s), name="psync-lifeline", daemon=True
    ).start()


def _end_with_launcher(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):  # nobody writes to it; its end is the message
        continue
    leads = os.getpgrp() == os.getpid()  # else others are in the group, which we did not start
    signal_all = os.killpg if leads else os.kill
    signal_all(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    signal_all(os.getpid(), signal.SIGKILL)
