"""Updates of rows as a ps gets them: identity, what is refused, and what anything at all does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inside import store_of, work_of
from memory_cluster import until
from ps_cluster import CONFIG, WORKER, PsCluster, hold, pull
from psync.client.ps_client import PsClient
from psync.errors import FencedError, PsyncError, RemoteError, UsageError, ValueMismatchError
from psync.specs import VariableSpec
from psync.wire.messages import Assign, Fence, Push, StagePush
from psync.wire.tensors import to_bytes_view
from sync_tools import GROUP, config

VALUE = np.arange(30, dtype=np.float32).reshape(10, 3)


def body(rows: list[int], count: int | None = None) -> memoryview:
    """Row numbers, and rows of ones."""
    ones = np.ones((len(rows) if count is None else count, 3), np.float32)
    return to_bytes_view(
        np.concatenate([np.array(rows, np.int64).view(np.uint8), ones.reshape(-1).view(np.uint8)])
    )


async def send(client: PsClient, message: Any, *segments: memoryview) -> Any:
    return (await client.links[0].call(lambda peer: message, segments)).message


def assign(rows: list[int] | None, op: str = "add", **given: Any) -> Assign:
    fields = {"sequence": 1, "closure": -1, "members": [(0, 0)]} | given
    return Assign(fields["sequence"], 0, fields["closure"], 0, 1, fields["members"], op, rows)


def push(rows: list[int] | None, **given: Any) -> Push:
    fields: dict[str, Any] = {"sequence": 1, "members": [(0, 0)], "optimizer": 1} | given
    return Push(
        fields["sequence"], 0, -1, 0, 1, fields["members"], fields["optimizer"], CONFIG, 0, rows
    )


async def value_of(cluster: PsCluster, v: VariableSpec) -> np.ndarray:
    return (await pull(cluster.chief, v))[0]


@pytest.mark.promise("updates.rows-at-most-once", "updates.misfit-refused")
@pytest.mark.asyncio
class TestIdentity:
    async def test_the_same_message_again_gets_the_first_answer(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", VALUE)
            client = cluster.client(WORKER)
            for _ in range(2):
                answer = await send(client, assign([2]), body([3, 7]))
                assert answer.outcome == "accepted"
            expected = VALUE.copy()
            expected[[3, 7]] += 1
            np.testing.assert_array_equal(await value_of(cluster, v), expected)

    async def test_the_second_run_of_a_closure_is_a_duplicate_whatever_rows_it_has(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", VALUE)
            client = cluster.client(WORKER)
            outcomes = [
                (await send(client, assign([1], sequence=n, closure=5), body([n]))).outcome
                for n in (1, 2)
            ]
            assert outcomes == ["accepted", "duplicate"]
            assert (await value_of(cluster, v) - VALUE)[:, 0].tolist() == [0, 1, *[0] * 8]

    async def test_who_was_replaced_changes_no_row(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", VALUE)
            client = cluster.client(WORKER, 500)
            await send(client, assign([1]), body([1]))
            fence = Fence(WORKER, 501)
            await cluster.chief.links[0].call(lambda peer: fence)
            with pytest.raises(FencedError):
                await send(client, assign([1], sequence=2), body([2]))
            assert (await value_of(cluster, v) - VALUE)[:, 0].tolist() == [0, 1, *[0] * 8]

    async def test_rows_of_a_busy_shard_wait_for_their_turn(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", VALUE)
            release = hold(cluster.ps[0], v)
            sending = asyncio.ensure_future(send(cluster.client(WORKER), push([1]), body([4])))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            release()
            assert (await sending).outcome == "accepted"
            assert (await value_of(cluster, v))[4].tolist() == (VALUE[4] - 0.5).tolist()

    async def test_an_update_that_was_refused_may_come_again_and_be_right(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", VALUE)
            client = cluster.client(WORKER)
            with pytest.raises(ValueMismatchError):
                await send(client, assign([1]), body([10]))
            assert (await send(client, assign([1]), body([1]))).outcome == "accepted"
            assert (await value_of(cluster, v) - VALUE)[:, 0].tolist() == [0, 1, *[0] * 8]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("message", "segments", "expected"),
    [
        (push([2]), [body([3, 3])], "got row 3 after row 3"),
        (push([2]), [body([3, 10])], "row 10 of the shard does not exist, it has 10"),
        (push([2]), [body([-1, 3])], "row -1 of the shard does not exist"),
        (push([2]), [body([3])], r"expected 2 rows \(40 bytes\), got 20 bytes"),
        (push([2, 2]), [body([3, 4])], "2 numbers of rows for 1 shards"),
        (push([]), [], "0 arrays for 1 shards|0 numbers of rows for 1 shards"),
        (push([1]), [body([1]), body([1])], "2 arrays for 1 shards"),
        (push([1], members=[(1, 0)]), [body([0])], "a scalar has no rows"),
        (push([1, 1], members=[(0, 0), (2, 0)]), [body([1]), body([1])], "only floating-point"),
        (assign([1, 1], "div", members=[(0, 0), (2, 0)]), [body([1]), body([1])], "divided"),
        (assign([1], "pow"), [body([1])], "unknown operation 'pow'"),
        (assign([-1], "mul"), [to_bytes_view(VALUE)], "unknown operation 'mul'"),
    ],
)
async def test_a_wrong_update_changes_nothing_at_all(
    message: Push | Assign, segments: list[memoryview], expected: str
) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", VALUE)
        await cluster.create("s", np.float32(1))
        i = await cluster.create("i", np.ones((4, 3), np.int32))
        with pytest.raises((ValueMismatchError, UsageError), match=expected):
            await send(cluster.client(WORKER), message, *segments)
        store = store_of(cluster.ps[0])
        assert [store.version(spec.shards[0].key) for spec in (v, i)] == [0, 0]
        np.testing.assert_array_equal(await value_of(cluster, v), VALUE)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["push", "assign", "stage"]),
    st.none() | st.lists(st.integers(-3, 12) | st.sampled_from([2**40, 2**63]), max_size=3),
    st.lists(st.binary(max_size=48) | st.lists(st.integers(-1, 10), max_size=3).map(body),
             max_size=3),
    st.lists(st.sampled_from([(0, 0), (1, 0), (2, 0), (9, 0)]), min_size=1, max_size=2),
    st.sampled_from(["assign", "add", "div", "min", "nothing"]),
)  # fmt: skip
def test_anything_from_the_wire_is_taken_whole_or_refused_whole(
    kind: str,
    rows: list[int] | None,
    segments: list[bytes | memoryview],
    members: list[tuple[int, int]],
    op: str,
) -> None:
    async def check() -> None:
        async with PsCluster() as cluster:
            variables = [
                await cluster.create("v", VALUE),
                await cluster.create("s", np.float32(1)),
                await cluster.create("b", np.ones((2, 5), np.bool_)),
            ]
            raw = config(1).to_config() | {"optimizer": CONFIG}
            message: Any = {
                "push": push(rows, members=members),
                "assign": assign(rows, op, members=members),
                "stage": StagePush(GROUP, raw, 1, -1, 1, members, rows),
            }[kind]
            client = cluster.client(WORKER)
            sent = send(client, message, *map(memoryview, segments))
            (answer,) = await asyncio.gather(sent, return_exceptions=True)
            store = store_of(cluster.ps[0])
            versions = [store.version(spec.shards[0].key) for spec in variables]
            if isinstance(answer, BaseException):
                assert isinstance(answer, PsyncError)
                assert not isinstance(answer, RemoteError)
                assert versions == [0, 0, 0]
            assert not any(map(store.busy, store.keys()))
            assert not cluster.ps[0].is_torn
            if not any(versions):
                np.testing.assert_array_equal(await value_of(cluster, variables[0]), VALUE)

    asyncio.run(check())
