"""Ps tasks and their backups without a network: what they send each other waits for the test.

The ps tasks are real ones, on the loop whose clock is virtual, and so are the backups and their
host. Instead of connections there are lists: what one ps asks another lies in ``Stage.letters``
until it is delivered, and entries reach a backup when the test says so. Whatever happens to a log
is a line of ``Stage.lines``.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from asked import Asked, peer_of, served
from held_backups import HeldSender, items_of
from held_links import HeldClient, Letters
from inside import backups_of, handlers_of
from psync.backups.primary import BackupSender
from psync.client.ps import PsClient
from psync.errors import FencedError
from psync.net.connection import AsIfFrom, Connection
from psync.net.platform import Parts, Platform
from psync.net.secret import Secret
from psync.ps.computes import Place
from psync.ps.life import Life
from psync.ps_task import PsTask
from psync.specs import ShardSpec, dtype_name, dtype_of
from psync.store.commit_log import CommitLog, LogState
from psync.store.store import Key
from psync.sync.ps_services import PsServices
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, decode, encode
from psync.wire.limits import Limits
from psync.wire.messages import (
    AttachPs,
    BackUp,
    DefinePlan,
    FillSnapshot,
    PrepareSnapshot,
    Promote,
    RestoreSnapshot,
    Text,
)
from psync.wire.tensors import to_bytes_view
from stage_words import PLANS, error_words
from traced_log import TracedLog, TracedServices

CHIEF = ("/job:chief/task:0", 100)
HOSTS = (6, 7)
"""Indices of the processes in which backups live: these serve no ps themselves at first.

In the second one is the backup of what the first one has come to serve, and so on."""

SECRET = Secret(b"a secret of at least thirty-two bytes")


class StageParts(Parts):
    """The parts of all tasks of a stage."""

    def __init__(self, stage: Stage) -> None:
        self._made: dict[type, type] = {
            PsClient: type("HeldClient", (HeldClient,), {"stage": stage}),
            PsServices: type("TracedServices", (TracedServices,), {"stage": stage}),
            BackupSender: type("HeldSender", (HeldSender,), {"stage": stage}),
            CommitLog: TracedLog,
        }

    def of(self, cls: type[Any]) -> type[Any]:
        return self._made.get(cls, cls)


# The stage.


class Stage:
    """Ps tasks, their backups, and what happens between them.

    Args:
        num_ps: Number of ps tasks.
        limits: Of all tasks.

    Attributes:
        lines: What has happened.
        serving: Who serves each ps.
        former: Who served it before.
    """

    def __init__(self, num_ps: int = 1, limits: Limits | None = None) -> None:
        self.lines: list[str] = []
        self.letters = Letters(self)
        self.senders: dict[Any, HeldSender] = {}
        self.busy: set[Place] = set()  # whose computes take long
        self.copies_wait = False
        self.traced = True
        self._executed = (0, 0)  # (ps, number) of the last line about a backup
        self._turns: list[asyncio.Future[None]] = []
        self.dead: set[PsTask] = set()
        self._epoch = self._moves = self._timeline = 0
        self._promoted = Counter[int]()  # how often each ps was
        network = MemoryNetwork()
        self._platform = Platform(
            cast(Any, network), SECRET, limits or Limits(), StageParts(self),
            new_incarnation=lambda: 7,
        )  # fmt: skip
        self.addresses = [f"ps{index}:1" for index in range(num_ps)]
        self.serving = {
            index: PsTask(self._platform, index, address)
            for index, address in enumerate(self.addresses)
        }
        self.former: dict[int, PsTask] = {}
        self.at: dict[str, PsTask] = {self.addresses[k]: each for k, each in self.serving.items()}
        self._hosts: dict[int, PsTask] = {}
        self._all = list(self.serving.values())
        self._peers: dict[tuple[PsTask, str, int], Connection] = {}
        self._asking: set[asyncio.Task[Any]] = set()

    def say(self, words: str, by: Any = None) -> None:
        """Add a line, unless it is about somebody who has died."""
        if self.traced and not any(each.services is by for each in self.dead):
            self.lines.append(words)

    def judged(self, by: TracedServices, number: str, words: str) -> None:
        """An entry is judged: one line with its number, if nothing was between."""
        whole = f"{by.name}: {number}: {words}"
        if self.lines and self.lines[-1] == whole:
            self.lines[-1] = f"{whole}; judged"
        else:
            by.say(f"{number}: judged")

    def executed(self, index: int, number: int, outcome: Any) -> None:
        """A backup has executed an entry: one line for several, one after the other."""
        if not self.traced:
            return
        refused = ", refused" if isinstance(outcome, Exception) else ""
        before = re.fullmatch(
            rf"(backup of ps {index}: has executed entr)(?:y|ies) (\d+)(?: to {number - 1})?",
            self.lines[-1] if self.lines else "",
        )
        if before and not refused and self._executed == (index, number - 1):
            self.lines[-1] = f"{before[1]}ies {before[2]} to {number}"
        else:
            self.say(f"backup of ps {index}: has executed entry {number}{refused}")
        self._executed = (index, number)

    # Begin and end.

    async def begin(self) -> None:
        """Let a coordinator attach all ps tasks."""
        for index, task in self.serving.items():
            await self.request(CHIEF, index, self._attach())
            assert task.life is Life.SERVING

    def _attach(self) -> AttachPs:
        return AttachPs(CHIEF[1], list(self.addresses), 15.0, moves=self._moves)

    def create(self, index: int, key: Key, name: str, value: Any) -> None:
        """Create a variable of one shard, before there is anything else."""
        array = np.asarray(value)
        spec = ShardSpec(name, *key, 0, array.shape, dtype_name(array.dtype), index)
        self.serving[index].services.store.create(spec, to_bytes_view(array))

    async def close(self) -> None:
        """End all tasks."""
        self.traced = self.copies_wait = False
        self.busy.clear()
        self.wake()
        for task in list(self._asking):
            task.cancel()
        await settle()
        for client in dict.fromkeys(letter.link.client for letter in list(self.letters.all)):
            self.letters.give_up(client)
        for each in self._all:
            await each.close()

    # Requests of clients.

    def peer(self, task: PsTask, client: tuple[str, int]) -> AsIfFrom:
        """The connection of a client to a ps."""
        return self._peers.setdefault((task, *client), peer_of(client))

    def hang_up(self, index: int, client: tuple[str, int]) -> None:
        """The connection of a client to a ps breaks."""
        peer = self._peers.pop((self.serving[index], *client), None)
        if peer is not None:
            peer.is_closed = True
            for listener in list(peer.on_closed):
                listener(peer)

    def ask(
        self,
        client: tuple[str, int],
        index: int,
        message: Message,
        segments: Sequence[bytes],
        then: Callable[[Any], None],
        *,
        to_former: bool = False,
    ) -> Asked:
        """Send a request to a ps, as a connection would bring it; ``then`` gets its answer.

        Returns:
            What the client may give up.
        """
        task = self.former[index] if to_former else self.serving[index]
        handler = handlers_of(task)[type(message)]
        if not client[0].startswith("/job:ps/"):  # a connection is cut when its task is replaced
            try:
                task.services.ledger.check_incarnation(*client)
            except FencedError as exc:
                then(exc)
                return Asked(self.peer(task, client), message)
        definition = PLANS.get(getattr(message, "plan", -1))
        if definition is not None:
            self.define(task, client, definition)
        return served(handler, self.peer(task, client), decode(encode(message)), segments, then)

    def define(self, task: PsTask, client: tuple[str, int], definition: DefinePlan) -> None:
        """Say what a plan is, unless it was said over this connection."""
        peer = self.peer(task, client)
        if definition.plan not in peer.state.setdefault("plans", set()):
            peer.state["plans"].add(definition.plan)
            served(handlers_of(task)[type(definition)], peer, definition)

    async def request(
        self,
        client: tuple[str, int],
        index: int,
        message: Message,
        segments: Sequence[bytes] = (),
    ) -> Message:
        """Send a request and return its answer, which does not wait for anything else."""
        got: list[Any] = []
        self.ask(client, index, message, segments, got.append)
        await settle()
        (answer,) = got
        if isinstance(answer, Exception):
            raise answer
        return answer.message

    # Backups.

    def host(self, index: int) -> PsTask:
        """Return in whose process the backup of a ps is, or is to be."""
        number = HOSTS[self._promoted[index] % 2]
        if number not in self._hosts:
            self._hosts[number] = PsTask(self._platform, number, f"host{number}:1")
            self._all.append(self._hosts[number])
        return self._hosts[number]

    async def back_up(self, index: int, *, wait: bool = False) -> None:
        """Let a ps make a backup; with ``wait`` it is complete when ``copies_wait`` ends."""
        self.copies_wait = wait
        await self._order(index, self.host(index).task)

    async def go_on_alone(self, index: int) -> None:
        """Let a ps serve without a backup."""
        await self._order(index, "")

    async def _order(self, index: int, host: str) -> None:
        self._epoch += 1
        order = BackUp(self._epoch, host, host, lost=False)
        self.ask(CHIEF, index, order, (), self._ordered)
        await settle()

    def _ordered(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            self.say(f"the coordinator is told: {error_words(outcome)}")

    async def copied(self) -> None:
        """Wait until a copy may end."""
        while self.copies_wait:
            await self.freed()

    def sender(self, index: int, *, former: bool = False) -> HeldSender | None:
        """Return what feeds the backup of a ps; None: there is none."""
        served = self.former[index] if former else self.serving[index]
        return self.senders.get(served.services.executor.log)

    def backup(self, index: int) -> PsTask | None:
        """Return the backup of a ps; None: there is none that follows it."""
        known = backups_of(self.host(index)).get(index)
        if known is None or self.sender(index) is None or known.task.life is not Life.HOSTED:
            return None
        return cast(PsTask, known.task)

    def is_paired(self, index: int) -> bool:
        """Return whether a ps has a complete backup."""
        return self.serving[index].services.executor.log.state is LogState.PAIRED

    def is_even(self, index: int) -> bool:
        """Return whether a ps and its backup have executed the same entries."""
        served, backup = self.serving[index], backups_of(self.host(index))[index]
        executor = served.services.executor
        log = executor.log
        return bool(
            served not in self.dead
            and log.state is LogState.PAIRED
            and backup.taken == log.taken == log.last
            and not executor.waiting
            and not backup.waiting
            and not backup.is_damaged
        )

    # Deaths.

    def crash(self, index: int) -> None:
        """The process of a ps dies: nothing comes from it any more."""
        dead = self.serving[index]
        self.dead.add(dead)
        self.letters.lose(dead)
        dead.services.executor.log.depose()  # nothing is judged there any more

    async def promote(self, index: int, fences: Sequence[tuple[str, int]] = ()) -> None:
        """Let the backup of a ps serve, and tell all where it does."""
        sender = self.sender(index)
        epoch = 0 if sender is None else sender.order.epoch
        host = self.host(index)
        task = backups_of(host)[index].task
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task.services.executor.log.last -= 0 if sender is None else sender.hidden
        order = Promote(index, epoch, CHIEF[1], list(fences))
        served(handlers_of(host)[Promote], peer_of(CHIEF), order, (), told.set_result)
        promoted = (await told).message
        assert isinstance(promoted, Text)
        task.services.is_hosted = False
        self._promoted[index] += 1
        self.former[index], self.serving[index] = self.serving[index], task
        self.addresses[index] = promoted.value
        self.at[promoted.value] = task
        self._moves += 1
        self.say(f"ps {index} is served by its backup, and the coordinator says so")
        for other in sorted(self.serving):
            if self.serving[other] not in self.dead:
                await self.request(CHIEF, other, self._attach())

    # Back to a snapshot.

    def snapshot(self, index: int) -> tuple[bytes, list[tuple[int, bytes]]]:
        """Return what a ps holds: its state, and the bytes of each item."""
        frozen = self.serving[index].services.freeze()
        kept = frozen.state.to_bytes(), list(items_of(frozen))
        frozen.drop()
        return kept

    async def roll_back(
        self, snapshots: dict[int, tuple[bytes, list[tuple[int, bytes]]]], fences: list[Any]
    ) -> None:
        """Let all ps tasks hold earlier snapshots, on a new timeline."""
        self._timeline += 1
        for index, (state, items) in snapshots.items():
            load = self._timeline
            await self.request(CHIEF, index, PrepareSnapshot(load, ""), [state])
            for item, data in items:
                await self.request(CHIEF, index, FillSnapshot(index, load, item, 0), [data])
            await self.request(CHIEF, index, RestoreSnapshot(load, load, fences))

    # Time, and what takes long.

    async def freed(self) -> None:
        """Wait until something that was held up may go on."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        await turn

    def wake(self) -> None:
        """Something may go on."""
        turns, self._turns = self._turns, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    # What there is.

    def value(self, task: PsTask, key: Key) -> np.ndarray:
        """Return what a shard holds."""
        store = task.services.store
        spec = store.spec(key)
        data = b"".join(bytes(block) for block in store.read(key))
        return np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)
