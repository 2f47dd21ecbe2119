"""Asking a running program for its status from another process: by its run file, or by URL."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from http.client import HTTPException

from psync.cluster_roles import CHIEF
from psync.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectFailed,
    DeadlineExceeded,
    PsyncError,
    RemoteProtocolError,
    TransportError,
)
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.transport import SocketNetwork
from psync.status.model import Status
from psync.status.run_files import Run
from psync.wire.messages import AskStatistics

READER = "/job:status/task:0"
"""What whoever asks calls itself."""

ANSWERS_WITHIN_S = 5.0
"""The program's own code may keep its loop for a while."""

MAX_ERROR_BYTES = 1024


@contextlib.asynccontextmanager
async def reading_status(run: Run) -> AsyncIterator[StatusReader]:
    """Return a context in which a run can be asked for its status.

    Args:
        run: As its run file says.

    Raises:
        ConfigurationError: It has ended; or its run file is not of this run.
        VersionMismatch: It uses another version of psync.
    """
    platform = Platform(SocketNetwork(), Secret(run.token.encode()))
    endpoint = Endpoint(platform, READER, 0, {})
    try:
        try:
            peer = await endpoint.connect(run.address, CHIEF)
        except (ConnectFailed, AuthenticationError) as exc:
            raise ConfigurationError(f"{run} has ended, or cannot be reached: {exc}") from exc
        yield StatusReader(run, peer)
    finally:
        await endpoint.close()


class StatusReader:
    """A connection to a run that is asked for its status again and again."""

    def __init__(self, run: Run, peer: Peer) -> None:
        self._run = run
        self._peer = peer

    async def read(self) -> Status:
        """Return the status as of now.

        Raises:
            ConfigurationError: The run has ended.
            DeadlineExceeded: It does not answer, and may later.
            RemoteProtocolError: It uses another version of psync.

        Cancellation: Safe.
        """
        try:
            deadline = asyncio.get_running_loop().time() + ANSWERS_WITHIN_S
            received = await self._peer.call(AskStatistics(), deadline=deadline)
        except DeadlineExceeded as exc:
            raise DeadlineExceeded(
                f"{self._run} has not answered for {ANSWERS_WITHIN_S:g} s",
                hint="its event loop computes, or the process is stopped",
            ) from exc
        except TransportError as exc:
            raise ConfigurationError(f"{self._run} has ended") from exc
        except PsyncError as exc:
            raise RemoteProtocolError(f"{self._run} cannot say its status: {exc.message}") from exc
        if len(received.segments) != 1:
            raise RemoteProtocolError(f"{self._run}: expected a status, got something else")
        return Status.from_json(bytes(received.segments[0]))


class UrlReader:
    """Asks a program over HTTP for its status, again and again.

    Args:
        url: As the log of the program has it, with its token.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # What a proxy between here and there would answer is no status.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def read(self) -> Status:
        """Return the status as of now.

        Raises:
            ConfigurationError: Nobody answers there, or something else than a status.
            RemoteProtocolError: It is that of another version of psync.

        Cancellation: Safe; the answer is waited for, in a thread.
        """
        return await asyncio.to_thread(self._read)

    def _read(self) -> Status:
        where = self._url.partition("?")[0]  # without the token
        try:
            with self._opener.open(self._url, timeout=ANSWERS_WITHIN_S) as answer:
                return Status.from_json(answer.read())
        except urllib.error.HTTPError as exc:
            with exc:
                text = exc.read(MAX_ERROR_BYTES).decode("utf-8", "replace").strip()
            raise ConfigurationError(f"{where}: {exc.code} {exc.reason}: {text}") from exc
        except (OSError, ValueError, HTTPException) as exc:
            raise ConfigurationError(
                f"{where} does not answer: {exc}", hint="has the program ended?"
            ) from exc
