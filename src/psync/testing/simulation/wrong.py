"""What takes the place of a rule in a mutant: functions that do it wrong.

Each makes, of the function that is there, the one that takes its place; see ``mutants``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np

from psync.accumulators import Accumulator
from psync.backups.host import _Backup
from psync.backups.primary import BackupSender
from psync.checkpoints.files import NewestCheckpoints
from psync.client.context import Runtime
from psync.client.plan import Landing, Plan
from psync.client.sync import PulledAhead
from psync.closures.closure import Closure, Identities, Identity
from psync.closures.queue import Action, ClosureQueue
from psync.closures.rollback import EndedClosures
from psync.errors import TaskLost
from psync.net.connection import Handler, OwnRequest, Request
from psync.net.shared.bodies import BorrowedBody, Loan, Sharing
from psync.ps.admission import PsLocks
from psync.ps.computes import Compute, Computes
from psync.ps.plans import Plans, ShardSet
from psync.ps.updates import PsUpdate, PsUpdates
from psync.ps_task import PsTask
from psync.store.commit_log import LogState, chained
from psync.store.ledger import Ledger
from psync.store.push_counts import FIRST, HOME
from psync.store.reattach import Progress
from psync.store.shards import ShardTable
from psync.store.store import ShardStore
from psync.sync.ps_services import PsServices
from psync.sync.ps_sync import PsSync
from psync.sync.staging import Staging
from psync.sync.staleness_service import ClockService
from psync.sync.step_closer import AllPs, StepCloser
from psync.sync.steps import Close, Contribution, Group, SyncSteps
from psync.wire.closure_numbers import PART_BITS, first_of
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.messages import Done, FinalBelow, TellCounts

Make = Callable[[Callable[..., Any]], Any]
"""Given what is there, returns what takes its place."""


def released_as_shipped(original: Callable[..., Any]) -> Any:
    def ship(self: BackupSender) -> None:
        original(self)
        executor = self._service.executor
        if executor.log.state is LogState.PAIRED:
            executor.log.released = max(executor.log.released, executor.log.shipped)
            executor.advance()

    return ship


def one_too_few(original: Callable[..., int]) -> Any:
    return lambda self, alive: max(1, original(self, alive) - 1)


def only_says_so(_: Any) -> Any:
    return lambda self, request: request.answer(Done())


def made_is_updated(_: Any) -> Any:
    def progress(self: PsUpdates) -> Progress:
        return Progress.TORN if self.is_restoring else Progress.UPDATED

    return property(progress)


def fresh_by_one(original: Callable[..., Any]) -> Any:
    def contribute(self: SyncSteps, group: int, push: Contribution) -> Any:
        if 0 <= push.local_step == self.present(group) - 1:
            push = msgspec.structs.replace(push, local_step=push.local_step + 1)
        return original(self, group, push)

    return contribute


def _unnoticed(make: Make) -> Make:
    """Let a backup's chain over its entries be right: what else finds that it did others?"""

    def made(original: Callable[..., Any]) -> Any:
        def unchained(self: _Backup, number: int, entry: Any, body: Any) -> None:
            chain = self.chain
            original(self, number, entry, body)
            self.chain = chain

        wrong = make(unchained)

        def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
            wrong(self, number, entry, body)
            if number >= self.order.first:
                self.chain = chained(self.chain, entry[:2], entry[2], sum(map(len, body)))

        return add

    return made


def done_if(holds: Callable[[Any, int], Any]) -> Make:
    def make(original: Callable[..., Any]) -> Any:
        def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
            if holds(self, number):
                original(self, number, entry, body)
            self.taken = number

        return add

    return _unnoticed(make)


def drops_calls(original: Callable[..., Any]) -> Any:
    def restore(ledger: Ledger, state: Any, unpack: Any) -> None:
        fewer = dataclasses.replace(state, calls=state.calls[: len(state.calls) // 2])
        original(ledger, fewer, unpack)

    return restore


def remembers(most: int) -> Make:
    def make(original: Callable[..., Any]) -> Any:
        def saved(self: EndedClosures, *cut: Any) -> None:
            original(self, *cut[:-1], min(cut[-1], most))

        return saved

    return make


def only_this_time(original: Callable[..., Any]) -> Any:
    def pass_over(self: NewestCheckpoints, error: Any) -> None:
        passed_over = self.paths[-1]
        original(self, error)

        def use_again() -> None:
            self.paths = [*self.paths, passed_over]

        asyncio.get_running_loop().call_later(1.0, use_again)

    return pass_over


def one_forgets_to_take(original: Callable[..., Any]) -> Any:
    def take(self: PsTask, loaded: Any, message: Any) -> None:
        if self.index != 0:
            original(self, loaded, message)

    return take


def all_weigh_one(original: Callable[..., Any]) -> Any:
    def close(self: Group, **how: Any) -> Any:
        made: Close = original(self, **how)
        weightless = [(*push[:3], 1.0) for push in made.pushes]
        self.closing = msgspec.structs.replace(made, pushes=weightless)
        return self.closing

    return close


def settled_without_the_last(original: Callable[..., Any]) -> Any:
    return lambda self, cutoff: original(self, cutoff - 1)


def forgets_one_more(original: Callable[..., Any]) -> Any:
    def final_below(self: PsServices, request: Request[FinalBelow]) -> None:
        told = request.message
        request.message = replace(told, closure=told.closure + 1)
        original(self, request)

    return final_below


def does_nothing(result: Any) -> Make:
    return lambda original: lambda *_: result


def messages_not_remembered(original: Callable[..., Any]) -> Any:
    def record(self: Ledger, ticket: Any, answer: Any) -> Any:
        original(self, ticket, answer)
        if ticket.call is None:
            self._senders[ticket.client[0]].messages.pop(ticket.sequence, None)
        return answer

    return record


def of_its_connection(original: Callable[..., Any]) -> Any:
    def carry(self: PsUpdates, request: Request[Any], waiting: Any) -> None:
        task = asyncio.get_running_loop().create_task(waiting)

        def closed(_: object) -> None:
            task.cancel()

        request.peer.on_closed.append(closed)

    return carry


def only_answers(original: Callable[..., Any]) -> Any:
    return lambda self, request, *_: request.answer(Done())


def judged_as_if_it_came_now(original: Callable[..., Any]) -> Any:
    return lambda self, *args, arrived=False: original(self, *args)


def other_runs_are_fresh(original: Callable[..., Any]) -> Any:
    def judge(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        ticket = original(self, *args, **kwargs)
        if not ticket.recorded:
            ticket.first = True
        return ticket

    return judge


def writes_are_let_in(original: Callable[..., Any]) -> Any:
    def claim(self: PsLocks, keys: Any, *, exclusive: bool = False) -> Any:
        return original(self, keys, exclusive=False)

    return claim


def read_at_any_time(self: ShardTable, key: Any) -> Any:
    return self._shard(key).values.export()


def read_together_at_any_time(self: ShardStore, shards: Any) -> Any:
    if shards.layout != self.layout:
        self._settle(shards)
    return [view for key in shards.keys for view in read_at_any_time(self, key)]


def only_values(shard: Any) -> Iterator[Any]:
    yield -1, "", shard.values


def one_is_missing(original: Callable[..., Any]) -> Any:
    async def merge(strategy: Any, brought: Any, *args: Any, **kwargs: Any) -> Any:
        return await original(strategy, [*brought[:-1], brought[0]], *args, **kwargs)

    return merge


def takes_what_came(original: Callable[..., Any]) -> Any:
    def take(self: PulledAhead, plan: Plan, arrival: int) -> Landing | None:
        came = self._wanted
        original(self, plan, arrival)
        return came if came is not None and came.plan is plan else None

    return take


def is_of_now(original: Callable[..., Any]) -> Any:
    def offer(self: Accumulator[Any, Any], given: Any, local_step: int, *rest: Any) -> Any:
        return original(self, given, max(local_step, self.step), *rest)

    return offer


def takes_leave_it(original: Callable[..., Any]) -> Any:
    def complete(self: Accumulator[Any, Any]) -> Any:
        total = self._sum
        take = original(self)
        if take is not None and self.step % 2 == 0:
            self._sum = total
        return take

    return complete


@_unnoticed
def some_twice(original: Callable[..., Any]) -> Any:
    def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
        original(self, number, entry, body)
        if not number % 3:
            original(self, number, entry, body)

    return add


def at_its_own_time(original: Callable[..., Any]) -> Any:
    def members(self: SyncSteps, alive: Any, missing: Any, now: float) -> Any:
        return original(self, alive, missing, asyncio.get_running_loop().time())

    return members


def done_before(original: Callable[..., Any]) -> Any:
    def add(self: Computes, compute: Compute, done: Callable[[Any], None]) -> None:
        work = Compute(compute.keys, compute.done, compute.nbytes, in_pieces=compute.in_pieces)
        original(self, work, lambda _: None)
        done(None)

    return add


def keeps_the_parts(original: Callable[..., Any]) -> Any:
    def close(self: Staging, group: int, step: int, pushes: Any = ()) -> int:
        if group not in self._groups:
            return int(original(self, group, step, pushes))
        self._groups[group].step = step + 1
        return 0

    return close


def allows_one_more(original: Callable[..., Any]) -> Any:
    def bound(self: ClockService, message: Any) -> Any:
        return original(self, replace(message, max_staleness=message.max_staleness + 1))

    return bound


def without_the_last(original: Any) -> Any:
    return property(lambda group: original.func(group)[:-1])


@_unnoticed
def passes_over_finality(original: Callable[..., Any]) -> Any:
    def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
        message = decode(entry[2])
        if isinstance(message, FinalBelow):
            entry = (*entry[:2], encode(replace(message, closure=0)), entry[3])
        original(self, number, entry, body)

    return add


def begins_anew(original: Callable[..., Any]) -> Any:
    def begin(self: Identities, closure: Closure, identity: Identity) -> None:
        identity.has_begun = False
        original(self, closure, identity)

    return begin


def of_no_closure(original: Callable[..., Any]) -> Any:
    def begin_update(self: Runtime, operation: str) -> Any:
        identity = original(self, operation)
        return (-1, identity[1]) if '/sums"' in operation else identity

    return begin_update


def says_no_name(original: Callable[..., Any]) -> Any:
    def init(self: TaskLost, task: str, message: str = "was lost", *, hint: Any = None) -> None:
        original(self, "somebody", message, hint=hint)
        self.task = task

    return init


def only_renames(original: Callable[..., Any]) -> Any:
    return lambda path: path.rename(path.with_name(path.name + ".tmp"))


async def nothing(*_: Any) -> None:
    pass


def home_of_each_client(original: Callable[..., Any]) -> Any:
    def plan(self: Any, *given: Any) -> Plan:
        made: Plan = original(self, *given)
        is_odd = int(self.links[0]._endpoint.task[-1]) % 2
        last = max([request.ps for request in made.requests], default=0)
        for request in made.requests:
            if is_odd and request.part == 0:
                request.place = HOME if request.ps == last else FIRST
        return made

    return plan


def counts_duplicates(original: Callable[..., Any]) -> Any:
    def judge(self: PsUpdates, update: PsUpdate) -> Any:
        before = self.ledger.statistics()["already_applied"]
        outcome = original(self, update)
        is_other_run = self.ledger.statistics()["already_applied"] > before
        if is_other_run and update.known.is_push and update.message.place == HOME:
            own = self.store.push_count(update.known.optimizer).own
            own[()] = own.get((), 0) + 1
        return outcome

    return judge


def never_looks_again(original: Callable[..., Any]) -> Any:
    def look_up(self: ShardSet, store: ShardStore) -> ShardSet:
        if self.store is None:
            original(self, store)
        else:
            self.plan.layout = store.layout  # it leads to the shards of another store
        return self

    return look_up


def means_another_set_on_a_backup(original: Callable[..., Any]) -> Any:
    def serve(self: Plans, request: Any) -> None:
        original(self, request)
        plan = self.plan(request.peer.client, request.message.plan)
        if isinstance(request, OwnRequest) and isinstance(plan, ShardSet):
            plan.keys = plan.keys[::-1]

    return serve


def defines_off_the_record(original: Callable[..., Any]) -> Any:
    def serve(self: Plans, request: Any) -> None:
        note, self.note = self.note, lambda *_: None
        original(self, request)
        self.note = note

    return serve


def hears_off_the_record(original: Callable[..., Any]) -> Any:
    def handlers(self: PsServices) -> Any:
        return {**original(self), TellCounts: Handler(self._hear_counts)}

    return handlers


def keeps_what_was_told(original: Callable[..., Any]) -> Any:
    def restored(self: PsServices, loaded: Any) -> Any:
        contents = original(self, loaded)
        for number, each in self.store.optimizers.items():
            if (new := contents.store.optimizers.get(number)) is not None:
                new.count.elsewhere = max(new.count.elsewhere, each.count.elsewhere)
        return contents

    return restored


def holds_nothing(original: Callable[..., Any]) -> Any:
    def sent(self: Sharing, loan: Loan) -> None:
        original(self, loan)
        loan.holds.clear()

    return sent


def gives_back_at_once(original: Callable[..., Any]) -> Any:
    def keep(self: BorrowedBody) -> list[memoryview]:
        self.is_kept = True
        self._sharing.kept(self._number, self._nbytes)
        self._sharing.give_back(self._number)
        return list(self.views)

    return keep


def as_if_unchanged(original: Callable[..., Any]) -> Any:
    def end_of_data(self: ClosureQueue, worker: str, closure_id: int, error: Any) -> Any:
        error.updates = 0
        return original(self, worker, closure_id, error)

    return end_of_data


def ends_all(original: Callable[..., Any]) -> Any:
    def request_stop(self: ClosureQueue, reason: str) -> list[Action]:
        if self.ending is None:
            self._end_all(reason)
            self.requested_stop = reason
        return self.dispatch()

    return request_stop


def shown_beside_others(original: Callable[..., Any]) -> Any:
    def settle(self: Landing, leased: Any = None) -> Any:
        arrays = original(self, leased)
        for (buffer, offset, shape, dtype), variables in self.plan.alike:
            if not leased or leased.keys() >= {*variables}:
                continue
            for place, index in enumerate(variables):
                if index in leased:
                    start = offset + place * arrays[index].nbytes
                    arrays[index] = np.ndarray(shape, dtype, self._roots[buffer], start)
        return arrays

    return settle


def lacks(kind: type) -> Make:
    def make(original: Callable[..., Any]) -> Any:
        def digest(self: PsServices) -> Any:
            sections = self.sections
            self.sections = [each for each in sections if not isinstance(each, kind)]
            try:
                return original(self)
            finally:
                self.sections = sections

        return digest

    return make


def packs_all(original: Callable[..., Any]) -> Any:
    return lambda answer: encode(answer) if isinstance(answer, Message) else None


def notes_who_has_come(original: Callable[..., Any]) -> Any:
    def took(self: StepCloser, request: Request[Any], part: Any) -> None:
        message = request.message
        if message.closure >= 0:
            call = first_of(message.closure), message.ordinal << PART_BITS
            self.steps.__dict__.setdefault("came", {}).setdefault(call, part.key[1:])
        original(self, request, part)

    return took


def counts_who_came_first(original: Callable[..., Any]) -> Any:
    def contribute(self: SyncSteps, group: int, push: Contribution) -> Any:
        if push.call is not None:
            call = first_of(push.call[0]), push.call[1]
            who = push.replica, push.number
            if self.__dict__.get("came", {}).get(call, who) != who:
                self.ledger.count(call, (group, push.variable_set))
        return original(self, group, push)

    return contribute


def drops_all_parts(original: Callable[..., Any]) -> Any:
    def fence(self: Staging, task: str, below: int) -> None:
        original(self, task, below)
        for known in self._groups.values():
            for key in [key for key in known.parts if key[1][0] == task and key[1][1] < below]:
                self._bytes -= known.parts.pop(key).nbytes

    return fence


def tells_the_first(original: Callable[..., Any]) -> Any:
    def follow(self: PsSync, request: Request[Any]) -> None:
        has_told = bool(self._followers)
        original(self, request)
        if has_told:
            self._untold.clear()

    return follow


def takes_all_of_the_step(original: Callable[..., Any]) -> Any:
    def parts(self: Staging, group: int, pushes: Any) -> Any:
        found, known = original(self, group, pushes), self._groups.get(group)
        named = {part.key for part, _ in found}
        others = [] if known is None or not found else known.parts.values()
        step = max((part.local_step for part, _ in found), default=-1)
        return [*found, *((each, 1.0) for each in others
                          if each.key not in named and each.local_step == step)]  # fmt: skip

    return parts


def reserves_for_all(original: Callable[..., Any]) -> Any:
    def close(self: Group, **how: Any) -> Any:
        others, self.others = self.others, ANY
        made = original(self, **how)
        self.others = others
        return made

    return close


def waits_for_nobody(original: Callable[..., Any]) -> Any:
    def tell(self: AllPs, message: Any, parts: Any, then: Callable[..., None]) -> None:
        is_close = not message.measures
        original(self, message, parts, (lambda *_: None) if is_close else then)
        if is_close:
            then([], None)

    return tell
