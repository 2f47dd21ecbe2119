"""The entry point of ``psync`` and ``python -m psync``: Ctrl-C while it still loads is no error."""

import sys


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        from psync.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
