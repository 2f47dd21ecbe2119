"""Log entries of synchronous steps, from a primary to its backup.

    entry      says
    StagePush  a part of a push is here
    CountPush  on ps 0: a push counts, with what of it came along
    CloseStep  a step is closed, with the parts that ps 0 has handed on; the others are here
    RaiseStep  a global step is raised (``groups``)
    SetSteps   the steps of groups, in the snapshot that the log goes on from

The rule on ps 0 is not replicated: no worker and no ps is told a decision before the entries that
it comes from are in the log. A log names sets, and groups, by numbers of its own (``LogNames``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psync.ps.committer import Build
from psync.store.commit_log import LogNames
from psync.store.ledger import Client
from psync.sync.group import Contribution
from psync.sync.groups import CLOSER
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.recovery_messages import CountPush, SetSteps
from psync.wire.sync_messages import CloseStep, Contribute, StagePush

FROM_CLOSER: Client = (CLOSER, 0)
"""In place of a client: the log says what ps 0 has decided, whoever that is now."""

Raw = Mapping[str, Any]
"""The configuration of a group, as it came."""


def staged_entry(part: Part, message: StagePush, raw: Raw) -> Build:
    """Return the entry of a part that has come in."""

    def build(names: LogNames) -> StagePush:
        number, members = names.of_set(part.known.keys)
        config = dict(raw) if names.is_new(message.group) else None
        return replace(message, config=config, set_id=number, members=members)

    return build


def push_of(
    message: Contribute | CountPush, replica: Replica, acked_below: int = 0
) -> Contribution:
    """Return a push as the rule of steps takes it.

    Args:
        message: Says it.
        replica: That pushes.
        acked_below: Its pushes below this number are answered, and the answers have come.
    """
    return Contribution(
        replica, message.push, acked_below, message.closure if message.closure >= 0 else None,
        message.ordinal, message.variable_set, message.local_step, message.weight,
    )  # fmt: skip


def counted_entry(
    group: int, step: int, push: Contribution, part: Part | None, raw: Raw, *, spread: bool
) -> tuple[Build, Sequence[memoryview]]:
    """Return the entry of a push that counts, and its segments.

    Args:
        group: Of the push.
        step: In which it counts.
        push: That counts.
        part: What has come with it; None: ps 0's part, if it has one, was staged.
        raw: Configuration of the group.
        spread: As in ``Contribute``.
    """

    def build(names: LogNames) -> CountPush:
        number, members, rows = -1, None, None
        lengths: Sequence[int] = ()
        if part is not None and part.whole is not None:
            number, members = names.of_whole(part.whole.members)
            lengths = part.whole.lengths
            rows = None if part.rows is None else list(part.rows)
        return CountPush(
            group, dict(raw) if names.is_new(group) else None, step, push.number,
            -1 if push.closure is None else push.closure, push.ordinal, push.variable_set,
            push.local_step, push.weight, number, members, list(lengths), rows, spread,
        )  # fmt: skip

    if part is None or part.whole is None or not len(part.body):
        return build, ()
    return build, (part.body,)


def closing_entry(
    message: CloseStep, raw: Raw, along: Sequence[Part | None]
) -> tuple[Build, Sequence[memoryview]]:
    """Return the entry of a step that is closed, and its segments."""

    def build(names: LogNames) -> CloseStep:
        sets: list[tuple[int, Any]] = []
        numbers: list[int] = []
        for part in along:
            if part is None or not len(part.body):
                numbers.append(-1)
                continue
            number, members = names.of_set(part.known.keys)
            numbers.append(number)
            if members is not None:
                sets.append((number, members))
        config = dict(raw) if names.is_new(message.group) else None
        return replace(message, config=config, sets=sets, along=numbers, ahead=[])

    return build, [part.body for part in along if part is not None and len(part.body)]


def entries_of_snapshot(
    groups: Mapping[int, Raw],
    steps: Mapping[int, int],
    raised: Callable[[int], int],
    held: Iterable[tuple[int, Replica, int, int, Part]],
    counted: Iterable[tuple[int, int, Contribution]],
    spread: Container[int],
) -> list[tuple[Client, Build, Sequence[memoryview]]]:
    """Return (client, message, segments) of what a snapshot of a ps does not have.

    Args:
        groups: All groups that the ps knows.
        steps: Present step of each that has closed one.
        raised: Returns the last step for which a group's global step was raised there, or -1.
        held: (group, replica, push, local step, part) of all parts that are there.
        counted: On ps 0, (group, step, push) of all that counts.
        spread: Groups that have a variable on several ps tasks.
    """
    state = SetSteps(
        [(group, dict(raw), steps.get(group, -1), raised(group)) for group, raw in groups.items()]
    )
    entries: list[tuple[Client, Build, Sequence[memoryview]]] = []
    entries.append((FROM_CLOSER, _as_it_is(state), ()))
    came: dict[tuple[int, Replica, int], Part] = {}
    for group, replica, push, local_step, part in held:
        if part.whole is not None:
            came[group, replica, push] = part
            continue
        rows = None if part.rows is None else list(part.rows)
        message = StagePush(group, None, push, local_step, 0, None, rows)
        body = (part.body,) if len(part.body) else ()
        entries.append((replica, staged_entry(part, message, groups[group]), body))
    for group, step, contribution in counted:
        known = came.get((group, contribution.replica, contribution.number))
        build, segments = counted_entry(
            group, step, contribution, known, groups[group], spread=group in spread
        )
        entries.append((contribution.replica, build, segments))
    return entries


def _as_it_is(message: Message) -> Build:
    return lambda _: message
