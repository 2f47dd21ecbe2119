"""The dashboard and the run log of a coordinator, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psync.status.dashboard.recorder import Recorder
from psync.status.dashboard.run_log import RunLog
from psync.status.dashboard.server import serving

if TYPE_CHECKING:
    from psync.status.sampling import StatusSource


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a program or its launcher has asked for.

    Attributes:
        address: Of the dashboard; "": none.
        log: Path of the run log; "": none.
        hosts: Names by which the dashboard may be asked for, beside localhost and addresses.
        continues: Whether the log goes on: a launcher has started the program again, or this is a
            further coordinator of the program for which the launcher wants a log.
    """

    address: str = ""
    log: str = ""
    hosts: tuple[str, ...] = ()
    continues: bool = False


_begun: set[str] = set()
"""Logs that this process has begun. The one of ``PSYNC_RUN_LOG`` is of all its coordinators."""


def wanted(
    address: str | None,
    log: str | os.PathLike[str] | None,
    environ: Mapping[str, str] = os.environ,
) -> Wanted:
    """Return what is asked for: as given, else as the environment says; "" is no either way."""
    path = environ.get("PSYNC_RUN_LOG", "") if log is None else os.fspath(log)
    is_again = log is None and path in _begun
    return Wanted(
        environ.get("PSYNC_DASHBOARD", "") if address is None else address,
        path,
        hosts_of(environ),
        is_again or environ.get("PSYNC_RESTART_COUNT", "0") not in ("", "0"),
    )


def hosts_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names by which a dashboard may be asked for, as ``PSYNC_DASHBOARD_HOSTS`` says."""
    names = environ.get("PSYNC_DASHBOARD_HOSTS", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


class Attached:
    """What shows or writes down one coordinator's run.

    Args:
        what: Is asked for.
        source: Of the status.

    Attributes:
        url: Of the dashboard, with its token; "": there is none.
    """

    def __init__(self, what: Wanted, source: StatusSource) -> None:
        self._what = what
        self._source = source
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def start(self) -> None:
        """Begin, and print the URL.

        Raises:
            ConfigurationError: The port is in use; the log cannot be written, or its path is
                something else's; aiohttp is missing.

        Cancellation: ``close`` still has to be called.
        """
        what, log = self._what, None
        if what.log:
            log = RunLog(what.log, self._source.program, append=what.continues)
            _begun.add(what.log)
        recorder = Recorder(self._source.status, log)
        self._stack.push_async_callback(recorder.close)
        if what.address:
            page = serving(recorder.show, what.address, what.hosts)
            self.url = await self._stack.enter_async_context(page)
        self._source.asks_workers += 1
        recorder.start()
        if self.url:
            print(f"psync: dashboard at {self.url}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        """Write the last status, and end. Cancellation: a connection may still be closing."""
        await self._stack.aclose()
