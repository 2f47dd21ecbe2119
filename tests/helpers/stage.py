"""Ps tasks and their backups without a network: what they send each other waits for the test.

The ps tasks are real ones, on the loop whose clock is virtual, and so are the backups and their
host. Instead of connections there are lists: what one ps asks another lies in ``Stage.letters``
until it is delivered, and entries reach a backup when the test says so. Whatever happens to a log
is a line of ``Stage.lines``.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from inside import backups_of, handlers_of
from psync.errors import ClosedError, FencedError, PsyncError
from psync.net.peer import Later, Peer, Received, Reply
from psync.net.platform import Parts, Platform
from psync.net.secret import Secret
from psync.numerics.blocks import bytes_of
from psync.ps.backup_host import AsIfFrom
from psync.ps.backup_sender import BackupSender, Served
from psync.ps.computes import Compute
from psync.ps.executor import Entry
from psync.ps.life import Life
from psync.ps_task import PsTask
from psync.client.known_sets import note_known
from psync.client.ps_client import PsClient
from psync.specs import ShardSpec, dtype_name, dtype_of
from psync.store.commit_log import CommitLog, LogNames, LogState
from psync.store.store import Key
from psync.sync.groups import CLOSER
from psync.sync.ps_services import PsServices
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, decode, encode
from psync.wire.handshake import RELEASE
from psync.wire.log_messages import CheckState
from psync.wire.ps_messages import AttachPs, DefineOptimizer
from psync.wire.recovery_messages import (
    BackUp,
    BackupBegun,
    BeginBackup,
    FillBackup,
    LogEntries,
    LogTaken,
    Promote,
    Promoted,
)
from psync.wire.tensors import to_bytes_view
from stage_words import entry_words, error_words, message_words

CHIEF = ("/job:chief/task:0", 100)
HOSTS = (6, 7)
"""Indices of the processes in which backups live: these serve no ps themselves.

In the second one is the backup of what the first one has come to serve."""

SECRET = Secret(b"a secret of at least thirty-two bytes")

MANY = 1 << 30


class Connection(AsIfFrom):
    """Of a client."""

    is_closed = False


# What ps tasks send each other.


@dataclass(eq=False)
class Letter:
    """A request of ps 0 to another ps; then its answer."""

    link: HeldLink
    build: Callable[[Peer], Message]
    segments: Sequence[Any]
    then: Callable[[Received | Exception], None]
    set_ids: Sequence[int]
    message: Message | None = None  # as it was sent last
    to: PsTask | None = None  # who works on it
    answer: Received | Exception | None = None

    def __str__(self) -> str:
        here, there = self.link.owner.name, f"ps {self.link.index}"
        if self.answer is None:
            return f"{here} → {there}: {message_words(cast(Message, self.message))}"
        if isinstance(self.answer, Exception):
            return f"{there} → {here}: {error_words(self.answer)}"
        return f"{there} → {here}: {message_words(self.answer.message)}"


class HeldLink:
    """In place of a ``PsLink``."""

    def __init__(self, client: HeldClient, index: int, address: str) -> None:
        self.client, self.stage, self.owner = client, client.stage, client.owner
        self.index, self.task, self.address = index, f"/job:ps/task:{index}", address
        self.lost: Exception | None = None
        self.lost_after_s = 15.0
        self.on_lost: Any = None
        self.held = False
        self._connect()

    def _connect(self) -> None:
        self.near = cast(Peer, AsIfFrom(self.task, 0, {}))
        self.far = cast(Peer, AsIfFrom(CLOSER, self.client.incarnation, {}))

    def ask(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Any],
        then: Callable[[Received | Exception], None],
        *,
        set_ids: Iterable[int] = (),
        **_: Any,
    ) -> None:
        self.stage.post(Letter(self, build, segments, then, list(set_ids)))

    async def call(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Any] = (),
        *,
        set_ids: Iterable[int] = (),
        **_: Any,
    ) -> Received:
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

        def then(outcome: Received | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.ask(build, segments, then, set_ids=set_ids)
        return await future

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def revive(self) -> None:
        self.lost = None
        self._connect()
        self.stage.send_again(self)


class HeldClient:
    """In place of the ``PsClient`` of ps 0."""

    stage: Stage

    def __init__(self, endpoint: Any, addresses: Sequence[str], *_: Any) -> None:
        self.incarnation = endpoint.incarnation
        self.owner = cast(TracedServices, self.stage.serving[0].services)  # nobody else has one
        self.links = [HeldLink(self, index, each) for index, each in enumerate(addresses)]

    async def close(self) -> None:
        self.stage.give_up(self)


# The log.


class TracedLog(CommitLog[Entry]):
    """Says which numbers entries get."""

    appended: Callable[[int, Entry], None] = staticmethod(lambda *_: None)

    def append(self, entry: Entry, nbytes: int) -> int:
        number = super().append(entry, nbytes)
        self.appended(number, entry)
        return number


@dataclass(eq=False)
class Shown:
    """An entry, as the trace has it."""

    words: str
    kind: type[Message]
    number: int = 0


class TracedServices(PsServices):
    """Writes down what becomes of each entry."""

    stage: Stage

    def __init__(self, process: Any, life: Life, *rest: Any) -> None:
        self.index, self.is_hosted = process.index, life is Life.HOSTED
        super().__init__(process, life, *rest)
        executor, work = self.executor, process.work
        self._submit_plain, executor.submit = executor.submit, self._submit  # type: ignore[method-assign]
        self._fits_plain, work.fits_now = work.fits_now, self._fits
        self._appending: Shown | None = None
        cast(TracedLog, executor.log).appended = self._appended  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        if self.is_hosted:
            return f"backup of ps {self.index}"
        serving = self.stage.serving.get(self.index)
        if serving is not None and serving.services is not self and serving.life is Life.SERVING:
            return f"former ps {self.index}"
        return f"ps {self.index}"

    def say(self, words: str) -> None:
        self.stage.say(f"{self.name}: {words}", by=self)

    def _submit(self, client: Any, message: Any, body: Any, act: Any, claim: Any = None) -> Any:
        if not self.stage.traced:
            return self._submit_plain(client, message, body, act, claim)
        shown = message if isinstance(message, Message) else message(LogNames())
        entry = Shown(entry_words(client, shown), type(shown))
        outer, self._appending = self._appending, entry
        try:
            return self._submit_plain(client, message, body, lambda: self._act(entry, act), claim)
        finally:
            self._appending = outer

    def _appended(self, number: int, entry: Entry) -> None:
        if self.is_hosted or not self.stage.traced:
            return  # of a backup: its own log begins when it is promoted
        shown = self._appending
        message = decode(entry.header) if entry.header else None
        if isinstance(message, DefineOptimizer | CheckState) and (
            shown is None or shown.kind is not type(message)
        ):
            self.say(f"entry {number}: {entry_words(entry.client, message)}, on its own account")
        elif shown is not None:
            shown.number = number
            self.say(f"entry {number}: {shown.words}")

    def _act(self, entry: Shown, act: Callable[[], Any]) -> Any:
        if not self.is_hosted:
            self.stage.judged(self, f"entry {entry.number}", entry.words)
        try:
            outcome = act()
        except PsyncError as exc:
            if not self.is_hosted:
                self.say(f"entry {entry.number}: refused, {error_words(exc)}")
            raise
        if self.is_hosted:
            return outcome
        if isinstance(outcome, Compute) and outcome.in_pieces is not None:
            outcome.in_pieces = functools.partial(
                self._compute, entry, outcome.keys, outcome.in_pieces
            )
        return outcome

    def _fits(self, store: Any, keys: Sequence[Key], nbytes: int) -> bool:
        if not self.is_hosted and self.stage.busy.intersection(keys):
            return False
        return self._fits_plain(store, keys, nbytes)

    async def _compute(
        self, entry: Shown, keys: Sequence[Key], work: Callable[[], Awaitable[None]]
    ) -> None:
        self.say(f"entry {entry.number}: its compute has begun")
        while not self.is_hosted and self.stage.busy.intersection(keys):
            await self.stage.freed()
        await work()
        self.say(f"entry {entry.number}: computed")


class HeldSender:
    """In place of a ``BackupSender``: the test says when the backup takes entries."""

    stage: Stage

    def __init__(
        self,
        platform: Platform,
        served: Served,
        order: BackUp,
        log: CommitLog[Entry],
        begun: Callable[[BackUp, str], None],
        advanced: Callable[[], None],
        deposed: Callable[[], None],
    ) -> None:
        self.order, self.log = order, log
        self.ended = asyncio.Event()
        self.error: PsyncError | None = None
        self._served, self._begun, self._advanced = served, begun, advanced
        self._deposed = deposed
        self._peer = AsIfFrom(f"/job:ps/task:{served.ps}", served.attach.coordinator, {})
        self._host = self.stage.host(served.ps)
        self.stage.senders[log] = self

    async def _tell(self, message: Message, body: Sequence[Any] = ()) -> Message:
        segments = [memoryview(bytes(each)) for each in body]
        run = handlers_of(self._host)[type(message)].run
        answer = run(cast(Peer, self._peer), decode(encode(message)), segments)
        reply = await answer if isinstance(answer, Awaitable) else answer
        return cast(Message, reply.message)

    async def copy(self, frozen: Any, first: int, before: Sequence[Entry] = ()) -> None:
        ps, order, attach = self._served.ps, self.order, self._served.attach
        begin = BeginBackup(
            ps, order.epoch, attach.coordinator, list(attach.ps_addresses), attach.ps_timeout_s,
            self._served.timeline, first - len(before), self._served.lineage, RELEASE,
        )  # fmt: skip
        begun = await self._tell(begin, [frozen.state.to_bytes()])
        assert isinstance(begun, BackupBegun)
        self._begun(order, begun.numerics)
        self.stage.say(f"ps {ps} → its backup: a snapshot")
        known = backups_of(self._host)[ps]
        known._done = functools.partial(self._executed, first, known._done)
        for item, known in enumerate(frozen.state.items):
            if not known.is_constant:
                data = b"".join(map(bytes, frozen.part(item, 0, known.nbytes)))
                await self._tell(FillBackup(ps, order.epoch, item, 0), [data])
        frozen.drop()
        for number, entry in enumerate(before, first - len(before)):
            words = entry_words(entry.client, decode(entry.header))
            self.stage.say(f"ps {ps} → its backup: {words}")
            await self._entries(number, [entry])
        await self._entries(first, [])
        await self.stage.copied()
        self.log.pair()
        while self.log.taken < self.log.last:
            await self.take(MANY)

    def _executed(self, first: int, plain: Any, entry: Any, outcome: Any) -> None:
        if entry.number >= first:  # else it came with the snapshot
            self.stage.executed(self._served.ps, entry.number, outcome)
        plain(entry, outcome)

    async def _entries(self, first: int, entries: Sequence[Entry]) -> int:
        listed = [(*each.client, each.header, len(each.body)) for each in entries]
        segments = [segment for each in entries for segment in each.body]
        message = LogEntries(self._served.ps, self.order.epoch, first, listed)
        answer = await self._tell(message, segments)
        assert isinstance(answer, LogTaken)
        return answer.upto

    async def take(self, count: int, *, heard: bool = True) -> int:
        """Let the backup have the next entries; return how many.

        Args:
            count: At most so many.
            heard: Whether its primary hears that it has them.
        """
        batch = self.log.to_ship(count, MANY)
        if not batch:
            return 0
        try:
            upto = await self._entries(batch[0].number, [each.entry for each in batch])
        except PsyncError as exc:
            self._fail(exc)
            return 0
        numbers = " to ".join(dict.fromkeys([f"{batch[0].number}", f"{upto}"]))
        what = "entry" if len(batch) == 1 else "entries"
        not_heard = "" if heard else ", which is not heard"
        self.stage.say(f"backup of ps {self._served.ps}: has {what} {numbers}{not_heard}")
        if heard:
            self.log.note_taken(upto)
            self._advanced()
        return len(batch)

    def ship(self) -> None:
        """Nothing: see ``take``."""

    def _fail(self, error: PsyncError) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self.stage.say(f"the backup does not follow, {error_words(error)}")
            if isinstance(error, FencedError):
                self._deposed()

    def close(self) -> Any:
        self.ended.set()
        self.stage.senders.pop(self.log, None)
        return _nothing()


async def _nothing() -> None: ...


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

    Attributes:
        lines: What has happened.
        serving: Who serves each ps.
        former: Who served it before.
    """

    def __init__(self, num_ps: int = 1) -> None:
        self.lines: list[str] = []
        self.letters: list[Letter] = []
        self.senders: dict[Any, HeldSender] = {}
        self.busy: set[Key] = set()  # shards whose computes take long
        self.copies_wait = False
        self.traced = True
        self._executed = (0, 0)  # (ps, number) of the last line about a backup
        self._turns: list[asyncio.Future[None]] = []
        self._dead: set[PsTask] = set()
        self._epoch = self._moves = 0
        network = MemoryNetwork()
        self._platform = Platform(
            cast(Any, network), SECRET, parts=StageParts(self), new_incarnation=lambda: 7
        )
        self.addresses = [f"ps{index}:1" for index in range(num_ps)]
        self.serving = {
            index: PsTask(self._platform, index, address)
            for index, address in enumerate(self.addresses)
        }
        self.former: dict[int, PsTask] = {}
        self.at: dict[str, PsTask] = {self.addresses[k]: each for k, each in self.serving.items()}
        self._hosts = [PsTask(self._platform, each, f"host{each}:1") for each in HOSTS]
        self._all = [*self.serving.values(), *self._hosts]
        self._peers: dict[tuple[PsTask, str, int], Connection] = {}
        self._asking: set[asyncio.Task[Any]] = set()

    def say(self, words: str, by: Any = None) -> None:
        """Add a line, unless it is about somebody who has died."""
        if self.traced and not any(each.services is by for each in self._dead):
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
            await self.request(CHIEF, index, self._attach(index))
            assert task.life is Life.SERVING

    def _attach(self, index: int) -> AttachPs:
        return AttachPs(CHIEF[1], index, list(self.addresses), 15.0, moves=self._moves)

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
        for each in self._all:
            for link in [letter.link for letter in self.letters]:
                self.give_up(link.client)
            await each.close()

    # Requests of clients.

    def peer(self, task: PsTask, client: tuple[str, int]) -> Connection:
        """The connection of a client to a ps."""
        return self._peers.setdefault((task, *client), Connection(*client, {}))

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
        then: Callable[[Reply | Exception], None],
        *,
        to_former: bool = False,
    ) -> Later | None:
        """Send a request to a ps, as a connection would bring it; ``then`` gets its answer.

        Returns:
            What the client may give up.
        """
        task = self.former[index] if to_former else self.serving[index]
        peer = cast(Peer, self.peer(task, client))
        handler = handlers_of(task)[type(message)]
        sent = decode(encode(message))
        try:
            body = [memoryview(bytes(each)) for each in segments]
            if handler.prepare is not None and segments:
                whole = b"".join(segments)
                body = list(handler.prepare(peer, sent, tuple(map(len, segments))))
                at = 0
                for view in body:
                    view[:] = whole[at : at + len(view)]
                    at += len(view)
            answer = handler.run(peer, sent, body)
        except PsyncError as exc:
            then(exc)
            return None
        if answer is None or isinstance(answer, Reply):
            if answer is not None:
                then(answer)
        elif isinstance(answer, Later):
            answer.deliver_to(then)
            return answer
        else:
            waiting = asyncio.get_running_loop().create_task(_then(answer, then))
            self._asking.add(waiting)
            waiting.add_done_callback(self._asking.discard)
        return None

    async def request(self, client: tuple[str, int], index: int, message: Message) -> Message:
        """Send a request and return its answer, which does not wait for anything else."""
        got: list[Reply | Exception] = []
        self.ask(client, index, message, (), got.append)
        await settle()
        (answer,) = got
        if isinstance(answer, Exception):
            raise answer
        return answer.message

    # Between ps tasks.

    def post(self, letter: Letter) -> None:
        """A ps asks another one."""
        letter.message = letter.build(letter.link.near)
        self.letters.append(letter)
        self.say(str(letter), by=letter.link.owner)

    def send_again(self, link: HeldLink) -> None:
        """A connection is made again: what was not answered is sent again."""
        for letter in [each for each in self.letters if each.link is link]:
            self.letters.remove(letter)
            letter.answer, letter.to = None, None
            self.post(letter)

    def give_up(self, client: HeldClient) -> None:
        """Links are closed: what is under way on them fails."""
        for letter in [each for each in self.letters if each.link.client is client]:
            self.letters.remove(letter)
            letter.then(ClosedError("the link is closed"))

    def deliverable(self) -> Letter | None:
        """Return the first letter whose receiver is there."""
        for letter in self.letters:
            if letter.answer is not None:
                return letter
            there = self.at.get(letter.link.address)
            if letter.to is None and not letter.link.held and there not in self._dead:
                return letter
        return None

    def deliver(self) -> bool:
        """Let the next request or answer arrive; return whether there was one."""
        letter = self.deliverable()
        if letter is None:
            return False
        if letter.answer is not None:
            self.letters.remove(letter)
            if isinstance(letter.answer, Received):
                for number in letter.set_ids:
                    note_known(letter.link.near, number)
            letter.then(letter.answer)
            return True
        letter.to = self.at[letter.link.address]
        there, message = letter.to, decode(encode(cast(Message, letter.message)))
        body = [memoryview(bytes(each)) for each in letter.segments]

        def answered(outcome: Reply | Exception) -> None:
            if there in self._dead or letter.to is not there:
                return
            if isinstance(outcome, Exception):
                letter.answer = outcome
            else:
                flat = [bytes(part) for each in outcome.segments for part in _flat(each)]
                letter.answer = Received(outcome.message, list(map(memoryview, flat)))
            self.say(str(letter))

        try:
            answer = handlers_of(there)[type(message)].run(letter.link.far, message, body)
        except PsyncError as exc:
            answered(exc)
            return True
        if isinstance(answer, Reply):
            answered(answer)
        elif isinstance(answer, Later):
            answer.deliver_to(answered)
        else:
            waiting = asyncio.get_running_loop().create_task(_then(answer, answered))
            self._asking.add(waiting)
            waiting.add_done_callback(self._asking.discard)
        return True

    def drop(self) -> Letter | None:
        """Lose the next request or answer with its connection, over which it will come again."""
        letter = self.deliverable()
        if letter is not None:
            letter.link.revive()
        return letter

    # Backups.

    def host(self, index: int) -> PsTask:
        """Return in whose process the backup of a ps is, or is to be."""
        return self._hosts[index in self.former]

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

    def _ordered(self, outcome: Reply | Exception) -> None:
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

    def is_even(self, index: int) -> bool:
        """Return whether a ps and its backup have executed the same entries."""
        served, backup = self.serving[index], backups_of(self.host(index))[index]
        executor = served.services.executor
        log = executor.log
        return bool(
            served not in self._dead
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
        self._dead.add(dead)
        for letter in list(self.letters):
            if letter.link.owner is dead.services:
                self.letters.remove(letter)
            elif letter.to is dead or self.at.get(letter.link.address) is dead:
                letter.answer, letter.to = None, None
        dead.services.executor.log.depose()  # nothing is judged there any more

    async def promote(self, index: int, fences: Sequence[tuple[str, int]] = ()) -> None:
        """Let the backup of a ps serve, and tell all where it does."""
        sender = self.sender(index)
        epoch = 0 if sender is None else sender.order.epoch
        host = self.host(index)
        task = backups_of(host)[index].task
        run = handlers_of(host)[Promote].run
        peer = cast(Peer, AsIfFrom(*CHIEF, {}))
        answer = run(peer, Promote(index, epoch, CHIEF[1], list(fences)), [])
        promoted = (await cast(Awaitable[Reply], answer)).message
        assert isinstance(promoted, Promoted)
        task.services.is_hosted = False
        self.former[index], self.serving[index] = self.serving[index], task
        self.addresses[index] = promoted.address
        self.at[promoted.address] = task
        self._moves += 1
        self.say(f"ps {index} is served by its backup, and the coordinator says so")
        for other in sorted(self.serving):
            if self.serving[other] not in self._dead:
                await self.request(CHIEF, other, self._attach(other))

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


def _flat(segment: Any) -> list[Any]:
    return list(segment) if isinstance(segment, list | tuple) else [segment]


async def _then(
    answer: Awaitable[Reply], then: Callable[[Reply | Exception], None]
) -> None:
    outcome: Reply | Later | Exception
    try:
        outcome = await answer
    except PsyncError as exc:
        outcome = exc
    if isinstance(outcome, Later):
        outcome.deliver_to(then)
    else:
        then(outcome)
