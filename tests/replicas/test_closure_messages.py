"""What goes inline, what is fetched, and in which order."""

from __future__ import annotations

import numpy as np
import pytest

from psync.closures.closure import Closure, Replica
from psync.errors import LocalProtocolError
from psync.replicas.closure_messages import (
    INLINE_BYTES,
    ScheduledCall,
    ScheduledClosures,
    arguments_reply,
    function_reply,
    run_closures,
    starting,
)
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, pack, pack_arguments
from psync.serialization.remote_value import RemoteValue
from psync.wire.messages import RunReplica
from psync.worker.inputs import _unpack

TABLE = FunctionTable()


def step(*args: object, **kwargs: object) -> None: ...


def call_of(*args: object, **kwargs: object) -> ScheduledCall:
    arguments = pack_arguments("step", args, kwargs) if args or kwargs else EMPTY
    return ScheduledCall(TABLE.register(step), arguments)


def closure_of(closure_id: int, *args: object, **kwargs: object) -> Closure:
    return Closure(closure_id, call_of(*args, **kwargs))


def remote_value(obj: object) -> RemoteValue:
    value = RemoteValue(Closure(0), lambda closure_id: None)
    value._set_payload(pack(obj))
    return value


def unpacked(segments, counts, own):
    return _unpack([memoryview(segment) for segment in segments], counts, own, [])


def test_small_arguments_travel_with_the_closure():
    closures = [closure_of(0), closure_of(1, 5, x="y"), closure_of(2, np.zeros(1000))]
    message, segments = run_closures(closures)
    key = TABLE.register(step).key
    assert message.closures == [(0, key, 0, []), (1, key, 1, []), (2, key, 2, [])]
    assert unpacked(segments[:1], [], 1) == ((5,), {"x": "y"})
    (array,), _ = unpacked(segments[1:], [], 2)
    assert (array == np.zeros(1000)).all()


def test_a_replica_travels_like_a_closure_and_says_which_it_is():
    call = ScheduledCall(TABLE.register(step), pack_arguments("step", (5,), {}), (1, 3))
    replica = Replica(7, call, name="step")
    message, segments = starting([replica])
    assert isinstance(message, RunReplica)
    assert message.closure == (7, TABLE.register(step).key, 1, [])
    assert (message.replica_id, message.num_replicas) == (1, 3)
    assert unpacked(segments, [], 1) == ((5,), {})


def test_large_arguments_are_fetched():
    closure = closure_of(3, np.zeros(INLINE_BYTES, np.uint8))
    message, segments = run_closures([closure])
    assert message.closures[0][2] == -1
    assert segments == []
    assert closure.payload.inline_bytes == 0
    reply = arguments_reply(closure.payload)
    (array,), _ = unpacked(reply.segments, reply.message.remote_values, reply.message.segments)
    assert array.nbytes == INLINE_BYTES


def test_values_of_inputs_follow_the_arguments():
    values = [remote_value(np.arange(800)), remote_value(None), remote_value("text")]
    call = call_of([values[0], values[1]], values[2], again=values[0])
    message, segments = run_closures([Closure(4, call)])
    ((_, _, own, counts),) = message.closures
    assert (own, counts) == (1, [2, 0, 1])
    ((array, nothing), text), kwargs = unpacked(segments, counts, own)
    assert array[-1] == 799
    assert nothing is None
    assert text == "text"
    assert kwargs["again"] is array
    assert call.inline_bytes == INLINE_BYTES  # nobody knows before the values are there


def test_large_values_of_inputs_are_fetched():
    call = call_of(remote_value(np.zeros(INLINE_BYTES, np.uint8)))
    message, segments = run_closures([Closure(5, call)])
    assert (message.closures[0][2], segments) == (-1, [])
    reply = arguments_reply(call)
    assert reply.message.remote_values == [2]


def test_an_input_without_a_value_is_a_bug_that_is_named():
    value = RemoteValue(Closure(9, name="make"), lambda closure_id: None)
    with pytest.raises(LocalProtocolError, match=r"closure 9 \(make\), not ready> is the input"):
        run_closures([Closure(6, call_of(value))])


def test_a_function_travels_with_its_name_and_arrays():
    table = np.arange(5000)
    function = FunctionTable().register(lambda: table)
    reply = function_reply(function)
    assert "lambda" in reply.message.name
    assert [len(segment) for segment in reply.segments][1:] == [table.nbytes]


def test_a_closure_that_is_adopted_has_a_value_to_be_and_lets_go_of_its_call_when_it_is_final():
    cancelled: list[int] = []
    closures = ScheduledClosures(cancelled.append)
    closure = closure_of(3)
    value = closures.adopt(closure)
    assert closures == {3: closure}
    value.cancel()
    assert cancelled == [3]
    closures.settle(closure, ValueError("no"))
    assert closures == {}
    assert closure.payload is None
    with pytest.raises(ValueError, match="no"):
        value.get_nowait()


def test_nobody_need_hold_the_value_of_a_closure_that_fails():
    closures = ScheduledClosures(lambda closure_id: None)
    closure = closure_of(3)
    closures.adopt(closure)
    closures.settle(closure, ValueError("no"))
    assert not closures
