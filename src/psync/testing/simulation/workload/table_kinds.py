"""The kinds of tables of a simulated program, and which of them a plan has."""

from __future__ import annotations

from psync.testing.simulation.plan import Plan
from psync.testing.simulation.workload.data_tables import Uneven, Visited
from psync.testing.simulation.workload.hand_tables import Ganged, Held
from psync.testing.simulation.workload.replayed_tables import Averaged, Metered, Moved, Spread
from psync.testing.simulation.workload.sync_tables import Synchronous
from psync.testing.simulation.workload.tables import (
    SPARE,
    Added,
    Both,
    Counted,
    Dense,
    Rows,
    Scattered,
    Table,
)

KINDS: dict[str, type[Table]] = {
    "added": Added, "averaged": Averaged, "both": Both, "counted": Counted, "dense": Dense,
    "ganged": Ganged, "held": Held, "metered": Metered, "moved": Moved, "rows": Rows,
    "scattered": Scattered, "spread": Spread, "sync": Synchronous, "uneven": Uneven,
    "visited": Visited,
}  # fmt: skip
"""Of tables, by their names without numbers."""

WORKS_COLUMNS = 40
"""Of tables that no call changes, without spare ones."""


def tables_of(plan: Plan) -> dict[str, Table]:
    """Return the tables that the closures of a plan change."""
    columns: dict[str, int] = {}
    for batch in plan.batches:
        for closure in batch.closures:
            for call in closure.calls:
                columns[call.kind] = max(columns.get(call.kind, 0), call.column + 1)
    columns |= {name: WORKS_COLUMNS for name in plan.works}
    return {
        name: KINDS[name.rstrip("0123456789")](name, plan, count + SPARE)
        for name, count in sorted(columns.items())
    }
