"""Every shard of every epoch is done exactly once, whatever becomes of its runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.closures.shard_epochs import EpochAccount, Visitation
from psync.errors import ConfigurationError, LocalProtocolError


def do(visitation: Visitation, *shards: int) -> None:
    for shard in shards:
        visitation.finish(shard, visitation.epoch)


def through_json(visitation: Visitation) -> Any:
    return json.loads(json.dumps(visitation.state()))


def test_an_epoch_begins_when_all_shards_of_the_last_one_are_done() -> None:
    visitation = Visitation(3, 2)
    assert visitation.pending() == [0, 1, 2]
    assert visitation.pending({(0, 1)}) == [0, 2]
    do(visitation, 0, 2)
    assert (visitation.epoch, visitation.pending({(0, 1)})) == (0, [])
    do(visitation, 1)
    assert (visitation.epoch, visitation.pending()) == (1, [0, 1, 2])
    do(visitation, 2, 1, 0)
    assert visitation.is_over
    assert visitation.pending() == []
    assert [account.is_complete for account in visitation.account()] == [True, True]


def test_a_shard_that_was_lost_or_failed_is_done_once_and_its_runs_are_counted() -> None:
    visitation = Visitation(4)
    for shard in (1, 1, 2):
        visitation.lose(shard, 0)
    assert visitation.pending({(0, 0), (0, 1)}) == [2, 3]
    (account,) = visitation.account()
    assert account == EpochAccount(0, 4, (0, 1, 2, 3), {1: 2, 2: 1})
    assert account.restarted == {}
    do(visitation, 1, 2)
    (account,) = visitation.account()
    assert (account.num_done, account.undone, account.is_complete) == (2, (0, 3), False)
    assert account.restarted == {1: 3, 2: 2}
    assert str(account) == "epoch 0: 2 of 4 shards done, restarted: 1 (3 runs), 2 (2 runs)"
    do(visitation, 0, 3)
    (account,) = visitation.account()
    assert (account.undone, account.restarted) == ((), {1: 3, 2: 2})
    assert str(Visitation(2).account()[0]) == "epoch 0: 0 of 2 shards done"


def test_what_is_undone_when_all_was_done_is_not_over() -> None:
    visitation = Visitation(1)
    do(visitation, 0)
    visitation.undo(0, 0)
    assert not visitation.is_over
    assert repr(visitation) == "<visitation: epoch 0 of 1, 0 of 1 shards done>"
    do(visitation, 0)
    assert visitation.is_over
    assert Visitation(1, state=through_json(visitation)).account() == visitation.account()


def test_a_seed_orders_each_epoch_anew_and_every_program_alike() -> None:
    one, two = Visitation(50, 2, shuffle_seed=7), Visitation(50, 2, shuffle_seed=7)
    first = one.pending()
    assert first == two.pending() != list(range(50))
    assert sorted(first) == list(range(50))
    do(one, *first)
    assert one.pending() != first


def test_a_move_that_cannot_be_is_a_bug() -> None:
    visitation = Visitation(2)
    do(visitation, 0)
    for act in (lambda: visitation.finish(0, 0), lambda: visitation.undo(1, 0)):
        with pytest.raises(LocalProtocolError, match="shard"):
            act()


def test_what_was_over_stays_over_and_more_epochs_may_follow() -> None:
    visitation = Visitation(2)
    do(visitation, 0, 1)
    state = through_json(visitation)
    assert Visitation(2, state=state).is_over
    assert Visitation(2, state=state).account() == visitation.account()
    more = Visitation(2, 3, state=state)
    assert (more.epoch, more.pending()) == (1, [0, 1])


def test_a_status_line_says_how_far_it_is() -> None:
    visitation = Visitation(3, 2)
    do(visitation, 0)
    assert repr(visitation) == "<visitation: epoch 0 of 2, 1 of 3 shards done>"
    done = Visitation(1)
    do(done, 0)
    assert repr(done) == "<visitation: 1 epochs of 1 shards, all done>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, r"^num_shards: expected an integer of at least 1, got 0$"),
        ({"num_epochs": 0}, r"^num_epochs: expected an integer of at least 1, got 0$"),
        ({"num_epochs": True}, r"^num_epochs: expected an integer of at least 1, got True$"),
        ({"num_epochs": None}, r"^num_epochs: expected an integer of at least 1, got None$"),
        ({"shuffle_seed": -1}, r"^shuffle_seed: expected an integer of at least 0, got -1$"),
        ({"shuffle_seed": 0.5}, r"^shuffle_seed: expected an integer of at least 0, got 0.5$"),
    ],
)
def test_a_number_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Visitation(**{"num_shards": 3, **options})


GOOD = Visitation(3).state()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], r"^state: expected a result of state\(\), version 1, got list of version None$"),
        ({**GOOD, "version": 2}, "got dict of version 2$"),
        (
            {**GOOD, "num_shards": 4},
            "^state: expected a state of 3 shards, .* got one of 4\nhint: pa",
        ),
        ({**GOOD, "done": None}, r"^state: expected a result of state\(\), got {'version'"),
        ({"version": 1, "num_shards": 3}, r"^state: expected a result of state\(\), got {'ver"),
        ({**GOOD, "done": [3]}, r"^state: expected shards 0 to 2, got \[3\]$"),
        ({**GOOD, "unfinished": [[-1, 2]]}, r"^state: expected shards 0 to 2, got \[-1\]$"),
        ({**GOOD, "unfinished": [[1, -2]]}, "^state: expected numbers of runs from 0, got -2$"),
        ({**GOOD, "past": [[[0, -1]]]}, "^state: expected numbers of runs from 0, got -1$"),
        ({**GOOD, "past": [[], [], []]}, "^state: expected at most 2 epochs .num_epochs., got 3$"),
        ({**GOOD, "past": [[], []], "done": [0]}, "expected at most 2 epochs .* got 3$"),
    ],
)
def test_what_is_no_state_of_these_shards_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Visitation(3, 2, state=state)


class Machine(RuleBasedStateMachine):
    """Runs of shards that end in every way and order, and programs that go on from a state."""

    @initialize(
        num_shards=st.integers(1, 5),
        num_epochs=st.integers(1, 3),
        seed=st.none() | st.integers(0, 3),
    )
    def begin(self, num_shards: int, num_epochs: int, seed: int | None) -> None:
        self.options: dict[str, Any] = {"num_epochs": num_epochs, "shuffle_seed": seed}
        self.visitation = Visitation(num_shards, **self.options)
        self.running: set[tuple[int, int]] = set()  # (epoch, shard)
        self.finished: dict[tuple[int, int], int] = {}  # (epoch, shard) → times it was done
        self.runs: dict[tuple[int, int], int] = {}  # that have not finished it

    def some_running(self, data: st.DataObject) -> tuple[int, tuple[int, int]]:
        key = data.draw(st.sampled_from(sorted(self.running)))
        return key[1], key

    @precondition(lambda self: self.visitation.pending(self.running))
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.visitation.pending(self.running)))
        key = (self.visitation.epoch, shard)
        assert key not in self.running
        assert key not in self.finished
        self.running.add(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        shard, key = self.some_running(data)
        self.visitation.lose(shard, key[0])
        self.runs[key] = self.runs.get(key, 0) + 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), begun=st.booleans())
    def put_back(self, data: st.DataObject, begun: bool) -> None:
        shard, key = self.some_running(data)
        self.running.remove(key)
        if begun:
            self.visitation.lose(shard, key[0])
            self.runs[key] = self.runs.get(key, 0) + 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        shard, key = self.some_running(data)
        self.visitation.finish(shard, key[0])
        self.running.remove(key)
        self.finished[key] = self.finished.get(key, 0) + 1

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.finished)))
        self.visitation.undo(key[1], key[0])
        del self.finished[key]
        self.runs[key] = self.runs.get(key, 0) + 1

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.visitation.state(self.running)))
        for key in self.running:
            self.runs[key] = self.runs.get(key, 0) + 1
        self.running.clear()
        self.visitation = Visitation(self.visitation.num_shards, state=state, **self.options)

    @invariant()
    def nothing_is_done_twice_and_epochs_do_not_overlap(self) -> None:
        visitation = self.visitation
        assert set(self.finished.values()) <= {1}
        accounts = visitation.account()
        assert [account.epoch for account in accounts] == list(range(len(accounts)))
        for account in accounts:
            shards = range(account.num_shards)
            undone = {s for s in shards if (account.epoch, s) not in self.finished}
            assert set(account.undone) == undone
            assert account.is_complete == (not undone)
            assert not undone or account.epoch >= visitation.epoch
            expected = {
                shard: self.runs[account.epoch, shard] + (shard not in undone)
                for shard in shards
                if (account.epoch, shard) in self.runs
            }
            assert account.runs == expected
        if not visitation.is_over:
            epoch = visitation.epoch
            assert accounts[epoch].undone
            running = {shard for of, shard in self.running if of == epoch}
            assert set(visitation.pending(self.running)) == set(accounts[epoch].undone) - running

    def teardown(self) -> None:
        """Whatever has happened, what is left can be done, and then all is done once."""
        visitation = self.visitation
        for epoch, shard in sorted(self.running):
            self.finished[epoch, shard] = 1
            visitation.finish(shard, epoch)
        while not visitation.is_over:
            for shard in visitation.pending():
                key = (visitation.epoch, shard)
                assert key not in self.finished
                self.finished[key] = 1
                do(visitation, shard)
        assert len(self.finished) == visitation.num_epochs * visitation.num_shards
        assert all(account.is_complete for account in visitation.account())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
