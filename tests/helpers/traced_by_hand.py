"""Readings of recorders, written by hand: what a task would have recorded."""

from __future__ import annotations

from typing import Any

from msgspec import msgpack

from psync.net.trace_file import Reading
from psync.wire.codec import Message, encode
from psync.wire.frames import SENT, Kind

CHIEF, PS, WORKER = "/job:chief/task:0", "/job:ps/task:0", "/job:worker/task:0"

INCARNATIONS = {CHIEF: 1, PS: 2, WORKER: 3}


class ByHand:
    """One task. Times are by its clock, which is ``ahead`` of the true time."""

    def __init__(self, task: str, ahead: float = 0.0, origin: str = "a") -> None:
        self.task = task
        self._ahead = ahead
        self._origin = origin
        self._links: dict[int, Any] = {}
        self.entries: list[Any] = []
        self.facts: dict[str, Any] = {}

    def frame(
        self, at: float, peer: str, kind: Kind, request: int, message: Message | None = None,
        nbytes: int = 0, *, sent: bool, link: int = 0,
    ) -> None:  # fmt: skip
        """Send a message, or receive one."""
        number = list(INCARNATIONS).index(peer) + 10 * link
        own, other = INCARNATIONS[self.task], INCARNATIONS[peer]
        self._links[number] = (self.task, own, peer, other, "control")
        header = b"" if message is None else encode(message)
        flags = int(kind) | (SENT if sent else 0)
        self.entries.append((at + self._ahead, number, flags, request, header, nbytes))

    def note(self, at: float, *note: Any) -> None:
        self.entries.append((at + self._ahead, *note))

    def reading(self, at: float, lost: int = 0, within: float = 1.0) -> Reading:
        """What there is, and no more of it afterwards; on its way for so long, there and back."""
        chunks, self.entries = [msgpack.encode(self.entries)] if self.entries else [], []
        links, self._links = list(self._links.items()), {}
        facts, self.facts = self.facts, {}
        body = msgpack.encode(
            {"origin": self._origin, "at": at + self._ahead, "lost": lost, "chunks": chunks,
             "connections": links, "facts": facts}
        )  # fmt: skip
        return Reading(self.task, body, at - within, at + within)


def entries_of(body: bytes) -> list[Any]:
    """What a task has recorded, unpacked."""
    chunks = msgpack.decode(body)["chunks"]
    return [each for chunk in chunks for each in msgpack.decode(chunk)]


def exchange(
    client: ByHand, server: ByHand, number: int, times: tuple[float, float, float, float],
    message: Message, answer: Message, nbytes: int = 0,
) -> None:  # fmt: skip
    """Let one task ask another one: sent, came, answered, got."""
    sent, came, answered, got = times
    client.frame(sent, server.task, Kind.REQUEST, number, message, nbytes, sent=True)
    server.frame(came, client.task, Kind.REQUEST, number, message, nbytes, sent=False)
    server.frame(answered, client.task, Kind.REPLY, number, answer, sent=True)
    client.frame(got, server.task, Kind.REPLY, number, answer, sent=False)
