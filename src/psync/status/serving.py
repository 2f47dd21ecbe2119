"""The status of a running coordinator or session, for its program and its user's processes.

Others ask over a Unix socket, with psync's own handshake and a token made for that, both of which
a run file names (``run_files``). The cluster's connections have nothing to do with it: what comes
over the socket may ask for the status, as ``AskStatistics``, for what a trace needs, as
``AskSpans``, and for nothing else. A cluster in memory is seen by its program only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgpack

from psync.cluster_roles import CHIEF
from psync.errors import ConfigurationError
from psync.net.connection import Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, random_hex
from psync.net.secret import Secret
from psync.net.tls import TlsNetwork
from psync.net.transport import SocketNetwork
from psync.status.exposition import exposition
from psync.status.http import StatusServer
from psync.status.run_files import (
    SUFFIX,
    Run,
    directory_of_runs,
    make_directory,
    run_file,
    take_away_ended,
)
from psync.wire.codec import Message
from psync.wire.messages import AskSpans, AskStatistics, Statistics

if TYPE_CHECKING:
    from psync.status.sampling import ClusterSource

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32


def is_served(platform: Platform, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether other processes may ask: ``PSYNC_STATUS`` is not 0, the cluster is not in memory.

    Raises:
        ConfigurationError: The variable is neither 0 nor 1.
    """
    value = environ.get("PSYNC_STATUS", "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"PSYNC_STATUS: expected 0 or 1, got {value!r}")
    return value != "0" and is_outside(platform)


def is_outside(platform: Platform) -> bool:
    """Whether the cluster is on a network of the machine's, and not in memory."""
    return isinstance(platform.network, SocketNetwork | TlsNetwork)


class ServedStatus:
    """The status of one program, which may be asked for while it starts and while it runs.

    Args:
        source: Of the status.
        platform: Of the program.
        metrics: Where to serve it over HTTP, as "host:port"; None: as ``PSYNC_METRICS`` says.

    Raises:
        ConfigurationError: ``PSYNC_STATUS`` is neither 0 nor 1, or an address is none.
    """

    def __init__(
        self, source: ClusterSource, platform: Platform, metrics: str | None = None
    ) -> None:
        self.source = source
        self._is_served = is_served(platform)
        if metrics is None and is_outside(platform):
            metrics = os.environ.get("PSYNC_METRICS")
        self._http: StatusServer | None = None
        if metrics:
            self._http = StatusServer(
                metrics, self._metrics, {"/status": self._json, "/spans": self._spans}
            )
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Let processes of this user ask.

        That they cannot, because a directory cannot be written for example, is no more than noted
        in the log.

        Raises:
            ConfigurationError: The address for metrics is in use.

        Cancellation: ``close`` still has to be called; so it is after an error.
        """
        url = ""
        if self._http is not None:
            await self._http.start()
            url = self._http.url
        if not self._is_served:
            return
        try:
            await _serve(self.source, url, self._stack)
        except (OSError, ConfigurationError) as exc:
            logger.info("the status of this run is not available: %s", exc)
            await self._stack.aclose()

    async def _metrics(self) -> str:
        return exposition(await self.source.status())

    async def _json(self, _: Mapping[str, str]) -> tuple[str, str]:
        return "application/json", (await self.source.status()).to_json()

    async def _spans(self, query: Mapping[str, str]) -> tuple[str, bytes]:
        """Return what tasks have recorded: msgpack of a list of readings."""
        reader, last = query.get("reader", ""), "last" in query
        readings = await self.source.spans.read(reader, last=last)
        return "application/msgpack", msgpack.packb(readings)

    async def close(self) -> None:
        """Answer nobody any more. Cancellation: a connection may still be closing."""
        try:
            await self._stack.aclose()
        finally:
            if self._http is not None:
                await self._http.close()
            await self.source.close()


async def _serve(source: ClusterSource, metrics: str, stack: contextlib.AsyncExitStack) -> None:
    directory = directory_of_runs()
    make_directory(directory)
    take_away_ended(directory)
    path = directory / f"{os.getpid()}-{random_hex(4)}{SUFFIX}"
    token, address = random_hex(TOKEN_BYTES), f"unix:{path.with_suffix('.sock')}"

    async def answer(request: Request[AskStatistics]) -> None:
        status = await source.status()
        request.answer(Statistics({}), [status.to_json().encode()])

    async def spans(request: Request[AskSpans]) -> None:
        message = request.message
        readings = await source.spans.read(message.reader, last=message.last)
        told = [(reading.task, reading.asked, reading.got) for reading in readings]
        request.answer(Statistics({"readings": told}), [reading.body for reading in readings])

    platform = Platform(SocketNetwork(), Secret(token.encode()))
    handlers: dict[type[Message], Handler] = {
        AskStatistics: Handler(answer), AskSpans: Handler(spans),
    }  # fmt: skip
    endpoint = Endpoint(platform, CHIEF, 0, handlers)
    stack.push_async_callback(endpoint.close)
    await endpoint.listen(address)
    run = Run(os.getpid(), time.time(), source.program, address, token, metrics)
    stack.enter_context(run_file(path, run))
