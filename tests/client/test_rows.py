from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asked import Reply
from inside import handlers_of
from ps_cluster import CONFIG, WORKER, PsCluster
from psync import IndexedSlices
from psync.client.ps_client import PsClient
from psync.errors import RemoteProtocolError, UnknownVariableError, ValueMismatchError
from psync.net.connection import Handler
from psync.specs import ShardSpec, VariableSpec
from psync.wire.messages import Done, PullRows, RowsPulled

aio = pytest.mark.asyncio


def table(rows: int = 10, columns: int = 3, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(rows * columns, dtype=dtype).reshape(rows, columns)


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


async def push_rows(
    client: PsClient, v: VariableSpec, slices: IndexedSlices, **given: Any
) -> list[str]:
    answers = await client.push(
        client.plan((v,)), [slices], optimizer=1, config=CONFIG, elsewhere={},
        **{"closure": -1, "ordinal": 0, **given},
    )  # fmt: skip
    return [answer.outcome for answer in answers]


@aio
class TestReading:
    async def test_what_is_not_there_is_refused_and_named(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", table())
            s = await cluster.create("s", np.float32(1))
            ones = np.ones((2, 3), np.float32)
            client = cluster.chief
            for rows, row in ((rows_of(3, 10), 10), (rows_of(-1, 3), -1)):
                for refused in (
                    client.read_rows(v, rows),
                    client.scatter(v, rows, ones, op="add", closure=-1, ordinal=0),
                    push_rows(client, v, IndexedSlices(ones, rows)),
                    client.read_range(v, int(rows[0]), int(rows[1]) + 1),
                ):
                    text = f'variable "v": row {row} does not exist, it has 10'
                    with pytest.raises(ValueMismatchError, match=text):
                        await refused
            with pytest.raises(ValueMismatchError, match=r"a scalar has no rows"):
                await cluster.chief.read_rows(s, rows_of(0))
            unknown = VariableSpec(
                "u", 99, (3,), "float32", True, (ShardSpec("u", 99, 0, 0, (3,), "float32", 0),), ""
            )
            with pytest.raises(UnknownVariableError):
                await cluster.chief.read_rows(unknown, rows_of(0))

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            (Reply(Done()), "answered a pull of rows with Done"),
            (Reply(RowsPulled([]), [b"123"]), "wrong sizes for the rows: expected 12 bytes"),
        ],
    )
    async def test_an_answer_that_does_not_fit_is_refused(
        self, answer: Reply, expected: str
    ) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", table())
            handlers_of(cluster.ps[0])[PullRows] = Handler(lambda request: request.answer(*answer))
            with pytest.raises(RemoteProtocolError, match=expected):
                await cluster.chief.read_rows(v, rows_of(1))


@aio
async def test_updates_of_rows_go_on_while_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reader sees rows of one version: all of them have had the same updates."""
    async with PsCluster(chunk=(1 << 10, 1 << 16)) as cluster:
        v = await cluster.create("v", np.zeros((64, 1 << 14), np.float32))  # 64 KiB a row
        rows = np.arange(64)
        ones = np.ones((64, 1 << 14), np.float32)
        client = cluster.client(WORKER)

        async def update() -> None:
            for _ in range(3):
                await client.scatter(v, rows, ones, op="add", closure=-1, ordinal=0)

        async def read() -> None:
            for _ in range(3):
                got = await cluster.chief.read_rows(v, rows)
                assert (got == got[0, 0]).all()

        await asyncio.gather(update(), read(), read())
        assert (await cluster.chief.read_rows(v, rows) == 3).all()
