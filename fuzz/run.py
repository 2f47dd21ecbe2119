"""Runs all targets, or those that are named, one after the other; the exit code counts findings."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NO_TARGETS = {"driver", "run", "samples", "templates"}
TARGETS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS, help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--plain", action="store_true", help="do not use atheris")
    options = parser.parse_args()
    failed = []
    for target in options.targets:
        print(f"--- {target}", flush=True)
        command = [sys.executable, str(HERE / f"{target}.py"), "--seconds", str(options.seconds)]
        if subprocess.run(command + ["--plain"] * options.plain, check=False).returncode:
            failed.append(target)
    print(f"findings: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
