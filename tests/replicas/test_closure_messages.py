"""What goes inline, what is fetched, and in which order."""

from __future__ import annotations

import pytest

from psync import RemoteValue
from psync.closures.closure import Closure
from psync.errors import LocalProtocolError
from psync.replicas.closure_messages import (
    ScheduledCall,
    starting,
)
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, pack_arguments

TABLE = FunctionTable()


def step(*args: object, **kwargs: object) -> None: ...


def call_of(*args: object, **kwargs: object) -> ScheduledCall:
    arguments = pack_arguments("step", args, kwargs) if args or kwargs else EMPTY
    return ScheduledCall(TABLE.register(step), arguments)


def test_an_input_without_a_value_is_a_bug_that_is_named():
    value = RemoteValue(Closure(9, name="make"), lambda closure_id: None)
    with pytest.raises(LocalProtocolError, match=r"closure 9 \(make\), not ready> is the input"):
        starting([Closure(6, call_of(value))])
