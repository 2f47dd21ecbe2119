"""Rules without a safeguard do what the safeguard forbids; what trains is not changed by them."""

from __future__ import annotations

import pytest

from psync.errors import FencedError
from psync.store.ledger import Ledger
from psync.testing.sabotage import SabotagedParts
from psync.testing.sabotage.weakened_rules import WeakLedger

WORKER = "/job:worker/task:0"


def ledger_without(*names: str) -> Ledger:
    return SabotagedParts(without=frozenset(names)).of(Ledger)()


def begin(
    ledger: Ledger, incarnation: int, sequence: int, closure: int | None = None, acked: int = 1
) -> str:
    ticket = ledger.judge((WORKER, incarnation), sequence, acked, closure, 0, 1)
    if ticket.recorded:
        return "a repetition"
    ledger.record(ticket, "answer")
    return "fresh" if ticket.first else "another run"


@pytest.mark.promise("updates.tests-notice")
def test_without_dedup_repetitions_and_second_runs_are_applied_again() -> None:
    whole, weak = ledger_without(), ledger_without("dedup")
    for ledger, again in ((whole, "a repetition"), (weak, "fresh")):
        assert begin(ledger, 1, 1, closure=5) == "fresh"
        assert begin(ledger, 1, 1, closure=5) == again
        other = begin(ledger, 2, 1, closure=5)
        assert other == ("another run" if ledger is whole else "fresh")
    assert weak.is_settled((WORKER, 1), 99), "cuts do not wait for what is not remembered"


@pytest.mark.promise("updates.none-from-before-rollback")
def test_without_the_timeline_only_a_roll_back_fences_nobody() -> None:
    whole, weak = ledger_without(), ledger_without("timeline")
    for ledger in (whole, weak):
        begin(ledger, 2, 1, closure=4)
        if isinstance(ledger, WeakLedger):
            ledger.went_back([(WORKER, 4)])
        ledger.fence(WORKER, 4)
        begin(ledger, 4, 1, closure=6)
    with pytest.raises(FencedError):
        begin(whole, 3, 1, closure=5)
    assert begin(weak, 3, 1, closure=5) == "fresh", "of after the snapshot"
    assert begin(weak, 3, 1, closure=5) == "a repetition", "messages are still known"
    assert begin(weak, 2, 7, closure=4) == "another run", "and so are calls"
    weak.fence(WORKER, 6)
    with pytest.raises(FencedError):
        begin(weak, 4, 2, closure=8)
