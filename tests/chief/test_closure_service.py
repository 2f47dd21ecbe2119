"""What a coordinator does with reports that make no sense, or come from workers given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asked import Asked
from memory_cluster import coordinating
from psync.errors import RemoteProtocolError, UsageError
from psync.wire.messages import ClosureResults, FetchArguments, FetchFunction, GivenBack

pytestmark = pytest.mark.virtual_time


async def slow() -> None:
    await asyncio.sleep(1)


async def test_reports_that_make_no_sense_are_refused_and_change_nothing():
    async with coordinating(1, 1) as (_, coordinator):
        inner = coordinator._coordinator
        value = coordinator.schedule(slow)
        await asyncio.sleep(0.1)
        (record,) = inner.links.workers.records()
        handlers = inner.links.endpoint.handlers

        def said(message: Any, peer: Any) -> Any:
            handlers[type(message)].serve(Asked(peer, message))

        for outcome in ("error", "end_of_data", "vanished"):
            with pytest.raises(RemoteProtocolError, match=f"closure 0 ended as '{outcome}'"):
                said(ClosureResults([(0, outcome, 0, None)], 0.0), record.peers[0])
        with pytest.raises(UsageError, match="a function that is no longer needed"):
            said(FetchFunction(b"unknown"), record.peers[0])
        with pytest.raises(UsageError, match="closure 7, which has ended"):
            said(FetchArguments(7), record.peers[0])
        given_up = SimpleNamespace(task=record.name)  # a connection of its earlier session
        late = [("step", 'assign to "w"', 2)]
        said(ClosureResults([(0, "ok", 0, None)], 0.0, late=late), given_up)
        said(GivenBack([0]), given_up)
        assert value._closure.state.value == "held"
        await coordinator.join()
