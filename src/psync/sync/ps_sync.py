"""Synchronous steps on every ps: parts of pushes are held, and applied when ps 0 closes their step.

One object serves one coordinator and timeline, with its store and its ledger; another one gets
another. A worker sends each ps its part of a push, as an ``Update``; see docs/design.md, "A
synchronous step".

    message       then
    Update        check, take memory, hold the part (``staging``); tell ps 0 of it. On ps 0 the rule
                  is told (``StepCloser``). Answered when the part is applied, on ps 0 when there
                  is a token
    FollowParts   tell ps 0, on this connection, of all parts that are here and that come
    KeepPart      copy a part that lies in memory of its worker's
    CloseStep     apply the mean of the named pushes, shard by shard; moving averages follow, and
                  the global step if it is here (``step``); a repetition changes nothing. Or say
                  what the norms of the mean would be, which changes nothing

Update and CloseStep are entries of the log, and a backup does with them what is done here. A
closing is judged in its order: its parts are taken, and the group is at the next step. The update
of the shards is a compute; pulls name the next step once it is done. A step that changes locked
shards waits for the locks before it is an entry.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from psync.cluster import parse_task_name
from psync.errors import (
    ConfigurationError,
    NotServedError,
    PsyncError,
    RemoteProtocolError,
    UsageError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.platform import Platform
from psync.numerics.memory import bytes_of
from psync.numerics.rules import Sums
from psync.ps.computes import Compute
from psync.ps.executor import LATER, Later, Service, awaited
from psync.ps.plans import Body, ShardSet, owned
from psync.specs import dtype_of
from psync.store.commit_log import LogState
from psync.store.ledger import Client
from psync.store.step_norms import ShardSums
from psync.store.store import Key, Work
from psync.store.sync_config import SyncConfig
from psync.sync.staging import Part, PushKey, Staging
from psync.sync.step import GLOBAL_STEP_DTYPE, NOWHERE, KnownGroup, Step
from psync.sync.steps import SyncSteps
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.frames import Segment
from psync.wire.messages import (
    CloseStep,
    Done,
    Failure,
    FollowParts,
    Held,
    KeepPart,
    Measured,
    Pushed,
    ReportSchedule,
    Update,
)
from psync.wire.remote_errors import exception_of, failure_of

CLOSER = "/job:ps/task:0"
"""Who decides steps."""

FROM_CLOSER: Client = (CLOSER, 0)
"""In place of a client: the log says what ps 0 has decided, whoever that is now."""

Reads = dict[Sequence[Key], Sequence[Segment] | None]
"""Values of shards that were read within one turn; None: one is busy."""

MAX_TOLD = 4096
"""Parts that one message names."""

_DONE = Done()
_ACCEPTED = Pushed("accepted", 0)
_STALE = Pushed("stale", 0)


@dataclass(eq=False)
class PsSync(Service):
    """The synchronous groups of one ps under one coordinator; on ps 0 a ``StepCloser``.

    Args:
        platform: Limits.
        serves: False: no coordinator has attached it yet, or its backup serves in its place.

    Attributes:
        groups: By the numbers that connections use.
        steps: The rule. Only ps 0 tells it of groups.
        check: Called with the configuration of a new group, which it may refuse.
        reserve: Reserves memory for a part that is about to arrive, see ``Staging.reserve``.
        read_now: Reads the values that an answer brings, see ``PsPulls.read_now``.
    """

    platform: Platform
    serves: bool

    read_now: Callable[[ShardSet], Sequence[Segment] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.staging = Staging(self.platform.limits.staging_bytes, self.task)
        self.reserve: Callable[[PushKey, int, int, SyncConfig], None] = self.staging.reserve
        self.groups: dict[int, KnownGroup] = {}
        self.steps = SyncSteps(self.ledger)
        self.check: Callable[[SyncConfig], None] = lambda _: None
        self._index = parse_task_name(self.task)[1]
        self._waiting: dict[PushKey, list[Request[Update]]] = {}
        # Connections of ps 0, and of one that it has replaced: they are told of all parts.
        self._followers: list[Connection] = []
        self._untold: list[tuple[int, str, int, int, int]] = []

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            FollowParts: Handler(self._follow),
            KeepPart: Handler(self._keep_part),
            CloseStep: Handler(self._close_for),
        }

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who does which entry of the log of the one that is backed up; see ``replay``."""
        return {CloseStep: Handler(self.execute)}

    # Groups.

    def known(self, group: int, raw: dict[str, Any] | None) -> KnownGroup:
        """Return what is known of a group; make it and its optimizer known if they are not yet.

        Args:
            group: Its number, which follows its name if another group here has that name.
            raw: Its configuration as it came; None: it is known.

        Raises:
            ConfigurationError: It is none, or another one than at first.
            RemoteProtocolError: It is not known.
        """
        known = self.groups.get(group)
        if known is not None and (raw is None or raw == known.raw):
            return known
        if raw is None:
            raise RemoteProtocolError(f"{self.task}: synchronous group {group} is not defined")
        config = SyncConfig.from_config(raw)
        if known is None:
            self.check(config)
            if any(each.config.name == config.name for each in self.groups.values()):
                config = msgspec.structs.replace(config, name=f"{config.name}/{group}")
            self.store.define_optimizer(group, config.optimizer)
            ps, variable, index = config.global_step
            here = (variable, index) if ps == self._index else None
            elsewhere = NOWHERE if here and not (self._index or config.averages) else 0
            known = self.groups[group] = KnownGroup(self.store, group, raw, config, here, elsewhere)
        elif (first := SyncConfig.from_config(known.raw)) != config:
            raise ConfigurationError(
                f"{known.config.name} on {self.task}: a different configuration than at first: "
                f"expected {first.to_config()}, got {config.to_config()}"
            )
        return known

    async def read_global_step(self, config: SyncConfig) -> int:
        """Return the present value of a global step that is on this ps.

        Raises:
            ConfigurationError: It is no single integer.
            UnknownVariableError: It is not here.

        Cancellation: Safe.
        """
        spec = self.store.spec(config.global_step[1:])
        if spec.size != 1 or spec.dtype != GLOBAL_STEP_DTYPE:
            raise ConfigurationError(
                f"{config.name}: its global step {spec} has shape {spec.shape} {spec.dtype}, "
                f"expected one element of {GLOBAL_STEP_DTYPE}"
            )
        (block,) = await self.work.when_idle(self.store.read, spec.key)
        return int(bytes_of(block).view(dtype_of(spec.dtype))[0])

    # Parts.

    def define(self, known: ShardSet) -> None:
        """Make the group of a plan known."""
        known.group = self.known(known.optimizer, known.says.config).config

    def part(self, known: ShardSet, client: Client, message: Update, body: Body) -> Part:
        """Return the part of a push that belongs to this ps; ValueMismatchError: it is none."""
        gradients = known.operands(self.store, body, message.rows)
        key, nbytes = (known.optimizer, client, message.sequence), sum(map(len, body))
        return Part(key, message.local_step, known, gradients, body, nbytes, message.rows)

    def replay(self, request: Request[Update], known: ShardSet) -> None:
        """Do an entry of the log of the one that is backed up: nobody waits for it here."""
        request.token, message = known, request.message
        part = self.part(known, request.peer.client, message, request.segments)

        def act() -> None:  # the entry is done with that
            self._judge(request, part)

        self.executor.submit(request, message, part.body, act)

    def submit(self, request: Request[Update], part: Part) -> None:
        """Make an entry of a part that has come in; its request waits for more than that."""
        if request.on_given_up is None:
            self.wait(request, part)
        if self.executor.log.state is not LogState.ALONE:
            self.plans.keep(part.key[1], part.known)
            part = self._owned(part)
        act = partial(self._judge, request, part)
        self.executor.submit(request, request.message, part.body, act)

    took = submit  # ps 0 waits for the parts of the others before

    def _owned(self, part: Part) -> Part:
        """Return a part in memory that nobody else can write to."""
        body, known = owned(self.pool, part.body), part.known
        if body is part.body:
            return part
        gradients = known.operands(self.store, body, part.rows)
        return msgspec.structs.replace(part, gradients=gradients, body=body)

    def _judge(self, request: Request[Update], part: Part) -> Later:
        """Hold a part, and tell ps 0. Answers, if the part is refused; raises nothing."""
        try:
            self.ledger.check_incarnation(*part.key[1])  # FencedError: its sender is replaced
            known = self.groups[part.key[0]]
            if known.broken is not None:
                raise known.broken.with_traceback(None)  # it is raised many times
        except PsyncError as exc:
            self.staging.give_back(part.key)
            self.fail(part.key, exc)
        else:
            if self.staging.stage(part):
                self._tell([part])
            else:  # its step is closed: answer as soon as what was closed is applied
                answer = partial(self.answer, part.key, _STALE)
                self.executor.in_turn(lambda: Compute(known.touched, answer))
        request.segments = ()
        return LATER

    def _tell(self, parts: Sequence[Part]) -> None:
        """Say that these parts are held, once a turn; who follows later is told of all."""
        if self._followers:
            if not self._untold:
                asyncio.get_running_loop().call_soon(self._tell_now)
            for part in parts:
                group, replica, push = part.key
                self._untold.append((group, *replica, push, part.local_step))

    def _tell_now(self) -> None:
        told, self._untold = self._untold, []
        for at in range(0, len(told), MAX_TOLD):
            for peer in self._followers:
                peer.notify(Held(self._index, told[at : at + MAX_TOLD]))

    def _follow(self, request: Request[FollowParts]) -> None:
        """Tell ps 0 of parts as long as its connection lasts: this request is not answered."""
        self._check_closer(request.peer)
        self._followers = [each for each in self._followers if not each.is_closed]
        self._followers.append(request.peer)
        self._tell(self.staging.held())

    def _keep_part(self, request: Request[KeepPart]) -> None:
        key = request.message.group, request.peer.client, request.message.push
        # The part may wait for its turn, too.
        self.executor.in_turn(lambda: self.staging.replace(key, self._owned), request)

    # Requests that wait. A push may have two, after a lost connection that is not noticed yet.

    def wait(self, request: Request[Update], part: Part) -> None:
        """Let a request wait until its push is answered."""
        request.on_given_up = partial(self._left, part.key)
        self._waiting.setdefault(part.key, []).append(request)

    def _left(self, key: PushKey, request: Request[Any]) -> None:
        waiting = self._waiting.get(key, [])
        if request in waiting:
            waiting.remove(request)
            if not waiting:
                del self._waiting[key]
                self._forsake(key)

    def _forsake(self, key: PushKey) -> None:
        """Nobody waits for a push any more."""

    def answer(self, key: PushKey, message: Message, reads: Reads | None = None) -> None:
        """Answer all who wait for a push.

        Args:
            key: Of the push.
            message: The answer.
            reads: What was read in this turn, for other pushes; this one is answered with the
                values that its plan wants, if they are free. None: without.
        """
        for request in self._waiting.pop(key, ()):
            wanted, read = request.token.wanted, None
            if reads is not None and wanted is not None and wanted.compression is None:
                if wanted.keys not in reads:
                    reads[wanted.keys] = self.read_now(wanted)
                read = reads[wanted.keys]
            if read is None:
                request.answer(message)
            else:
                request.answer(replace(message, steps=self.staging.steps), read)

    def fail(self, key: PushKey, error: BaseException) -> None:
        """Tell all who wait for a push that it has failed."""
        for request in self._waiting.pop(key, ()):
            request.fail(error)

    # Steps that ps 0 has decided.

    def _measure(self, request: Request[CloseStep]) -> None:
        """Measure a step; nothing is changed.

        Raises:
            RemoteProtocolError: A part of it is not here.
        """
        message = request.message
        known = self.known(message.group, message.config)
        if self.staging.is_closed(message.group, message.step):
            request.answer(Measured([]))  # it was overtaken: nobody waits for the answer
            return
        step = self._step_of(message, known)
        shards, sums = step.layout.shards, list[Sums]()

        def begin(position: int) -> Work:
            return step.measure(message.measures, position, sums)

        def answer() -> None:
            request.answer(Measured(step.sums_by_shard(sums)))

        costs = step.layout.costs[: len(shards)]
        self.work.serve(request, self.store, shards, costs, begin, answer)

    async def _measure_slowly(self, step: Step, what: str) -> list[ShardSums]:
        sums: list[Sums] = []
        await self.work.shard_by_shard(
            step.layout.costs[: len(step.layout.shards)], lambda i: step.measure(what, i, sums)
        )
        return step.sums_by_shard(sums)

    def execute(self, request: Request[CloseStep]) -> None:
        """Apply a step, and answer; one that is closed is not applied again. Or measure it.

        Raises:
            RemoteProtocolError: A part of it is not here.
            ConfigurationError: Moving averages are not beside their variables.
            RuleError: A rule of a user's raised for some shard, which is as it was; all others are
                updated. ps 0 then ends the group.
        """
        message = request.message
        if message.measures:
            self._measure(request)
            return
        known = self.groups.get(message.group)
        if known is None or message.config is not None:
            known = self.known(message.group, message.config)
        submit = partial(
            self.executor.submit, message=message, body=(), client=request.peer.client,
            act=partial(self._judge_step, request, known),
            claim=partial(self._claim, message, known),
        )  # fmt: skip
        if self.locks.num_exclusive and self.locks.blocks(self._keys_of(message, known)):
            request.start(self._when_unlocked(self._keys_of(message, known), submit))
        else:
            submit(request)

    def _claim(self, message: CloseStep, known: KnownGroup) -> Callable[[], None]:
        # Once it is judged its parts are gone.
        is_judged = self.staging.is_closed(message.group, message.step)
        claim = self.locks.begin(known.touched if is_judged else self._keys_of(message, known))
        return partial(self.locks.end, claim)

    async def _when_unlocked(
        self, keys: Sequence[Key], submit: Callable[[Request[Any]], None]
    ) -> None:
        claim = self.locks.claim(keys)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await self.locks.turn(claim)
            submit(awaited(FROM_CLOSER, done))
            await done
        finally:
            self.locks.end(claim)

    def _keys_of(self, message: CloseStep, known: KnownGroup) -> Sequence[Key]:
        """Return the shards that a step changes, if it is not closed."""
        parts = self.staging.parts(message.group, message.pushes)
        return known.keys([key for part, _ in parts for key in part.known.keys])

    def _judge_step(self, request: Request[CloseStep], known: KnownGroup) -> Compute:
        message = request.message
        if self.staging.is_closed(message.group, message.step):
            return Compute(known.touched, partial(self._applied, request, known))
        try:
            step = self._step_of(message, known)
            if step.layout.shards:
                step.optimizer_step = self.store.begin_step(message.group, message.step)
        except PsyncError as exc:
            self._refuse(message, exc)
            raise
        nbytes = self.staging.close(message.group, message.step, message.pushes)
        known.touched = step.layout.touched
        done = partial(self._applied, request, known, step, nbytes)

        async def in_pieces() -> None:
            for what in step.alone:
                step.norms.conclude(what, await self._measure_slowly(step, what))
            await self.work.shard_by_shard(step.layout.costs, step.work)

        cost = step.layout.nbytes * (1 + len(step.alone))
        return Compute(step.layout.touched, done, cost, step.whole, in_pieces)

    def _step_of(self, message: CloseStep, known: KnownGroup) -> Step:
        """Say what a step changes here; as ``KnownGroup.step_of``, and all its parts are here."""
        parts = self.staging.parts(message.group, message.pushes)
        if len(parts) < len(message.pushes):
            here = {part.key[1:] for part, _ in parts}
            task, incarnation, push, _ = next(
                each for each in message.pushes if ((each[0], each[1]), each[2]) not in here
            )
            raise RemoteProtocolError(
                f"{self.task}: step {message.step} of {known.config.name} is to be closed with "
                f"push {push} of {task} (incarnation {incarnation}), which has not come in yet"
            )
        return known.step_of(message, parts)

    def _applied(
        self,
        request: Request[CloseStep],
        known: KnownGroup,
        step: Step | None = None,
        nbytes: int = 0,
    ) -> None:
        """A step is applied here: answer, or raise the RuleError of a rule.

        Args:
            request: Of ps 0, which does not know yet.
            known: The group.
            step: What was applied just now; None: that was done earlier.
            nbytes: Of its parts.
        """
        message = request.message
        if step is not None:
            self.staging.applied(message.group, message.step, nbytes)
            if self.store.failures:
                failed = self.store.take_failure(message.group, step.optimizer_step)
                if failed is not None:
                    raised = encode(failure_of(failed))
                    self.ledger.step_failures[message.group, message.step] = raised
        if known.rule.may_raise:
            failure = self.ledger.step_failures.get((message.group, message.step))
            if failure is not None:
                error = exception_of(cast(Failure, decode(failure)), self.task)
                self._refuse(message, error)
                raise error
        self._answer_step(message)
        request.answer(_DONE)

    def _answer_step(self, message: CloseStep) -> None:
        """A step is applied here: answer its pushes."""
        reads: Reads = {}
        for task, incarnation, push, _ in message.pushes:
            self.answer((message.group, (task, incarnation), push), _ACCEPTED, reads)

    def _refuse(self, message: CloseStep, error: PsyncError) -> None:
        """A step cannot be applied here: neither can its pushes, whatever ps 0 has told them."""
        self.end_group(message.group, error)
        for task, incarnation, push, _ in message.pushes:
            self.fail((message.group, (task, incarnation), push), error)

    def end_group(self, group: int, error: PsyncError) -> None:
        """A step could not be applied, here or elsewhere: no other one will be."""
        known = self.groups[group]
        error.hint = error.hint or (
            f"{known.config.name} has ended, and takes no more gradients: correct the cause and "
            "restart the program; it continues from its newest checkpoint, if it has one"
        )
        known.broken = error.with_traceback(None)
        self.staging.drop(group)

    def _close_for(self, request: Request[CloseStep]) -> None:
        self._check_closer(request.peer)
        self.execute(request)

    def _check_closer(self, peer: Connection) -> None:
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        if peer.task != CLOSER:
            raise UsageError(f"{self.task}: {peer.task} may not close a step, only {CLOSER}")
        if not self.serves:
            self.check_served()

    def check_served(self) -> None:
        """Raise NotServedError unless this process serves its ps, for a coordinator."""
        if not self.serves:
            raise NotServedError(f"{self.task} is not, or no longer, served by this process")

    # What ps 0 does besides, see ``StepCloser``.

    @property
    def is_torn(self) -> bool:
        """Whether a step that was decided is perhaps not applied everywhere."""
        return False

    def describe(self) -> list[str]:
        """Say what open steps wait for, but for pushes; for reports."""
        return []

    def statistics(self) -> dict[str, Any]:
        """Return counters of each group, by its name and number."""
        return {}

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator."""

    def fence(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over, says an entry."""
        self.staging.fence(task, below)

    def expect_moves(self) -> None:
        """From now on wait for a ps that is lost until it is served elsewhere, see ``move``."""

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served; if this was a backup, go on with the steps."""

    async def pause(self, why: str) -> None:
        """Close no step from now on; wait for those that are being closed. Cancellation: safe."""

    def resume(self, why: str) -> None:
        """End a pause."""

    def replaced(self, error: PsyncError) -> None:
        """Another one decides from now on: pending requests fail, and later ones."""
        for key in list(self._waiting):
            self.fail(key, error)

    async def close(self) -> None:
        """Close links to other ps tasks. Cancellation: they may be left open."""

    # A section of the state.

    def control(self) -> list[Any]:
        """Return what is held and decided, as plain data in an order of its own, for a digest."""
        held = sorted(
            [group, *replica, push, part.local_step, part.nbytes]
            for part in self.staging.held()
            for group, replica, push in [part.key]
        )
        decided = sorted(
            [group, self.staging.step(group), known.spread, known.elsewhere]
            for group, known in self.groups.items()
            if self.staging.step(group) is not None
        )
        return [held, decided, [group for group, known in self.groups.items() if known.broken]]

    async def live(self, arrays: list[memoryview]) -> Any:
        """Return the parts that are held, and how far groups are; see ``backups.primary.Section``.

        No step is on its way, but some may be decided.
        """
        parts = []
        for part in map(self._owned, self.staging.held()):
            arrays += part.body
            rows = None if part.rows is None else list(part.rows)
            # The plan may have gone, as its client defines others now.
            parts.append((part.key, part.local_step, part.known.header, rows, len(part.body)))
        steps, groups = dict(self.staging.steps), []
        for group, known in self.groups.items():
            broken = known.broken and encode(failure_of(known.broken))
            groups.append((group, steps.get(group, -1), known.elsewhere, known.spread, broken))
        return parts, groups

    async def restore(self, state: Any, arrays: Iterator[memoryview]) -> None:
        """Hold what ``live`` has returned; the snapshot had the groups."""
        parts, groups = state
        for (group, client, push), local_step, header, rows, held in parts:
            replica: Client = tuple(client)
            known = self.plans.restore(replica, header)
            self.define(known)
            known.look_up(self.store)
            body = list(itertools.islice(arrays, held))
            gradients, nbytes = known.operands(self.store, body, rows), sum(map(len, body))
            key = group, replica, push
            self.staging.stage(Part(key, local_step, known, gradients, body, nbytes, rows))
        for group, step, elsewhere, spread, broken in groups:
            here = self.groups[group]
            if broken is not None:
                here.broken = exception_of(cast(Failure, decode(broken)), self.task)
            here.elsewhere, here.spread = elsewhere, spread
            if step >= 0:
                self.staging.close(group, step - 1)
                self.staging.applied(group, step - 1)

    def raw_configs(self) -> dict[int, dict[str, Any]]:
        """Return the configurations of all groups, by their number, as they came."""
        return {number: known.raw for number, known in self.groups.items()}
