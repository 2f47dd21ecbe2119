"""Run logs: the statuses of a run in a file of JSON lines.

The first line is ``{"psync_run_log": 1, "program": …, "interval_s": 1.0}``. Each other one is an
object with one key: "status" (as ``Status.to_json``), "placement" (a list of shards; it holds from
there on) or "end" (the run was closed in order). Readers pass over keys that they do not know, and
over a last line that a killed process has left unfinished.

A log is bounded: when the file would get larger than ``MAX_BYTES``, every second status goes, and
from then on only every second one is written. So it always tells of the whole run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.status.dashboard.view import Placed
from psync.status.model import Status

SCHEMA = 1

MAX_BYTES = 64 << 20
"""About 12 hours of 4 workers, before anything is thinned out; 5 minutes of 1,000."""

KEY = "psync_run_log"


class RunLog:
    """Writes a run log. Its methods block for as long as the disk does.

    Args:
        path: Of the file, readable by this user only. A run log that is there is replaced.
        program: What runs.
        interval_s: Between two statuses.
        append: Go on with a log that is there: the same run, whose program was started again.
        max_bytes: Of the file.

    Raises:
        ConfigurationError: The file cannot be written, or is something else than a run log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        program: str,
        *,
        interval_s: float = 1.0,
        append: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._every, self._passed = 1, 0
        head = {KEY: SCHEMA, "program": program, "interval_s": interval_s}
        try:
            is_there = self.path.exists() and self.path.stat().st_size > 0
            if is_there:
                check_head(self.path)
            if append and is_there:
                _end_line(self.path)
            self._file = self._opened("ab" if append else "wb")
            self._write(head)
        except OSError as exc:
            raise ConfigurationError(f"run log {self.path}: {exc.strerror}") from exc

    def _opened(self, mode: str, path: Path | None = None) -> BinaryIO:
        def opener(name: str, flags: int) -> int:
            return os.open(name, flags, 0o600)

        return cast(BinaryIO, open(path or self.path, mode, opener=opener))

    def add(self, status: Status) -> None:
        """Write a status. Raises OSError."""
        self._passed += 1
        if self._passed % self._every == 0:
            self._append(b'{"status":%s}\n' % status.to_json().encode())

    def place(self, placed: Sequence[Placed]) -> None:
        """Write where variables lie. Raises OSError."""
        self._write({"placement": [dataclasses.asdict(each) for each in placed]})

    def close(self) -> None:
        """Write that the run has ended, and close the file. Raises OSError."""
        if not self._file.closed:
            try:
                self._write({"end": {}})
            finally:
                self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._file.tell() + len(line) > self._max_bytes:
            self._thin()
        self._file.write(line)
        self._file.flush()

    def _thin(self) -> None:
        """Drop every second status; nobody ever sees half a file."""
        self._file.close()
        draft = self.path.with_name(self.path.name + ".draft")
        count = 0
        with open(self.path, "rb") as old, self._opened("wb", draft) as new:
            for line in old:
                if line.startswith(b'{"status":'):
                    count += 1
                    if count % 2:
                        continue
                new.write(line)
        os.replace(draft, self.path)
        self._file = self._opened("ab")
        self._every *= 2


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
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline(4096))
        version = head[KEY]
    except OSError as exc:
        raise ConfigurationError(f"run log {path}: {exc.strerror}") from exc
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigurationError(
            f"{path}: expected a run log of psync, got something else",
            hint="psync run --log RUN.jsonl, or ClusterCoordinator(run_log=…), writes one",
        ) from exc
    if version != SCHEMA:
        raise ConfigurationError(
            f"{path}: expected a run log of schema {SCHEMA}, got {version}",
            hint="use the version of psync that has written it",
        )


class FinishedRun:
    """A run log that is read: all moments of it, each loaded when it is wanted.

    Args:
        path: Of the file.

    Raises:
        ConfigurationError: It is no run log, cannot be read, or has no status.

    Attributes:
        placed: Where variables lay in the end; None: it does not say.
        ended: Whether the run was closed in order; False: it was killed, or goes on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        check_head(self.path)
        self._offsets: list[int] = []
        self.placed: list[Placed] | None = None
        self.ended = False
        offset = 0
        with open(self.path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # the last one may be half
                    self._note(offset, line)
                offset += len(line)
        if not self._offsets:
            raise ConfigurationError(f"{self.path}: the run log has no status: nothing ran")

    def __len__(self) -> int:
        return len(self._offsets)

    def _note(self, offset: int, line: bytes) -> None:
        if line.startswith(b'{"status":'):
            self._offsets.append(offset)
            self.ended = False
            return
        try:
            data = json.loads(line)
            if "placement" in data:
                self.placed = [
                    Placed(**{**each, "shape": tuple(each["shape"])}) for each in data["placement"]
                ]
            self.ended = self.ended or "end" in data
        except (ValueError, TypeError, KeyError) as exc:
            raise self._broken(offset) from exc  # a status is looked at when it is wanted

    def _broken(self, offset: int) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: expected a line of a run log at byte {offset}")

    def statuses(self, first: int = 0, last: int | None = None) -> Iterator[Status]:
        """Yield statuses from ``first`` to before ``last``, in order.

        Raises:
            ConfigurationError: A line is none.
        """
        with open(self.path, "rb") as file:
            for offset in self._offsets[first:last]:
                file.seek(offset)
                line = file.readline()
                try:
                    yield Status.from_json(line.rstrip()[len(b'{"status":') : -1])
                except RemoteProtocolError as exc:
                    raise self._broken(offset) from exc
