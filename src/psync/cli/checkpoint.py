"""``psync checkpoint``: list, inspect, compare and export checkpoints.

No cluster is needed. An error in a checkpoint is one line on stderr and exit code 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from psync.errors import CheckpointError

FAILED = 1  # exit code

checkpoint_path = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def checkpoint() -> None:
    """Inspect, compare and export checkpoints.

    \b
    List the checkpoints, inspect the newest, export its model for other programs:
        psync checkpoint ls run/checkpoints
        psync checkpoint inspect run/checkpoints/ckpt-00000012
        psync checkpoint export run/checkpoints/ckpt-00000012 model --only model
    """


@checkpoint.command("ls")
@click.argument("directory", type=checkpoint_path)
def list_command(directory: Path) -> int:
    """List the complete checkpoints in DIRECTORY, the oldest first."""
    from psync.checkpoints.files import checkpoints_in
    from psync.cli.checkpoint_reports import summary

    return _report(lambda: [summary(path) for _, path in checkpoints_in(directory, "ckpt")])


@checkpoint.command("inspect")
@click.argument("path", type=checkpoint_path)
def inspect_command(path: Path) -> int:
    """List the contents of the checkpoint PATH, and verify every byte."""
    from psync.cli.checkpoint_reports import inspection
    from psync.launch.plugins import load_plugins

    load_plugins("psync checkpoint")  # it names rules
    return _report(lambda: inspection(path))


@checkpoint.command("diff")
@click.argument("first", type=checkpoint_path)
@click.argument("second", type=checkpoint_path)
def diff_command(first: Path, second: Path) -> int:
    """List the differences between two checkpoints; exit code 1 if there are any."""
    from psync.cli.checkpoint_reports import differences

    lines: list[str] = []

    def describe() -> list[str]:
        lines.extend(map(str, differences(first, second)))
        return lines

    return _report(describe) or (FAILED if lines else 0)


@checkpoint.command("export")
@click.argument("path", type=checkpoint_path)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--only",
    "prefixes",
    multiple=True,
    metavar="PREFIX",
    help="Export tensors with this name, or with this prefix up to a /. Repeatable.",
)
@click.option(
    "--max-file-mib",
    type=click.IntRange(min=1),
    default=5 << 10,
    help="Start another file when one reaches this size.",
)
def export_command(
    path: Path, directory: Path, prefixes: tuple[str, ...], max_file_mib: int
) -> int:
    """Write tensors of the checkpoint PATH to the new DIRECTORY as plain safetensors.

    Each variable is exported whole, however it was sharded. If several files are needed, they come
    with an index that Hugging Face tools read.
    """
    from psync.cli.checkpoint_reports import export

    return _report(
        lambda: [
            str(file)
            for file in export(
                path, directory, prefixes=prefixes, max_file_bytes=max_file_mib << 20
            )
        ]
    )


def _report(lines_of: Callable[[], list[str]]) -> int:
    """Print lines, or an error about a checkpoint in one line; return the exit code."""
    try:
        for line in lines_of():
            click.echo(line)
    except CheckpointError as error:
        click.echo(f"psync: error: {' '.join(str(error).split())}", err=True)
        return FAILED
    return 0
