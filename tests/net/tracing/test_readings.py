"""Readings of tasks are understood: requests and both of their halves."""

from __future__ import annotations

import pytest

from psync.net.tracing.readings import logs_of, pairs_of
from psync.wire.frames import Kind
from psync.wire.messages import AskStatistics, Failure, GiveBack, Shutdown, Statistics
from traced_by_hand import CHIEF, PS, WORKER, ByHand, exchange

ASK, TOLD = AskStatistics(), Statistics({"a": 1})


def test_a_request_has_its_two_halves_across_readings() -> None:
    worker, ps = ByHand(WORKER, ahead=100.0), ByHand(PS)
    first = [worker.reading(0.0), ps.reading(0.0)]
    exchange(worker, ps, 1, (1.0, 1.5, 2.0, 3.0), ASK, TOLD, nbytes=7)
    logs = logs_of([*first, worker.reading(4.0), ps.reading(4.0)])
    assert [log.task for log in logs] == [WORKER, PS]
    ((at, sent, other, served),) = pairs_of(logs)
    assert (at, other) == (0, 1)
    assert (sent.begin, sent.end, sent.sent, sent.received) == (101.0, 103.0, 7, 0)
    assert (served.begin, served.end, served.sent, served.received) == (1.5, 2.0, 0, 7)
    assert sent.message == ASK
    assert sent.answer == served.answer == TOLD
    assert (sent.other, served.other) == (PS, WORKER)
    assert (logs[0].begin, logs[0].end) == (100.0, 104.0)


def test_an_answer_may_be_in_a_later_reading_and_be_an_error() -> None:
    worker = ByHand(WORKER)
    worker.frame(1.0, PS, Kind.REQUEST, 1, ASK, sent=True)
    readings = [worker.reading(2.0, lost=3)]
    error = Failure("", "E", "", "m", None, "t")
    worker.frame(3.0, PS, Kind.ERROR, 1, error, sent=False)
    (log,) = logs_of([*readings, worker.reading(4.0, lost=4)])
    (half,) = log.halves
    assert (half.end, half.outcome, half.answer) == (3.0, "error", error)
    assert log.lost == 7


def test_what_is_given_up_has_ended_and_may_be_answered_later() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    for task, is_client in ((worker, True), (ps, False)):
        other = PS if is_client else WORKER
        task.frame(1.0, other, Kind.REQUEST, 1, ASK, sent=is_client)
        task.frame(2.0, other, Kind.CANCEL, 1, sent=is_client)
        task.frame(2.0, other, Kind.CANCEL, 2, sent=is_client)  # of nothing that is known
    ps.frame(3.0, WORKER, Kind.REPLY, 1, TOLD, sent=True)
    ps.frame(3.0, WORKER, Kind.REPLY, 2, TOLD, sent=True)
    client, server = logs_of([worker.reading(4.0), ps.reading(4.0)])
    assert (client.halves[0].end, client.halves[0].outcome) == (2.0, "given up")
    assert (server.halves[0].end, server.halves[0].outcome) == (3.0, "")


def test_notifications_and_notes_are_kept_and_pings_are_not() -> None:
    chief = ByHand(CHIEF)
    chief.frame(1.0, WORKER, Kind.NOTIFY, 0, GiveBack([1]), sent=True)
    chief.frame(1.5, WORKER, Kind.PING, 0, sent=True)
    chief.note(2.0, "counters", {"queue": 1})
    chief.facts = {"variables": {3: "w"}}
    (log,) = logs_of([chief.reading(3.0)])
    assert log.told == [(1.0, True, WORKER, GiveBack([1]))]
    assert log.notes == [[2.0, "counters", {"queue": 1}]]
    assert log.facts == {"variables": {3: "w"}}
    assert log.halves == []


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.NOTIFY])
def test_a_message_that_this_version_does_not_know_is_left_out(kind: Kind) -> None:
    chief = ByHand(CHIEF)
    chief.frame(1.0, WORKER, kind, 1, sent=True)
    (log,) = logs_of([chief.reading(3.0)])
    assert (log.halves, log.told) == ([], [])


def test_a_process_that_comes_after_another_one_has_a_log_of_its_own() -> None:
    readings = [ByHand(WORKER).reading(1.0), ByHand(WORKER, 50.0, origin="b").reading(1.0)]
    assert [(log.task, log.begin) for log in logs_of(readings)] == [(WORKER, 1.0), (WORKER, 51.0)]


def test_where_a_connection_came_again_its_requests_have_no_other_half() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    exchange(worker, ps, 1, (1.0, 1.1, 1.2, 1.3), ASK, TOLD)
    exchange(worker, ps, 2, (2.0, 2.1, 2.2, 2.3), ASK, TOLD)
    ps.frame(3.0, WORKER, Kind.REQUEST, 1, ASK, sent=False, link=1)
    worker.frame(4.0, PS, Kind.REQUEST, 2, ASK, sent=True, link=1)
    worker.frame(4.0, PS, Kind.REQUEST, 3, ASK, sent=True)
    ps.frame(4.1, WORKER, Kind.REQUEST, 3, Shutdown("other"), sent=False)
    assert list(pairs_of(logs_of([worker.reading(5.0), ps.reading(5.0)]))) == []
