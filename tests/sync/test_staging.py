from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.numerics.rules import SGD
from psync.store.sync_config import SyncConfig
from psync.sync.staging import BUDGET_VARIABLE, Staging
from psync.sync.steps import Replica
from psync.wire.limits import Limits

TASK = "/job:ps/task:1"
A: Replica = ("/job:worker/task:0", 1)
B: Replica = ("/job:worker/task:1", 1)
BUDGET = 100


def config_of(needed: int = 2, total: int = 2) -> SyncConfig:
    return SyncConfig(
        name="sync",
        optimizer=SGD(0.5).to_config(),
        replicas_to_aggregate=needed,
        total_num_replicas=total,
        global_step=(0, 0, 0),
    )


@dataclass
class Part:
    """A part of a push."""

    key: tuple[int, Replica, int]
    local_step: int
    nbytes: int


@pytest.fixture
def staging() -> Staging:
    return Staging(BUDGET, TASK)


def put(
    staging: Staging, replica: Replica, push: int, local_step: int = -1, nbytes: int = 10
) -> bool:
    """Announce a part of group 7 and let it arrive."""
    reserve(staging, replica, push, local_step, nbytes)
    return arrive(staging, replica, push, local_step, nbytes)


def reserve(
    staging: Staging, replica: Replica, push: int, local_step: int = -1, nbytes: int = 10
) -> None:
    staging.reserve((7, replica, push), local_step, nbytes, config_of())


def arrive(
    staging: Staging, replica: Replica, push: int, local_step: int = -1, nbytes: int = 10
) -> bool:
    return staging.stage(Part((7, replica, push), local_step, nbytes))


def named(*pushes: tuple[Replica, int]) -> list[tuple[str, int, int, float]]:
    """As a closing names them."""
    return [(task, incarnation, push, 1.0) for (task, incarnation), push in pushes]


def of_step(staging: Staging, *pushes: tuple[Replica, int]) -> list[tuple[Replica, int]]:
    """Whose parts of group 7 a step has which names these."""
    return [part.key[1:] for part, _ in staging.parts(7, named(*pushes))]


def end(staging: Staging, step: int, *pushes: tuple[Replica, int], group: int = 7) -> None:
    """Close a step, and apply it."""
    staging.applied(group, step, staging.close(group, step, named(*pushes)))


class TestAStep:
    def test_parts_count_until_the_step_is_applied(self, staging: Staging) -> None:
        put(staging, A, 1)
        put(staging, B, 1)
        assert staging.close(7, 0, named((A, 1))) == 20
        statistics = staging.statistics()
        assert (statistics["parts"], statistics["bytes"]) == (0, 20)
        staging.applied(7, 0, 20)
        statistics = staging.statistics()
        assert statistics == {
            "parts": 0, "bytes": 0, "peak_bytes": 20, "budget_bytes": BUDGET, "staged": 2,
            "stale": 0,
        }  # fmt: skip

    def test_has_the_parts_that_are_here_in_the_order_of_its_pushes(self, staging: Staging) -> None:
        put(staging, B, 4)
        put(staging, A, 1)
        pushes = [(*A, 1, 2.0), (*B, 4, 0.5), (*B, 5, 1.0)]
        parts = [(part.key[1:], weight) for part, weight in staging.parts(7, pushes)]
        assert parts == [((A, 1), 2.0), ((B, 4), 0.5)]
        assert (7, B, 4) in [part.key for part in staging.held()]

    def test_leaves_the_parts_of_the_next_step(self, staging: Staging) -> None:
        end(staging, 0)
        put(staging, A, 1, local_step=1)
        put(staging, A, 2, local_step=2)
        reserve(staging, B, 1, local_step=2, nbytes=5)
        end(staging, 1)
        assert [part.key for part in staging.held()] == [(7, A, 2)]
        assert staging.statistics()["bytes"] == 15


class TestAPartThatIsRefused:
    def test_gives_its_memory_back(self, staging: Staging) -> None:
        reserve(staging, A, 1)
        staging.give_back((7, A, 1))
        staging.give_back((7, A, 1))  # again
        staging.give_back((8, A, 1))  # of a group that nobody knows
        assert staging.statistics()["bytes"] == 0

    def test_with_its_group_the_others_go_too(self, staging: Staging) -> None:
        put(staging, A, 1)
        reserve(staging, B, 1, nbytes=5)
        for group in (7, 8):
            staging.drop(group)
        assert staging.held() == []
        assert staging.statistics()["bytes"] == 5  # it comes, and is refused
        staging.give_back((7, B, 1))
        assert staging.statistics()["bytes"] == 0


class TestStale:
    def test_a_part_whose_step_is_closed_while_it_comes_in_is_not_kept(
        self, staging: Staging
    ) -> None:
        reserve(staging, A, 1, 0)
        end(staging, 0)
        assert not arrive(staging, A, 1, 0)
        statistics = staging.statistics()
        assert (statistics["bytes"], statistics["stale"]) == (0, 1)


class TestRepetition:
    def test_of_another_size_replaces_a_part_that_has_not_come(self, staging: Staging) -> None:
        for nbytes in (10, 30, 20):
            reserve(staging, A, 1, nbytes=nbytes)
            assert staging.statistics()["bytes"] == nbytes

    def test_of_another_size_is_refused_once_the_part_is_here(self, staging: Staging) -> None:
        put(staging, A, 1, nbytes=10)  # it may be counted by now
        with pytest.raises(RemoteProtocolError, match="has come with 10 bytes"):
            reserve(staging, A, 1, nbytes=30)
        assert of_step(staging, (A, 1)) == [(A, 1)]

    def test_of_the_same_size_changes_nothing(self, staging: Staging) -> None:
        put(staging, A, 1)
        (first,) = staging.held()
        assert put(staging, A, 1)
        assert staging.held() == [first]
        assert staging.statistics()["bytes"] == 10

    def test_can_be_held_in_other_memory(self, staging: Staging) -> None:
        put(staging, A, 1)
        owned = Part((7, A, 1), -1, 10)
        for key in ((7, A, 1), (7, A, 9), (8, A, 1)):
            staging.replace(key, lambda _: owned)
        assert staging.held() == [owned]
        assert staging.held()[0] is owned

    def test_of_a_step_far_ahead_is_refused(self, staging: Staging) -> None:
        end(staging, 4)
        assert put(staging, A, 1, local_step=6)
        with pytest.raises(RemoteProtocolError, match="of step 7, and the step is 5"):
            put(staging, A, 2, local_step=7)


@pytest.mark.promise("input.peers-bounded")
class TestBudget:
    def test_is_set_by_the_variable_that_the_hints_name(self) -> None:
        limits = {f"PSYNC_LIMIT_{field.name.upper()}" for field in dataclasses.fields(Limits)}
        assert BUDGET_VARIABLE in limits

    def test_a_step_that_cannot_fit_is_refused_at_its_first_push(self, staging: Staging) -> None:
        reserve(staging, A, 1, nbytes=33)  # and two more: 99 bytes
        with pytest.raises(ConfigurationError) as caught:
            reserve(staging, A, 2, nbytes=34)
        assert str(caught.value) == (
            "sync on /job:ps/task:1: a step may need 3 pushes of 34 bytes (102 bytes) at the same "
            "time, but the budget is 100 bytes\n"
            "hint: set PSYNC_LIMIT_STAGING_BYTES=102 or more on the ps tasks, or spread the "
            "variables over more of them"
        )
        assert staging.statistics()["bytes"] == 33

    @pytest.mark.parametrize(("needed", "total"), [(4, 2), (2, 4), (1, 4)])
    def test_a_step_needs_a_part_for_each_token_and_one_more(
        self, staging: Staging, needed: int, total: int
    ) -> None:
        staging.reserve((7, A, 1), -1, 20, config_of(needed, total))
        with pytest.raises(ConfigurationError, match=r"5 pushes of 21 bytes \(105 bytes\)"):
            staging.reserve((7, B, 1), -1, 21, config_of(needed, total))

    def test_a_part_that_grows_needs_the_difference(self, staging: Staging) -> None:
        for push in (1, 2):
            put(staging, A, push, nbytes=30)
        for nbytes in (30, 32):
            reserve(staging, A, 3, nbytes=nbytes)
        put(staging, A, 4, nbytes=8)
        with pytest.raises(ConfigurationError, match="100 of 100 bytes"):
            reserve(staging, A, 3, nbytes=33)
        assert put(staging, A, 3, nbytes=32)  # what it had stays


@dataclass
class Known(Part):
    """What the model believes of one part."""

    complete: bool = False
    counted: bool = False


class Steps(RuleBasedStateMachine):
    """Two groups, two workers that die, and a ps 0 that counts any of the parts that are whole."""

    @initialize()
    def begin(self) -> None:
        self.staging: Staging = Staging(BUDGET, TASK)
        self.parts: list[Known] = []
        self.steps = {0: -1, 1: -1}  # -1: none was closed yet
        self.being_applied: list[tuple[int, int, int]] = []  # (group, step, bytes)
        self.applied = {0: -1, 1: -1}
        self.incarnations = [1, 1]
        self.pushes = 0

    @rule(
        group=st.integers(0, 1),
        worker=st.integers(0, 1),
        age=st.integers(-1, 2),
        nbytes=st.sampled_from([0, 10, 20, 33]),
    )
    def announce(self, group: int, worker: int, age: int, nbytes: int) -> None:
        replica = (f"/job:worker/task:{worker}", self.incarnations[worker])
        self.pushes += 1
        key = (group, replica, self.pushes)
        part = Known(key, max(self.steps[group] - age, -1), nbytes)
        expected = part.local_step >= self.steps[group]
        total = self.staging.statistics()["bytes"]
        try:
            self.reserve(part)
        except ConfigurationError:
            assert total + nbytes > BUDGET
            assert expected
        else:
            if expected:
                assert total + nbytes <= BUDGET
                self.parts.append(part)
            else:
                assert not self.staging.stage(part)

    @precondition(lambda self: self.parts)
    @rule(which=st.integers(0, 1000), announce=st.booleans())
    def arrive(self, which: int, announce: bool) -> None:
        """For the first time, or again after a lost connection."""
        part = self.parts[which % len(self.parts)]
        if announce:
            self.reserve(part)
        assert self.staging.stage(part)
        part.complete = True

    @precondition(lambda self: any(part.complete for part in self.parts))
    @rule(which=st.integers(0, 1000))
    def count(self, which: int) -> None:
        whole = [part for part in self.parts if part.complete]
        whole[which % len(whole)].counted = True

    @rule(group=st.integers(0, 1), early=st.booleans())
    def close(self, group: int, early: bool) -> None:
        """Close the step with all that were counted and are of it."""
        step = max(self.steps[group], 0)
        counted = [
            part
            for part in self.parts
            if part.key[0] == group and part.counted and (early or part.local_step <= step)
        ]
        pushes = named(*(part.key[1:] for part in counted), (A, 0))  # of which nothing is here
        assert self.staging.parts(group, pushes) == [(part, 1.0) for part in counted]
        self.being_applied.append((group, step, self.staging.close(group, step, pushes)))
        self.steps[group] = step + 1
        self.parts = [
            part
            for part in self.parts
            if part.key[0] != group or (part.local_step > step and part not in counted)
        ]

    @precondition(lambda self: self.being_applied)
    @rule(which=st.integers(0, 1000))
    def apply(self, which: int) -> None:
        group, step, nbytes = self.being_applied.pop(which % len(self.being_applied))
        self.staging.applied(group, step, nbytes)
        self.applied[group] = max(self.applied[group], step + 1)

    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        self.incarnations[worker] += 1
        task = f"/job:worker/task:{worker}"
        self.staging.fence(task, self.incarnations[worker])
        self.parts = [part for part in self.parts if part.key[1][0] != task or part.complete]

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        statistics = self.staging.statistics()
        assert statistics["parts"] == len(self.parts)
        held = sum(part.nbytes for part in self.parts)
        applied = sum(nbytes for *_, nbytes in self.being_applied)
        assert statistics["bytes"] == held + applied <= BUDGET
        for group, step in self.steps.items():
            assert self.staging.step(group) == (step if step >= 0 else None)
            closed = [self.staging.is_closed(group, each) for each in range(step + 3)]
            assert closed == [each < step for each in range(step + 3)]
        applied = {group: step for group, step in self.applied.items() if step >= 0}
        assert dict(self.staging.steps) == applied

    def reserve(self, part: Known) -> None:
        self.staging.reserve(part.key, part.local_step, part.nbytes, config_of())


TestAnyOrder = Steps.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestABackup:
    def test_what_another_one_has_kept_is_kept_without_a_question(self, staging: Staging) -> None:
        staging.fence(A[0], A[1] + 1)
        assert staging.stage(part := Part((7, A, 1), 3, BUDGET + 1))
        assert staging.held() == [part]
        assert staging.statistics()["bytes"] == BUDGET + 1
        end(staging, 3)
        assert (staging.held(), staging.statistics()["bytes"]) == ([], 0)

    def test_what_is_still_coming_in_is_not_held(self, staging: Staging) -> None:
        reserve(staging, A, 1)
        put(staging, B, 1)
        assert staging.held() == [Part((7, B, 1), -1, 10)]
