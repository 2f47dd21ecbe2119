"""fails_once.py DIRECTORY SCRIPT: runs SCRIPT DIRECTORY; worker 0 dies in the first attempt."""

import os
import runpy
import sys

import psync

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "3":
    resolver = psync.resolve_cluster()
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    resolver.cluster_spec()  # the others have met this task
    sys.exit("once")
directory, script = sys.argv[1:3]
sys.argv = [script, directory]
runpy.run_path(script, run_name="__main__")
