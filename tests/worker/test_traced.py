"""What a session tells a trace: closures, and kinds of work; only while it is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from memory_cluster import coordinating
from traced_by_hand import entries_of

pytestmark = pytest.mark.virtual_time

WORKER = "/job:worker/task:0"


async def test_closures_are_told_with_their_names_and_ends() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        async def good() -> None: ...

        async def bad() -> None:
            raise ValueError("mine")

        await coordinator.schedule(good)  # before anybody reads
        collector: Any = coordinator._seen.source.spans
        await collector.read("r")
        await coordinator.schedule(good)
        coordinator.schedule(bad)
        with pytest.raises(ValueError, match="mine"):
            await coordinator.join()
        told = [
            entry[1:]
            for task, body, *_ in await collector.read("r", last=True)
            for entry in entries_of(body)
            if task == WORKER and not isinstance(entry[1], int)
        ]
        ended = [each for each in told if each[0] == "ended"]
        assert [(each[1], each[2].rpartition(".")[2], each[3]) for each in ended] == [
            (1, "good", "ok"), (2, "bad", "error"),
        ]  # fmt: skip
        assert [each for each in told if each[0] == "work"] == [["work", 0], ["work", -1]] * 2
        await coordinator.schedule(good)  # nobody reads any more
