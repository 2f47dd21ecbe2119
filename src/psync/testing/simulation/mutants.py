"""Rules that are wrong on purpose, to see that an oracle notices.

A mutant takes the place of one function for the length of a run, so the code that trains knows
nothing of it. The safeguards that ``sabotage.switches`` turns off are mutants, too.

Rules behind which another one stands are no mutants, for without them nothing is wrong: that a
backup takes an entry once (its ledger knows it), that a fence holds on every ps (a call of a
closure counts once on each), that a step publishes its tokens once (what comes from values of
before it is stale), that a backup follows no former copy (its entries are known, or fenced).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from psync.accumulators import Accumulator, ArrayAccumulator
from psync.api.data_shards import Visits
from psync.checkpoints import files
from psync.chief import cluster_links
from psync.chief.failover import ReplicaRecovery
from psync.client.runtime import Runtime
from psync.closures.queue import ClosureQueue
from psync.closures.rollback import EndedClosures
from psync.closures.shard_epochs import Visitation
from psync.coordinator import Coordinator
from psync.errors import TaskLost
from psync.ps.backup_host import _Backup
from psync.ps.computes import Computes
from psync.ps_task import PsTask
from psync.replicas import gang_run
from psync.store import ledger_snapshot, snapshot
from psync.store.commit_log import CommitLog, LogState
from psync.store.ledger import AlreadyApplied, Fresh, Ledger
from psync.store.locks import LockTable
from psync.store.shards import ShardTable
from psync.store.update_gate import UpdateGate
from psync.sync import step_update
from psync.sync.group import Group
from psync.sync.staging import Staging
from psync.sync.staleness_service import ClockService
from psync.sync.step_applier import StepApplier
from psync.sync.step_closer import StepCloser
from psync.sync.steps import SyncSteps
from psync.testing.simulation.tight import replaced
from psync.wire.codec import decode, encode
from psync.wire.ps_messages import FinalBelow

Make = Callable[[Callable[..., Any]], Any]
"""Given what is there, returns what takes its place."""


@dataclass(frozen=True)
class Mutant:
    """One rule that is wrong.

    Attributes:
        breaks: What.
        shapes: Of the plans among which it is looked for.
        where: Class or module, the name there, and what takes its place; more than one if need be.
        without: Safeguards that are switched off.
    """

    breaks: str
    shapes: tuple[str, ...] = ("any",)
    where: tuple[tuple[Any, str, Make], ...] = ()
    without: frozenset[str] = frozenset()


def _switched(name: str, breaks: str, *shapes: str) -> dict[str, Mutant]:
    return {name: Mutant(breaks, shapes, without=frozenset({name}))}


def _may_apply_shipped(original: Callable[..., Any]) -> Any:
    def may_apply(self: CommitLog[Any], number: int) -> bool:
        shipped = self.state is LogState.PAIRED and number <= self._shipped
        return shipped or bool(original(self, number))

    return may_apply


def _is_nearly_complete(original: Any) -> Any:
    return property(lambda self: len(self._counted) >= max(1, self._target - 1))


def _fresh_by_one(original: Callable[..., Any]) -> Any:
    def contribute(self: SyncSteps, group: int, push: Any) -> Any:
        if 0 <= push.local_step == self.step(group) - 1:
            push = dataclasses.replace(push, local_step=push.local_step + 1)
        return original(self, group, push)

    return contribute


def _done_if(holds: Callable[[Any, int], Any]) -> Make:
    def make(original: Callable[..., Any]) -> Any:
        def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
            if holds(self, number):
                original(self, number, entry, body)
            self.taken = number

        return add

    return make


def _drops_calls(original: Callable[..., Any]) -> Any:
    def restore_ledger(ledger: Ledger, state: Any, unpack: Any) -> None:
        fewer = dataclasses.replace(state, calls=state.calls[: len(state.calls) // 2])
        original(ledger, fewer, unpack)

    return restore_ledger


def _one_forgets_to_take(original: Callable[..., Any]) -> Any:
    def take(self: PsTask, loaded: Any, message: Any) -> None:
        if self._index != 0:
            original(self, loaded, message)

    return take


def _all_weigh_one(original: Callable[..., Any]) -> Any:
    def close(self: Group, *, partial: bool) -> Any:
        made = original(self, partial=partial)
        self.closing = dataclasses.replace(
            made, pushes=tuple((*push[:3], 1.0) for push in made.pushes)
        )
        return self.closing

    return close


def _off_by(number: int) -> Make:
    return lambda original: lambda self, closure: original(self, closure + number)


def _does_nothing(result: Any) -> Make:
    return lambda original: lambda *_: result


def _messages_not_remembered(original: Callable[..., Any]) -> Any:
    def record(self: Ledger, ticket: Any, answer: Any) -> Any:
        original(self, ticket, answer)
        if ticket.call is None:
            self._senders[ticket.client[0]].messages.pop(ticket.sequence, None)
        return answer

    return record


def _other_runs_are_fresh(original: Callable[..., Any]) -> Any:
    def judge(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        verdict = original(self, *args, **kwargs)
        if not isinstance(verdict, AlreadyApplied):
            return verdict
        verdict.ticket.first = True
        return Fresh(verdict.ticket)

    return judge


def _writes_are_let_in(original: Callable[..., Any]) -> Any:
    def claim(self: LockTable, keys: Any, *, exclusive: bool) -> Any:
        return original(self, keys, exclusive=False)

    return claim


def _read_at_any_time(self: ShardTable, key: Any) -> Any:
    return self._shard(key).values.export()


def _only_values(shard: Any) -> Iterator[Any]:
    yield -1, "", shard.values


def _one_is_missing(original: Callable[..., Any]) -> Any:
    async def merge(strategy: Any, brought: Any, *args: Any, **kwargs: Any) -> Any:
        return await original(strategy, [*brought[:-1], brought[0]], *args, **kwargs)

    return merge


def _is_of_now(original: Callable[..., Any]) -> Any:
    def offer(self: Accumulator[Any, Any], given: Any, local_step: int, weight: float) -> Any:
        return original(self, given, max(local_step, self._step), weight)

    return offer


def _takes_leave_it(original: Callable[..., Any]) -> Any:
    def clear(self: ArrayAccumulator[Any, Any]) -> None:
        if self._step % 2:
            original(self)

    return clear


def _some_twice(original: Callable[..., Any]) -> Any:
    def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
        original(self, number, entry, body)
        if not number % 3:
            original(self, number, entry, body)

    return add


def _at_its_own_time(original: Callable[..., Any]) -> Any:
    def members(self: SyncSteps, alive: Any, missing: Any, now: float) -> Any:
        return original(self, alive, missing, asyncio.get_running_loop().time())

    return members


def _done_before(original: Callable[..., Any]) -> Any:
    def add(self: Computes, compute: Any, done: Callable[[Any], None]) -> None:
        original(self, compute, lambda _: None)
        done(None)

    return add


def _overtakes(original: Callable[..., Any]) -> Any:
    def done_now(self: Computes, compute: Any) -> bool:
        if any(map(self._store.busy, compute.keys)):
            return bool(original(self, compute))
        compute.at_once()
        return True

    return done_now


def _keeps_the_parts(original: Callable[..., Any]) -> Any:
    def close(self: Staging, group: int, step: int, pushes: Any = ()) -> int:
        if group not in self._groups:
            return int(original(self, group, step, pushes))
        self._groups[group].step = step + 1
        return 0

    return close


def _allows_one_more(original: Callable[..., Any]) -> Any:
    def bound(self: ClockService, message: Any) -> Any:
        return original(self, dataclasses.replace(message, max_staleness=message.max_staleness + 1))

    return bound


def _without_the_last(original: Callable[..., Any]) -> Any:
    return lambda *args: original(*args)[:-1]


def _passes_over_finality(original: Callable[..., Any]) -> Any:
    def add(self: _Backup, number: int, entry: Any, body: Any) -> None:
        message = decode(entry[2])
        if isinstance(message, FinalBelow):
            entry = (*entry[:2], encode(dataclasses.replace(message, closure=0)), entry[3])
        original(self, number, entry, body)

    return add


def _of_no_closure(original: Callable[..., Any]) -> Any:
    def begin_update(self: Runtime, operation: str) -> Any:
        identity = original(self, operation)
        return (-1, identity[1]) if '/sums"' in operation else identity

    return begin_update


def _says_no_name(original: Callable[..., Any]) -> Any:
    def init(self: TaskLost, task: str, message: str = "was lost", *, hint: Any = None) -> None:
        original(self, "somebody", message, hint=hint)
        self.task = task

    return init


def _only_renames(original: Callable[..., Any]) -> Any:
    return lambda path: path.rename(path.with_name(path.name + ".tmp"))


def _of_nobody(original: Callable[..., Any]) -> Any:
    return lambda timeout_s, missing: original(timeout_s, "somebody")


async def _nothing(*_: Any) -> None:
    pass


MUTANTS: Mapping[str, Mutant] = {
    **_switched("dedup", "each update is remembered", "async"),
    **_switched("fencing", "who was replaced is refused", "async"),
    **_switched("low_water", "calls are kept until their closures are final", "async"),
    **_switched("staleness", "a push of an old step does not count", "sync"),
    **_switched("staged_commit", "a push counts when all its parts are there", "sync"),
    **_switched("one_cut", "a checkpoint is one cut", "checkpoint"),
    **_switched("timeline", "who trained before a rollback is refused after it", "checkpoint"),
    **_switched("commit_marker", "COMMIT comes last", "checkpoint"),
    **_switched("replica_ack", "an answer waits for the backup", "replica"),
    "ack_early": Mutant(
        "what is on its way to the backup does not count as taken", ("replica",),
        ((CommitLog, "may_apply", _may_apply_shipped),),
    ),
    "one_too_few": Mutant(
        "a step is closed with as many pushes as it needs", ("sync",),
        ((Group, "is_complete", _is_nearly_complete),),
    ),
    "stale_by_one": Mutant(
        "a push of the step before does not count", ("sync",),
        ((SyncSteps, "contribute", _fresh_by_one),),
    ),
    "first_not_done": Mutant(
        "a backup goes on where its snapshot ends", ("replica",),
        ((_Backup, "add", _done_if(lambda self, number: number > self.order.first + 4)),),
    ),
    "copy_drops_calls": Mutant(
        "a copy and a snapshot have all calls that were applied", ("checkpoint", "replica"),
        ((ledger_snapshot, "restore_ledger", _drops_calls),),
    ),
    "rollback_without_one": Mutant(
        "all ps tasks go back", ("checkpoint",), ((PsTask, "take", _one_forgets_to_take),)
    ),
    "checkpoint_without_slots": Mutant(
        "a checkpoint has the slots of optimizers", ("checkpoint",),
        ((snapshot, "_arrays_of", lambda original: _only_values),),
    ),
    "weight_ignored": Mutant(
        "a push counts with its weight", ("sync",), ((Group, "close", _all_weigh_one),)
    ),
    "low_water_too_high": Mutant(
        "calls of a closure that runs are not forgotten", ("async",),
        ((Ledger, "final_below", _off_by(1)),),
    ),
    "promoted_closes_nothing": Mutant(
        "a promoted ps 0 closes the last step again", ("sync-replica",),
        ((StepCloser, "serve", _does_nothing(None)),),
    ),
    "promoted_counts_nothing": Mutant(
        "a promoted ps 0 counts what had counted", ("sync-replica",),
        ((StepCloser, "_replay_count", _does_nothing(None)),),
    ),
    "copy_without_rule": Mutant(
        "a copy has the state of the rule of synchronous steps", ("sync-replica",),
        ((SyncSteps, "restore", _does_nothing(None)),),
    ),
    "message_forgotten": Mutant(
        "an update outside of closures is remembered until it is acknowledged", ("async",),
        ((Ledger, "record", _messages_not_remembered),),
    ),
    "second_run_counts": Mutant(
        "of the runs of a closure the first counts", ("async",),
        ((Ledger, "judge", _other_runs_are_fresh),),
    ),
    "sync_second_run_counts": Mutant(
        "of the runs of a closure one counts in a step", ("sync",),
        ((Group, "_was_counted", _does_nothing(False)),),
    ),
    "entry_not_done": Mutant(
        "a backup does each entry that it has taken", ("replica",),
        ((_Backup, "add", _done_if(lambda _, number: number % 3)),),
    ),
    "entry_judged_twice": Mutant(
        "a backup executes each entry once", ("sync-replica",),
        ((_Backup, "add", _some_twice),),
    ),
    "clock_in_judge": Mutant(
        "judging reads no clock but that of the log", ("sync-replica",),
        ((SyncSteps, "members", _at_its_own_time),),
    ),
    "answered_early": Mutant(
        "an answer waits for its computes", ("any",), ((Computes, "add", _done_before),)
    ),
    "overtaken": Mutant(
        "computes of a shard are done in the order of entries", ("any",),
        ((Computes, "done_now", _overtakes),),
    ),
    "join_too_early": Mutant(
        "join waits for the last closure", ("any",), ((ClosureQueue, "is_settled", _off_by(-1)),)
    ),
    "join_leaves_steps": Mutant(
        "join waits for steps that have begun", ("sync",),
        ((Coordinator, "_finish_steps", lambda original: _nothing),),
    ),
    "cut_does_not_wait": Mutant(
        "a cut waits for updates that have begun", ("checkpoint",),
        ((UpdateGate, "unsettled", _does_nothing([])),),
    ),
    "cut_knows_no_others": Mutant(
        "a cut has all parts of an update or none", ("checkpoint",),
        ((Ledger, "others", _does_nothing([])),),
    ),
    "locks_of_two": Mutant(
        "who writes under a lock is alone", ("any",), ((LockTable, "claim", _writes_are_let_in),)
    ),
    "step_raised_again": Mutant(
        "a step that is closed is not applied again", ("sync-replica",),
        ((StepApplier, "_is_closed", _does_nothing(False)),),
    ),
    "rollback_names_nobody": Mutant(
        "a RollbackEvent names the closures that it undoes", ("checkpoint",),
        ((EndedClosures, "undone", _does_nothing(())),),
    ),
    "gang_without_one": Mutant(
        "a collective has what every replica has brought", ("any",),
        ((gang_run, "merge", _one_is_missing),),
    ),
    "account_forgets_runs": Mutant(
        "the account of data shards names those that ran again", ("any",),
        ((Visitation, "lose", _does_nothing(None)),),
    ),
    "shards_done_again": Mutant(
        "visits that are restored know which data shards are done", ("any",),
        ((Visits, "restore_checkpoint_state", _does_nothing(None)),),
    ),
    "takes_are_given_again": Mutant(
        "a gradient in an accumulator is taken once", ("any",),
        ((ArrayAccumulator, "_clear", _takes_leave_it),),
    ),
    "stale_gradient_is_held": Mutant(
        "a gradient of an old step is in no take", ("async",),
        ((Accumulator, "offer_pieces", _is_of_now),),
    ),
    "ahead_by_one_more": Mutant(
        "no worker is further ahead than a bound of staleness allows", ("async",),
        ((ClockService, "_bound", _allows_one_more),),
    ),
    "average_of_one_shard": Mutant(
        "each step moves the averages of all shards", ("sync",),
        ((step_update, "averages_of", _without_the_last),),
    ),
    "backup_forgets_nothing": Mutant(
        "a backup does each entry, also those that nobody waits for", ("replica",),
        ((_Backup, "add", _passes_over_finality),),
    ),
    "reads_in_between": Mutant(
        "nobody reads what is half updated", ("any",),
        ((ShardTable, "read", lambda original: _read_at_any_time),),
    ),
    "metric_counts_each_run": Mutant(
        "of the runs of a closure one counts in a metric", ("async",),
        ((Runtime, "begin_update", _of_no_closure),),
    ),
    "lost_without_name": Mutant(
        "who ends because somebody is lost names who that is", ("any",),
        ((TaskLost, "__init__", _says_no_name), (cluster_links, "_did_not_come_up", _of_nobody)),
    ),
    "close_leaves_tasks": Mutant(
        "a coordinator that is closed leaves nothing running", ("replica",),
        ((ReplicaRecovery, "close", lambda original: _nothing),),
    ),
    "parts_stay": Mutant(
        "parts of pushes go when their step is closed", ("sync",),
        ((Staging, "close", _keeps_the_parts),),
    ),
    "files_stay": Mutant(
        "of a checkpoint that is removed no file is left", ("checkpoint",),
        ((files, "remove", _only_renames),
         (files, "remove_leftovers", _does_nothing(None))),
    ),
}  # fmt: skip
"""By name."""


def mutated(name: str) -> AbstractContextManager[None]:
    """Let the rule of a mutant be wrong; ``""``: none."""
    return replaced(MUTANTS[name].where if name else ())
