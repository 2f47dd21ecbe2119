"""Results gather for one turn of the loop, and leave together by the connection that suits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from psync.serialization.payloads import pack
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import ClosureResults
from psync.worker.results import CANCELLED, ClosureEnd, ResultsToSend, failed
from turns import Turns


class Lane:
    """Takes messages in place of a connection."""

    def __init__(self) -> None:
        self.told: list[ClosureResults] = []
        self.segments: list[Sequence[Any]] = []

    def notify(self, message: Message, segments: Sequence[Any] = ()) -> None:
        assert isinstance(message, ClosureResults)
        self.told.append(message)
        self.segments.append(segments)


def results_of() -> tuple[ResultsToSend, Lane, Lane]:
    control, bulk = Lane(), Lane()
    return ResultsToSend(control, bulk), control, bulk  # type: ignore[arg-type]


def value(content: object) -> ClosureEnd:
    return ClosureEnd(
        "ok", pack(content, subject="it", receiver="the coordinator", main_by_name=False)
    )


def test_results_of_one_turn_leave_in_one_message_with_their_mean(turns: Turns) -> None:
    results, control, bulk = results_of()
    for closure_id, seconds, calls in ((3, 1.0, 0), (4, 2.0, 2)):
        results.add(closure_id, value(closure_id), seconds, calls)
    results.add(5, CANCELLED)
    assert (len(results), control.told) == (3, [])
    turns.settle()
    (message,) = control.told
    assert [result[:2] for result in message.results] == [(3, "ok"), (4, "ok"), (5, "cancelled")]
    assert sum(result[2] for result in message.results) == len(control.segments[0])
    assert (message.mean_seconds, message.updates) == (1.5, [(4, 2)])
    assert (len(results), bulk.told) == (0, [])


def test_what_was_told_is_not_told_again(turns: Turns) -> None:
    results, control, _ = results_of()
    results.flush()
    results.add(1, value(1), 1.0, 1)
    results.flush()
    results.add(2, CANCELLED)
    results.flush()
    turns.settle()
    first, second = control.told
    assert (first.mean_seconds, first.updates) == (1.0, [(1, 1)])
    assert (second.mean_seconds, second.updates) == (0.0, None)


def test_large_results_leave_by_the_bulk_connection(turns: Turns) -> None:
    results, control, bulk = results_of()
    results.add(1, value(np.zeros(SMALL_BODY_BYTES + 1, np.uint8)))
    assert results.nbytes > SMALL_BODY_BYTES
    results.flush()
    assert (len(bulk.told), control.told, results.nbytes) == (1, [], 0)


def test_an_error_leaves_at_once_with_its_text_and_its_exception(turns: Turns) -> None:
    results, control, _ = results_of()
    results.add(1, failed("error", ValueError("wrong"), main_by_name=False))
    ((_, kind, count, error),) = control.told[0].results
    assert (kind, error and error[:2]) == ("error", ("ValueError", "wrong"))
    assert count == len(control.segments[0]) > 0


def test_whoever_writes_to_a_value_hears_that_it_is_read_only_and_what_to_do() -> None:
    value = np.zeros(3, np.float32)
    value.flags.writeable = False
    with pytest.raises(ValueError, match="read-only") as caught:
        value += 1
    for _ in range(2):  # the same exception of two closures
        end = failed("error", caught.value, main_by_name=False)
        assert end.error is not None
        assert end.error[2].count("copy=True, out=, or value.copy()") == 1


def test_an_exception_that_cannot_be_shown_is_reported_all_the_same() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    for exc in (ValueError(Mute()), type("Own", (ValueError,), {"__str__": Mute.__str__})()):
        assert failed("error", exc, main_by_name=False).error is not None
