"""The phases of synchronous groups, without a rule or a network."""

from __future__ import annotations

import asyncio

import pytest
from psync.sync.group_phases import MOVES, GroupEvent, GroupPhases, Phase

from psync.errors import LocalProtocolError, PsyncError
from psync.sync.group import Close

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


def closing(group: int) -> Close:
    return Close(group, 0, (), partial=False)


@pytest.mark.asyncio
async def test_a_pause_waits_for_steps_on_their_way_and_holds_those_that_are_decided() -> None:
    phases = in_phase(Phase.OPEN)
    assert not phases.hold(closing(3))
    phases.close(3)
    pausing = asyncio.create_task(phases.pause("cut"))
    await asyncio.sleep(0)
    assert not pausing.done()
    phases.ended(3)
    await pausing
    assert phases.hold(closing(3))
    await phases.pause("copy")
    assert phases.resume("cut") == []
    assert phases.resume("copy") == [closing(3)]
    assert phases[3] is Phase.OPEN


@pytest.mark.asyncio
async def test_a_group_that_cannot_begin_is_new_again() -> None:
    async def fail() -> None:
        raise PsyncError("no global step")

    phases = GroupPhases()
    beginning = phases.begin(3, GroupEvent.READ, fail())
    assert phases.beginning(3) is beginning
    with pytest.raises(PsyncError):
        await beginning
    assert (phases[3], phases.beginning(3)) == (Phase.NEW, None)


@pytest.mark.asyncio
async def test_a_group_that_closes_a_step_as_it_begins_is_waited_for_until_that_has_ended() -> None:
    phases = GroupPhases()

    async def replay() -> None:
        phases.move(3, GroupEvent.DEFINE)
        phases.close(3)

    await phases.begin(3, GroupEvent.REPLAY, replay())
    await asyncio.sleep(0)
    assert len(phases.carried()) == 1
    draining = asyncio.create_task(phases.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    phases.ended(3)
    await draining
    assert not await phases.settled()


@pytest.mark.asyncio
async def test_what_is_of_no_group_is_waited_for_too_and_steps_that_are_dropped_are_not() -> None:
    phases, told = in_phase(Phase.OPEN), asyncio.Event()

    async def tell() -> None:
        await told.wait()

    phases.carry(tell())
    pausing = asyncio.create_task(phases.pause("end"))
    await asyncio.sleep(0)
    assert phases.hold(closing(3))
    told.set()
    await pausing
    phases.drop()
    assert phases.resume("end") == []
    assert not await phases.settled()
