"""Call the launcher as `psync run` does, with task.py in place of `psync task` as well.

Arguments: options of the launcher as JSON, then those of the script.
"""

import json
import sys
from pathlib import Path

from psync.cli.run import Launcher

script = str(Path(__file__).with_name("task.py"))
options = {"ps_command": [sys.executable, script, *sys.argv[2:]], **json.loads(sys.argv[1])}
sys.exit(Launcher([sys.executable, script, *sys.argv[2:]], **options).launch())
