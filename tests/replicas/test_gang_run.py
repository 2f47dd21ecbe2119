"""One gang: which closures are its replicas, what each is given, and how its caller is told."""

from __future__ import annotations

import pytest

from psync.closures.queue import Barrier
from psync.errors import ReplicaValueError
from psync.replicas.gang_runner import GangRun, fail
from psync.serialization.functions import Function
from psync.serialization.payloads import EMPTY, Payload, pack_arguments
from turns import Turns


def payload(number: int) -> Payload:
    return pack_arguments("fn", (number,), {}, main_by_name=False)


def run_of(*arguments: Payload) -> GangRun:
    return GangRun(None, Function(b"key", "fn", True, EMPTY), list(arguments), Barrier(0))


@pytest.mark.usefixtures("turns")
def test_one_payload_is_for_all_replicas_and_several_are_for_one_each() -> None:
    one, two = payload(1), payload(2)
    assert run_of(one).arguments_for(3) == [one] * 3
    assert run_of(one, two).arguments_for(2) == [one, two]
    with pytest.raises(ReplicaValueError, match="there are arguments for 2 replicas, but 3 work"):
        run_of(one, two).arguments_for(3)


@pytest.mark.parametrize(
    "told", [[None, ValueError("too late")], [ValueError("wrong"), None]], ids=["end", "error"]
)
def test_the_caller_is_told_once_and_an_error_that_nobody_sees_is_no_warning(
    told: list[Exception | None], turns: Turns
) -> None:
    seen, unseen = run_of(payload(1)), run_of(payload(1))
    for each in told:
        seen.tell(each)
        unseen.tell(each)
    other = turns.create_future()
    other.cancel()
    fail(other, ValueError("nobody waits"))
    assert seen.ended.exception() is told[0]
    del unseen
    assert not turns.reports
