"""The phases of synchronous groups, without any."""

from __future__ import annotations

import pytest

from psync.errors import LocalProtocolError
from psync.sync.group_phases import MOVES, GroupEvent, GroupPhases, Phase

PATHS: dict[Phase, list[GroupEvent]] = {
    Phase.NEW: [],
    Phase.READING: [GroupEvent.READ],
    Phase.REPLAYING: [GroupEvent.REPLAY],
    Phase.OPEN: [GroupEvent.READ, GroupEvent.DEFINE],
    Phase.HELD: [GroupEvent.READ, GroupEvent.DEFINE, GroupEvent.HOLD],
    Phase.CLOSING: [GroupEvent.REPLAY, GroupEvent.DEFINE, GroupEvent.CLOSE],
}


def in_phase(phase: Phase) -> GroupPhases:
    phases = GroupPhases()
    for event in PATHS[phase]:
        phases.move(3, event)
    return phases


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", GroupEvent)
def test_a_group_goes_where_the_table_says_and_nowhere_else(
    phase: Phase, event: GroupEvent
) -> None:
    phases = in_phase(phase)
    assert phases[3] is phase
    if (to := MOVES[phase].get(event)) is not None:
        phases.move(3, event)
        assert phases[3] is to
    else:
        with pytest.raises(LocalProtocolError):
            phases.move(3, event)
        assert phases[3] is phase


def test_an_illegal_move_names_the_group_the_event_and_the_phase() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        in_phase(Phase.CLOSING).move(3, GroupEvent.CLOSE)
    assert str(caught.value) == "synchronous group 3 cannot close a step: it is closing a step"


def test_groups_are_found_by_their_phases() -> None:
    phases = in_phase(Phase.CLOSING)
    phases.move(4, GroupEvent.REPLAY)
    phases.move(5, GroupEvent.READ)
    assert phases.of(Phase.REPLAYING, Phase.CLOSING) == [3, 4]
    assert phases.of(Phase.NEW) == []
