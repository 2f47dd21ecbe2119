"""The chief's door: where workers join a running cluster that know its address and the secret.

A worker that joins tells where it listens and is told its index; the workforce then brings it to
the coordinators of the program, the one that runs and those that come later. Its connection to the
door stays open. One that leaves says so; one whose connection is lost without a word is missed for
a while, in which it may come back under its index (the network was cut, or the chief is a new
process), and then forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass

from psync.cluster import split_address, task_name
from psync.cluster_roles import CHIEF
from psync.errors import ConfigurationError
from psync.launch.interfaces import PYTHON
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.workforce import Workforce
from psync.wire.messages import Done, JoinCluster, Joined, LeaveCluster

logger = logging.getLogger(__name__)

FIRST_JOINED = 10_000
"""Index of the first worker that joins: whoever started the others goes on numbering below it."""

FORGET_AFTER_S = 60.0
"""A worker that was lost without a word has been killed, or is back by then."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that has joined."""

    address: str
    peer: Connection  # its newest connection
    forgetting: asyncio.TimerHandle | None = None  # while it is missed


class Door:
    """Takes in workers that join. An async context manager; it listens while it is entered.

    Args:
        platform: Network, secret.
        address: Of the chief.
        workforce: Told of those that come and leave.
        added: Gets the address of each that is there, by name: they, too, hear of the program's
            end.
        forget_after_s: Seconds until one that was lost is forgotten.

    Raises:
        ConfigurationError: From entering it: the address is in use, or not this machine's.
    """

    def __init__(
        self,
        platform: Platform,
        address: str,
        workforce: Workforce,
        added: MutableMapping[str, str],
        *,
        forget_after_s: float = FORGET_AFTER_S,
    ) -> None:
        self._address = address
        self._workforce = workforce
        self._added = added
        self._forget_after_s = forget_after_s
        self._members: dict[int, _Member] = {}
        self._next = FIRST_JOINED
        self._endpoint = Endpoint(
            platform, CHIEF, platform.new_incarnation(),
            {JoinCluster: Handler(self._join), LeaveCluster: Handler(self._leave)},
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self._endpoint.listen(self._address)

    async def __aexit__(self, *exc_info: object) -> None:
        for member in self._members.values():
            if member.forgetting is not None:
                member.forgetting.cancel()
        self._members.clear()
        await self._endpoint.close()

    def _join(self, request: Request[JoinCluster]) -> None:
        peer, message = request.peer, request.message
        if message.python != PYTHON:
            raise ConfigurationError(
                f"the chief runs Python {PYTHON}, but the worker at {message.address} runs "
                f"{message.python} and could not read the program's functions",
                hint="start the worker with the same Python version as the chief",
            )
        split_address(message.address)  # is it one?
        index, known = message.index, self._members.get(message.index)
        if index < FIRST_JOINED or (known is not None and known.address != message.address):
            index, known = self._next, None
        self._next = max(self._next, index + 1)
        if known is not None and known.forgetting is not None:
            known.forgetting.cancel()
        self._members[index] = _Member(message.address, peer)
        peer.on_closed.append(lambda _: self._miss(index, peer))
        name = task_name("worker", index)
        logger.info("%s joins, from %s", name, message.address)
        self._added[name] = message.address
        self._workforce.change({index: message.address}, ())
        request.answer(Joined(index))

    def _leave(self, request: Request[LeaveCluster]) -> None:
        peer, message = request.peer, request.message
        for index, member in list(self._members.items()):
            if member.peer is peer:
                self._forget(index, message.reason)
        request.answer(Done())

    def _miss(self, index: int, peer: Connection) -> None:
        member = self._members.get(index)
        if member is not None and member.peer is peer:
            loop = asyncio.get_running_loop()
            why = f"it was lost {self._forget_after_s:g} s ago"
            member.forgetting = loop.call_later(self._forget_after_s, self._forget, index, why)

    def _forget(self, index: int, reason: str) -> None:
        del self._members[index]
        name = task_name("worker", index)
        logger.info("%s is no longer a worker of the cluster: %s", name, reason)
        self._added.pop(name, None)
        self._workforce.change({}, (index,))
