"""Print ``ready PID`` and sleep until a signal ends it, or the launcher has gone.

Arguments: ``stubborn`` ignores SIGTERM; ``parent`` starts a child that sleeps, too, and prints
``child PID``; ``daemon`` as well, but the child leaves the session.
"""

import os
import signal
import subprocess
import sys


def say(word: str) -> None:
    """In one piece: the pipe is the child's, too."""
    os.write(1, f"{word} {os.getpid()}\n".encode())


arguments = sys.argv[1:]
if "stubborn" in arguments:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in arguments:
    say("child")
else:
    if "parent" in arguments or "daemon" in arguments:
        child = subprocess.Popen(
            [sys.executable, __file__, "child", *arguments],
            stderr=subprocess.DEVNULL,
            start_new_session="daemon" in arguments,
        )
    if "PSYNC_LIFELINE_FD" in os.environ:
        from psync.launch.process import watch_launcher

        watch_launcher(grace_s=0.2)
    say("ready")
while True:
    signal.pause()
