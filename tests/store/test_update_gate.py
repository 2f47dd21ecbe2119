"""The gate of a ps: what waits while a cut is taken, and what is let through."""

from __future__ import annotations

from psync.store.ledger import Fresh, Ledger
from psync.store.update_gate import UpdateGate

W0, W1 = ("/job:worker/task:0", 5), ("/job:worker/task:1", 5)
CLOSER = ("/job:ps/task:0", 9)


def judged(ledger: Ledger, client: tuple[str, int], sequence: int) -> None:
    verdict = ledger.judge(client, sequence, 0, None, 0, 1)
    assert isinstance(verdict, Fresh)
    ledger.record(verdict, "accepted")


def test_a_shut_gate_holds_what_is_new_and_lets_pass_what_was_judged_and_ps_0() -> None:
    ledger = Ledger()
    gate = UpdateGate(ledger, CLOSER[0])
    judged(ledger, W0, 1)
    gate.shut(3)
    assert gate.cut == 3
    assert not gate.holds(W0, 1)  # a repetition
    assert gate.holds(W0, 2)
    assert gate.holds(W1, 1)
    assert not gate.holds(CLOSER, 1)


def test_admitted_messages_pass_until_the_gate_is_opened() -> None:
    gate = UpdateGate(Ledger(), CLOSER[0])
    gate.shut(3)
    assert gate.admit(3, [(W0, 2)])
    assert not gate.holds(W0, 2)
    assert gate.holds(W0, 3)
    assert gate.open(3)
    assert not gate.holds(W0, 3)
    gate.shut(4)
    assert gate.holds(W0, 2)  # that was for the cut before


def test_only_the_present_cut_admits_and_opens() -> None:
    gate = UpdateGate(Ledger(), CLOSER[0])
    gate.shut(3)
    gate.shut(2)  # it comes late
    assert gate.cut == 3
    assert not gate.admit(2, [(W0, 2)])
    assert not gate.open(2)
    assert gate.holds(W0, 2)
    gate.shut(4)
    assert not gate.open(3)


def test_a_cut_that_is_over_shuts_nothing() -> None:
    gate = UpdateGate(Ledger(), CLOSER[0])
    assert gate.shut(2)
    assert gate.shut(2)  # said again
    assert gate.open(2)
    assert not gate.open(3)  # faster than what would have shut it
    assert not gate.shut(3)
    assert not gate.holds(W0, 2)
    assert gate.shut(4)


def test_what_is_settled_is_not_waited_for() -> None:
    ledger = Ledger()
    gate = UpdateGate(ledger, CLOSER[0])
    judged(ledger, W0, 1)
    wanted = [(W0, 1), (W0, 2), (W0, 3)]
    assert gate.unsettled(wanted) == [(W0, 2), (W0, 3)]
    ledger.refuse(W0, 2)
    assert gate.unsettled(wanted) == [(W0, 3)]
    ledger.fence(W0[0], 6)
    assert gate.unsettled(wanted) == []


def test_what_waits_is_not_settled_although_its_client_is_replaced() -> None:
    ledger = Ledger()
    gate = UpdateGate(ledger, CLOSER[0])
    gate.waiting[W0, 2] += 1
    ledger.fence(W0[0], W0[1] + 1)
    assert gate.unsettled([(W0, 1), (W0, 2)]) == [(W0, 2)]
