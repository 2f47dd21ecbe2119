"""When a step that ps 0 has decided is applied on one ps; what it does there: test_ps_sync."""

from __future__ import annotations

import numpy as np
import pytest

from asked import Asked, Reply
from backup_by_hand import BackupByHand
from inside import staged_on
from ps_by_hand import PS_0, A, PsByHand, group_config
from psync.errors import FencedError
from psync.store.store import Key
from psync.wire.messages import CloseStep, Done, Staged, StagePush
from turns import Turns

GROUP = 9
RATE = 0.5
ONES = np.ones(3, np.float32).tobytes()


class Group(PsByHand):
    """A ps beside ps 0, with a variable, the global step of a group, and a part of a push."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.create("w", np.ones(3, np.float32))
        self.other = self.create("other", np.ones(3, np.float32))
        self.step = self.create("step", np.array(5))
        self.config = group_config(global_step=(1, *self.step))
        part = StagePush(GROUP, self.config, 1, -1, 1, [self.w])
        assert self.ask(A, part, ONES) == Staged(False)

    def close(self, step: int = 0, push: int = 1) -> Asked:
        return self.begin(PS_0, CloseStep(GROUP, self.config, step, [(*A, push, 1.0)]))


def value_of(ps: PsByHand, key: Key) -> list[float]:
    return np.frombuffer(b"".join(map(bytes, ps.store.read(key))), np.float32).tolist()


@pytest.mark.usefixtures("turns")
def test_a_pull_names_a_step_once_it_is_computed(turns: Turns) -> None:
    ps = Group()
    busy = ps.store.assign(ps.w, "add", np.zeros(3, np.float32))
    answer = ps.close()
    turns.settle()
    assert answer.outcome is None
    assert ps.pull(ps.other)[1] == []
    assert ps.sync.staging.step(GROUP) == 1  # judged
    assert ps.sync.statistics()["bytes"] == 12
    again = ps.close()
    for _ in busy:  # it is done
        pass
    ps.work.wake()
    turns.settle()
    for each in (answer, again):
        assert isinstance(each.outcome, Reply)
    value, steps = ps.pull(ps.w)
    assert (value.tolist(), steps) == ([1 - RATE] * 3, [(GROUP, 1)])
    assert (ps.value(ps.step), ps.sync.statistics()["bytes"]) == (6, 0)


@pytest.mark.usefixtures("turns")
def test_nobody_hears_of_a_step_before_the_backup_has_it_and_a_repetition_waits_as_well() -> None:
    ps = Group()
    backup = BackupByHand(ps)
    first, again = ps.close(), ps.close()
    assert (first.outcome, again.outcome, ps.sync.steps()) == (None, None, [])
    backup.catch_up()
    assert isinstance(first.outcome, Reply)
    assert isinstance(again.outcome, Reply)
    assert (ps.value(ps.step), ps.sync.steps()) == (6, [(GROUP, 1)])


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("has_it", [True, False])
def test_a_promoted_backup_closes_a_step_once_which_ps_0_closes_again(*, has_it: bool) -> None:
    ps = Group()
    backup = BackupByHand(ps)
    assert staged_on(backup.services) == staged_on(ps.services)
    ps.close()
    if has_it:
        backup.read_ahead(1)
    backup.promote()
    message = CloseStep(GROUP, ps.config, 0, [(*A, 1, 1.0)])
    for _ in range(2):
        assert backup.ask(PS_0, message) == Done()
    assert backup.value(ps.w).tolist() == [1 - RATE] * 3
    assert (backup.value(ps.step), backup.sync.steps()) == (6, [(GROUP, 1)])


@pytest.mark.usefixtures("turns")
def test_whoever_was_replaced_closes_no_step_and_tells_nobody() -> None:
    """Else ps 0 would take the step for closed, of which the one that serves has not heard."""
    ps = Group()
    BackupByHand(ps)
    answers = [ps.close(), ps.close()]
    ps.services.executor.depose()
    for answer in answers:
        assert isinstance(answer.outcome, FencedError)
        assert "replaced by its backup" in str(answer.outcome)
    assert (ps.sync.steps(), value_of(ps, ps.w)) == ([], [1] * 3)
    with pytest.raises(FencedError, match="replaced by its backup"):
        ps.close().result()
