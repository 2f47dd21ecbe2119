"""``psync scale``: more or fewer workers for a run that goes on, asked of its launcher.

``psync run`` listens at a Unix socket in a directory that only its user can enter, beside a file
that names it, as coordinators do for ``psync top`` (``status.run_files``). A request is a line of
JSON with the token of that file, the answer likewise; numpy is not needed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import click

from psync.cli.options import choosing_run
from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.status.guard import is_token
from psync.status.run_files import (
    SUFFIX,
    Run,
    chosen_run,
    directory_of_runs,
    has_ended,
    make_directory,
    run_file,
    runs_in,
    socket_of,
    take_away_ended,
)

LAUNCHERS = "launchers"
"""The directory of their files, in that of run files, which are of coordinators."""

MAX_REQUEST_BYTES = 4096
REQUEST_WITHIN_S = 5.0

Scale = Callable[[int], Awaitable[str]]


@contextlib.asynccontextmanager
async def scaled_on_request(
    scale: Scale, program: str, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Return a context in which this user's processes may ask a launcher for other workers.

    Where no directory can be made for it, they cannot.

    Args:
        scale: Called with a number of workers; returns what to say, or raises a PsyncError.
        program: Name of the script.
        environ: As for ``directory_of_runs``; with ``PSYNC_STATUS=0`` nobody may ask.
    """
    async with contextlib.AsyncExitStack() as stack:
        if environ.get("PSYNC_STATUS") != "0":
            with contextlib.suppress(OSError):
                await _listen(stack, scale, program, environ)
        yield


async def _listen(
    stack: contextlib.AsyncExitStack, scale: Scale, program: str, environ: Mapping[str, str]
) -> None:
    directory = _directory(environ)
    make_directory(directory.parent)
    make_directory(directory)
    take_away_ended(directory)
    path = directory / f"{os.getpid()}-{random_hex(4)}{SUFFIX}"
    where, token = path.with_suffix(".sock"), random_hex(32)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            async with asyncio.timeout(REQUEST_WITHIN_S):
                line = await reader.readline()
            reply = await _reply(line, token, scale)
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()

    bound = stack.enter_context(socket.socket(socket.AF_UNIX))
    bound.bind(os.fspath(where))
    os.chmod(where, 0o600)
    server = await asyncio.start_unix_server(answer, sock=bound, limit=MAX_REQUEST_BYTES)
    stack.callback(server.close)
    run = Run(os.getpid(), time.time(), program, f"unix:{where}", token)
    stack.enter_context(run_file(path, run))


async def _reply(line: bytes, token: str, scale: Scale) -> dict[str, str]:
    try:
        request = json.loads(line)
        given, workers = str(request["token"]), request["workers"]
        if type(workers) is not int or workers < 1:
            raise ValueError("expected a number of workers")
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"error": "expected a request of psync scale"}
    if not is_token(given, token):
        return {"error": "the token is not that of this run"}
    try:
        return {"said": await scale(workers)}
    except (PsyncError, OSError) as exc:
        return {"error": str(exc)}


def _directory(environ: Mapping[str, str] = os.environ) -> Path:
    return directory_of_runs(environ) / LAUNCHERS


@click.command()
@click.argument("workers", type=click.IntRange(min=1))
@choosing_run
def scale(workers: int, run: str | None) -> int:
    """Change the number of workers of a program that psync run started to WORKERS.

    New workers are started and join the coordinator. If there are too many, the workers with the
    highest indices finish their closure and leave. RUN is the id, process id or name of one of your
    psync runs on this machine, or the path of its file. If several are running and you name none,
    they are listed.

    \b
    Eight workers for the program in the other terminal:
        psync scale 8
    """
    asked = _launched(run)
    answer = asyncio.run(_ask(asked, workers))
    if "error" in answer:
        raise ConfigurationError(f"{asked}: {answer['error']}")
    click.echo(f"{asked}: {answer['said']}")
    return 0


def _launched(named: str | None) -> Run:
    try:
        return chosen_run(named, _directory())
    except ConfigurationError as none:
        if not all(has_ended(each) for _, each in runs_in(_directory())):
            raise
        try:
            other = chosen_run(named)
        except ConfigurationError:
            raise none from None
        raise ConfigurationError(
            f"no program started by psync run is running: {other} was started without it",
            hint="psync scale asks psync run for workers; a program that opens a cluster itself "
            "calls its scale(workers=8)",
        ) from none


async def _ask(run: Run, workers: int) -> dict[str, Any]:
    try:
        reader, writer = await asyncio.open_unix_connection(socket_of(run))
        with contextlib.closing(writer):
            writer.write(json.dumps({"token": run.token, "workers": workers}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{run} has ended, or is unreachable: {exc}") from exc
    return answer
