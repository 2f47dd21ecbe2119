"""The oracle of ps tasks: invariants of their state, read in their processes.

A primary and its backup are equal at one position of the log, also in what the rule of synchronous
steps has seen. Not compared: counters of what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from psync.backups.primary import MAX_UNDER_WAY
from psync.cluster import parse_task_name
from psync.errors import BusyError, FencedError
from psync.ps.life import Life
from psync.ps.updates import PsUpdate, PsUpdates
from psync.ps_task import PsTask
from psync.specs import STEP_BITS
from psync.store.commit_log import LogState
from psync.store.snapshot_state import SnapshotState
from psync.testing.simulation.journal import Journal
from psync.testing.simulation.workload.tables import Fault


def _served_in(tasks: Iterable[Any]) -> Iterator[tuple[PsTask, PsTask]]:
    """Yield (task that serves a ps, task whose process it is) of processes."""
    for task in tasks:
        if isinstance(task, PsTask):
            for each in (task, *task._host.serving):
                assert isinstance(each, PsTask)
                yield each, task


def faults_of_pairs(
    tasks: dict[str, Any], digests: MutableMapping[Any, Any] | None = None
) -> tuple[int, list[Fault]]:
    """Compare each primary with its backup, if both have done the same entries.

    Args:
        tasks: Of the living processes, by name.
        digests: By services of a ps, for each section, the last digest and what was in it: it must
            be another one where that is; None: it is not looked at.

    Returns:
        How many were compared, and what differs.
    """
    found: list[Fault] = []
    compared = 0
    for primary, _ in _served_in(tasks.values()):
        backup = _backup_of(primary, tasks)
        if backup is None:
            continue
        try:
            (held, judged), (copied, _) = _contents(primary), _contents(backup)
        except BusyError:  # something that is in no log is under way
            continue
        compared += 1
        if digests is not None:
            found += _faults_of_digest(primary, judged, digests)
        found += [
            (
                "pair",
                (f"{primary.task}: {name}: {held.get(name)}, its backup has {copied.get(name)}"),
            )
            for name in dict.fromkeys((*held, *copied))
            if held.get(name) != copied.get(name) and not _is_unwritten(name, held, copied)
        ]
    return compared, found


def faults_of_rest(
    tasks: Mapping[str, Any], moved: Mapping[str, str], num_ps: int
) -> Iterator[Fault]:
    """When all is done and quiet, a ps holds nothing that somebody may still wait for.

    Args:
        tasks: Of the living processes, by name.
        moved: In whose process a ps is served, since one was lost.
        num_ps: How many serve the present coordinator.
    """
    for task, host in _served_in(tasks.values()):
        # One that was taken for dead, and lives, keeps what it held until another chief comes
        # and ends it: see ``backups.host``, AskServed.
        if moved.get(task.task, task.task) != host.task or task.index >= num_ps:
            continue
        name, statistics = f"{task.task} in the process of {host.task}", task.statistics()
        staging, steps = statistics["staging"], dict(task.services.sync.staging.steps)
        # Of pushes that were told duplicate, or cancelled, and of runs that were lost, they wait
        # for the end of the step that is open. That of values that nobody has pulled is -1.
        waiting = sum(
            local >= steps.get(group, -1)
            for group, known in task.services.sync.staging._groups.items()
            for local in (
                *(part.local_step for part in known.parts.values()),
                *(local_step for local_step, _ in known.coming.values()),
            )
        )
        if staging["parts"] != waiting or (staging["bytes"] and not waiting):
            yield "left over", f"{name}: parts of steps that are closed: {staging}"
        for group, counters in statistics["sync"].items():
            tokens = counters["tokens"]
            if tokens["published"] != tokens["taken"] + tokens["void"] + tokens["left"]:
                yield "tokens", f"{name}: {group}: {tokens}"
            if counters["waiting"] or counters["counted"]:
                yield "left over", f"{name}: {group}: {counters}"
        for clock, counters in statistics["clocks"].items():
            if counters["waiting"]:
                yield "left over", f"{name}: clock {clock}: {counters}"
    yield from faults_of_counts(tasks, num_ps, at_rest=True)


def faults_of_counts(
    tasks: Mapping[str, Any], num_ps: int, *, at_rest: bool = False
) -> Iterator[Fault]:
    """Each ps knows of no push that others have not counted; at rest, of all that they have.

    Of an optimizer whose number was set, others forget what they had counted, and a ps that has
    yet to hear of that does not: then nothing can be said, until all is at rest.

    Args:
        tasks: Of the living processes, by name.
        num_ps: How many serve the present coordinator.
        at_rest: Whether all is done and told.
    """
    timelines: dict[tuple[int, int], list[PsTask]] = {}
    for task, _ in _served_in(tasks.values()):
        if task.life is Life.SERVING and task.index < num_ps:
            timelines.setdefault((task.floor, task.services.timeline), []).append(task)
    for served in timelines.values():
        # Otherwise one is away, or was replaced and has not noticed; or has been started again, and
        # is still to roll back.
        is_whole = at_rest or all(each.services.store.keys() for each in served)
        if is_whole and sorted(each.index for each in served) == list(range(num_ps)):
            for task in served:
                others = [each for each in served if each is not task]
                yield from _faults_of_count(task, others, at_rest=at_rest)


def _faults_of_count(task: PsTask, others: Sequence[PsTask], *, at_rest: bool) -> Iterator[Fault]:
    stores = [each.services.store.optimizers for each in others]
    for number, optimizer in task.services.store.optimizers.items():
        counts = [known[number].count for known in stores if number in known]
        epoch = optimizer.count.base >> STEP_BITS
        if not at_rest and any(count.base >> STEP_BITS > epoch for count in counts):
            continue
        expected = sum(
            pushes
            for count in counts
            if count.base >> STEP_BITS == epoch
            for touched, pushes in count.own.items()
            if task.index not in touched
        )
        found = optimizer.count.elsewhere
        if found > expected or (at_rest and found < expected):
            said = f"knows of {found} pushes elsewhere, there are {expected}"
            yield "iterations", f"{task.task}: optimizer {number}: {said}"


def noting_arrivals(original: Callable[..., Any]) -> Any:
    """Return an admission of updates that notes which parts have arrived whole where."""

    def admit(self: PsUpdates, update: PsUpdate) -> Any:
        message, journal = update.message, Journal.current()
        key = (journal.lives, message.closure, message.ordinal)
        parts = 1 + len(message.spread or ())
        journal.arrived.setdefault(key, (set(), parts))[0].add(self.task)
        waiting = journal.admitted.setdefault(self, set())
        waiting.add((update.client, message.sequence))
        try:
            return original(self, update)
        except Exception:
            waiting.discard((update.client, message.sequence))
            raise

    return admit


def noting_judgement(original: Callable[..., Any]) -> Any:
    """Return a judgement of updates that notes it; an update of a closure is refused to nobody.

    It has arrived, so another ps may have applied its part of it.
    """

    def judge(self: PsUpdates, update: PsUpdate) -> Any:
        journal, identity = Journal.current(), (update.client, update.message.sequence)
        journal.admitted.get(self, set()).discard(identity)
        try:
            return original(self, update)
        except FencedError as exc:
            said = f"{self.task}: {identity}, which has arrived: {exc}"
            journal.look(update.message.closure < 0, said, "dropped")
            raise

    return judge


def faults_of_arrivals(tasks: Mapping[str, Any]) -> Iterator[Fault]:
    """An update that has arrived is judged, as soon as it waits for nothing.

    Args:
        tasks: Of the living processes, by name.
    """
    for task, _ in _served_in(tasks.values()):
        services = task.services
        left = Journal.current().admitted.get(services.updates)
        if left and not services.executor.waiting and not services.gate.held_back:
            yield "dropped", f"{task.task}: {sorted(left)} have arrived, and wait for nothing"


def full_budgets(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Name the marks of two ps tasks that back each other up and cannot read from clients.

    Args:
        tasks: Of the living processes, by name.
    """
    found: dict[str, set[tuple[str, str]]] = {}
    for primary, host in _served_in(tasks.values()):
        sender, log = primary.services.backup._sender, primary.services.executor.log
        if sender is not None and any(
            peer._unfinished_bytes > peer._limits.unfinished_bytes
            and not (peer._in_order and peer.holds)
            for peer in primary._endpoint.peers
        ):
            pair = host.task, sender.order.task
            if len(sender._unanswered) >= MAX_UNDER_WAY and log.shipped < log.last:
                found.setdefault("two ps tasks that back each other up have both budgets full",
                                 set()).add(pair)  # fmt: skip
            if primary.services.gate.held_back:
                found.setdefault("updates wait at locks or gates of two ps tasks with full budgets",
                                 set()).add(pair)  # fmt: skip
    for mark, pairs in found.items():
        if any((backup, host) in pairs for host, backup in pairs):
            yield mark


def _backup_of(primary: PsTask, tasks: dict[str, Any]) -> PsTask | None:
    """Return the backup of a ps, if both have done all entries of its log."""
    service = primary.services.backup
    executor, sender = service.executor, service._sender
    if sender is None or executor.log.state is not LogState.PAIRED:
        return None
    host = tasks.get(f"ps-{parse_task_name(sender.order.task)[1]}")
    backup = host._host._backups.get(primary.index) if host is not None else None
    if (
        backup is None
        or (backup.order.coordinator, backup.epoch) != (primary.floor, sender.order.epoch)
        or backup.address is not None or backup.loaded is not None or backup.is_damaged
        or executor.waiting or backup.pending_bytes or backup.taken != executor.log.last
    ):  # fmt: skip
        return None
    task: PsTask = backup.task
    return task


def _is_unwritten(name: str, held: dict[str, Any], copied: dict[str, Any]) -> bool:
    """A slot that was only read, or measured, is there with what it begins with, or not at all."""
    if not name.startswith("slot") or (name in held) == (name in copied):
        return False
    there: bytes = (held if name in held else copied)[name]
    return there == there[:4] * (len(there) // 4)


Contents = dict[str, Any]
"""What a ps has, by what it is."""


def _contents(task: PsTask) -> tuple[Contents, Sequence[Contents]]:
    """Return all that a backup has to have; and of that, by section, what judging has made."""
    if task.services.executor.computes.waiting:
        raise BusyError("something is being computed")
    frozen = task.services.freeze()
    state = frozen.state
    found: Contents = {}
    for place, item in enumerate(state.items):
        found[str(item)] = b"".join(frozen.views(place))
    frozen.drop()
    found["shards"] = [(each.spec, each.version, dict(each.pushes)) for each in state.shards]
    found["accumulators"] = state.accumulators
    # A definition that came in passing is told to the backup with the first entry that needs it.
    for optimizer, (number, count) in zip(state.optimizers, state.counts, strict=True):
        if any(count):
            found[f"optimizer {number}"] = optimizer
    groups = dict(state.groups)
    for number, _ in task.services.sync.staging.steps:
        found[f"group {number}"] = groups.get(number)
    for name, hosted in task.services.accumulators.hosted.items():
        held = hosted.rule.held()
        found[f"gradients of {name!r}"] = held and (
            held[0][1:3],
            [array.tolist() for array in held[1]],
        )
    judged = _judged(task, state)
    for section in judged:
        found |= section
    return found, judged


def _judged(task: PsTask, state: SnapshotState) -> Sequence[Contents]:
    """Return what judging has made of each section of a ps: what its digest is of."""
    services = task.services
    updates: Contents = {f"ledger of {sender.task}": tuple(sender) for sender in state.senders}
    calls = [(*call, *state.variable_sets[place]) for *call, place in state.calls]
    updates["calls"] = sorted(calls), sorted(state.parts)
    updates["counted"] = sorted(services.ledger.counted())
    updates["final below"] = state.final_below, state.kept
    updates |= {f"pushes of {number}": count for number, count in state.counts if any(count)}
    accumulators = {
        f"accumulator {name!r}": (
            hosted.rule.num_accumulated(),
            hosted.rule.step,
            [(*each.owner.client, each.owner.sequence) for each in hosted.rule.waiting],
        )
        for name, hosted in services.accumulators.hosted.items()
    }
    steps: Contents = {"steps": dict(services.sync.staging.steps)}
    if task.index == 0:
        steps["rule"] = services.sync.steps.snapshot()
    return updates, accumulators, steps


def _faults_of_digest(
    task: PsTask, judged: Sequence[Contents], digests: MutableMapping[Any, Any]
) -> Iterator[Fault]:
    """The digest of a section changes with all that judging has made of it.

    A backup that differs in what is in no digest would never be found to.
    """
    services = task.services
    before, sections, now = digests.get(services), services.sections, []
    for section in sections:
        services.sections = [section]
        now.append(services.digest())
    services.sections = sections
    digests[services] = now, judged
    if before is None:
        return
    for last, then, digest, known in zip(*before, now, judged, strict=True):
        if last == digest and then != known:
            names = [name for name in known if known[name] != then.get(name)]
            yield "digest", f"{task.task}: the digest is the same, and not {names}"
