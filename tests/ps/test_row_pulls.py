"""Pulls of rows as a ps gets them: what is refused, and what takes its time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inside import store_of, work_of
from memory_cluster import until
from ps_by_hand import A, PsByHand, joined
from ps_cluster import WORKER, PsCluster, assign, hold, pull
from psync.errors import (
    PsyncError,
    RemoteError,
    RemoteProtocolError,
    UsageError,
    ValueMismatchError,
)
from psync.ps_task import PsTask
from psync.wire.frames import Frame
from psync.wire.limits import Limits
from psync.wire.messages import PullRows, RowsPulled
from psync.wire.tensors import to_bytes_view

aio = pytest.mark.asyncio

VALUE = np.arange(30, dtype=np.float32).reshape(10, 3)
ALL = (0, 0, 10, 0, 10, 1)


def rows_of(ps: PsByHand, message: PullRows, *numbers: list[int]) -> list[list[float]]:
    """Ask for rows; return those of each part."""
    reply = ps.call(A, message, *(np.array(rows, np.int64).tobytes() for rows in numbers))
    assert isinstance(reply.message, RowsPulled)
    return [np.frombuffer(joined([each]), np.float32).tolist() for each in reply.segments]


def holding(value: np.ndarray = VALUE, **limits: int) -> PsByHand:
    ps = PsByHand(limits=Limits(**limits))
    ps.create("v", value)
    return ps


async def ask(cluster: PsCluster, message: PullRows, *numbers: list[int]) -> Frame:
    segments = [to_bytes_view(np.array(rows, np.int64)) for rows in numbers]
    return await cluster.chief.links[0].call(lambda peer: message, segments)


def parts_of(received: Frame) -> list[list[float]]:
    assert isinstance(received.message, RowsPulled)
    return [np.frombuffer(view, np.float32).tolist() for view in received.segments]


@aio
async def test_several_parts_are_answered_in_their_order() -> None:
    async with PsCluster() as cluster:
        await cluster.create("v", VALUE)
        parts = [(0, 0, 2, 0, 0, 0), (0, 0, 3, 2, 5, 1), (0, 0, 2, 9, 5, -2), (0, 0, 1, 0, 0, 0)]
        got = parts_of(await ask(cluster, PullRows(parts, -1, ""), [7, 1], [4]))
        expected = [VALUE[[7, 1]], VALUE[2:5], VALUE[[9, 7]], VALUE[[4]]]
        assert got == [rows.reshape(-1).tolist() for rows in expected]


@pytest.mark.parametrize(
    ("parts", "numbers", "expected"),
    [
        (
            [(0, 0, 2, 0, 0, 0)],
            [[10, 0]],
            (ValueMismatchError, "row 10 of the shard does not exist"),
        ),
        ([(0, 0, 1, 0, 0, 0)], [[-1]], (ValueMismatchError, "row -1 of the shard does not exist")),
        ([(0, 0, 3, 8, 11, 1)], [], (ValueMismatchError, "row 10 of the shard does not exist")),
        ([(0, 0, 2, 0, -2, -1)], [], (ValueMismatchError, "row -1 of the shard does not exist")),
        ([(0, 0, 3, 2, 6, 1)], [], (RemoteProtocolError, "4 rows named, 3 declared")),
        ([(0, 0, 2, 0, 0, 0)], [], (RemoteProtocolError, "0 rows named, 2 declared")),
        ([(0, 0, 2, 0, 0, 0)], [[1]], (RemoteProtocolError, r"segments of \(8,\) bytes")),
        ([ALL], [[1]], (RemoteProtocolError, r"segments of \(8,\) bytes, expected those of \[\]")),
        ([(0, 0, 1, 0, 2**63, 2**62)], [], (RemoteProtocolError, "row numbers beyond")),
    ],
)
def test_what_does_not_fit_is_refused(
    parts: list[tuple[int, int, int, int, int, int]],
    numbers: list[list[int]],
    expected: tuple[type[PsyncError], str],
) -> None:
    ps = holding()
    with pytest.raises(expected[0], match=expected[1]):
        rows_of(ps, PullRows(parts, -1, ""), *numbers)
    assert rows_of(ps, PullRows([ALL], -1, "")) == [VALUE.reshape(-1).tolist()]


def test_no_more_is_gathered_than_the_limit_allows() -> None:
    ps = holding(gathered_bytes=24)
    assert rows_of(ps, PullRows([ALL], -1, ""))  # nothing is gathered
    with pytest.raises(UsageError, match="36 bytes of rows asked for at once, at most 24"):
        rows_of(ps, PullRows([(0, 0, 3, 0, 0, 0)], -1, ""), [1, 1, 1])


@aio
async def test_rows_of_a_busy_shard_are_waited_for() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", VALUE)
        release = hold(cluster.ps[0], v)
        parts = [(0, 0, 1, 0, 0, 0), (0, 0, 2, 0, 2, 1)]
        asking = asyncio.ensure_future(ask(cluster, PullRows(parts, -1, ""), [7]))
        await until(lambda: work_of(cluster.ps[0]).waiting)
        release()
        got = parts_of(await asking)
        assert got == [VALUE[7].tolist(), VALUE[:2].reshape(-1).tolist()]


@aio
async def test_many_rows_are_gathered_with_the_loop_running_in_between() -> None:
    async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
        value = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
        v = await cluster.create("v", value)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += store_of(cluster.ps[0]).busy(v.shards[0].key)

        counting = asyncio.ensure_future(count())
        reading = cluster.chief.read_rows(v, np.arange(1 << 10)[::-1])
        adding = assign(cluster.client(WORKER), v, np.ones((1 << 10, 1 << 10), np.float32), "add")
        got, _ = await asyncio.gather(reading, adding)
        counting.cancel()
        assert turns > 4
        changed = got - value[::-1]
        assert (changed == changed[0, 0]).all()
        assert ((await pull(cluster.chief, v))[0] == value + 1).all()


numbers = st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), *[numbers] * 4), max_size=4),
    st.lists(st.lists(st.integers(-3, 12), max_size=3), max_size=3),
    st.integers(-1, 1),
)
def test_any_request_is_answered_or_refused_by_an_error_of_ours(
    parts: list[tuple[int, int, int, int, int, int]], rows: list[list[int]], optimizer: int
) -> None:
    async def check() -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", VALUE)
            await cluster.create("s", np.float32(1))
            asked = ask(cluster, PullRows(parts, optimizer, "m"), *rows)
            (answer,) = await asyncio.gather(asked, return_exceptions=True)
            if isinstance(answer, BaseException):
                assert isinstance(answer, PsyncError)
                assert not isinstance(answer, RemoteError)
            else:
                assert len(answer.segments) == len(parts)
            assert not is_busy(cluster.ps[0])
            whole = parts_of(await ask(cluster, PullRows([ALL], -1, "")))
            assert whole == [VALUE.reshape(-1).tolist()]

    asyncio.run(check())


def is_busy(task: PsTask) -> bool:
    return any(map(store_of(task).busy, store_of(task).keys()))
