"""Claims on shards: who holds, who waits, who is next. The gate: what waits, what passes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psync.errors import CutLost, LockLost
from psync.numerics.memory import BlockPool
from psync.ps.admission import Claim, PsLocks, UpdateGate
from psync.store.ledger import Ledger
from psync.store.store import ShardStore

A, B, C = (1, 0), (1, 1), (2, 0)


def locks() -> PsLocks:
    return PsLocks("/job:ps/task:0", ShardStore("/job:ps/task:0", BlockPool()))


def test_a_lock_waits_for_the_updates_under_way() -> None:
    table = locks()
    first, second = table.begin([A]), table.begin([B])
    lock = table.claim([A, B], exclusive=True)
    assert not lock.held
    table.end(first)
    assert not lock.held
    table.end(second)
    assert lock.held


def test_whoever_waits_holds_back_those_who_come_later() -> None:
    table = locks()
    under_way = table.begin([A])
    lock = table.claim([A, B], exclusive=True)
    late = table.claim([B], exclusive=False)
    assert not late.held  # else updates of B could keep the lock waiting for ever
    assert table.blocks([B])
    table.end(under_way)
    assert (lock.held, late.held) == (True, False)
    table.end(lock)
    assert late.held


def test_who_gives_up_waiting_is_in_nobodys_way() -> None:
    table = locks()
    held = table.claim([A], exclusive=True)
    given_up = table.claim([A, B], exclusive=True)
    later = table.claim([B], exclusive=False)
    table.end(given_up)
    assert later.held
    table.end(given_up)
    table.end(held)
    assert not table.blocks([A, B])


@pytest.mark.virtual_time
async def test_who_has_given_up_before_its_wait_begins_does_not_wait() -> None:
    table = locks()
    table.claim([A], exclusive=True)
    given_up = table.claim([A], exclusive=True)
    table.end(given_up)
    with pytest.raises(LockLost, match="cancelled while it waited"):
        await table.turn(given_up)


def test_work_that_belongs_to_a_claim_outlives_it() -> None:
    table = locks()
    update = table.claim([A], exclusive=False)
    lock = table.claim([A], exclusive=True)
    work = table.begin([A])  # of the update, which is answered for by its own claim
    table.end(update)
    assert not lock.held
    table.end(work)
    assert lock.held


class ClaimsMachine(RuleBasedStateMachine):
    """Whatever is claimed and given up in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = locks()
        self.claims: list[Claim] = []

    @rule(keys=st.sets(st.sampled_from([A, B, C]), min_size=1), exclusive=st.booleans())
    def claim(self, keys: set[tuple[int, int]], exclusive: bool) -> None:
        blocked = self.table.blocks(keys)
        claim = self.table.claim(keys, exclusive=exclusive)
        if not exclusive:
            assert claim.held is not blocked
        self.claims.append(claim)

    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        if self.claims:
            claim = self.claims.pop(which % len(self.claims))
            held = [other for other in self.claims if other.held]
            self.table.end(claim)
            assert all(other.held for other in held)

    @invariant()
    def a_lock_is_alone(self) -> None:
        held = [claim for claim in self.claims if claim.held]
        for claim in held:
            for other in held:
                if claim is not other and claim.exclusive:
                    assert claim.keys.isdisjoint(other.keys)

    @invariant()
    def the_first_has_what_it_wants(self) -> None:
        for index, claim in enumerate(self.claims):
            before = self.claims[:index]
            in_the_way = any(
                (claim.exclusive or other.exclusive) and not claim.keys.isdisjoint(other.keys)
                for other in before
            )
            if not in_the_way:
                assert claim.held


TestClaims = ClaimsMachine.TestCase
TestClaims.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# The gate.

W0, W1 = ("/job:worker/task:0", 5), ("/job:worker/task:1", 5)
CLOSER = ("/job:ps/task:0", 9)


def gate_of(ledger: Ledger) -> UpdateGate:
    return UpdateGate(
        CLOSER[0], ledger, CLOSER[0], lambda _: None, lambda: asyncio.sleep(0), lambda: None
    )


def judged(ledger: Ledger, client: tuple[str, int], sequence: int) -> None:
    ledger.record(ledger.judge(client, sequence, 0, None, 0, 1), "accepted")


def test_a_shut_gate_holds_what_is_new_and_lets_pass_what_was_judged_and_ps_0() -> None:
    ledger = Ledger()
    gate = gate_of(ledger)
    judged(ledger, W0, 1)
    gate.shut(3)
    assert gate.cut == 3
    assert not gate.holds(W0, 1)  # a repetition
    assert gate.holds(W0, 2)
    assert gate.holds(W1, 1)
    assert not gate.holds(CLOSER, 1)


def test_admitted_messages_pass_until_the_gate_is_opened() -> None:
    gate = gate_of(Ledger())
    gate.shut(3)
    gate.admit(3, [(W0, 2)])
    assert not gate.holds(W0, 2)
    assert gate.holds(W0, 3)
    assert gate.open(3)
    assert not gate.holds(W0, 3)
    gate.shut(4)
    assert gate.holds(W0, 2)  # that was for the cut before


def test_only_the_present_cut_admits_and_opens() -> None:
    gate = gate_of(Ledger())
    gate.shut(3)
    gate.shut(2)  # it comes late
    assert gate.cut == 3
    with pytest.raises(CutLost):
        gate.admit(2, [(W0, 2)])
    assert not gate.open(2)
    assert gate.holds(W0, 2)
    gate.shut(4)
    assert not gate.open(3)


def test_a_cut_that_is_over_shuts_nothing() -> None:
    gate = gate_of(Ledger())
    assert gate.shut(2)
    assert gate.shut(2)  # said again
    assert gate.open(2)
    assert not gate.open(3)  # faster than what would have shut it
    assert not gate.shut(3)
    assert not gate.holds(W0, 2)
    assert gate.shut(4)


def test_what_is_settled_is_not_waited_for() -> None:
    ledger = Ledger()
    gate = gate_of(ledger)
    judged(ledger, W0, 1)
    wanted = [(W0, 1), (W0, 2), (W0, 3)]
    assert gate.unsettled(wanted) == [(W0, 2), (W0, 3)]
    ledger.refuse(W0, 2)
    assert gate.unsettled(wanted) == [(W0, 3)]
    ledger.fence(W0[0], 6)
    assert gate.unsettled(wanted) == []


def test_what_waits_is_not_settled_although_its_client_is_replaced() -> None:
    ledger = Ledger()
    gate = gate_of(ledger)
    gate.held_back[W0, 2] += 1
    ledger.fence(W0[0], W0[1] + 1)
    assert gate.unsettled([(W0, 1), (W0, 2)]) == [(W0, 2)]
