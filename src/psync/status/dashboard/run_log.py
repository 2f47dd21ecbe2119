"""Run logs: the statuses of a run in a file of JSON lines; recording them, and reports of them.

The first line is ``{"psync_run_log": 1, "program": …, "interval_s": 1.0}``. Each other one is an
object with one key: "status" (as ``Status.to_json``, without its placement), "placement" (that, as
it holds from there on) or "end" (the run was closed in order). Readers pass over keys that they do
not know, and over a last line that a killed process has left unfinished.

A log is bounded: when the file would get larger than ``MAX_BYTES``, every second status goes, and
from then on only every second one is written. So it always tells of the whole run.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import msgspec

from psync.checkpoints.files import regular
from psync.checkpoints.ownership import Owner, own
from psync.errors import (
    ConfigurationError,
    PsyncError,
    RemoteProtocolError,
    UsageError,
    check_fits,
    os_errors,
    other_loop,
)
from psync.net.shielding import at_most
from psync.status.dashboard import view as page
from psync.status.http import STATIC, address_in, serving_dashboard
from psync.status.model import MISFITS, ShardStatus, Status
from psync.status.run_files import replacing
from psync.status.sampling import ClusterSource, reports, running

logger = logging.getLogger(__name__)

SCHEMA = 1

INTERVAL_S = 1.0
"""Between two statuses."""

MAX_BYTES = 64 << 20
"""About 8 hours of 4 workers, before anything is thinned out; 5 minutes of 1,000."""

MAX_LINE_BYTES = 64 << 20
"""A file with longer ones is none of ours."""

MAX_MOMENTS = 50_000
"""So many are read of a log that is larger than one can be, several in one file for example."""

KEY = "psync_run_log"

_Moment: TypeAlias = tuple[float, int, tuple[ShardStatus, ...], page.Row]
"""A status in the file: its time, where it is, the placement that holds there, and its row."""

STATUS, PLACEMENT = b'{"status":', b'{"placement":'
"""How lines begin."""


class RunLog:
    """Writes a run log. Its methods block for as long as the disk does, and threads may share it.

    When the disk refuses to write, that is a warning, and nothing is written from then on.

    Args:
        path: Of the file, readable by this user only. A run log that is there is replaced.
        program: What runs.
        append: Go on with a log that is there: the same run, whose program was started again.

    Raises:
        ConfigurationError: The file cannot be written, or is something else than a run log; or
            another program writes it.
    """

    _owner: Owner | None = None

    def __init__(self, path: str | os.PathLike[str], program: str, *, append: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._every, self._passed = 1, 0
        self._placement: tuple[ShardStatus, ...] = ()  # as it was written
        head = {KEY: SCHEMA, "program": program, "interval_s": INTERVAL_S}
        try:
            is_there = self.path.exists() and self.path.stat().st_size > 0
            if is_there:
                check_head(self.path)
            with contextlib.suppress(OSError):  # opening the log says the same
                self._owner = own(
                    self.path.with_name(f"{self.path.name}.owner"),
                    f"writes the run log {self.path}",
                    "give each program a log of its own",
                )
            if append and is_there:
                _end_line(self.path)
            self._file = self._opened("ab" if append else "wb")
            self._write(head)
        except OSError as exc:
            self._owner = None
            raise ConfigurationError(f"run log {self.path}: {exc.strerror}") from exc

    def _opened(self, mode: str) -> BinaryIO:
        file = cast(BinaryIO, open(self.path, mode, opener=regular))
        os.fchmod(file.fileno(), 0o600)  # also where it was there
        return file

    def add(self, status: Status) -> None:
        """Write a status."""
        self._try(self._add, status)

    def close(self) -> None:
        """Write that the run has ended, and close the file."""
        self._try(self._end)
        self._owner = None

    def _try(self, write: Callable[..., None], *what: Status) -> None:
        with self._lock:
            try:
                if not self._file.closed:
                    write(*what)
            except OSError as exc:
                logger.warning("run log %s is no longer written: %s", self.path, exc.strerror)
                with contextlib.suppress(OSError):
                    self._file.close()

    def _add(self, status: Status) -> None:
        self._passed += 1
        if self._passed % self._every:
            return
        if status.placement != self._placement:
            self._write({"placement": [dataclasses.asdict(each) for each in status.placement]})
            self._placement = status.placement
        bare = dataclasses.replace(status, placement=())
        self._append(b'{"status":%s}\n' % bare.to_json().encode())

    def _end(self) -> None:
        self._write({"end": {}})
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._file.tell() + len(line) > MAX_BYTES:
            self._thin()
        self._file.write(line)
        self._file.flush()

    def _thin(self) -> None:
        """Drop every second status; nobody ever sees half a file."""
        self._file.close()
        with open(self.path, "rb") as old, replacing(self.path) as new:
            new.writelines(_thinned(old))
        self._file = self._opened("ab")
        self._every *= 2


def _thinned(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield all lines but every second status, and placements that hold for none that is left."""
    count, placement = 0, b""
    for line in lines:
        if line.startswith(PLACEMENT):
            placement = line
            continue
        if line.startswith(STATUS):
            count += 1
            if count % 2:
                continue
            yield placement
            placement = b""
        yield line
    yield placement


def _end_line(path: Path) -> None:
    """Drop what a killed program has left of a last line."""
    end = 0
    with open(path, "r+b") as file:
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        file.truncate(end)


def check_head(path: Path) -> None:
    """Check that a file is a run log.

    Raises:
        ConfigurationError: It is none, cannot be read, or is of another version.
    """
    with os_errors(f"run log {path}"), open(path, "rb", opener=regular) as file:
        line = file.readline(4096)
    try:
        version = json.loads(line)[KEY]
    except MISFITS as exc:
        raise ConfigurationError(
            f"{path}: expected a run log of psync, got something else",
            hint="psync run --log RUN.jsonl, or ClusterCoordinator(run_log=…), writes one",
        ) from exc
    hint = "use the version of psync that wrote it"
    check_fits(version == SCHEMA, f"{path}: expected a run log of schema {SCHEMA}", version, hint)


def _status_in(line: bytes) -> Status:
    return Status.from_json(line.rstrip()[len(STATUS) : -1])


class FinishedRun:
    """A run log that is read: every moment of it can be shown, and is loaded when it is wanted.

    Args:
        path: Of the file. All of it is read once.

    Raises:
        ConfigurationError: It is no run log, cannot be read, has a broken line or no status.

    Attributes:
        ended: Whether the run was closed in order; False: it was killed, or goes on.
        close: Closes the file; so does the end of this value.
        status_at: Returns the status of a moment, by its number.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        check_head(self.path)
        self._moments: page.Thinned[_Moment] = page.Thinned(MAX_MOMENTS)
        self._whole: page.Thinned[page.Row] = page.Thinned(page.MAX_ROWS)
        self._placement: tuple[ShardStatus, ...] = ()
        self.status_at = functools.lru_cache(2 * page.LANE_CELLS)(self._loaded)
        self._reading = asyncio.Lock()
        self.ended = False
        # It stays open: the program may go on, and put another file in its place.
        self._file = file = open(self.path, "rb", opener=regular)
        self.close = weakref.finalize(self, file.close)
        offset = 0
        while line := file.readline(MAX_LINE_BYTES):
            if line.endswith(b"\n"):  # the last one may be half
                self._note(offset, line)
            elif len(line) == MAX_LINE_BYTES:
                raise self._broken(offset)
            offset += len(line)
        if not self._moments.kept:
            self.close()
            raise ConfigurationError(f"{self.path}: the run log has no status: nothing ran")

    def __len__(self) -> int:
        return len(self._moments.kept)

    def _note(self, offset: int, line: bytes) -> None:
        try:
            if line.startswith(STATUS):
                self.ended = False
                status = _status_in(line)
                row = page.row_of(status)
                self._whole.add(row)
                self._moments.add((status.time, offset, self._placement, row))
                return
            data = json.loads(line)
            if not isinstance(data, dict):
                raise TypeError("expected an object")
            if "placement" in data:
                self._placement = msgspec.convert(data["placement"], tuple[ShardStatus, ...])
            self.ended = self.ended or "end" in data
        except (*MISFITS, RemoteProtocolError) as exc:
            raise self._broken(offset) from exc

    def _broken(self, offset: int) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: expected a line of a run log at byte {offset}")

    def _loaded(self, index: int) -> Status:
        _, offset, placement, _ = self._moments.kept[index]
        self._file.seek(offset)
        try:
            status = _status_in(self._file.readline(MAX_LINE_BYTES))
        except RemoteProtocolError as exc:  # it was written over
            raise self._broken(offset) from exc
        if self.ended and index == len(self) - 1:
            status = dataclasses.replace(status, state="ended")
        return dataclasses.replace(status, placement=placement)

    def _index(self, time: float | None) -> int:
        """Return the number of the last moment that is not after a time."""
        if time is None:
            return len(self) - 1
        return max(0, bisect.bisect_left(self._moments.kept, (math.nextafter(time, math.inf),)) - 1)

    async def view(self, span: str, time: float | None) -> str:
        """Return the page as JSON. Cancellation: safe."""
        async with self._reading:
            return await asyncio.to_thread(self.view_at, span, self._index(time))

    async def status(self, time: float | None) -> Status | None:
        """Return the status of a moment. Cancellation: safe."""
        async with self._reading:
            return await asyncio.to_thread(self.status_at, self._index(time))

    def series(self) -> dict[str, list[float | None]]:
        """Return the charts of the whole run."""
        return page.columns(self._whole.with_newest())

    def view_at(self, span: str, index: int) -> str:
        """Return the page of a moment, by its number, as JSON."""
        shown = range(max(0, index + 1 - page.LANE_CELLS), index + 1)
        moments, kept = list(map(self.status_at, shown)), self._moments.kept
        if span == "run":
            series = self.series()
        else:
            first = bisect.bisect_left(kept, (moments[-1].time - page.RECENT_S,))
            series = page.columns([row for *_, row in kept[first : index + 1]])
        view = page.view_of(moments, series, mode="log")
        view["moments"] = {"first": kept[0][0], "last": kept[-1][0]}
        view["ended"] = self.ended
        return page.to_json(view)


# The report of a run: the page and what it shows, in one HTML file. The file opens offline, without
# a server: styles, scripts and data stand in it.

REPORT_MOMENTS = 200
"""Moments among which a reader can choose. Charts of the whole run have more."""

REPORT_BYTES = 16 << 20
"""Size of the data. Larger moments, as those of a thousand workers, are fewer."""

MODULES = "dom.js", "charts.js", "lanes.js", "app.js"
"""Scripts, each after those that it imports."""


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a report, which can be written there.

    Raises:
        ConfigurationError: It cannot, or something else than an HTML file is there.
    """
    path = Path(path)
    if path.is_dir() or not path.name.endswith((".html", ".htm")):
        raise ConfigurationError(f'report {path}: expected the name of a file that ends in ".html"')
    hint = "the folder must exist and be writable"
    with os_errors(f"report {path}", hint), tempfile.TemporaryFile(dir=path.parent):
        return path


def write_report(log: str | os.PathLike[str], path: Path) -> Path:
    """Write the report of a run log.

    Args:
        log: Path of the run log.
        path: Where to write. If that is not possible, a new file in the folder for temporary
            files is written instead.

    Returns:
        The path of the file that was written.

    Raises:
        ConfigurationError: It is no run log, or has no status; or no file can be written.
    """
    with contextlib.closing(FinishedRun(log)) as run:
        text = _page(run).encode()
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        try:
            elsewhere = Path(tempfile.mkdtemp(prefix="psync-")) / path.name
            with replacing(elsewhere) as file:
                file.write(text)
        except OSError:
            raise ConfigurationError(f"report {path}: {error.strerror}") from error
        return elsewhere
    return path


def _page(run: FinishedRun) -> str:
    count, last = min(len(run), REPORT_MOMENTS), len(run) - 1
    while True:
        step = last / max(count - 1, 1)
        moments = [run.view_at("recent", last - round(step * at)) for at in reversed(range(count))]
        size = sum(map(len, moments))
        if size <= REPORT_BYTES or count == 1:
            break
        count = max(1, count * REPORT_BYTES // (2 * size))
    series = page.to_json(run.series())
    return _filled(f'{{"moments":[{",".join(moments)}],"series":{series}}}')


def _filled(data: str) -> str:
    """Return the page, with everything that it would ask a server for."""
    html = _text("index.html")
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    html = html.replace("static/icon.svg", f"data:image/svg+xml;base64,{icon}")
    for name in ("vendor/uPlot.css", "style.css"):
        link = f'<link rel="stylesheet" href="static/{name}">'
        html = html.replace(link, f"<style>\n{_text(name)}</style>")
    code = "\n".join(map(_text, MODULES))
    code = re.sub(r"^(import .*\n|export )", "", code, flags=re.MULTILINE)
    licence = _text("vendor/uPlot.LICENSE").replace("*/", "")
    html = html.replace(
        '<script src="static/vendor/uPlot.js" defer></script>',
        f"<script>\n/* {licence} */\n{_text('vendor/uPlot.js')}</script>",
    )
    # Where the page ends, so that its elements are there; "<" in data could end the element.
    data = data.replace("<", "\\u003c")
    scripts = f'<script id="report" type="application/json">{data}</script>\n'
    scripts += f'<script type="module">\n{code}</script>\n</body>'
    html = html.replace('<script type="module" src="static/app.js"></script>\n', "")
    html = html.replace(' · <a href="api/status">status as JSON</a>', "")
    return html.replace("</body>", scripts)


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


# A status a second, for the dashboard and the run log of a run that goes on.


class Recorder:
    """Takes a status a second, from ``start`` to ``close``; the dashboard shows the newest one.

    Args:
        source: Of the statuses.
        log: Where they are written; None: nowhere.

    Attributes:
        history: The statuses, so far as the dashboard shows them.
    """

    def __init__(self, source: ClusterSource, log: RunLog | None = None) -> None:
        self._source = source
        self._log = log
        self.history = page.History()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # never cancelled: it may be writing

    def start(self) -> None:
        """Begin."""
        self._source.asks_workers += 1
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Take a last status, and end. Cancellation: it ends by itself."""
        self._closing.set()
        task, self._task = self._task, None
        if task is not None:
            self._source.asks_workers -= 1
            await asyncio.wait((task,))

    async def view(self, span: str, time: float | None) -> str:
        """Return the page as JSON; "{}" before the first status. Cancellation: safe."""
        moments = self.history.moments
        return page.to_json(page.view_of(moments, self.history.series(span))) if moments else "{}"

    async def status(self, time: float | None) -> Status | None:
        """Return the newest status; None before the first one. Cancellation: safe."""
        return self.history.moments[-1] if self.history.moments else None

    async def _run(self) -> None:
        fails = is_last = False
        while not is_last:
            is_last = self._closing.is_set()
            try:
                status = await self._source.status()
                self.history.add(status)
                if self._log is not None:
                    await asyncio.to_thread(self._log.add, status)
                fails = False
            except Exception:  # the page stands still; training does not
                if not fails:  # a run of days must not fill its log with one error
                    logger.exception("the dashboard cannot read the status")
                fails = True
            if not is_last:
                await at_most(INTERVAL_S, self._closing.wait())


class report:
    """Write an HTML file that shows a run as the dashboard does, and opens offline.

    The report covers every coordinator and training session of this process that runs within the
    context, including those that already run when it begins. It takes one sample per second. The
    file is written when the context ends, including after an error.

    Args:
        path: Path of the file, "….html"; an existing file is replaced. If the file cannot be
            written at the end, it is written to the folder for temporary files, and a warning names
            it.

    Raises:
        ConfigurationError: When it is entered: the folder is missing or not writable.
        UsageError: The same object is entered again; or coordinators run on another event loop.

    Cancellation: The report of the run so far is written.

    Example:
        async with psync.report("run.html"):
            async with psync.ClusterCoordinator(strategy) as coordinator:
                ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # None: not entered
        self._log: RunLog  # in it
        self._has_run = False

    async def __aenter__(self) -> None:
        if self._folder is not None:
            raise UsageError("report: it can be entered only once", hint="create a new one")
        self._loop = asyncio.get_running_loop()
        if running and all(run.loop is not self._loop for run in running):
            raise other_loop("report")
        check_path(self._path)
        self._folder = tempfile.TemporaryDirectory(prefix="psync-report-")
        program = os.path.basename(sys.argv[0] if sys.argv else "")
        self._log = RunLog(Path(self._folder.name, "run.jsonl"), program)
        reports[self] = self._begin_run
        for run in running:
            self._begin_run(run)

    def _begin_run(self, run: ClusterSource) -> None:
        """Note what happens in a run from now on, unless it is on another event loop."""
        if run.loop is self._loop:
            self._has_run, recorder = True, Recorder(run, self._log)
            run.recorders[self] = recorder.close
            recorder.start()

    async def __aexit__(self, *_: object) -> None:
        assert self._folder is not None, "it was entered"
        if asyncio.get_running_loop() is not self._loop:
            raise other_loop("the end of a report")
        reports.pop(self, None)
        path = self._path
        try:
            for run in list(running):
                if (end := run.recorders.pop(self, None)) is not None:
                    await end()
            if not self._has_run:
                raise ConfigurationError("no coordinator has run")
            await asyncio.to_thread(self._log.close)
            written = await asyncio.to_thread(write_report, self._log.path, path)
            if written != path:
                logger.warning("report %s cannot be written; it is in %s instead", path, written)
        except (PsyncError, OSError) as exc:  # never worth the result of a run
            logger.warning("no report was written: %s", exc)
        finally:
            self._log.close()
            self._folder.cleanup()


_begun: set[str] = set()
"""Logs that this process has begun. The one of ``PSYNC_RUN_LOG`` is of all its coordinators."""


@contextlib.asynccontextmanager
async def shown(
    source: ClusterSource,
    address: str | None = None,
    log: str | os.PathLike[str] | None = None,
) -> AsyncIterator[str]:
    """Return a context in which a run is shown or written down; yields the dashboard's URL.

    The URL is printed, too. Without a dashboard it is "".

    Args:
        source: Of the status.
        address: Of the dashboard; None: as ``PSYNC_DASHBOARD`` says; "": none.
        log: Path of the run log; None: as ``PSYNC_RUN_LOG`` says; "": none.

    Raises:
        ConfigurationError: The port is in use; the log cannot be written, or its path is
            something else's; aiohttp is missing.
    """
    environ, url = os.environ, ""
    address = address_in(environ, "PSYNC_DASHBOARD") if address is None else address
    path = environ.get("PSYNC_RUN_LOG", "") if log is None else os.fspath(log)
    # A log goes on if a launcher has started the program again, or if this is a further
    # coordinator of the program for which the launcher wants a log.
    is_again = log is None and path in _begun
    continues = is_again or environ.get("PSYNC_RESTART_COUNT", "0") not in ("", "0")
    async with contextlib.AsyncExitStack() as stack:
        written = None
        if path:
            written = RunLog(path, source.program, append=continues)
            stack.push_async_callback(asyncio.to_thread, written.close)
            _begun.add(path)
        recorder = Recorder(source, written)
        stack.push_async_callback(recorder.close)
        if address:
            url = await stack.enter_async_context(serving_dashboard(recorder, address))
        recorder.start()
        if url:
            print(f"psync: dashboard at {url}", file=sys.stderr, flush=True)
        yield url
