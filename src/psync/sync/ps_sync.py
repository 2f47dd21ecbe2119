"""Parts of synchronous pushes on every ps, and what ps 0 says of them.

One object serves one coordinator and timeline, with its store and its ledger; another one gets
another. A worker sends each ps its part of a push, as an ``Update``; see docs/design.md, "A
synchronous step".

    message       then
    Update        check, take memory, hold the part (``staging``); tell ps 0 of it. On ps 0 the rule
                  is told (``step_closer``). Answered when the part is applied, on ps 0 when there
                  is a token
    FollowParts   tell ps 0, on this connection, of all parts that are here and that come
    KeepPart      copy a part that lies in memory of its worker's
    MeasureStep   say what the norms of the same mean would be; changes nothing
    CloseStep     apply the mean of the named pushes, shard by shard; moving averages follow, and
                  the global step if it is here; a repetition changes nothing (``step_applier``)

Update and CloseStep are entries of the log, and a backup does with them what is done here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from psync.errors import NotServedError, PsyncError, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.net.platform import Platform
from psync.numerics.memory import ABOVE_BYTES, BlockPool, bytes_of
from psync.ps.admission import PsLocks
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import LATER, Executor, Later, Listed
from psync.ps.plans import Body, Plans, ShardSet, body_in_place, memory_for, owned
from psync.store.commit_log import LogState
from psync.store.ledger import Ledger
from psync.store.step_norms import ShardSums
from psync.store.store import ShardStore
from psync.sync.groups import CLOSER, FROM_CLOSER, GroupTable
from psync.sync.staging import Staging
from psync.sync.step_applier import StepApplier
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.frames import Segment
from psync.wire.messages import (
    CloseStep,
    Done,
    FollowParts,
    Held,
    HoldPush,
    KeepPart,
    MeasureStep,
    NormsMeasured,
    Pushed,
    SetGroups,
    StepMeasured,
    Update,
)
from psync.wire.tensors import to_bytes_view

PushKey = tuple[int, Replica, int]
"""Group, replica, number of the push."""

Made = Callable[[list[tuple[int, int]] | None], Message]
"""Makes an answer, given how far each group is in the values that go with it; None: there are none.
"""

MAX_TOLD = 4096
"""Parts that one message names."""

_DONE = Done()


class PsSync(GroupTable):
    """The synchronous groups of one ps under one coordinator.

    Args:
        platform: Limits.
        task: Name of the ps.
        store: Its shards.
        ledger: Knows who has been replaced.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait.
        executor: In whose order all is done.
        plans: Of the clients of this coordinator.
        serves: False: no coordinator has attached it yet, or its backup serves in its place.

    Attributes:
        took: What becomes of a part that has come in: it is to be an entry.
        judged: What becomes of that: the part is held. On ps 0 the rule decides.
        left: Told of a push for which nobody waits any more.
        read_now: Reads the values that an answer brings, see ``PsPulls.read_now``.
    """

    read_now: Callable[[ShardSet], Sequence[Segment] | None]

    def __init__(
        self,
        platform: Platform,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
        locks: PsLocks,
        executor: Executor,
        plans: Plans,
        *,
        serves: bool = True,
    ) -> None:
        super().__init__(store, task)
        self.plans = plans
        self.ledger = ledger
        self.executor = executor
        self.staging = Staging(platform.limits.staging_bytes, task)
        make = platform.parts.of(StepApplier)
        self.applier = make(self, ledger, self.staging, work, locks, executor)
        self.serves = serves
        self.took: Callable[[Request[Update], Part], None] = self.submit
        self.judged: Callable[[Request[Update], Part, PushKey], None] = self._judge
        self.left: Callable[[PushKey], None] = lambda _: None
        self._pool = pool
        self._waiting: dict[PushKey, list[Request[Update]]] = {}
        self._follower: Connection | None = None  # ps 0, which is told of all parts

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            FollowParts: Handler(self._follow),
            KeepPart: Handler(self._keep_part),
            MeasureStep: Handler(self._measure_for),
            CloseStep: Handler(self._close_for),
        }

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who does which entry of the log of the one that is backed up; see ``replay``."""
        return {
            SetGroups: Handler(self._set_groups),
            HoldPush: Handler(self._hold),
            CloseStep: Handler(
                lambda request: self.applier.close(request, lambda: request.answer(_DONE))
            ),
        }

    # Parts.

    def prepare(self, request: Request[Update], known: ShardSet) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        message, lengths, rows = request.message, request.lengths, request.message.rows
        if known.store is not self.store:
            self._look_up(known)
        if lengths != known.lengths or rows is not None:
            known.check_lengths(lengths, self._task, rows)
        request.token = known
        nbytes = sum(lengths)
        config = self._groups[known.optimizer].config
        self.staging.reserve(
            known.optimizer, request.peer.client, message.sequence, message.local_step, nbytes,
            config,
        )  # fmt: skip
        if rows is not None:
            return memory_for(self._pool, nbytes, varies=True)
        if nbytes < ABOVE_BYTES and request.borrowed is None:
            return (np.empty(nbytes, np.uint8).data,)
        is_alone = self.executor.log.state is LogState.ALONE
        return body_in_place(request, self._pool, known, nbytes, is_alone=is_alone)

    def _look_up(self, known: ShardSet) -> None:
        self.known(known.optimizer, known.config)
        known.look_up(self.store)

    def arrived(self, request: Request[Update], known: ShardSet) -> None:
        """Take a part that has come in whole."""
        client, rows = request.peer.client, request.message.rows
        if known.store is not self.store:  # while it came in a timeline may have ended
            known = self.plans.plan(client, known.number)
            self._look_up(known)
        request.token = known
        body: Body = request.segments
        if rows is not None or len(body) != 1 or len(body[0]) != known.nbytes:
            body = known.body_of(body, self._task, rows)
        self.took(request, self._part(known, body, rows))

    def replay(self, request: Request[Update], known: ShardSet) -> None:
        """Do an entry of the log of the one that is backed up: nobody waits for it here."""
        self._look_up(known)
        request.token = known
        part = self._part(known, request.segments, request.message.rows)

        def act() -> None:
            self.judged(request, part, key_of(request))

        self.executor.submit(request, request.message, part.body, act)

    def _part(self, known: ShardSet, body: Body, rows: Sequence[int] | None) -> Part:
        """Return the part of a push that belongs to this ps; ValueMismatchError: it is none."""
        nbytes = sum(map(len, body))
        if rows is None:
            gradients = known.gradients(self.store, known.optimizer, body)
            return Part(known, gradients, body, nbytes)
        operands = known.row_gradients(self.store, known.optimizer, body, rows)
        return Part(known, operands, body, nbytes, rows)

    def submit(self, request: Request[Update], part: Part) -> None:
        """Make an entry of a part that has come in; its request waits for more than that."""
        key = key_of(request)
        if request.on_given_up is None:
            self.wait(request, key)
        if self.executor.log.state is not LogState.ALONE:
            self.plans.keep(key[1], part.known)
            part = self._owned(part)

        def act() -> Later:
            try:
                self.judged(request, part, key)
            except PsyncError as exc:
                self.fail(key, exc)
            request.rest()  # the part is held
            request.segments = ()
            return LATER

        self.executor.submit(request, request.message, part.body, act)

    def _owned(self, part: Part) -> Part:
        """Return a part in memory that nobody else can write to."""
        body = owned(self._pool, part.body)
        return part if body is part.body else self._part(part.known, body, part.rows)

    def _judge(self, request: Request[Update], part: Part, key: PushKey) -> None:
        group, replica, push = key
        if self.hold(request, part, key):
            self._tell([(group, *replica, push, request.message.local_step)])
        else:
            self._is_over(key)

    def hold(self, request: Request[Update], part: Part, key: PushKey) -> bool:
        """Hold a part, in its turn; False: its step is over here.

        Raises:
            FencedError: Its sender has been replaced.
        """
        group, replica, push = key
        self.ledger.check_incarnation(*replica)
        local_step = request.message.local_step
        return self.staging.stage(group, replica, push, local_step, part.nbytes, part)

    def _tell(self, parts: list[tuple[int, str, int, int, int]]) -> None:
        """Say that these parts are held; who follows later is told of all."""
        if self._follower is not None:
            self._follower.notify(Held(self._index, parts))

    def _is_over(self, key: PushKey) -> None:
        """The step of a part is closed here: answer as soon as what was closed is applied."""
        touched = self.known(key[0], None).touched
        self.executor.in_turn(lambda: Compute(touched, lambda: self.answer(key, _over)))

    def _follow(self, request: Request[FollowParts]) -> None:
        """Tell ps 0 of parts as long as its connection lasts: this request is not answered."""
        self._check_closer(request.peer)
        self._follower = request.peer
        held = [
            (group, *replica, push, local_step)
            for group, replica, push, local_step, _ in self.staging.held()
        ]
        for at in range(0, len(held), MAX_TOLD):
            self._tell(held[at : at + MAX_TOLD])

    def _keep_part(self, request: Request[KeepPart]) -> None:
        message, replica = request.message, request.peer.client
        part: Part | None = self.staging.staged(message.group, replica, message.push)
        if part is not None:
            self.staging.replace(message.group, replica, message.push, self._owned(part))
        request.answer(_DONE)

    # Requests that wait. A push may have two, after a lost connection that is not noticed yet.

    def wait(self, request: Request[Update], key: PushKey) -> None:
        """Let a request wait until its push is answered."""
        request.on_given_up = self._left
        self._waiting.setdefault(key, []).append(request)

    def _left(self, request: Request[Any]) -> None:
        key = key_of(request)
        waiting = self._waiting.get(key, [])
        if request in waiting:
            waiting.remove(request)
            if not waiting:
                del self._waiting[key]
                self.left(key)

    def answer(self, key: PushKey, made: Made, *, brings: bool = False) -> None:
        """Answer all who wait for a push; with the values that its plan wants, if they are free."""
        for request in self._waiting.pop(key, ()):
            known: ShardSet = request.token
            wanted, read = known.wanted, None
            if brings and wanted is not None and wanted.compression is None:
                read = self.read_now(wanted)
            if read is None:
                request.answer(made(None))
            else:
                request.answer(made(self.staging.steps), read)

    def fail(self, key: PushKey, error: BaseException) -> None:
        """Tell all who wait for a push that it has failed."""
        for request in self._waiting.pop(key, ()):
            request.fail(error)

    def fail_all(self, error: PsyncError) -> None:
        """Nobody waits any more: all are told why."""
        for key in list(self._waiting):
            self.fail(key, error)

    # A section of the state.

    def _hold(self, request: Request[HoldPush]) -> None:
        """Hold a part that is held over there, whether its sender lives or not."""
        message, replica = request.message, request.peer.client
        known = self.plans.plan(replica, message.plan)
        self._look_up(known)
        part = self._part(known, request.segments, message.rows)
        self.staging.stage(
            message.group, replica, message.push, message.local_step, part.nbytes, part
        )
        request.answer(_DONE)

    def _set_groups(self, request: Request[SetGroups]) -> None:
        self.set_groups(request.message)
        request.answer(_DONE)

    def set_groups(self, message: SetGroups) -> None:
        """Know the groups that the one knows whose backup this is."""
        for group, config, step in message.groups:
            self.known(group, config)
            if step >= 0:
                self.staging.close(group, step - 1)
                self.staging.applied(group, step - 1)
        for group in message.spread:
            self.known(group, None).spread = True

    def control(self) -> list[Any]:
        """Return what is held and decided, as plain data in an order of its own, for a digest."""
        held = sorted(
            [group, *replica, push, local_step, part.nbytes]
            for group, replica, push, local_step, part in self.staging.held()
        )
        decided = sorted(
            [group, self.staging.step(group), known.spread, known.outgoing and [
                known.outgoing.close.step, known.outgoing.is_measured]]
            for group, known in self._groups.items()
            if self.staging.step(group) is not None or known.outgoing is not None
        )  # fmt: skip
        return [held, decided]

    async def entries(self, rule: Mapping[str, Any] | None = None) -> list[Listed]:
        """Return entries that give a backup what no snapshot has: that has the groups alone.

        Args:
            rule: On ps 0, ``SyncSteps.snapshot``. No step is on its way, but some may be decided.
        """
        entries: list[Listed] = []
        for group, replica, push, local_step, part in self.staging.held():
            rows = None if part.rows is None else list(part.rows)
            holding = HoldPush(group, push, local_step, part.known.number, rows)
            # The plan may have gone, as its client defines others now.
            entries += [(replica, part.known.header, ()), (replica, holding, part.body)]
        steps = dict(self.staging.steps)
        groups = [(group, raw, steps.get(group, -1)) for group, raw in self.raw_configs().items()]
        state = SetGroups(groups, [group for group, known in self._groups.items() if known.spread])
        packed = () if rule is None else (to_bytes_view(bytes_of(msgpack.packb(rule))),)
        entries.append((FROM_CLOSER, state, packed))
        for each in self.outgoing():
            if each.is_measured:
                factors = each.scales, each.ratios
                measured = NormsMeasured(each.close.group, each.close.step, *factors)
                entries.append((FROM_CLOSER, measured, ()))
        return entries

    # What ps 0 says.

    def _measure_for(self, request: Request[MeasureStep]) -> None:
        self._check_closer(request.peer)
        sums = self.applier.measure(request.message)
        if isinstance(sums, list):
            request.answer(StepMeasured(sums))
        else:
            request.start(self._measured(request, sums))

    async def _measured(
        self, request: Request[MeasureStep], under_way: Awaitable[list[ShardSums]]
    ) -> None:
        request.answer(StepMeasured(await under_way))

    def _close_for(self, request: Request[CloseStep]) -> None:
        self._check_closer(request.peer)
        message = request.message

        def applied() -> None:
            for task, incarnation, push, _ in message.pushes:
                self.answer((message.group, (task, incarnation), push), _accepted, brings=True)
            request.answer(_DONE)

        self.applier.close(request, applied)

    def _check_closer(self, peer: Connection) -> None:
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        if peer.task != CLOSER:
            raise UsageError(f"{self._task}: {peer.task} may not close a step, only {CLOSER}")
        self.check_served()

    def check_served(self) -> None:
        """Raise NotServedError unless this process serves its ps, for a coordinator."""
        if not self.serves:
            raise NotServedError(f"{self._task} is not, or no longer, served by this process")


def _accepted(steps: list[tuple[int, int]] | None) -> Pushed:
    return Pushed("accepted", 0, steps)


def _over(_: object) -> Pushed:
    return Pushed("stale", 0)


def key_of(request: Request[Update]) -> PushKey:
    """Return of which push a part is that has come in."""
    known: ShardSet = request.token
    return known.optimizer, request.peer.client, request.message.sequence
