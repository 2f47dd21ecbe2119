from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inside import handlers_of, store_of, sync_of
from ps_cluster import CONFIG, OTHER, RATE, WORKER, PsCluster, pull
from psync.client import rows
from psync.client.ps_client import PsClient
from psync.client.pulled_steps import PulledSteps
from psync.client.rows import _within
from psync.errors import RemoteProtocolError, UnknownVariableError, ValueMismatchError
from psync.net.peer import Handler, Reply
from psync.numerics.rows import SCATTER_OPS, IndexedSlices
from psync.numerics.rules import SGD
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


def part_of(v: VariableSpec, index: int) -> VariableSpec:
    """One shard of a variable as a variable of its own."""
    shard = v.shards[index]
    alone = ShardSpec(v.name, v.variable_id, index, 0, shard.shape, shard.dtype, shard.ps)
    return VariableSpec(f"v/part_{index}", v.variable_id, shard.shape, v.dtype, True, (alone,), "")


@aio
class TestReading:
    @pytest.mark.parametrize("shards", [1, 2, 3, 10])
    async def test_rows_come_in_the_order_in_which_they_are_asked_for(self, shards: int) -> None:
        value = table()
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", value, shards=shards)
            for rows in ([], [0], [9, 0], [3, 3, 3], [7, 2, 7, 0, 9, 2], range(10)):
                got = await cluster.chief.read_rows(v, np.array(rows, np.int64))
                np.testing.assert_array_equal(got, value[list(rows)])
                got[...] = 0  # the caller's own
                assert await cluster.chief.read_rows(v, np.array(rows, np.int64), out=got) is got
                np.testing.assert_array_equal(got, value[list(rows)])
            np.testing.assert_array_equal((await pull(cluster.chief, v))[0], value)

    async def test_rows_may_be_of_any_shape_and_dtype(self) -> None:
        async with PsCluster() as cluster:
            for number, (shape, dtype) in enumerate(
                [((5,), np.int8), ((5, 2, 3), np.float64), ((5, 0), np.float32), ((5, 1), np.bool_)]
            ):
                value = np.ones(shape, dtype)
                v = await cluster.create(f"v{number}", value)
                got = await cluster.chief.read_rows(v, rows_of(4, 1, 1))
                assert (got.shape, got.dtype) == ((3, *shape[1:]), value.dtype)
                assert got.all()

    @pytest.mark.parametrize(
        ("rows", "travel", "asked"), [((8, 1, 2, 1) * 50, [2, 1], [1, 1]), ((1, 0), [2, 0], [1, 0])]
    )
    async def test_each_row_travels_once_and_only_ps_tasks_that_have_some_are_asked(
        self, rows: tuple[int, ...], travel: list[int], asked: list[int]
    ) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=2)
            await cluster.chief.read_rows(v, rows_of(*rows))
            statistics = [task.statistics() for task in cluster.ps]
            assert [each["store"]["rows"] for each in statistics] == travel
            assert [each["row_pulls"] for each in statistics] == asked

    async def test_many_are_asked_for_in_several_messages(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rows, "ROWS_PER_REQUEST_BYTES", 24)  # two rows
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=2)
            got = await cluster.chief.read_rows(v, np.arange(10))
            np.testing.assert_array_equal(got, table())
            got = await cluster.chief.read_range(v, 9, -1, -1)
            np.testing.assert_array_equal(got, table()[::-1])
            assert [task.statistics()["row_pulls"] for task in cluster.ps] == [6, 6]

    async def test_a_shard_alone_has_rows_of_its_own(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=2)
            alone = part_of(v, 1)
            got = await cluster.chief.read_rows(alone, rows_of(4, 0))
            np.testing.assert_array_equal(got, table()[[9, 5]])
            got = await cluster.chief.read_range(alone, 1, 3)
            np.testing.assert_array_equal(got, table()[6:8])
            gradient = IndexedSlices(np.ones((1, 3), np.float32), rows_of(2))
            await push_rows(cluster.chief, alone, gradient)
            got = await cluster.chief.read_rows(v, rows_of(7, 8))
            np.testing.assert_array_equal(got, table()[[7, 8]] - [[RATE], [0]])

    @pytest.mark.parametrize("dtype", [np.float32, np.float16])
    async def test_rows_of_slots_are_read_too(self, dtype: type) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", np.zeros((6, 2), dtype), shards=2)
            config = SGD(RATE, momentum=0.5).to_config()
            client = cluster.chief
            gradient = IndexedSlices(np.ones((1, 2), dtype), rows_of(4))
            await client.push(
                client.plan((v,)), [gradient], optimizer=2, config=config, elsewhere={}, closure=-1,
                ordinal=0,
            )  # fmt: skip
            got = await client.read_rows(v, rows_of(4, 0), optimizer=2, slot="momentum")
            assert got.dtype == np.float32
            assert got.tolist() == [[-RATE, -RATE], [0, 0]]

    async def test_the_steps_of_all_answers_are_noted(self) -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=2)
            for task, step in zip(cluster.ps, (5, 4), strict=True):
                sync_of(task).staging.applied(7, step - 1)
            seen = PulledSteps()
            await cluster.chief.read_rows(v, np.arange(10), seen=seen)
            assert seen.lowest(7) == 4

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
            handlers_of(cluster.ps[0])[PullRows] = Handler(lambda *_: answer)
            with pytest.raises(RemoteProtocolError, match=expected):
                await cluster.chief.read_rows(v, rows_of(1))


@aio
class TestRanges:
    @pytest.mark.parametrize("shards", [1, 3])
    async def test_they_are_those_of_python(self, shards: int) -> None:
        value = table(11)
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", value, shards=shards)
            for part in ("2:7", ":", "::3", "1:10:4", "::-1", "9:2:-3", "10::-5", "4:4", "0:11:11"):
                numbers = [int(number) if number else None for number in part.split(":")]
                start, stop, step = slice(*numbers).indices(11)
                got = await cluster.chief.read_range(v, start, stop, step)
                np.testing.assert_array_equal(got, value[slice(*numbers)])

    async def test_consecutive_rows_are_not_copied_on_the_ps(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", table())
            await cluster.chief.read_range(v, 2, 7)
            store = cluster.ps[0].statistics()["store"]
            assert (store["rows"], store["row_blocks"], store["row_bytes"]) == (5, 1, 60)
            assert store_of(cluster.ps[0]).shards()[v.shards[0].key].values.num_made == 1


@given(
    st.integers(-5, 20), st.integers(-5, 20), st.sampled_from([-4, -1, 1, 2, 3, 7]),
    st.integers(0, 20), st.integers(0, 20),
)  # fmt: skip
def test_which_positions_of_a_range_are_in_a_shard(
    start: int, stop: int, step: int, low: int, extent: int
) -> None:
    rows = range(start, stop, step)
    begin, end = _within(rows, low, low + extent)
    assert list(rows[begin:end]) == [row for row in rows if low <= row < low + extent]


@aio
class TestPushes:
    async def test_a_shard_without_rows_counts_the_push_too(self) -> None:
        """So steps are the same on all ps tasks, and a call has one variable set."""
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=2)
            first, second = cluster.client(WORKER), cluster.client(OTHER)
            one = IndexedSlices(np.ones((1, 3), np.float32), rows_of(1))
            other = IndexedSlices(np.ones((1, 3), np.float32), rows_of(8))
            assert await push_rows(first, v, one, closure=5) == ["accepted"] * 2
            assert await push_rows(second, v, other, closure=5) == ["duplicate"] * 2
            expected = table()
            expected[1] -= RATE
            np.testing.assert_array_equal((await pull(first, v))[0], expected)
            assert [task.statistics()["pushes"] for task in cluster.ps] == [1, 1]
            assert [store_of(task).push_count(1).marked for task in cluster.ps] == [1, 1]


@aio
class TestScattering:
    @pytest.mark.parametrize("op", SCATTER_OPS)
    async def test_rows_change_as_in_numpy(self, op: str) -> None:
        value = table(dtype=np.float64) + 1
        rows, values = rows_of(7, 0, 3), np.array([[2.0], [0.5], [4.0]]) * np.ones(3)
        expected = value.copy()
        with np.errstate(all="raise"):
            expected[rows] = {
                "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
                "min": np.minimum, "max": np.maximum, "assign": lambda _, new: new,
            }[op](value[rows], values)  # fmt: skip
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", value, shards=3)
            answers = await cluster.chief.scatter(v, rows, values, op=op, closure=-1, ordinal=0)
            assert {answer.outcome for answer in answers} == {"accepted"}
            np.testing.assert_array_equal((await pull(cluster.chief, v))[0], expected)


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


@aio
async def test_what_rows_cost_does_not_depend_on_the_size_of_the_table() -> None:
    """The same rows of each shard are used, of a table of 16 MB and of a declared one of 4 GB."""

    async def cost_of(rows_per_shard: int) -> list[dict[str, int]]:
        async with PsCluster(2) as cluster:
            shape = (8 * rows_per_shard, 64)
            value = np.broadcast_to(np.float32(0.25), shape)
            v = await cluster.create("v", value, shards=8)
            local = rows_of(8191, 0, 1, 5000, 0)
            rows = np.concatenate([shard.offset + local for shard in v.shards])
            client = cluster.client(WORKER)
            gradient = IndexedSlices(np.ones((len(rows), 64), np.float32), rows)
            before = counters(cluster)
            await push_rows(client, v, gradient)
            await client.scatter(v, rows, gradient.values, op="add", closure=-1, ordinal=0)
            got = await client.read_rows(v, rows)
            expected = [0.25 + (2 if row == 0 else 1) * (1 - RATE) for row in local]
            assert got[:, 0].tolist() == expected * 8
            assert (await client.read_rows(v, rows_of(7, shape[0] - 8)) == 0.25).all()
            after = counters(cluster)
        return [{key: b[key] - a[key] for key in a} for a, b in zip(before, after, strict=True)]

    def counters(cluster: PsCluster) -> list[dict[str, int]]:
        made = []
        for task in cluster.ps:
            statistics = task.statistics()
            store, network = statistics["store"], statistics["network"]
            made.append(
                {key: store[key] for key in ("rows", "row_blocks", "row_bytes")}
                | {key: network[key] for key in ("bytes_received", "bytes_sent")}
            )
        return made

    small, large = await cost_of(8192), await cost_of(1 << 21)
    assert small == large
    assert [task["rows"] for task in small] == [49, 49]
    assert [task["row_blocks"] for task in small] == [25, 25]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 4))
def test_any_rows_of_any_number_of_shards(rows: list[int], shards: int) -> None:
    async def check() -> None:
        async with PsCluster(2) as cluster:
            v = await cluster.create("v", table(), shards=shards)
            got = await cluster.chief.read_rows(v, np.array(rows, np.int64))
            np.testing.assert_array_equal(got, table()[rows])

    asyncio.run(check())
