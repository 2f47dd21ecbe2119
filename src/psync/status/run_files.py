"""Run files: how a user's programs are found, and asked, by other processes of that user.

A coordinator's process, which tells its status, and a launcher, which scales, each write one into a
directory that only their user can enter, ``psync`` in ``$XDG_RUNTIME_DIR`` or ``psync-UID`` in the
directory for temporary files: a JSON object with the address of a Unix socket, which lies beside
it, and a token that callers must present. The token is good for nothing else; the cluster's secret
is not in it. The file goes when the program ends. A killed program leaves it behind: nobody listens
at its socket then, and the next run removes it.

A question is a line of JSON with the token. The answer is a line of JSON, ``{"nbytes": 12}`` and as
many bytes, or ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from psync.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PsyncError,
    check_fits,
    os_errors,
)
from psync.net.platform import is_deserted, random_hex
from psync.net.secret import read_private
from psync.net.shielding import begin, end_all
from psync.status.http import is_token
from psync.status.model import MISFITS, Number, Whole
from psync.status.units import seconds_text

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Of run files."""

SUFFIX = ".json"

TOKEN_BYTES = 32

MAX_BYTES = 1 << 16
"""Of a run file, which has some 250; what is larger is something else."""

NEW_S = 60.0
"""A socket of which there is no run file is left alone for so long."""

MAX_QUESTION_BYTES = 4096
QUESTION_WITHIN_S = 5.0

Answer = Callable[[Mapping[str, Any]], Awaitable[bytes]]
"""Returns the answer to a question."""


@dataclass(frozen=True, slots=True)
class Run:
    """A program that can be asked for its status."""

    pid: Whole
    started: Number  # seconds since 1970
    program: str  # name of its script
    address: str  # "unix:/run/user/1000/psync/123-9f3a.sock"
    token: str  # in hexadecimal digits
    parent: Whole = 0  # the process that started it, such as psync run; 0: unknown

    def __str__(self) -> str:
        return f"{self.program} (process {self.pid})"


def directory_of_runs(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's run files, whether it is there or not."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(runtime) and os.stat(runtime).st_uid == os.getuid():
            return Path(runtime, "psync")
    return Path(tempfile.gettempdir(), f"psync-{os.getuid()}")


def make_directory(path: Path) -> None:
    """Make a directory that nobody else can enter, or check that it is one.

    Raises:
        OSError: It cannot be made, or is another user's, or others may enter it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check_private(path)


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            errno.EACCES, "expected a directory owned by this user, with mode 0700", str(path)
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Return a context for a new file, mode 600, that takes a path at the end of the context.

    So nobody ever sees half of it. After an error nothing has changed.

    Raises:
        OSError: It cannot be written.
    """
    # A name that nobody knows: the path may lie where others write, too.
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(fd, "wb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


@contextlib.contextmanager
def run_file(run: Run) -> Iterator[None]:
    """Return a context in which a run can be found; its socket goes with the file beside it.

    Raises:
        OSError: It cannot be written.
    """
    path = socket_of(run).with_suffix(SUFFIX)
    with replacing(path) as file:
        file.write(json.dumps({"schema": SCHEMA, **dataclasses.asdict(run)}).encode())
    try:
        yield
    finally:
        # The socket, too: a program may end without closing anything.
        _remove(path, socket_of(run))


@contextlib.asynccontextmanager
async def answering(directory: Path, program: str, answer: Answer) -> AsyncIterator[None]:
    """Return a context in which processes of this user find this one as a run, and may ask it.

    Args:
        directory: Of run files. It is made, and files that killed runs have left are removed.
        program: Name of the script.
        answer: Called with each question, without the token. Its error is told to who asks.

    Raises:
        OSError: As of ``make_directory``; or nothing can listen or be written there.
    """
    make_directory(directory)
    take_away_ended(directory)
    where, token = directory / f"{os.getpid()}-{random_hex(4)}.sock", random_hex(TOKEN_BYTES)
    run = Run(os.getpid(), time.time(), program, f"unix:{where}", token, os.getppid())
    responding: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin(respond(reader, writer), responding)

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            async with asyncio.timeout(QUESTION_WITHIN_S):
                line = await reader.readline()
            if line:  # else it was only a look whether somebody listens
                writer.writelines(await _reply(line, token, answer))
                await writer.drain()

    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.fspath(where))
        os.chmod(where, 0o600)
        server = await asyncio.start_unix_server(connected, sock=bound, limit=MAX_QUESTION_BYTES)
        try:
            with contextlib.closing(server), run_file(run):
                yield
        finally:
            await end_all(responding)


async def _reply(line: bytes, token: str, answer: Answer) -> tuple[bytes, bytes]:
    body = b""
    try:
        question = json.loads(line)
        has_token = isinstance(question, dict) and is_token(str(question.pop("token", "")), token)
        if not has_token:
            raise ConfigurationError("the token is not that of this run")
        body = await answer(question)
        head: dict[str, object] = {"nbytes": len(body)}
    except (PsyncError, OSError) as exc:
        head = {"error": str(exc)}
    except Exception as exc:
        logger.exception("a question of another process cannot be answered")
        head = {"error": f"{type(exc).__name__}: {exc}"}
    return json.dumps(head).encode() + b"\n", body


async def ask(run: Run, within_s: float | None = None, /, **question: Any) -> bytes:
    """Ask a run something; return its answer.

    Raises:
        ConfigurationError: It has ended, or is unreachable; or it refuses, and says why.
        DeadlineExceeded: It has not answered in time.

    Cancellation: Safe.
    """
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(socket_of(run))
            with contextlib.closing(writer):
                writer.write(json.dumps({"token": run.token, **question}).encode() + b"\n")
                head = json.loads(await reader.readuntil())
                answer = await reader.readexactly(head.get("nbytes", 0))
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"{run} has not answered for {within_s:g} s",
            hint="its event loop is busy, or the process is stopped",
        ) from exc
    except (FileNotFoundError, EOFError) as exc:
        raise ConfigurationError(f"{run} has ended") from exc
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{run} has ended, or is unreachable: {exc}") from exc
    if "error" in head:
        raise ConfigurationError(f"{run} refuses: {head['error']}")
    return answer


def read_run(path: Path) -> Run:
    """Return what a run file says.

    Raises:
        ConfigurationError: It is none; or there is none, as where the run has ended.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigurationError(f"{path}: expected a run file of psync")
        data = json.loads(read_private(str(path), str(path)))
        schema, expected = data.pop("schema"), f"{path}: expected a run file of schema {SCHEMA}"
        check_fits(schema == SCHEMA, expected, schema, "use the version of psync that the run uses")
        return msgspec.convert(data, Run)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file: has the run ended?") from None
    except OSError as exc:
        raise ConfigurationError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ConfigurationError:
        raise
    except MISFITS as exc:
        raise ConfigurationError(f"{path}: expected a run file of psync") from exc


def chosen_run(named: str | None = None, directory: Path | None = None) -> Run:
    """Return this user's run that is meant.

    Args:
        named: The path of its file, or its id, process, program or parent's process; None: the
            only one that runs.
        directory: Of run files; default: this user's.

    Raises:
        ConfigurationError: No such run is there, or several are: lists those that run.
    """
    if named is not None and (os.sep in named or named.endswith(SUFFIX)):
        return read_run(Path(named))
    directory = directory_of_runs() if directory is None else directory
    runs: list[tuple[Path, Run]] = []
    with os_errors(str(directory)), contextlib.suppress(FileNotFoundError):
        _check_private(directory)  # what somebody else has put there is not this user's run
        runs = runs_in(directory)
    running = [(path.stem, run) for path, run in runs if not has_ended(run)]
    meant = [
        run
        for id_, run in running
        if named is None
        or named in (id_, f"{run.pid}", f"{run.parent}", run.program, Path(run.program).stem)
    ]
    if len(meant) == 1:
        return meant[0]
    if running:
        what = "programs of this user run" if named is None else f"running programs match {named!r}"
        listed = "".join(
            f"\n  {id_}  {run}, for {seconds_text(time.time() - run.started)}"
            for id_, run in running
        )
        raise ConfigurationError(
            f"expected one program, and {len(meant) or 'no'} {what}",
            hint=f"choose one with --run, by its id, process or name:{listed}",
        )
    hint = "start one on this machine, or give the path of its run file"
    if runs:
        raise ConfigurationError(f"the newest run, {runs[0][1]}, has ended", hint=hint)
    raise ConfigurationError(
        f"no program of this user is running (looked in {directory})", hint=hint
    )


def runs_in(directory: Path) -> list[tuple[Path, Run]]:
    """Return all runs, the newest first; what cannot be read is passed over."""
    found: list[tuple[Path, Run]] = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(ConfigurationError):
            found.append((path, read_run(path)))
    return sorted(found, key=lambda each: each[1].started, reverse=True)


def socket_of(run: Run) -> Path:
    """Return the path of its socket."""
    return Path(run.address.removeprefix("unix:"))


def has_ended(run: Run) -> bool:
    """Whether nobody listens any more where the run did."""
    return is_deserted(str(socket_of(run)))


def take_away_ended(directory: Path) -> None:
    """Remove what runs that were killed have left: their files, and sockets without a file."""
    for path, run in runs_in(directory):
        if has_ended(run):
            left = socket_of(run)
            is_ours = left.parent == directory and left.suffix == ".sock"  # it might say anything
            _remove(path, *([left] if is_ours else []))
    for path in directory.glob("*.sock"):
        with contextlib.suppress(OSError):
            # One that is new may be about to listen, and to get its file.
            if time.time() - path.stat().st_mtime > NEW_S and is_deserted(str(path)):
                _remove(path)


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
