"""Log entries of synchronous steps, from a primary to its backup.

    entry      says
    StagePush  a part of a push is here
    CountPush  on ps 0: a push is to be judged, with what came along
    CloseStep  a step is closed, with the parts that ps 0 has handed on; the others are here
    others     the table of ``step_closer``

and, of a snapshot that the log goes on from, the parts that are staged and the state of the rule. A
log names sets, and groups, by numbers of its own (``LogNames``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgpack

from psync.numerics.memory import bytes_of
from psync.ps.executor import Build, Listed
from psync.store.commit_log import LogNames
from psync.store.ledger import Client
from psync.sync.groups import CLOSER
from psync.sync.pushes import Contribution
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.messages import (
    CloseStep,
    Contribute,
    CountPush,
    HoldPush,
    NormsMeasured,
    SetGroups,
    StagePush,
)
from psync.wire.tensors import to_bytes_view

FROM_CLOSER: Client = (CLOSER, 0)
"""In place of a client: the log says what ps 0 has decided, whoever that is now."""

Raw = Mapping[str, Any]
"""The configuration of a group, as it came."""


def staged_entry(part: Part, message: StagePush, raw: Raw) -> Build:
    """Return the entry of a part that has come in."""

    def build(names: LogNames) -> StagePush:
        number, members = names.of_set(part.known.members)
        config = dict(raw) if names.is_new(message.group) else None
        return replace(message, config=config, set_id=number, members=members)

    return build


def push_of(message: Contribute | CountPush, replica: Replica) -> Contribution:
    """Return a push as the rule of steps takes it."""
    return Contribution(
        replica, message.push, message.acked_below,
        message.closure if message.closure >= 0 else None, message.ordinal, message.variable_set,
        message.local_step, message.weight,
    )  # fmt: skip


def counted_entry(message: Contribute, part: Part | None) -> Build:
    """Return the entry of a push, with what has come along; None: nothing."""

    def build(names: LogNames) -> CountPush:
        number, members, lengths, rows = _along(part, names)
        return CountPush(
            message.group, message.push, message.acked_below, message.closure, message.ordinal,
            message.variable_set, message.local_step, message.weight, number, members, lengths,
            rows, message.spread,
        )  # fmt: skip

    return build


def _along(part: Part | None, names: LogNames) -> tuple[int, Any, list[int], Any]:
    """Return (set, members, lengths, rows) of what has come along with a push."""
    if part is None or part.whole is None:
        return -1, None, [], None
    number, members = names.of_whole(part.whole.members)
    rows = None if part.rows is None else list(part.rows)
    return number, members, list(part.whole.lengths), rows


def body_of(part: Part | None) -> Sequence[memoryview]:
    """Return the segments of an entry with a part."""
    return () if part is None else part.body


def closing_entry(
    message: CloseStep, raw: Raw, along: Sequence[Part | None]
) -> tuple[Build, Sequence[memoryview]]:
    """Return the entry of a step that is closed, and its segments."""

    def build(names: LogNames) -> CloseStep:
        sets: list[tuple[int, Any]] = []
        numbers: list[int] = []
        for part in along:
            if part is None or not part.body:
                numbers.append(-1)
                continue
            number, members = names.of_set(part.known.members)
            numbers.append(number)
            if members is not None:
                sets.append((number, members))
        config = dict(raw) if names.is_new(message.group) else None
        return replace(message, config=config, sets=sets, along=numbers, ahead=[])

    return build, [part.body[0] for part in along if part is not None and part.body]


def entries_of_snapshot(
    groups: Mapping[int, Raw],
    steps: Mapping[int, int],
    spread: Iterable[int],
    held: Iterable[tuple[int, Replica, int, int, Part]],
    rule: Mapping[str, Any] | None,
    measured: Iterable[NormsMeasured] = (),
) -> list[Listed]:
    """Return the entries that give a backup what a snapshot does not have; groups it has.

    Args:
        groups: All groups that the ps knows.
        steps: Present step of each that has closed one.
        spread: Groups that have a variable on several ps tasks.
        held: (group, replica, push, local step, part) of all parts that are there.
        rule: On ps 0, ``SyncSteps.snapshot``. No step is on its way, but some may be decided: of
            what belongs to others of their pushes the parts are there before this.
        measured: On ps 0, of steps that are decided.
    """
    state = SetGroups(
        [(group, dict(raw), steps.get(group, -1)) for group, raw in groups.items()], list(spread)
    )
    packed = () if rule is None else (to_bytes_view(bytes_of(msgpack.packb(rule))),)
    entries: list[Listed] = [
        (replica, _holding(group, push, local_step, part), body_of(part))
        for group, replica, push, local_step, part in held
    ]
    entries.append((FROM_CLOSER, state, packed))
    entries += [(FROM_CLOSER, message, ()) for message in measured]
    return entries


def _holding(group: int, push: int, local_step: int, part: Part) -> Build:
    def build(names: LogNames) -> Message:
        rows = None if part.rows is None else list(part.rows)
        if part.whole is not None:
            members, lengths = part.whole.members, list(part.whole.lengths)
            number, _ = names.of_whole(members)
        else:
            members, lengths = tuple((0, *member) for member in part.known.members), []
            number, _ = names.of_set(part.known.members)
        whole = part.whole is not None
        return HoldPush(group, push, local_step, number, list(members), whole, lengths, rows)

    return build
