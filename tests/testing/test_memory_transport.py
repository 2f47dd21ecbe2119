"""What the transport in memory does by itself; what it shares with sockets: test_network.py."""

from __future__ import annotations

from typing import Any

import pytest

from recorder import Recorder
from turns import Turns, linked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (16 << 10, 64 << 10)),
        ({"high": 100}, (25, 100)),
        ({"low": 100}, (100, 400)),
        ({"high": 0}, (0, 0)),
        ({"high": 9, "low": 3}, (3, 9)),
    ],
)
def test_water_marks_follow_asyncio(turns: Turns, given: Any, expected: Any) -> None:
    client, _, _ = linked()
    client.transport.set_write_buffer_limits(**given)
    assert client.transport.get_write_buffer_limits() == expected


def test_impossible_water_marks_are_refused(turns: Turns) -> None:
    client, _, _ = linked()
    with pytest.raises(ValueError, match="expected high >= low >= 0, got high=1, low=2"):
        client.transport.set_write_buffer_limits(high=1, low=2)


class Failing(Recorder):
    """Fails in one method."""

    def __init__(self, method: str, result: object = None) -> None:
        super().__init__()
        self._result = result
        setattr(self, method, self.fail)

    def fail(self, *args: object) -> object:
        if self._result is None:
            raise ZeroDivisionError("a bug in the protocol")
        return self._result


@pytest.mark.parametrize("method", ["get_buffer", "buffer_updated", "eof_received"])
def test_an_error_of_the_protocol_ends_the_connection(turns: Turns, method: str) -> None:
    client, server, _ = linked(server=lambda: Failing(method))
    client.transport.write(b"x")
    client.transport.close()
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert isinstance(server.lost, ZeroDivisionError)
    assert [report["message"] for report in turns.reports] == [f"protocol.{method}() failed"]
    assert turns.reports[0]["transport"] is server.transport
    assert turns.reports[0]["protocol"] is server


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(), r"get_buffer\(\) returned an empty buffer"),
        (b"read-only", r"get_buffer\(\) returned a read-only buffer"),
    ],
)
def test_memory_that_cannot_be_read_into_ends_the_connection(
    turns: Turns, buffer: object, message: str
) -> None:
    client, server, _ = linked(server=lambda: Failing("get_buffer", buffer))
    client.transport.write(b"x")
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert server.lost is not None
    with pytest.raises((RuntimeError, TypeError), match=message):
        raise server.lost
    assert len(turns.reports) == 1


@pytest.mark.parametrize("method", ["pause_writing", "resume_writing"])
def test_an_error_of_flow_control_is_reported_and_no_more(turns: Turns, method: str) -> None:
    client, server, _ = linked(lambda: Failing(method))
    client.transport.write(bytes(100_000))
    turns.settle()
    assert len(server.received) == 100_000
    assert [report["message"] for report in turns.reports] == [f"protocol.{method}() failed"]
