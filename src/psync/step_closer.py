"""Synchronous training on ps 0: who contributed, when a step is closed, who may go on.

Layer: L3. Imports: errors, cluster, sums, blocks, sync_steps, platform, rpc, long_work, ps_sync,
all_ps, wire.

Joins the rule (``SyncSteps``) with the network: answers wait here until there is a token, and
a decided step goes to every ps.

    Contribute    → SyncSteps.contribute → Answer, Refuse: to whoever waits for that push
                                           Close: CloseStep to every ps, all at once;
                                                  then the global step is raised by one;
                                                  then SyncSteps.closed → Answer, …

One object serves one coordinator. When a newer one comes, whoever waits here is told, and a
step that is being closed reaches no ps that already serves the newer one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from psync.all_ps import AllPs
from psync.blocks import BlockPool
from psync.cluster import task_name
from psync.errors import ClosedError, ConnectionLost, FencedError, PsyncError
from psync.long_work import LongWork
from psync.platform import Platform
from psync.ps_sync import CLOSER, PsSync
from psync.rpc import Handler, Peer, Received, Reply
from psync.sums import check_weight
from psync.sync_steps import Action, Close, Contribution, Refuse, Replica, SyncSteps
from psync.wire.messages import (
    AskStep,
    AttachPs,
    CloseStep,
    Contribute,
    Contributed,
    Done,
    Fence,
    FinishSteps,
    InitTokens,
    Message,
    ReportSchedule,
    SyncStep,
)

logger = logging.getLogger(__name__)

_PushKey = tuple[int, Replica, int]
"""Group, replica, number of the push."""


class StepCloser:
    """Decides the synchronous steps of one coordinator's cluster, and closes them.

    Args:
        platform: Network, secret, failpoints.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        work: Waits for shards that are busy.
        pool: Memory for what comes in.
        waits_changed: Called when ``steps.waiting`` may have changed.
    """

    def __init__(
        self,
        platform: Platform,
        attach: AttachPs,
        sync: PsSync,
        work: LongWork,
        pool: BlockPool,
        waits_changed: Callable[[], None],
    ) -> None:
        self.steps = SyncSteps()
        self._coordinator = (task_name("chief", 0), attach.coordinator)
        self._sync = sync
        self._all_ps = AllPs(platform, attach, sync, work, pool)
        self._waits_changed = waits_changed
        self._failpoints = platform.failpoints
        self._loop = asyncio.get_running_loop()
        self._report_version = 0
        self._members: tuple[Mapping[str, int], Sequence[str]] | None = None  # told last
        self._waiting: dict[_PushKey, list[asyncio.Future[Reply]]] = {}
        self._beginning: dict[int, asyncio.Task[int]] = {}  # groups whose first step is read
        self._under_way: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # of the timer
        self._over: PsyncError | None = None  # why nothing is decided here any more

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Contribute: Handler(self._contribute, self._prepare_contribute),
            AskStep: Handler(self._ask_step),
            InitTokens: Handler(self._init_tokens),
            FinishSteps: Handler(self._finish),
        }

    def replaced(self) -> None:
        """A newer coordinator is served: tell whoever waits, or comes later."""
        self._over = FencedError(f"{CLOSER} serves a newer coordinator")
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                _fail(waiter, self._over)

    async def close(self) -> None:
        """Close the links to the other ps tasks; a step that is being closed gets no further.

        Cancellation: Links may be left open.
        """
        self._over = self._over or ClosedError(f"{CLOSER} ends")
        if self._timer is not None:
            self._timer.cancel()
        await self._all_ps.close()
        if under_way := [*self._under_way, *self._beginning.values()]:
            await asyncio.wait(under_way)  # they end with their links

    # Messages.

    def _prepare_contribute(
        self, peer: Peer, message: Contribute, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        self._check(peer)
        return self._sync.prepare_part(peer, message, lengths)

    def _contribute(
        self, peer: Peer, message: Contribute, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        self._check(peer)
        if message.set_id >= 0:
            self._sync.stage_part(peer, message, body)
        if self._is_ready(message.group, message.config):
            return self._judge(peer, message)
        return self._contribute_first(peer, message)

    async def _contribute_first(self, peer: Peer, message: Contribute) -> Reply:
        """The group is new: its first step is that of the global step."""
        await self._begin(message.group, message.config)
        self._check(peer)
        answer = self._judge(peer, message)
        return answer if isinstance(answer, Reply) else await answer

    def _judge(self, peer: Peer, message: Contribute) -> Reply | Awaitable[Reply]:
        check_weight(message.weight)
        replica = (peer.task, peer.incarnation)
        actions = self.steps.contribute(
            message.group,
            Contribution(
                replica, message.push, message.acked_below,
                message.closure if message.closure >= 0 else None, message.ordinal,
                message.variable_set, message.local_step, message.weight,
            ),
        )  # fmt: skip
        waiter = self._wait(peer, (message.group, replica, message.push))
        self._perform(actions)
        return waiter.result() if waiter.done() else waiter

    def _ask_step(self, peer: Peer, message: AskStep, _: list[memoryview]) -> Reply:
        self._check(peer)
        return self._step_of(message.group)

    async def _init_tokens(self, peer: Peer, message: InitTokens, _: list[memoryview]) -> Reply:
        self._check(peer)
        if not self._is_ready(message.group, message.config):
            await self._begin(message.group, message.config)
            self._check(peer)
        self._perform(self.steps.init_tokens(message.group, message.count))
        return self._step_of(message.group)

    def _step_of(self, group: int) -> Reply:
        return Reply(SyncStep(self.steps.step(group), self.steps.first_step(group)))

    async def _finish(self, peer: Peer, message: FinishSteps, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        while self._over is None and not self.steps.is_settled:
            self._perform(self.steps.finish())
            if self._under_way:
                await asyncio.wait(list(self._under_way))
        return Reply(Done())

    def _check_coordinator(self, peer: Peer) -> None:
        if (peer.task, peer.incarnation) != self._coordinator:
            raise FencedError(f"{CLOSER}: {peer.task} is not the coordinator that it serves")

    def _check(self, peer: Peer) -> None:
        self._sync.ledger.check_incarnation(peer.task, peer.incarnation)
        if self._over is not None:
            raise self._over.with_traceback(None)  # it is raised many times

    # Membership.

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator, unless a newer one was there."""
        if message.version <= self._report_version:
            return
        self._report_version = message.version
        alive = {task_name("worker", index): born for index, born in message.workers}
        self.set_members(alive, message.missing)
        in_flight = [closure for closure, _ in message.in_flight]
        self._perform(self.steps.schedule(message.queued, in_flight))

    def set_members(self, alive: Mapping[str, int], missing: Sequence[str]) -> None:
        """Take note of who lives (task → incarnation), and of the names of those who should."""
        self._members = (alive, missing)
        self._perform(self.steps.members(alive, missing, self._loop.time()))

    def lost(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over: nobody waits for their answers."""
        self._perform(self.steps.fence(task, below))

    def end(self, reason: str) -> None:
        """Training is over: whoever waits, or pushes later, is told."""
        self._perform(self.steps.end(reason))

    def fence(self, task: str, below: int) -> None:
        """Let the other ps tasks refuse incarnations of ``task`` below ``below``."""
        message = Fence(task, below)
        if calls := self._all_ps.ask_others(message):
            self._start(self._fence_others(calls))

    async def _fence_others(self, calls: Sequence[asyncio.Task[Received]]) -> None:
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(failed, Exception):
                logger.warning("%s: a ps was not told of a fence: %s", CLOSER, failed)

    # Who waits.

    def _wait(self, peer: Peer, key: _PushKey) -> asyncio.Future[Reply]:
        """Return what will be the answer to a request, which others may wait for, too."""
        waiter: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting.setdefault(key, []).append(waiter)
        of_peer: set[asyncio.Future[Reply]] | None = peer.state.get("contributing")
        if of_peer is None:
            of_peer = peer.state["contributing"] = set()
            peer.on_closed.append(_connection_lost)
        of_peer.add(waiter)
        waiter.add_done_callback(of_peer.discard)
        waiter.add_done_callback(functools.partial(self._left, key))
        return waiter

    def _left(self, key: _PushKey, waiter: asyncio.Future[Reply]) -> None:
        """A request has ended; unless it was answered, perhaps nobody waits for this push now."""
        waiters = self._waiting.get(key, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
                self.steps.forget(*key)
                self._waits_changed()

    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the rule has decided, then look when it wants to be asked again."""
        for action in actions:
            if isinstance(action, Close):
                self._close(action)
                continue
            waiters = self._waiting.pop((action.group, action.replica, action.number), ())
            if isinstance(action, Refuse):
                for waiter in waiters:
                    _fail(waiter, action.error)
                continue
            reply = Reply(
                Contributed(
                    action.outcome, action.staleness, action.token, action.partial, action.count
                )
            )
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(reply)
        deadline = self.steps.next_deadline()
        if deadline != self._deadline:
            self._set_timer(deadline)
        self._waits_changed()

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._deadline = self._timer = None
        self._perform(self.steps.tick(self._loop.time()))

    # The first step of a group.

    def _is_ready(self, group: int, raw: dict[str, Any] | None) -> bool:
        """Return whether a group is known; raise if it is known as something else."""
        self._sync.define(group, raw)
        return self.steps.knows(group)

    async def _begin(self, group: int, raw: dict[str, Any] | None) -> None:
        """Begin a group at the present global step, read once for all who ask meanwhile."""
        config = self._sync.define(group, raw)
        reading = self._beginning.get(group)
        if reading is None:
            reading = self._beginning[group] = self._loop.create_task(
                self._all_ps.read_global_step(config)
            )
            reading.add_done_callback(lambda task: self._begun(group, task))
        try:
            first = await asyncio.shield(reading)
        except PsyncError:
            if self._over is not None:
                raise self._over.with_traceback(None) from None
            raise
        if not self.steps.knows(group):
            self.steps.define(group, config, first)
            if self._members is not None:
                self.set_members(*self._members)  # a group knows since when too few live

    def _begun(self, group: int, task: asyncio.Task[int]) -> None:
        del self._beginning[group]  # an attempt that failed is made again
        if not task.cancelled():
            task.exception()  # seen, even if those who asked have gone

    # Closing.

    def _close(self, close: Close) -> None:
        message = CloseStep(
            close.group, self._sync.raw_config(close.group), close.step, list(close.pushes)
        )
        try:
            self._failpoints.hit("ps0.step.decided")
        except PsyncError as exc:
            self._perform(self.steps.close_failed(close.group, exc))
            return
        calls = self._all_ps.ask_others(message)  # first: they work while ps 0 does its own part
        self._start(self._close_everywhere(message, calls))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _close_everywhere(
        self, message: CloseStep, calls: Sequence[asyncio.Task[Received]]
    ) -> None:
        """Let every ps apply a step, raise the global step, let replicas go on."""
        try:
            await self._all_ps.apply(message, calls)
            self._failpoints.hit("ps0.step.applied")
            await self._all_ps.raise_global_step(self._sync.define(message.group, None))
            if self._over is None:
                self._perform(self.steps.closed(message.group, message.step))
        except Exception as exc:
            if self._over is not None:
                return
            error = exc if isinstance(exc, PsyncError) else _unexpected(exc)
            logger.error(
                "%s: step %d of group %d cannot be closed: %s",
                CLOSER, message.step, message.group, error.message,
            )  # fmt: skip
            self._perform(self.steps.close_failed(message.group, error))


def _connection_lost(peer: Peer) -> None:
    """Who waited on this connection will ask again on another one, or is gone."""
    for waiter in list(peer.state["contributing"]):
        _fail(waiter, ConnectionLost(f"the connection to {peer.task} was lost"))


def _fail(waiter: asyncio.Future[Reply], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _unexpected(error: Exception) -> PsyncError:
    wrapped = PsyncError(f"{type(error).__name__} while a step was applied: {error}")
    wrapped.__cause__ = error
    return wrapped
