"""Synchronous against asynchronous training: what ``psync bench sync-async`` runs, as a script.

    python benchmarks/sync_vs_async.py --quick
    python benchmarks/sync_vs_async.py --parts peers --tensorflow ~/tensorflow/bin/python

Takes the options of that command; it finds the script for TensorFlow from any folder.
"""

import sys
from pathlib import Path

from psync.cli.main import main

if __name__ == "__main__":
    script = Path(__file__).with_name("peers_tensorflow1_sync.py")
    defaults = ["--tensorflow-script", str(script)]
    sys.exit(main(["bench", "sync-async", *defaults, *sys.argv[1:]]))
