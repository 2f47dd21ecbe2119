from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.errors import ConfigurationError, FencedError, RemoteProtocolError
from psync.numerics.update_rule import SGD
from psync.store.sync_config import SyncConfig
from psync.sync.staging import BUDGET_VARIABLE, Staging
from psync.sync.tokens import Replica
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


@pytest.fixture
def staging() -> Staging:
    return Staging(BUDGET, TASK)


def put(
    staging: Staging, replica: Replica, push: int, local_step: int = -1, nbytes: int = 10
) -> bool:
    """Announce a part of group 7 and let it arrive; the part is its own name."""
    return staging.check(7, replica, push, local_step, nbytes, config_of()) and staging.stage(
        7, replica, push, local_step, (replica, push)
    )


def named(*pushes: tuple[Replica, int]) -> list[tuple[str, int, int, float]]:
    """As a closing names them."""
    return [(task, incarnation, push, 1.0) for (task, incarnation), push in pushes]


def taken(staging: Staging, *pushes: tuple[Replica, int]) -> list[object]:
    """The parts of group 7 that a closing gets which names these."""
    return [part for part, _ in staging.take(7, 0, named(*pushes))]


class TestAStep:
    def test_parts_come_back_in_the_order_in_which_the_closing_names_them(
        self, staging: Staging
    ) -> None:
        assert put(staging, A, 1)
        assert put(staging, B, 4)
        pushes = [(*B, 4, 0.5), (*A, 1, 2.0)]
        assert staging.take(7, 0, pushes) == [((B, 4), 0.5), ((A, 1), 2.0)]

    def test_parts_count_until_the_step_is_closed(self, staging: Staging) -> None:
        put(staging, A, 1)
        put(staging, B, 1)
        staging.take(7, 0, named((A, 1)))
        assert staging.statistics().bytes == 20
        staging.closed(7, 0)
        statistics = staging.statistics()
        assert (statistics.parts, statistics.bytes, statistics.peak_bytes) == (0, 0, 20)
        assert (statistics.staged, statistics.stale, statistics.budget_bytes) == (2, 0, BUDGET)

    def test_a_part_may_be_looked_at_before(self, staging: Staging) -> None:
        put(staging, A, 1)
        assert staging.staged(7, A, 1) == (A, 1)
        assert staging.staged(7, A, 2) is None
        assert staging.staged(8, A, 1) is None

    def test_parts_that_come_with_the_closing_need_no_staging(self, staging: Staging) -> None:
        put(staging, B, 4)
        pushes = [(*A, 1, 2.0), (*B, 4, 0.5)]
        assert staging.take(7, 0, pushes, ["came along", None]) == [
            ("came along", 2.0), ((B, 4), 0.5),
        ]  # fmt: skip

    def test_what_belongs_to_a_later_step_stays(self, staging: Staging) -> None:
        put(staging, A, 1, local_step=5)  # its values are of a ps that has closed step 4
        staging.closed(7, 4)
        assert taken(staging, (A, 1)) == [(A, 1)]

    def test_what_was_counted_goes_with_the_step_whatever_its_local_step(
        self, staging: Staging
    ) -> None:
        put(staging, A, 1, local_step=5)
        staging.take(7, 4, named((A, 1)))
        staging.closed(7, 4)
        assert staging.statistics().parts == 0

    def test_groups_are_apart(self, staging: Staging) -> None:
        put(staging, A, 1)
        staging.closed(8, 3)
        assert taken(staging, (A, 1)) == [(A, 1)]
        assert (staging.step(7), staging.step(8)) == (None, 4)

    def test_a_push_without_variables_here_has_no_part(self, staging: Staging) -> None:
        assert taken(staging, (A, 1), (B, 1)) == []
        put(staging, B, 1)
        assert taken(staging, (A, 1), (B, 1)) == [(B, 1)]

    def test_a_group_without_variables_here_has_its_steps(self, staging: Staging) -> None:
        assert staging.step(7) is None
        staging.closed(7, 0)
        assert staging.step(7) == 1

    def test_a_closing_with_a_part_that_is_still_coming_in_is_an_error(
        self, staging: Staging
    ) -> None:
        put(staging, A, 1, local_step=9)
        staging.check(7, B, 2, -1, 10, config_of())
        with pytest.raises(RemoteProtocolError) as caught:
            staging.take(7, 3, named((A, 1), (B, 2)))
        assert str(caught.value) == (
            "/job:ps/task:1: step 3 of group 7 is to be closed with push 2 of /job:worker/task:1 "
            "(incarnation 1), which has not come in yet"
        )
        staging.closed(7, 3)
        assert taken(staging, (A, 1)) == [(A, 1)]  # nothing was taken


class TestSteps:
    def test_name_the_groups_that_have_closed_one(self, staging: Staging) -> None:
        assert staging.steps() == []
        put(staging, A, 1)
        assert staging.steps() == []
        staging.closed(7, 0)
        staging.closed(3, 9)
        assert sorted(staging.steps()) == [(3, 10), (7, 1)]

    def test_are_the_same_list_until_one_is_closed(self, staging: Staging) -> None:
        staging.closed(7, 0)
        before = staging.steps()
        put(staging, A, 1, local_step=1)
        assert staging.steps() is before
        staging.closed(7, 1)
        assert (before, staging.steps()) == ([(7, 1)], [(7, 2)])  # who holds it sees no change

    def test_never_go_back(self, staging: Staging) -> None:
        staging.closed(7, 5)
        put(staging, A, 1, local_step=6)
        staging.closed(7, 5)
        staging.closed(7, 2)
        assert staging.step(7) == 6
        assert staging.statistics().parts == 1


class TestStale:
    @pytest.mark.parametrize("local_step", [-1, 0, 4])
    def test_a_late_part_leaves_no_trace(self, staging: Staging, local_step: int) -> None:
        staging.closed(7, 4)
        assert not staging.check(7, A, 1, local_step, 10, config_of())
        assert not staging.stage(7, A, 1, local_step, "late")  # it was under way all the same
        statistics = staging.statistics()
        assert (statistics.parts, statistics.bytes, statistics.stale) == (0, 0, 1)

    def test_any_local_step_will_do_before_the_first_closing(self, staging: Staging) -> None:
        for push, local_step in enumerate((-1, 0, 17), 1):
            assert put(staging, A, push, local_step)

    def test_a_part_whose_step_is_closed_while_it_comes_in_is_not_kept(
        self, staging: Staging
    ) -> None:
        staging.check(7, A, 1, 0, 10, config_of())
        staging.closed(7, 0)
        assert not staging.stage(7, A, 1, 0, "late")
        assert staging.statistics().bytes == 0

    def test_nor_one_that_comes_in_while_the_ps_is_emptied(self) -> None:
        assert not Staging(BUDGET).stage(7, A, 1, 0, "of an earlier coordinator")


class TestRepetition:
    def test_counts_once(self, staging: Staging) -> None:
        for _ in range(20):
            assert put(staging, A, 1)
        assert staging.statistics().bytes == 10
        assert taken(staging, (A, 1)) == [(A, 1)]

    def test_of_another_size_replaces_a_part_that_has_not_come(self, staging: Staging) -> None:
        for nbytes in (10, 30, 20):
            assert staging.check(7, A, 1, -1, nbytes, config_of())
            assert staging.statistics().bytes == nbytes

    def test_of_another_size_is_refused_once_the_part_is_here(self, staging: Staging) -> None:
        put(staging, A, 1, nbytes=10)  # it may be counted by now
        with pytest.raises(RemoteProtocolError, match="has come with 10 bytes"):
            put(staging, A, 1, nbytes=30)
        assert staging.take(7, 0, [(*A, 1, 1.0)]) != []

    def test_of_a_step_far_ahead_is_refused(self, staging: Staging) -> None:
        staging.closed(7, 4)
        assert put(staging, A, 1, local_step=6)
        with pytest.raises(RemoteProtocolError, match="of step 7, and the step is 5"):
            put(staging, A, 2, local_step=7)

    @pytest.mark.parametrize("nbytes", [10, 99])
    def test_changes_nothing_once_the_part_is_being_applied(
        self, staging: Staging, nbytes: int
    ) -> None:
        put(staging, A, 1)
        staging.take(7, 0, named((A, 1)))
        assert staging.check(7, A, 1, -1, nbytes, config_of())
        assert staging.stage(7, A, 1, -1, "again")
        assert taken(staging, (A, 1)) == [(A, 1)]
        assert staging.statistics().bytes == 10


class TestFence:
    def test_what_a_lost_worker_has_staged_may_have_been_counted(self, staging: Staging) -> None:
        put(staging, A, 1)
        staging.fence(A[0], 2)
        assert taken(staging, (A, 1)) == [(A, 1)]
        staging.closed(7, 0)
        assert staging.statistics().bytes == 0

    def test_what_was_still_coming_in_goes(self, staging: Staging) -> None:
        staging.check(7, A, 1, -1, 10, config_of())
        staging.check(7, B, 1, -1, 10, config_of())
        staging.check(7, (A[0], 2), 1, -1, 10, config_of())
        staging.fence(A[0], 2)
        assert staging.statistics().parts == 2
        with pytest.raises(FencedError, match="incarnation 1 of /job:worker/task:0 has been repl"):
            staging.stage(7, A, 1, -1, "late")
        assert staging.stage(7, (A[0], 2), 1, -1, "new")
        assert staging.stage(7, B, 1, -1, "another's")

    def test_an_older_incarnation_is_refused(self, staging: Staging) -> None:
        staging.fence(A[0], 3)
        staging.fence(A[0], 2)  # does not go back
        with pytest.raises(FencedError) as caught:
            put(staging, (A[0], 2), 1)
        assert str(caught.value) == "incarnation 2 of /job:worker/task:0 has been replaced by 3"
        assert staging.statistics().parts == 0
        assert put(staging, (A[0], 3), 1)


class TestBudget:
    def test_is_set_by_the_variable_that_the_hints_name(self) -> None:
        limits = {f"PSYNC_LIMIT_{field.name.upper()}" for field in dataclasses.fields(Limits)}
        assert BUDGET_VARIABLE in limits

    def test_a_step_that_cannot_fit_is_refused_at_its_first_push(self, staging: Staging) -> None:
        assert staging.check(7, A, 1, -1, 33, config_of())  # and two more: 99 bytes
        with pytest.raises(ConfigurationError) as caught:
            staging.check(7, A, 2, -1, 34, config_of())
        assert str(caught.value) == (
            "sync on /job:ps/task:1: a step may need 3 pushes of 34 bytes (102 bytes) at once, and "
            "the budget is 100 bytes\n"
            "hint: set PSYNC_LIMIT_STAGING_BYTES=102 or more on the ps tasks, or spread the "
            "variables over more of them"
        )
        assert staging.statistics().bytes == 33

    @pytest.mark.parametrize(("needed", "total"), [(4, 2), (2, 4), (1, 4)])
    def test_a_step_needs_a_part_for_each_token_and_one_more(
        self, staging: Staging, needed: int, total: int
    ) -> None:
        assert staging.check(7, A, 1, -1, 20, config_of(needed, total))
        with pytest.raises(ConfigurationError, match=r"5 pushes of 21 bytes \(105 bytes\)"):
            staging.check(7, B, 1, -1, 21, config_of(needed, total))

    def test_parts_that_are_coming_in_count(self, staging: Staging) -> None:
        for push in (1, 2, 3):
            staging.check(7, A, push, -1, 33, config_of())
        with pytest.raises(ConfigurationError) as caught:
            staging.check(7, B, 1, -1, 2, config_of())
        assert str(caught.value) == (
            "sync on /job:ps/task:1: 99 of 100 bytes for pushes of steps that are not closed yet "
            "are taken, and 2 more are needed\n"
            "hint: set PSYNC_LIMIT_STAGING_BYTES=101 or more on the ps tasks"
        )
        assert staging.check(7, B, 1, -1, 1, config_of())

    def test_a_part_that_grows_needs_the_difference(self, staging: Staging) -> None:
        for push in (1, 2):
            put(staging, A, push, nbytes=30)
        for nbytes in (30, 32):
            assert staging.check(7, A, 3, -1, nbytes, config_of())
        put(staging, A, 4, nbytes=8)
        with pytest.raises(ConfigurationError, match="100 of 100 bytes"):
            staging.check(7, A, 3, -1, 33, config_of())
        assert put(staging, A, 3, nbytes=32)  # what it had stays


@dataclass
class Held:
    """What the model believes of one part."""

    group: int
    replica: Replica
    push: int
    local_step: int
    nbytes: int
    complete: bool = False
    counted: bool = False


class Steps(RuleBasedStateMachine):
    """Two groups, two workers that die, and a ps 0 that counts any of the parts that are whole."""

    @initialize()
    def begin(self) -> None:
        self.staging = Staging(BUDGET, TASK)
        self.parts: list[Held] = []
        self.steps = {0: -1, 1: -1}  # -1: none was closed yet
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
        part = Held(group, replica, self.pushes, max(self.steps[group] - age, -1), nbytes)
        expected = part.local_step >= self.steps[group]
        total = sum(held.nbytes for held in self.parts)
        try:
            wanted = self.check(part)
        except ConfigurationError:
            assert total + nbytes > BUDGET
            assert expected
        else:
            assert wanted == expected
            assert not wanted or total + nbytes <= BUDGET
            if wanted:
                self.parts.append(part)

    @precondition(lambda self: self.parts)
    @rule(which=st.integers(0, 1000), announce=st.booleans())
    def arrive(self, which: int, announce: bool) -> None:
        """For the first time, or again after a lost connection."""
        part = self.parts[which % len(self.parts)]
        try:
            if announce:
                assert self.check(part)
            kept = self.staging.stage(
                part.group, part.replica, part.push, part.local_step, part.push
            )
        except FencedError:
            assert part.replica[1] < self.incarnations[int(part.replica[0][-1])]
        else:
            assert kept
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
            if part.group == group and part.counted and (early or part.local_step <= step)
        ]
        pushes = named(*((part.replica, part.push) for part in counted))
        assert self.staging.take(group, step, pushes) == [(part.push, 1.0) for part in counted]
        self.staging.closed(group, step)
        self.steps[group] = step + 1
        self.parts = [
            part
            for part in self.parts
            if part.group != group or (part.local_step > step and part not in counted)
        ]

    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        self.incarnations[worker] += 1
        task = f"/job:worker/task:{worker}"
        self.staging.fence(task, self.incarnations[worker])
        self.parts = [part for part in self.parts if part.replica[0] != task or part.complete]

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        statistics = self.staging.statistics()
        assert statistics.parts == len(self.parts)
        assert statistics.bytes == sum(part.nbytes for part in self.parts) <= BUDGET
        closed = {group: step for group, step in self.steps.items() if step >= 0}
        assert dict(self.staging.steps()) == closed

    def check(self, part: Held) -> bool:
        return self.staging.check(
            part.group, part.replica, part.push, part.local_step, part.nbytes, config_of()
        )


TestAnyOrder = Steps.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestABackup:
    def test_what_another_one_has_kept_is_kept_without_a_question(self, staging: Staging) -> None:
        staging.fence(A[0], A[1] + 1)
        staging.keep(7, A, 1, 3, BUDGET + 1, "part")
        assert staging.held() == [(7, A, 1, 3, "part")]
        assert staging.statistics().bytes == BUDGET + 1
        staging.keep(7, A, 1, 3, 10, "again")
        assert staging.statistics().bytes == 10
        assert taken(staging, (A, 1)) == ["again"]
        staging.closed(7, 3)
        assert (staging.held(), staging.statistics().bytes) == ([], 0)

    def test_what_is_still_coming_in_is_not_held(self, staging: Staging) -> None:
        staging.check(7, A, 1, -1, 10, config_of())
        put(staging, B, 1)
        assert staging.held() == [(7, B, 1, -1, (B, 1))]


def test_a_backup_keeps_no_part_that_its_ps_refused():
    staging = Staging(BUDGET)
    staging.closed(7, 3)
    staging.keep(7, A, 1, 3, 10, "late")
    staging.keep(7, A, 2, -1, 10, "of a session that knows no step")
    assert staging.statistics().parts == 0
    staging.keep(7, A, 3, 4, 10, "part")
    assert staging.staged(7, A, 3) == "part"
