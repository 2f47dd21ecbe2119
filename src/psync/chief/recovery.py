"""Recovery from the loss of a ps: the hands of ``recovery_rule``, and the backups of ps tasks.

Closures are paused while it recovers, and what is scheduled when all is gone has the same end. This
is the coordinator's half: a worker that loses a ps ends its session, see ``worker_task``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TypeVar

from psync.checkpoints.files import (
    STREAM_VARIABLE,
    NewestCheckpoints,
    StoredSnapshot,
    read_pieces,
    stored_snapshots,
)
from psync.chief import recovery_rule as rules
from psync.chief.declarations import Creation
from psync.chief.gangs import GangRunner, ScheduledCall
from psync.chief.links import ClusterLinks
from psync.chief.recovery_rule import RecoveryRule, State
from psync.chief.watch import FailoverEvent, RollbackEvent
from psync.client.context import setting
from psync.client.link import AWAY_FOR_S, REFUSED_FOR_S, PsLink, all_of, ask
from psync.closures.closure import Closure
from psync.closures.closure import State as ClosureState
from psync.closures.membership import ScheduleReports
from psync.closures.queue import Action as QueueAction
from psync.closures.queue import ClosureQueue
from psync.closures.rollback import KEPT_BYTES, CutCalls, EndedClosures
from psync.cluster import parse_task_name
from psync.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    PsyncError,
    UsageError,
    VersionMismatch,
)
from psync.net.connection import Connection
from psync.net.platform import flag
from psync.net.shielding import end_all
from psync.specs import checked_kind
from psync.store.reattach import Orders
from psync.store.snapshot_state import SnapshotState
from psync.store.untrusted_json import to_json
from psync.wire import messages
from psync.wire.codec import Message

logger = logging.getLogger(__name__)


PAUSE_S = 0.2
"""Between two attempts to make a backup."""

CONNECT_S = 1.0
"""A process where nobody has listened for so long has ended, and the backups in it."""


class Backups:
    """Keeps the backups of one coordinator's ps tasks.

    no backup --BackUp is answered-->                 complete    only now it may be promoted
    complete  --the backup does not follow-->         no backup   BackUp to "": the ps goes on alone

    A ps waits for its backup before it answers, and goes on without it only at this coordinator's
    command: so no backup is promoted that lacks what was answered. When one is promoted, says
    ``recovery_rule``.

    Source: docs/design.md, "Failover".

    Args:
        rule: Knows who is served where, and is told who has a backup.
        links: To all tasks; there are at least two ps tasks.
    """

    def __init__(self, rule: RecoveryRule, links: ClusterLinks) -> None:
        self._rule = rule
        self._cluster = links
        self._links = links.ps.links
        self._endpoint = links.endpoint
        self._processes = list(links.processes.items())
        self._next_epoch = itertools.count(1)
        self._epochs: dict[int, int] = {}  # under which complete backups were ordered
        # By ps, process and its incarnation: why it refuses to be the host, and always will.
        self._refusals: dict[tuple[int, int, int], PsyncError] = {}
        self._peers: dict[int, Connection] = {}  # to processes
        self._loop = asyncio.get_running_loop()
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._closed = False

    def describe(self) -> list[str]:
        """Say where each ps and its backup are; for reports."""
        rule = self._rule
        return [
            f"{link.task} is served in the process of {self._processes[home][0]}, its backup "
            + ("is not complete" if host is None else f"in that of {self._processes[host][0]}")
            for link, home, host in zip(self._links, rule.homes, rule.hosts, strict=True)
        ]

    async def complete(self, *, at_first: bool = False) -> None:
        """Wait until each ps has a backup, and could die.

        Args:
            at_first: Whether a process that refuses for good is an error.

        Raises:
            ParameterServerLost: A ps is gone.
            VersionMismatch: Ps tasks run several versions of psync.
            ConfigurationError: Bits are promised, and two ps tasks round differently.

        Cancellation: Safe.
        """
        while None in self._rule.hosts:
            if at_first and self._rule.gone is not None:
                raise self._rule.gone
            for refusal in self._refusals.values() if at_first else ():
                raise refusal
            self._changed.clear()
            await self._changed.wait()

    def look(self) -> None:
        """The rule has changed. A ps without a backup is given up as late as one that had none."""
        for link, host in zip(self._links, self._rule.hosts, strict=True):
            link.refused_for_s = REFUSED_FOR_S if host is None else AWAY_FOR_S
            link.away_for_s = math.inf if host is None else AWAY_FOR_S
        self._changed.set()

    # They are made, and made again.

    def keep(self) -> None:
        """Make backups; from now on, or again after a recovery."""
        if not self._closed and not self._keepers:
            self._keepers = [self._loop.create_task(self._keep(link.index)) for link in self._links]

    def pause(self) -> None:
        """Make none for a while."""
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []

    def give_up(self) -> None:
        """Make none any more: whoever waits for a ps that waits for its backup is answered."""
        self.pause()
        alone = [self.let_alone(link.index) for link in self._links if not link.lost]
        self._keepers = [self._loop.create_task(each) for each in alone]

    async def _keep(self, ps: int) -> None:
        """See to it that a ps has a backup."""
        link, chosen, failures = self._links[ps], 0, 0
        while True:
            try:
                host = self._rule.hosts[ps]
                if host is None:
                    host = chosen = await self._host_for(ps)
                    epoch = next(self._next_epoch)
                    await link.call(messages.BackUp(epoch, *self._processes[host], False))
                    self._epochs[ps] = epoch
                    self._note(ps, host)
                    failures = 0
                await link.call(messages.BackUp(self._epochs[ps], *self._processes[host], True))
                self._note(ps, None)
                # Where the ps that is served beside the backup is away, its loss is the alarm.
                homes = zip(self._links, self._rule.homes, strict=True)
                away = any(home == host and not each.is_open for each, home in homes)
                level = logging.INFO if away else logging.WARNING
                logger.log(level, "%s continues without its backup", link.task)
                await self.let_alone(ps)
                continue
            except ParameterServerLost as exc:
                if not link.is_held:  # it says so itself; else it was found out here
                    link.give_up(exc.message)
            except (VersionMismatch, ConfigurationError) as exc:
                logger.warning("%s has no backup: %s", link.task, exc)
                self._refusals[ps, chosen, self._peers[chosen].incarnation] = exc
                self._changed.set()
            except PsyncError as exc:
                failures += 1
                level = logging.WARNING if failures == 2 else logging.INFO  # one may be chance
                logger.log(level, "%s has no backup: %s", link.task, exc.message)
            except Exception:
                logger.exception("the backup of %s cannot be maintained", link.task)
            await asyncio.sleep(PAUSE_S)

    def _note(self, ps: int, host: int | None) -> None:
        self._rule.hosts[ps] = host
        self.look()

    async def let_alone(self, ps: int, *, urgent: bool = False) -> None:
        """Order a ps to go on without its backup. Raises as ``PsLink.call``."""
        order = messages.BackUp(next(self._next_epoch), "", "", False)
        await self._links[ps].call(order, urgent=urgent)

    async def _host_for(self, ps: int) -> int:
        """Return a process for a backup: the next one that is there, and has not refused."""
        count = len(self._processes)
        while True:
            for step in range(1, count):
                host = (self._rule.homes[ps] + step) % count
                with contextlib.suppress(PsyncError):
                    peer = self._peers.get(host)
                    if peer is None or not peer.is_open:
                        task, address = self._processes[host]  # where it was when all began
                        peer = self._peers[host] = await self._endpoint.connect(address, task)
                    if (ps, host, peer.incarnation) not in self._refusals:
                        return host
            await asyncio.sleep(PAUSE_S)

    # They are promoted.

    async def promote(self, ps: int, host: int) -> None:
        """Let the backup of a ps serve; asked again as often as the answer is lost.

        Raises:
            PsyncError: It does not.
            TimeoutError: It says nothing.
        """
        link, fences = self._links[ps], self._cluster.membership.fences()
        message = messages.Promote(ps, next(self._next_epoch), self._endpoint.incarnation, fences)
        way = PsLink(self._endpoint, host, self._processes[host][1], link.lost_after_s)
        way.refused_for_s = CONNECT_S
        try:
            async with asyncio.timeout(link.lost_after_s):
                address, _ = await ask(way, message, messages.Text)
        finally:
            way.close()
        self._cluster.move_ps(link, address.value)

    async def close(self) -> None:
        """Keep nothing more. Cancellation: safe."""
        self._closed = True
        await end_all(self._keepers)
        for peer in self._peers.values():
            peer.close()


T = TypeVar("T")

_restores: ContextVar[bool] = ContextVar("psync_restores", default=False)

RESTART_S = 60.0
"""A ps that was lost has at least this many seconds to be there again, if it can be recovered."""


@dataclass(eq=False)
class ClusterRecovery:
    """Whether the ps tasks of one coordinator are there, are being brought back, or are gone.

    Attributes:
        rule: Decides.
        backups: Of ps tasks, if they have any.
        checkpoints: To which a rollback may go.
        ended: The closures that a rollback may undo.
    """

    links: ClusterLinks
    queue: ClosureQueue  # is paused during a recovery; knows which closures have ended
    gangs: GangRunner  # those that run are ended by one
    reports: ScheduleReports  # are told again to ps 0 after one
    creation: Creation  # knows what was created, and what is adopted
    _: KW_ONLY
    perform: Callable[[Sequence[QueueAction]], None]  # does what the queue decided
    tell_again: Callable[[], None]  # tells ps tasks how far closures are: they do not know

    def __post_init__(self) -> None:
        links = self.links
        self.has_backups = links.options.has_backups
        # A lost ps has to be there again.
        self._wait_s = max(links.options.ps_timeout_s, RESTART_S)
        self.checkpoints = NewestCheckpoints()
        self.ended = EndedClosures(self.queue.identities)
        self._repeated: set[int] = set()  # timelines of rollbacks that were scheduled again
        self.rule = RecoveryRule(
            self, links.homes, lambda: bool(self.checkpoints.paths),
            lambda: self.creation.repeatable is not None,
        )  # fmt: skip
        self.backups = Backups(self.rule, links)
        links.on_ps_lost, links.on_replaced = self.ps_lost, self.rule.replaced
        links.on_worker_given_up = self.fail_if_gone
        self._task: asyncio.Task[None] | None = None  # recovers
        self._num_assigning = 0  # restores that assign at present
        self._is_torn = False  # one has failed since there was none
        self._began: float | None = None  # when the queue was paused; None: it is not
        # Of the present rollback: how far training was, and what it goes back to.
        self._from_step = 0
        self._snapshots: Sequence[StoredSnapshot] = ()
        self._loads = 0  # so far

    # Checkpoints.

    def saved(self, path: Path, snapshots: Sequence[SnapshotState]) -> None:
        """There is a new checkpoint: a rollback goes to it from now on."""
        self.checkpoints.add(path)
        self.ended.saved(CutCalls(snapshots), self.queue.open, len(self.checkpoints.paths))

    def note_ended(
        self, number: int, updates: int, closure: Closure | None, call: ScheduledCall | None,
        *, early: bool,
    ) -> None:  # fmt: skip
        """Note a closure that has ended: a rollback may undo it, ``reschedule`` repeats it.

        Args:
            number: Its number on ps tasks.
            updates: That it has made.
            closure: None: of a later run of a data shard.
            call: What it has run.
            early: Whether no cut was begun yet: the first one may lack a synchronous push.
        """
        if not early:
            self.ended.ended(number, updates)
        # Data shards are pending again automatically. A closure that was cancelled, although its
        # worker has carried it out, is left to the program.
        if (
            closure is None or closure.identity is not None or closure.is_replica
            or call is None or not call.may_repeat
            or closure.state is not ClosureState.FINISHED
        ):  # fmt: skip
            return
        if early:
            self.ended.ended_early(number)
        else:
            self.ended.kept.keep(number, call, call.parts())

    def calls_undone_by(self, event: RollbackEvent) -> list[ScheduledCall]:
        """Return, once, the calls of the closures that a rollback has undone, in order.

        Raises:
            UsageError: It is no rollback of this coordinator, or its calls were returned before or
                are not kept.
        """
        kept = self.ended.kept
        hint = "async for event in coordinator.events(): …"
        checked_kind(
            "reschedule: expected a RollbackEvent", event, RollbackEvent, hint=hint,
            error=UsageError,
        )  # fmt: skip
        if not any(each is event for each in self.links.events.rollbacks):
            raise UsageError(
                "reschedule: expected an event of this coordinator, got a copy or one of another "
                "coordinator",
                hint=hint,
            )
        if event.timeline in self._repeated:
            raise UsageError(
                f"reschedule: the closures of rollback {event.timeline} were already rescheduled",
                hint="call it once for each event",
            )
        if lost := kept.dropped(event.closures):
            raise UsageError(
                f"reschedule: the arguments of {len(lost)} of {len(event.closures)} closures are "
                f"no longer kept, the first is closure {lost[0]}",
                hint=f"psync keeps up to {KEPT_BYTES >> 20} MiB of calls, for the newest rollback "
                "and until the second checkpoint after it: reschedule immediately, save more "
                "often, pass large data by datasets, or schedule event.closures yourself",
            )
        self._repeated.add(event.timeline)
        return kept.take(event.closures)

    # Backups.

    async def first_backups(self, timeout_s: float, *, attached: bool) -> None:
        """Make backups, if there are any; see ``backed_up`` for those that are made later.

        Args:
            timeout_s: Seconds.
            attached: Whether something goes on: then they are made once all of it is adopted,
                in the background.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds.

        Cancellation: Safe.
        """
        if not self.has_backups:
            return
        if attached:
            self.creation.on_adopted = self.backups.keep
            return
        self.backups.keep()
        try:
            async with asyncio.timeout(timeout_s):
                await self.backups.complete(at_first=True)
        except TimeoutError as exc:
            where = "; ".join(self.backups.describe())
            raise ConnectFailed(
                f"no backups of all ps tasks within {timeout_s:g} s: {where}"
            ) from exc

    async def backed_up(self) -> None:
        """Wait until every ps has a backup; see ``ClusterCoordinator.backed_up``."""
        if self.has_backups:
            if self.creation.left is not None:
                await self.creation.ensure(last=True)
            await self.backups.complete()

    # The beginning.

    def started(self) -> None:
        """The coordinator has started.

        Raises:
            ParameterServerLost, FencedError: Meanwhile everything came to an end.
        """
        if self.rule.gone is not None:
            raise self.rule.gone
        self.rule.started = True

    async def begin(self) -> None:
        """The program is about to compute: from now on nothing can be done again without harm.

        Cancellation: Safe.
        """
        if self.creation.repeatable is not None and not _restores.get():
            await self.links.ps.links[0].recovered()
            self.creation.repeatable = None

    async def restored(self, restore: Callable[[], Awaitable[T]]) -> T:
        """Restore variables; again if ps tasks start afresh meanwhile.

        Args:
            restore: Assigns to variables, always the same.

        Cancellation: As that of ``restore``.
        """
        if self.creation.repeatable is None or _restores.get():
            return await restore()
        with setting(_restores, True):
            while True:
                starts = self.rule.starts
                result = await restore()
                await self.links.ps.links[0].recovered()
                if self.rule.starts == starts:
                    self.creation.repeatable = None
                    return result

    async def assigning(self, assign: Callable[[], Awaitable[None]]) -> None:
        """Assign what a checkpoint has; a chief that attaches can tell whether that has ended.

        Cancellation: As that of ``assign``; it has not ended then, nor if it fails.
        """
        self._is_torn = self._is_torn and self._num_assigning > 0
        self._num_assigning += 1
        try:
            await self._mark_restore(ended=False)
            await assign()
        except BaseException:
            self._is_torn = True
            raise
        finally:
            self._num_assigning -= 1
        if not self._num_assigning and not self._is_torn:
            await self._mark_restore(ended=True)

    async def _mark_restore(self, *, ended: bool) -> None:
        await all_of([link.call(messages.MarkRestore(ended)) for link in self.links.ps.links])

    # What is lost.

    def describe(self) -> list[str]:
        """Say where each ps and its backup are, and what a lost ps would mean; for reports."""
        lines = ["closures are held back: a ps is being recovered"] if self.is_recovering else []
        if self.has_backups:
            lines += self.backups.describe()
        elif not self.checkpoints.paths and self.creation.repeatable is None:
            lines.append(f"{rules.UNSAVED}: a ps that is lost ends the program")
        return lines

    @property
    def is_recovering(self) -> bool:
        """Whether closures are held back until a ps is there again."""
        return self._began is not None

    @property
    def is_rolling_back(self) -> bool:
        """Whether all ps tasks go back to a checkpoint."""
        return self.rule.state is State.ROLLBACK

    def ps_lost(self, error: ParameterServerLost) -> None:
        """A ps is lost."""
        if self.rule.state in rules.OVER:
            logger.error("%s", error.message)
        with self._ending_all_if_it_fails():
            self.rule.lost(parse_task_name(error.task)[1], error)
        self.backups.look()

    def will_recover(self, error: ParameterServerLost) -> bool:
        """A ps is lost, says ps 0, before it was noticed here; return whether it is recovered."""
        if not self.checkpoints.paths or self.rule.state in rules.OVER:
            return False
        if all(link.task != error.task for link in self.links.ps.links):
            return False  # a gang has ended because some ps was lost, which we know
        # Once the worker's other results are noted.
        asyncio.get_running_loop().call_soon(self.ps_lost, error)
        return True

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be done any more, or perhaps so: workers were given up."""
        return self.rule.gone is not None or self.links.workers.given_up != {}

    def fail_if_gone(self) -> None:
        """End what is scheduled where nobody is left who could do it."""
        if not self.is_gone or self.queue.pending_errors:
            return
        error = self.rule.gone
        if error is None and (self.gangs or self.queue.low_water() < self.queue.next_id):
            error = self.links.workers.all_given_up()
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End all that is scheduled or runs with an error that is no closure's own."""
        actions = self.queue.fail(error)
        self.gangs.fail(error)
        self.perform(actions)

    # The hands of the rule.

    @contextlib.contextmanager
    def _ending_all_if_it_fails(self) -> Iterator[None]:
        """End the run if this raises: joins would wait forever.

        An error of ``end`` itself is the caller's: the rule knows then that all is over.
        """
        try:
            yield
        except Exception as exc:
            if self.rule.state in rules.OVER:
                raise
            logger.exception("the recovery of ps tasks failed")
            self.abandon()
            self.rule.end(exc)

    def recover(self, recovery: Callable[[], Awaitable[None]]) -> None:
        """Run a recovery in the background, one at a time."""

        async def run() -> None:
            with self._ending_all_if_it_fails():
                await recovery()

        self._task = asyncio.get_running_loop().create_task(run())

    def abandon(self) -> None:
        """Cancel the recovery, if there is one."""
        if self._task is not None:
            self._task.cancel()

    async def let_alone(self, ps: int) -> None:
        """Step: order a ps to go on without its backup."""
        await self.backups.let_alone(ps, urgent=True)

    async def promote(self, ps: int, host: int) -> None:
        """Step: let the backup of a ps, in the process of ``host``, serve in its place."""
        await self.backups.promote(ps, host)

    async def attach(self, ps: int) -> None:
        """Step: attach a ps, and let it know where all are served."""
        self.backups.look()
        await self.links.attach_ps(self.links.ps.links[ps])

    async def restore(self) -> bool:
        """Step: let every ps prepare its snapshot, then restore it, in a new timeline.

        Returns:
            False: Nothing was restored. The checkpoint is damaged, and is passed over.

        Everything else that talks to ps tasks is paused meanwhile, see ``PsLink.hold``. Fences
        refuse what was sent in the old timeline: every worker bears a new incarnation afterwards.
        """
        self._loads += 1
        ps = self.links.ps
        each_ps = zip(ps.links, self._snapshots, strict=True)
        try:
            await all_of([self._prepare(link, snapshot) for link, snapshot in each_ps])
        except CheckpointError as exc:
            self.checkpoints.pass_over(exc)
            return False
        ps.outgoing.timeline += 1  # first: what some of them answer is sent again
        fences = self.links.membership.fences()
        await self._ask_all(messages.RestoreSnapshot(self._loads, ps.timeline, fences))
        return True

    async def create(self, lost: Sequence[int]) -> None:
        """Step: let every ps go on alone, then create variables again on those that were lost."""
        if self.has_backups:
            # Updates wait for a backup, and one that has survived may have lost its own.
            await all_of([self.let_alone(each.index) for each in self.links.ps.links])
        await self.creation.create_again(lost)

    async def adopt(self) -> None:
        """Step: let every ps say that it may be attached from now on."""
        lineage = self.links.endpoint.incarnation + self.links.ps.timeline
        if self._num_assigning:  # what was assigned is gone
            await self._ask_all(messages.MarkRestore(ended=False))
        await self._ask_all(messages.AdoptShards(lineage, last=True), [to_json(Orders())])

    async def _ask_all(self, message: Message, segments: Sequence[bytes] = ()) -> None:
        links = self.links.ps.links
        await all_of([link.call(message, segments, urgent=True) for link in links])

    async def read(self) -> None:
        """Step: read the newest checkpoint that can be used, and how far training was.

        Raises:
            CheckpointError: None can be used.
        """
        left = [each for each in await self.links.ps_counters(1.0) if each is not None]
        self._from_step = max((each["iterations"] for each in left), default=0)
        while True:
            path = self.checkpoints.use_newest()
            try:
                snapshots = await asyncio.to_thread(stored_snapshots, path)
                self._check_fits(path, snapshots)
                break
            except CheckpointError as exc:
                self.checkpoints.pass_over(exc)
        incarnation, optimizers = self.links.endpoint.incarnation, self.creation.own.listed()
        self._snapshots = [
            replace(each, state=each.state.for_coordinator(incarnation).with_rates(optimizers))
            for each in snapshots
        ]

    def _check_fits(self, path: Path, snapshots: Sequence[StoredSnapshot]) -> None:
        """Refuse a checkpoint of other ps tasks, or of other variables than there are now."""
        if len(snapshots) != len(self.links.ps.links):
            raise CheckpointError(
                f"{path}: expected {len(self.links.ps.links)} ps tasks, got {len(snapshots)}"
            )
        kept = {
            (key, spec.variable) for each in snapshots for key, spec in each.state.specs.items()
        }
        if missing := self.creation.created - kept:
            raise CheckpointError(
                f"{path}: {len(missing)} shards were created after it was saved, or by another "
                "program than this one",
                hint="save again after the last variable was declared",
            )

    async def attach_all(self) -> None:
        """Step: wait until all ps tasks are there, and serve this coordinator."""
        links = self.links.ps.links
        for link in links:
            if reason := self.links.endpoint.platform.given_up.reason(link.address):
                raise CheckpointError(f"{link.task} {reason}")
            if link.lost is not None:
                link.revive()
        patience_s = [link.lost_after_s for link in links]
        for link in links:
            link.lost_after_s = math.inf  # a launcher is starting it
        try:
            async with asyncio.timeout(self._wait_s):
                await all_of([self.links.attach_ps(link) for link in links])
        except TimeoutError as exc:
            away = ", ".join(f"{link.task} at {link.address}" for link in links if not link.is_open)
            raise CheckpointError(
                f"not reachable within {self._wait_s:g} s: {away or 'a ps that answers'}",
                hint="a supervisor must restart dead ps tasks; psync run does",
            ) from exc
        finally:
            for link, seconds in zip(links, patience_s, strict=True):
                link.lost_after_s = seconds

    async def _prepare(self, link: PsLink, snapshot: StoredSnapshot) -> None:
        """Let a ps read its snapshot, or send it, where the ps does not find the file."""
        packed = snapshot.state.to_bytes()
        if not flag(os.environ, STREAM_VARIABLE):
            places = to_json(snapshot.places)
            try:
                await self._send(
                    link, messages.PrepareSnapshot(self._loads, str(snapshot.file)), packed, places
                )
                return
            except CheckpointCorrupt:
                raise
            except CheckpointError as exc:
                logger.info(
                    "%s cannot read its snapshot (%s): the chief sends it", link.task, exc.message
                )
        await self._send(link, messages.PrepareSnapshot(self._loads, ""), packed)
        for item, first, nbytes, crc32 in snapshot.places:
            what, start = str(snapshot.state.items[item]), 0
            pieces = read_pieces(snapshot.file, first, nbytes, what, crc32)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                fill = messages.FillSnapshot(link.index, self._loads, item, start)
                await self._send(link, fill, bytes(piece))
                start += piece.size

    async def _send(self, link: PsLink, message: Message, *segments: bytes) -> None:
        await link.call(message, segments, bulk=True, urgent=True)

    def hold(self) -> None:
        """Let requests to ps tasks and closures wait, end gangs, make no backups."""
        self.backups.look()
        for link in self.links.ps.links:
            link.hold()
        self.backups.pause()
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
            self.queue.pause()
        self.gangs.fail(ParameterServerLost("/job:ps", "was lost while replicas ran"))

    def end_sessions(self) -> None:
        """Give up all workers: each gets a new incarnation, and hears of ps tasks."""
        self.reports.sessions_end()
        self.queue.dispatcher.forget()  # data begin anew with the next sessions
        self.links.workers.end_sessions(ConnectionLost("a ps was lost"))

    def go_home(self, ps: int) -> None:
        """Look for a ps where it was at the beginning."""
        link = self.links.ps.links[ps]
        if link.address != self.links.processes[link.task]:
            self.links.move_ps(link, self.links.processes[link.task])

    def resume(self) -> None:
        """Let everything go on; ps tasks know nothing of what they were told."""
        self.backups.look()
        for link in self.links.ps.links:
            link.release()
        self.links.tell_addresses()
        self.reports.tell_all()
        self.tell_again()
        if self.has_backups:
            self.backups.keep()
        self._resume_queue()

    def _resume_queue(self) -> None:
        if self._began is not None:
            self._began = None
            self.perform(self.queue.resume())

    def end(self, error: Exception, *, all_lost: bool, why: str) -> None:
        """Fail what is scheduled, and let requests go on: they fail, or do not need what is lost.

        Args:
            error: Why nothing can be done any more.
            all_lost: Whether requests to every ps fail: some have rolled back, or none.
            why: Begins the line of the log.
        """
        self.backups.look()
        for link in self.links.ps.links:
            if all_lost and isinstance(error, ParameterServerLost):
                link.fail(error)
            link.release()
        if self.rule.state is State.CLOSED:
            return
        is_lost = not isinstance(error, FencedError)
        # Before it has started it is raised, or tried again.
        level = logging.ERROR if self.rule.started else logging.DEBUG
        prefix = why if is_lost else "a newer coordinator has taken over: "
        logger.log(level, "%s%s", prefix, error)
        self.fail(error)
        self._resume_queue()
        if is_lost:
            # Pushes that were begun wait for an answer that cannot come.
            self.links.workers.end_sessions(error)
            if self.has_backups and not all_lost:
                self.backups.give_up()

    def failed_over(self, served: Mapping[int, int]) -> None:
        """Tell the program in whose process each lost ps is served now."""
        names = [link.task for link in self.links.ps.links]
        event = FailoverEvent(
            tuple(names[ps] for ps in served), tuple(names[host] for host in served.values()),
            self._seconds(),
        )  # fmt: skip
        logger.info(
            "%s: backups took over after %.2f s; no update is lost", ", ".join(event.lost),
            event.seconds,
        )  # fmt: skip
        self.links.events.emit(event)

    def rolled_back(self, lost: Sequence[int]) -> None:
        """Tell the program that these ps tasks were lost."""
        links = self.links.ps.links
        to_step = max(each.state.iterations for each in self._snapshots)
        undone = self.ended.undone(CutCalls([each.state for each in self._snapshots]))
        event = RollbackEvent(
            tuple(links[ps].task for ps in lost), self.links.ps.timeline,
            max(self._from_step, to_step), to_step, undone.closures, self._seconds(),
            undone.updates,
        )  # fmt: skip
        logger.info("recovered in %.2f s, timeline %d: %s", event.seconds, event.timeline, event)
        self.links.events.emit(event)
        self.checkpoints.in_use = None

    def _seconds(self) -> float:
        """Return since when it recovers."""
        assert self._began is not None, "it recovers"
        return asyncio.get_running_loop().time() - self._began

    # The end.

    async def close(self) -> None:
        """Bring back nothing more; the rule was closed before. Cancellation: safe."""
        if self._task is not None:
            await end_all([self._task])
        await self.backups.close()
