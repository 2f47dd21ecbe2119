"""``python -m psync``: the command line without the console script.

Layer: L5. Imports: cli.
"""

import sys

from psync.cli import main

sys.exit(main())
