"""How the traces of scripts name messages, entries, answers and the state of a ps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from psync.client.plan import numbered
from psync.errors import PsyncError
from psync.store.push_counts import PushCount
from psync.wire.codec import Message, decode
from psync.wire.messages import (
    AccumulatorState,
    ApplyGradient,
    BeginGroup,
    CheckState,
    CloseStep,
    Contributed,
    DefineAccumulator,
    DefinePlan,
    Done,
    EndTakes,
    Fence,
    FinalBelow,
    FinishSteps,
    ForgetPush,
    Freeze,
    Gate,
    Gated,
    GradientTaken,
    Held,
    HoldGradients,
    HoldPush,
    HoldTake,
    KeepAnswers,
    KeepPart,
    LockShards,
    Measured,
    MeasureStep,
    NormsMeasured,
    OpenGate,
    Pushed,
    ReportSchedule,
    SetGroups,
    StepApplied,
    TakeGradient,
    Tick,
    UnlockShards,
    Update,
)

NAMES = {(0, 0): "w", (1, 0): "v", (2, 0): "x", (3, 0): "y", (4, 0): "z", (9, 0): "step"}
"""The variables of all scripts: w, v and the global step on ps 0, x and y on ps 1.

There is no z before a script creates it."""

PLACES = {"w": (0, (0, 0)), "v": (0, (1, 0)), "x": (1, (2, 0)), "y": (1, (3, 0)), "z": (0, (4, 0))}
"""(ps, key) of each that scripts push to."""

PLANS: dict[int, DefinePlan] = {}
"""All that clients have named so far, by their numbers, which mean the same everywhere."""


def planned(definition: DefinePlan) -> DefinePlan:
    """Give a plan its number, and remember it."""
    made = numbered(definition)
    PLANS[made.plan] = made
    return made


def task_words(task: str, incarnation: int = 0) -> str:
    """Name a task as people do; with an incarnation, if it is not its first one."""
    _, job, index = (part.rpartition(":")[2] for part in task.split("/")) if task else ("",) * 3
    if job in ("chief", ""):
        return "the coordinator" if job else "the log"
    first = {"worker": 1000}.get(job, incarnation)
    life = f" ({incarnation})" if incarnation > first else ""
    return f"{job} {index}{life}"


def error_words(error: Exception) -> str:
    """Name an error with its text, tasks by their short names."""
    text = error.message if isinstance(error, PsyncError) else str(error)
    for job in ("ps", "worker"):
        for index in range(8):
            text = text.replace(f"/job:{job}/task:{index}", f"{job} {index}")
    return f"{type(error).__name__}: {text.replace('/job:chief/task:0', 'the coordinator')}"


def members_words(members: Sequence[Sequence[int]] | None) -> str:
    """Name shards."""
    keys = [(each[-2], each[-1]) for each in members or ()]
    return ", ".join(NAMES.get((key[0], key[1]), str(key)) for key in keys)


def _to(message: Any) -> str:
    named = members_words(PLANS[message.plan].members)
    return f" to {named}" if named else ""


def _call(message: Any) -> str:
    return f" (closure {message.closure})" if message.closure >= 0 else ""


def _factors(message: CloseStep | NormsMeasured) -> str:
    words = ""
    for what, factors in (("gradients", message.scales), ("updates", message.ratios)):
        if factors is not None:
            scaled = ", ".join(f"{NAMES[each, 0]} × {factor:.3g}" for each, factor in factors)
            words += f", {what}: {scaled}"
    return words


def message_words(message: Message) -> str:
    """Name a message, in few words."""
    name = type(message).__name__
    match message:
        case DefinePlan():
            PLANS.setdefault(message.plan, message)
            return f"{name} of {members_words(message.members)}"
        case Update():
            plan = PLANS[message.plan]
            if plan.variable_set:
                at = f" at step {max(0, message.local_step)}"
                return f"Part of push {message.sequence}{_to(message)}{at}{_call(message)}"
            what = "Push" if plan.optimizer >= 0 else "Assign"
            return f"{what} {message.sequence}{_to(message)}{_call(message)}"
        case KeepPart():
            return f"KeepPart of push {message.push}"
        case Held():
            held = [f"push {push} of {task_words(*who)}" for _, *who, push, _ in message.parts]
            return f"Held, {', '.join(held)}"
        case MeasureStep():
            return f"MeasureStep {message.step}, norms of {message.what}{_factors(message)}"
        case CloseStep():
            pushes = [
                f"push {number} of {task_words(task, incarnation)}"
                for task, incarnation, number, *_ in message.pushes
            ]
            return f"CloseStep {message.step}: {', '.join(pushes) or 'no push'}{_factors(message)}"
        case NormsMeasured():
            return f"NormsMeasured {message.step}{_factors(message)}"
        case Measured():
            sums = [f"{NAMES[variable, part]} {each:g}" for variable, part, each, _ in message.sums]
            return f"Measured, sums of squares: {', '.join(sums)}"
        case StepApplied():
            return f"StepApplied {message.step}" + (", failed" if message.failure else "")
        case BeginGroup():
            return f"BeginGroup at step {message.step}"
        case Tick():
            return f"Tick at {message.now:g} s"
        case ForgetPush():
            return f"ForgetPush {message.push}"
        case Fence():
            return f"Fence, {task_words(message.task)} below {message.below}"
        case FinalBelow():
            return f"FinalBelow closure {message.closure}"
        case CheckState():
            return f"CheckState {message.number}"
        case SetGroups():
            steps = [f"step {max(step, 0)}" for _, _, step, _ in message.groups]
            return f"SetGroups, {', '.join(steps) or 'none'}"
        case HoldPush():
            return f"HoldPush, push {message.push}{_to(message)}"
        case HoldGradients():
            return f"HoldGradients {message.accumulator}, {message.count} gradients"
        case HoldTake():
            return f"HoldTake {message.take} of {message.accumulator}"
        case KeepAnswers():
            return "KeepAnswers"
        case DefineAccumulator():
            return f"DefineAccumulator {message.name}"
        case ApplyGradient():
            return (
                f"ApplyGradient {message.sequence} to {message.accumulator} at step "
                f"{message.local_step}{_call(message)}"
            )
        case TakeGradient():
            wanted = f"{message.num_required} wanted"
            return f"TakeGradient {message.take} of {message.accumulator}, {wanted}"
        case EndTakes() | FinishSteps() | LockShards() | UnlockShards():
            return name
        case Gate() | OpenGate() | Freeze():
            return f"{name} {message.cut}"
        case ReportSchedule():
            missing = ", ".join(map(task_words, message.missing))
            who = ", ".join(task_words(*each) for each in message.workers) or "nobody"
            last = [closure for closure, _ in message.in_flight]
            more = "" if message.queued else f"; closures {last} are the last"
            missing = f"; missing: {missing}" if missing else ""
            return f"ReportSchedule {message.version} at {message.now:g} s: {who}{missing}{more}"
        case Done():
            return "done"
        case Pushed():
            return f"{message.outcome}, step {message.step}" if message.step else message.outcome
        case Contributed():
            late = f" by {message.staleness}" if message.staleness else ""
            partial = ", a partial step" if message.partial else ""
            return f"{message.outcome}{late}, token {message.token}{partial}"
        case Gated():
            parts = [f"{number} of {task_words(task)} on ps {ps}"
                     for ps, task, _, number in message.others]  # fmt: skip
            return "gated" + (f"; elsewhere: {', '.join(parts)}" if parts else "")
        case AccumulatorState():
            return f"{message.outcome or 'defined'}, {message.count} held, step {message.step}"
        case GradientTaken():
            return f"{message.count} taken, step {message.step}"
    return name


def entry_words(client: tuple[str, int], message: Message) -> str:
    """Name an entry of a log."""
    own = isinstance(
        message, BeginGroup | ReportSchedule | Tick | CloseStep | NormsMeasured | StepApplied
 | CheckState | SetGroups | FinishSteps,
    )  # fmt: skip
    words = message_words(message)
    return words if own else f"{words}, from {task_words(*client)}"


# State.


def state_words(sections: Sequence[Any]) -> Iterator[str]:
    """Say what sections have, as they say it for a digest (``Section.control``)."""
    updates, accumulators, steps = sections
    yield from _ledger(*updates)
    for name, count, step, waiting, takers in accumulators:
        waits = "".join(f"; take {n} of {task_words(t, i)} waits" for t, i, n in waiting)
        kept = "".join(
            f"; take {number} of {task_words(task, born)} is complete"
            for task, born, _, numbers in takers
            for number, *_ in numbers
            if [task, born, number] not in waiting
        )
        yield f"accumulator {name}: {count} held, step {step}{waits}{kept}"
    held, decided, *rule = steps
    for _, task, born, push, local_step, nbytes in held:
        yield (
            f"held: push {push} of {task_words(task, born)} at step {max(0, local_step)}, "
            f"{nbytes} bytes"
        )
    for _, step, *_, outgoing in decided:
        if step is not None:
            yield f"group: step {step - 1} is closed here"
        if outgoing:
            measured = ", its norms are measured" if outgoing[1] else ""
            yield f"outgoing: step {outgoing[0]}{measured}"
    for each in rule:
        yield from _rule(each)


def _ledger(ledger: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[str]:
    senders, calls, final_below, kept = ledger
    for task, born, acked_below, answers in senders:
        told = "; ".join(
            f"{number}{f' (closure {call[0]})' if call else ''} {message_words(decode(packed))}"
            for number, call, packed in answers
        )
        below = f", has the answers below {acked_below}" if acked_below else ""
        if answers or task_words(task).startswith("worker"):
            yield f"ledger: {task_words(task, born)}{below}: {told or 'nothing'}"
    for closure, ordinal, _, parts in calls:
        spread = f", on {parts} ps tasks" if parts > 1 else ""
        yield f"ledger: call {ordinal} of closure {closure} counts{spread}"
    if final_below:
        but = f", but for {kept}" if kept else ""
        yield f"ledger: closures below {final_below} are final{but}"
    for number, count in optimizers:
        yield f"optimizer {number}: at step {PushCount.of(count).known}"


def _rule(rule: dict[str, Any]) -> Iterator[str]:
    if rule["alive"] is not None:
        who = ", ".join(task_words(*each) for each in rule["alive"]) or "nobody"
        yield f"rule: alive at {rule['now']:g} s: {who}"
    for _, group in rule["groups"]:
        pushes = group["pushes"]
        counted = ", ".join(_push(pushes[place]) for place in group["counted"]) or "nothing"
        yield f"rule: step {group['step']}, {counted} of {group['target']} counted"
        if group["closing"]:
            named = ", ".join(_push(pushes[place]) for place in group["being_applied"])
            yield f"rule: step {group['closing'][0]} is being applied: {named}"
        if group["short_since"] is not None:
            yield f"rule: too few live since {group['short_since']:g} s"
        answered = [_push(each) for each in pushes if each[-1] is not None]
        if answered:
            yield f"rule: answered: {', '.join(answered)}"


def _push(push: Sequence[Any]) -> str:
    (task, born), number = push[0], push[1]
    return f"push {number} of {task_words(task, born)}"


def same_state(one: Any, other: Any) -> bool:
    """Whether two controls are equal, as a digest sees them."""
    return bool(msgpack.packb(one) == msgpack.packb(other))
