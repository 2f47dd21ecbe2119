"""``python -m psync``: the command line without the console script."""

import sys

from psync.cli.main import main

sys.exit(main())
