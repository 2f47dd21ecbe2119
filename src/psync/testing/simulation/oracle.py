"""The oracle of a simulated run: what must hold of values, by what the program was told.

Each function yields (oracle, message) for each fault. What must hold of one kind of table is said
by its class.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psync.checkpoints.files import Reader, check_places, checkpoints_in, stored_snapshots
from psync.errors import PsyncError
from psync.store.snapshot_state import unpack_answer
from psync.testing.simulation.drawing import EXACT
from psync.testing.simulation.workload.tables import COUNTED, Fault, Look, Seen, Values
from psync.training.checkpoint import OWNER

if TYPE_CHECKING:
    from psync.testing.simulation.journal import Closure, Journal, Save
    from psync.testing.simulation.plan import Call

Told = tuple["Closure", str, tuple[str, ...], bool]
"""A closure, its state and outcomes at the time of a look, and whether its life was rolled back."""


def faults_of_calls(look: Look, told: Sequence[Told]) -> Iterator[Fault]:
    """Compare the marks of all calls with what was told of them."""
    journal = look.journal
    marks = journal.marks(look.values)
    for closure, state, outcomes, rolled_back in told:
        for ordinal, call in enumerate(closure.plan.calls):
            table = journal.tables[call.kind]
            if not table.has_marks or (table.synchronous and not look.settled):
                continue
            seen = Seen(
                closure,
                state,
                outcomes[ordinal] if outcomes else "",
                marks[call.kind][:, call.column],
                journal.baseline[call.kind][:, call.column],
                closure.life != journal.lives,
                rolled_back or look.late,
                look.late,
            )
            wrong = table.wrong(seen) or _wrong_after_rollback(seen, call)
            if wrong:
                undone = "undone" if closure.undone else "not undone"
                yield wrong, _described(look, seen, f"{state}, {undone}", ordinal)


def _wrong_after_rollback(seen: Seen, call: Call) -> str:
    """Of what a rollback has undone there is what the checkpoint had to which it went."""
    target = seen.closure.undone_to
    if target is None or call.kind not in target.marks or seen.former or seen.late:
        return ""
    saved = target.marks[call.kind][:, call.column]
    return "" if (seen.found == saved).all() else "rollback"


def faults_of_stopping(journal: Journal, closures: Sequence[Closure]) -> Iterator[Fault]:
    """Where a step has asked for the end, what had begun by then has come to its end."""
    for closure in closures:
        if journal.is_calm and closure.runs and closure.state == "cancelled":
            if closure.plan.cancel_s is None:
                yield "stop", f"closure {closure.number} had begun, and was cancelled"


def _described(look: Look, seen: Seen, state: str, ordinal: int) -> str:
    closure, call = seen.closure, seen.closure.plan.calls[ordinal]
    return (
        f"{look.when}: closure {closure.number} (id {closure.id}, life {closure.life} of "
        f"{look.journal.lives}, {state}), call {ordinal}, {call.kind} column {call.column}, "
        f"{seen.outcome or 'no outcome'}: marks {seen.found.tolist()}, before this life "
        f"{seen.before.tolist()}"
    )


def faults_of_steps(look: Look) -> Iterator[Fault]:
    """A global step is the number of steps that its groups have made."""
    if look.late or not look.settled:
        return
    plan = look.journal.plan
    made: dict[int, int] = {}
    for name, table in look.journal.tables.items():
        if table.synchronous:
            number = plan.step_of(int(name.removeprefix("sync")))
            made[number] = made.get(number, 0) + table.num_steps(look.values[name])
    for number, steps in made.items():
        expected = steps + (plan.first_step if number == 0 else 0)
        found = int(look.values["steps"][str(number)])
        if found != expected:
            yield "global step", f"{look.when}: global step {number} is {found}, not {expected}"


def faults_of_save(journal: Journal, save: Save) -> Iterator[Fault]:
    """A checkpoint is one cut: it has each update wholly or not at all.

    Args:
        journal: Some time after it was complete.
        save: What was saved.
    """
    if not journal.is_rolled_back and (save.own != save.own[0]).any():
        yield "cut", f"checkpoint {save.name}: own updates {save.own.tolist()}"
    yield from _faults_of_counted(journal, save)
    for closure in journal.closures:
        for ordinal, call in enumerate(closure.plan.calls):
            table = journal.tables[call.kind]
            if call.kind not in save.marks or closure.life != save.life or closure.undone:
                continue
            found, wrong = save.marks[call.kind][:, call.column], ""
            done = closure.state == "done"
            counted = done and closure.outcomes[ordinal] in COUNTED
            whole = not table.synchronous or closure.number in save.settled
            # Of a run that was cut short a cut may have a part: see ``closures.rollback``.
            if not (found == found[0]).all():
                wrong = "cut" if table.synchronous or (done and len(closure.runs) == 1) else ""
            elif closure.number in save.began and counted and whole and not found.all():
                wrong = "saved"
            elif save.scheduled is not None and closure.number >= save.scheduled and found.any():
                wrong = "future"
            if wrong:
                said = (
                    f"checkpoint {save.name}: closure {closure.number} ({closure.state}), "
                    f"call {ordinal}, {call.kind}: marks {found.tolist()}"
                )
                yield wrong, said


def _faults_of_counted(journal: Journal, save: Save) -> Iterator[Fault]:
    """Of an open step a checkpoint has nothing: its calls are made again after a rollback."""
    for name, table in journal.tables.items():
        for closure in journal.closures:
            if not table.synchronous or closure.life != save.life:
                continue
            columns = [call.column for call in closure.plan.calls if call.kind == name]
            applied = np.count_nonzero(save.marks[name][:, columns].any(axis=0))
            if (counted := save.counted[name, closure.id]) > applied:
                said = f"{counted} calls of closure {closure.number} count, {applied} are applied"
                yield "counted", f"checkpoint {save.name}: {name}: {said}"


def saved_calls(path: Path) -> Counter[tuple[str, int]]:
    """Return how many calls a checkpoint takes for counted in steps, by group and closure."""
    counted: Counter[tuple[str, int]] = Counter()
    for snapshot in stored_snapshots(path):
        names = {number: config["name"] for number, config in snapshot.state.groups}
        counted.update((names[group], closure) for group, closure, *_ in snapshot.state.counted)
    return counted


def saved_values(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return what a checkpoint has of tables, by their names and those of their parts."""
    values: dict[str, dict[str, np.ndarray]] = {}
    reader = Reader(path)
    for name, tensor in reader.manifest.tensors.items():
        kind, _, rest = name.partition(".")
        if kind in ("v", "count"):
            table, _, part = (rest or "own.count").partition(".")
            values.setdefault(table, {})[part] = reader.read(tensor, 0, tensor.rows)
    return values


def faults_of_directory(
    journal: Journal, directory: Path, when: str, *, tidy: bool = False
) -> Iterator[Fault]:
    """What is said to be saved is there, what is there is whole; ``tidy``: nothing else is."""
    try:
        there = [path for _, path in checkpoints_in(directory)]
        for path in there:
            reader = Reader(path)
            for tensor in reader.manifest.tensors.values():
                reader.read(tensor, 0, tensor.rows)
            for snapshot in stored_snapshots(path):
                check_places(snapshot)
                for sender in snapshot.state.senders:
                    for _, _, answer in sender.answers:
                        unpack_answer(answer)
    except PsyncError as exc:
        yield "checkpoint", f"{when}: {exc}"
        return
    names = sorted(path.name for path in there)
    said = [save.name for save in journal.saves if save.name is not None]
    if said and said[-1] not in names:
        yield "checkpoint", f"{when}: {said[-1]} was saved, {names} are there"
    left = sorted(set(os.listdir(directory)) - {*names, OWNER}) if tidy else []
    if left:
        yield "left", f"{when}: {left} are left"


def faults_of_restoring(
    journal: Journal, restored: str, found: Mapping[str, Any]
) -> Iterator[Fault]:
    """What was saved at the end of a life is restored exactly, whatever the layout.

    Args:
        journal: Until then.
        restored: Name of the checkpoint.
        found: All values, slots and iterations.
    """
    if journal.left is None or journal.left[0] != restored:
        return
    journal.say("mark", "all that was left at the end is restored")
    held = _flat(found)
    for name, value in _flat(journal.left[1]).items():
        table = journal.tables.get(name[name[0] in ("slots", "iterations")])
        if name[0] == "own":  # the program changes it until it has ended
            continue
        rounded = 1e-6 if table is not None and table.has_copies else 0.0
        if not np.allclose(held[name], value, rtol=rounded, atol=0, equal_nan=True):
            yield "restored", f"{restored}: {name} was {value}, and is restored as {held[name]}"


def faults_of_attaching(journal: Journal, values: Values) -> Iterator[Fault]:
    """What has arrived is applied, and what an attach says of partial updates is true.

    It is looked at where nothing was rolled back, and the calls of closures are all updates but
    those of the program itself. What a ps has received dies with it, if it waits there.

    Args:
        journal: Until then; the life that has ended is the present one.
        values: That the next one has found.
    """
    plan = journal.plan
    calm = all(
        fault.kind in ("kill", "kill_many") and fault.targets
        and not any(name.startswith("ps") for name in fault.targets)
        for fault in plan.faults
    )  # fmt: skip
    ends = any(each.may_end for batch in plan.batches for each in batch.closures)
    if journal.has_rolled_back or ends or not journal.tables.keys() <= set(EXACT):
        return
    marks, partial = journal.marks(values), 0
    for closure in journal.closures[journal.dropped :]:
        for ordinal, call in enumerate(closure.plan.calls):
            found = marks[call.kind][:, call.column]
            if closure.life != journal.lives or (found == found[0]).all():
                continue
            partial += 1
            there, parts = journal.arrived.get((closure.life, closure.id, ordinal), (set(), 0))
            if calm and len(there) == parts:
                said = f"closure {closure.number}, call {ordinal}, {call.kind}: {found.tolist()}"
                yield "dropped", f"{said}, and all {parts} parts had arrived"
    added = values["own"]["count"].ravel() - journal.own.base
    least, most = int(added.max() - added.min()), journal.own.under_way
    if not partial + least <= journal.partial <= partial + most:
        said = f"{partial} of closures, and {least} to {most} of its own"
        yield "partial", f"after life {journal.lives} {journal.partial} are told: there are {said}"


def _flat(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        below = isinstance(value, Mapping)
        found |= _flat(value, (*path, name)) if below else {(*path, name): value}
    return found


def faults_of_beginning(
    journal: Journal, attached: bool, restored: str | None, values: Values
) -> Iterator[Fault]:
    """What a life finds is what was there, or one cut.

    Args:
        journal: Until then.
        attached: Whether the new chief found everything in place.
        restored: The name of the checkpoint that it has restored.
        values: That it has found.
    """
    marks = journal.marks(values)
    if attached and journal.kept is None:  # whoever has made these values did nothing but restore
        attached = False
        restored = next((each.name for each in journal.saves[::-1] if each.name), None)
    save = next((each for each in journal.saves if each.name == restored), None)
    unsaid: frozenset[int] = frozenset()
    if restored is not None and save is None:  # complete, and nobody was told: one of the last
        last = next((at for at, each in enumerate(journal.saves[::-1]) if each.name), None)
        begun = [each.began & each.settled for each in journal.saves[::-1][:last]]
        unsaid = frozenset.intersection(*begun) if begun else unsaid
    for closure in journal.closures:
        for ordinal, call in enumerate(closure.plan.calls):
            if not journal.tables[call.kind].has_marks:
                continue
            found = marks[call.kind][:, call.column]
            done = closure.state == "done"
            table = journal.tables[call.kind]
            counted = done and closure.outcomes[ordinal] in COUNTED
            # What was accepted is applied when join returns, says ClusterCoordinator.join: until
            # then its step is open, of which nothing is saved.
            applied = not table.synchronous or closure.settled
            wrong = ""
            # Of a run that was cut short a cut may have a part: see ``closures.rollback``.
            may_part = len(closure.runs) > 1 and not table.synchronous
            if done and not (found == found[0]).all() and not may_part:
                wrong = "cut"
            elif attached:
                kept = None if journal.kept is None else journal.kept[call.kind][:, call.column]
                if closure.number >= journal.dropped:
                    lost = counted and applied and not closure.undone and not found.all()
                else:  # a life since then began anew, and is all that may be there
                    lost = kept is not None and not set(found.tolist()) <= {0.0, *kept.tolist()}
                wrong = "attach" if lost else ""
            elif restored is None:
                wrong = "fresh" if found.any() else ""
            elif save is None:
                lost = closure.number in unsaid and counted
                wrong = "saved" if lost and not closure.undone and not found.all() else ""
            else:
                whole = not table.synchronous or closure.number in save.settled
                if closure.number in save.began and counted and whole and not found.all():
                    wrong = "saved"
                if save.scheduled is not None and closure.number >= save.scheduled and found.any():
                    wrong = "future"
            if wrong:
                said = (
                    f"life {journal.lives + 1} began with checkpoint {restored}: closure "
                    f"{closure.number} ({closure.state}): marks {found.tolist()}"
                )
                yield wrong, said
