"""What a backup gets of synchronous steps, in front of the log of its primary.

The entries of the log itself are the messages as they came, and those of the table in
``step_closer``. A snapshot has the groups; this has the parts that are staged, and the state of the
rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from psync.numerics.memory import bytes_of
from psync.ps.executor import Listed
from psync.store.ledger import Client
from psync.sync.groups import CLOSER
from psync.sync.pushes import Contribution
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.messages import (
    Contribute,
    HoldPush,
    NormsMeasured,
    SetGroups,
)
from psync.wire.tensors import to_bytes_view

FROM_CLOSER: Client = (CLOSER, 0)
"""In place of a client: the log says what ps 0 has decided, whoever that is now."""

Raw = Mapping[str, Any]
"""The configuration of a group, as it came."""


def push_of(message: Contribute, replica: Replica) -> Contribution:
    """Return a push as the rule of steps takes it."""
    return Contribution(
        replica, message.push, message.acked_below,
        message.closure if message.closure >= 0 else None, message.ordinal, message.variable_set,
        message.local_step, message.weight,
    )  # fmt: skip


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
    entries: list[Listed] = []
    for group, replica, push, local_step, part in held:
        plan = part.known if part.whole is None else part.whole
        rows = None if part.rows is None else list(part.rows)
        is_whole = part.whole is not None
        holding = HoldPush(group, push, local_step, plan.number, is_whole, rows)
        # The plan may have gone, as its client defines others now.
        entries += [(replica, plan.header, ()), (replica, holding, part.body)]
    entries.append((FROM_CLOSER, state, packed))
    entries += [(FROM_CLOSER, message, ()) for message in measured]
    return entries
