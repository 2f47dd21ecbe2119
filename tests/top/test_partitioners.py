"""How many shards a variable has, which rows each holds, and where it lies."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import ConfigurationError, PartitionError
from psync.partitioners import (
    PACKED_BYTES,
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    Placer,
    check_partitions,
    div_split,
)

KIB = 1024
F32 = np.float32


class TestTables:
    def test_fixed(self) -> None:
        for num_shards, shape, expected in [
            (2, (10, 3), [2, 1]),
            (12, (10, 3), [10, 1]),
            (1, (5,), [1]),
            (3, (0, 4), [1, 1]),
        ]:
            assert FixedShardsPartitioner(num_shards)(shape, F32) == expected

    def test_min_size(self) -> None:
        for min_shard_bytes, max_shards, shape, expected in [
            (256 * KIB, 2, (75 * KIB,), [2]),  # 300 KiB: rounded up, as in TensorFlow
            (256 * KIB, 1, (10 * KIB * KIB,), [1]),
            (256 * KIB, 9, (64 * KIB,), [1]),  # exactly one minimum
            (4, 2, (6, 1), [2, 1]),
            (4, 6, (6, 1), [6, 1]),
            (4, 10, (6, 1), [6, 1]),
            (8, 10, (6, 1), [3, 1]),
            (20, 10, (6, 1), [2, 1]),
            (4, 10, (6, 0), [1, 1]),
        ]:
            assert MinSizePartitioner(min_shard_bytes, max_shards)(shape, F32) == expected

    def test_max_size(self) -> None:
        for max_shard_bytes, max_shards, shape, expected in [
            (4, None, (6, 1), [6, 1]),
            (8, None, (6, 1), [3, 1]),
            (20, None, (6, 1), [2, 1]),
            (20, 1, (6, 1), [1, 1]),
            (4, 3, (6, 1), [3, 1]),
            (1, None, (6, 1), [6, 1]),  # a row is never cut
            (1 << 30, None, (6, 1), [1, 1]),
            (4, None, (6, 0), [1, 1]),
            (4, None, (0, 1), [1, 1]),
        ]:
            assert MaxSizePartitioner(max_shard_bytes, max_shards)(shape, F32) == expected

    def test_size_of_an_element(self) -> None:
        for dtype, by_min, by_max in [
            ("float64", [8], [9]),
            (np.dtype(np.int8), [1], [1]),
            ("bfloat16", [2], [2]),
            (ml_dtypes.bfloat16, [2], [2]),
            (str, [16], [17]),
            (np.dtype("U7"), [16], [17]),
        ]:
            assert MinSizePartitioner(100, 99)((100,), dtype) == by_min
            assert MaxSizePartitioner(100)((100,), dtype) == by_max

    def test_bytes_per_string(self) -> None:
        assert MinSizePartitioner(100, 99, bytes_per_string=3)((100,), str) == [3]
        assert MaxSizePartitioner(100, bytes_per_string=1)((100,), str) == [1]


class TestErrors:
    def test_argument(self) -> None:
        for value in [0, -1, 1.5, True, None, "2"]:
            for name, make in [
                ("FixedShardsPartitioner: num_shards", FixedShardsPartitioner),
                ("MinSizePartitioner: min_shard_bytes", MinSizePartitioner),
                ("MinSizePartitioner: max_shards", lambda n: MinSizePartitioner(1, n)),
                ("MinSizePartitioner: bytes_per_string", lambda n: MinSizePartitioner(1, 1, n)),
                ("MaxSizePartitioner: max_shard_bytes", MaxSizePartitioner),
                ("MaxSizePartitioner: bytes_per_string", lambda n: MaxSizePartitioner(1, 1, n)),
            ]:
                with pytest.raises(
                    ConfigurationError,
                    match=f"^{name}: expected a whole number above 0, got {value!r}$",
                ):
                    make(value)

    def test_zero_max_shards_of_max_size_is_no_longer_no_limit(self) -> None:
        with pytest.raises(ConfigurationError, match="MaxSizePartitioner: max_shards: expected"):
            MaxSizePartitioner(1, 0)

    def test_shape_that_is_not_known(self) -> None:
        for shape in [(None, 3), (-1,), (2.0,), (True,)]:
            with pytest.raises(PartitionError, match="expected a fully known shape, got"):
                FixedShardsPartitioner(2)(shape, F32)

    def test_scalar(self) -> None:
        with pytest.raises(PartitionError, match=r"^MinSizePartitioner: a scalar has no axis 0"):
            MinSizePartitioner()((), F32)

    def test_dtype(self) -> None:
        for dtype in [np.complex64, "no such", object(), np.dtype("M8[s]")]:
            with pytest.raises(PartitionError, match="dtype"):
                MaxSizePartitioner(1)((3,), dtype)


class TestCheckPartitions:
    def test_accepts(self) -> None:
        for partitions, expected in [
            ([2, 1], 2),
            ((3, 1), 3),
            ([1, 1], 1),
            ([99, 1], 10),
            ([np.int64(2), np.int64(1)], 2),
        ]:
            got = check_partitions(partitions, (10, 4), "w")
            assert got == expected
            assert type(got) is int

    def test_empty_variable_has_one_shard(self) -> None:
        assert check_partitions([3, 1], (0, 4), "w") == 1

    def test_refuses(self) -> None:
        for partitions in [
            None, [], [0, 1], [0, 1, 1], [2, 2], [2, 2, 1], [2], [2, 1, 1], [-1, 1], 2, "21",
            [2.0, 1], [True, 1], ["2", 1], [2, None], {2: 1},
        ]:  # fmt: skip
            with pytest.raises(PartitionError) as caught:
                check_partitions(partitions, (10, 4), "w")
            assert str(caught.value) == (
                'variable "w" of shape (10, 4): expected variable_partitioner to return a list of '
                f"2 whole numbers, the first at least 1 and all others 1, got {partitions!r}"
            )


@given(st.integers(0, 300), st.data())
def test_every_row_is_in_one_shard_and_the_larger_shards_come_first(
    dim0: int, data: st.DataObject
) -> None:
    num_shards = data.draw(st.integers(1, max(1, dim0)))
    split = div_split(dim0, num_shards)
    sizes = [rows for _, rows in split]
    assert sizes[0] - sizes[-1] <= 1
    assert sorted(sizes, reverse=True) == sizes
    covered = [row for offset, rows in split for row in range(offset, offset + rows)]
    assert covered == list(range(dim0))


partitioners: st.SearchStrategy[Partitioner] = (
    st.builds(FixedShardsPartitioner, st.integers(1, 50))
    | st.builds(MinSizePartitioner, st.integers(1, 4000), st.integers(1, 50))
    | st.builds(MaxSizePartitioner, st.integers(1, 4000), st.none() | st.integers(1, 50))
)


@given(partitioners, st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_every_partitioner_gives_shards_that_cover_each_element_once(
    partitioner: Partitioner, shape: list[int]
) -> None:
    partitions = partitioner(shape, np.float32)
    assert len(partitions) == len(shape)
    num_shards = check_partitions(partitions, shape, "w")
    assert num_shards == partitions[0]
    split = div_split(shape[0], num_shards)
    assert sum(rows for _, rows in split) == shape[0]
    assert all(rows for _, rows in split) or shape[0] == 0


@given(st.integers(1, 4000), st.integers(1, 200), st.integers(1, 50))
def test_max_size_is_respected_unless_a_row_is_larger(limit: int, rows: int, width: int) -> None:
    (num_shards, _) = MaxSizePartitioner(limit)((rows, width), np.float32)
    largest = max(count for _, count in div_split(rows, num_shards))
    assert largest * width * 4 <= limit or largest == 1


# --- placement -------------------------------------------------------------------------------


def test_shards_go_round_whatever_their_size() -> None:
    placer = Placer(3)
    assert [placer.place("v", nbytes) for nbytes in (1, 1 << 30, 0, 5, 5)] == [0, 1, 2, 0, 1]


def test_what_is_pinned_stays_where_it_is() -> None:
    placer = Placer(3)
    assert [placer.place("v", nbytes, 2) for nbytes in (1, 1 << 30, 0)] == [2, 2, 2]
    assert placer.place("v", 4) == 0


def test_each_shard_goes_where_the_fewest_bytes_are_and_of_equals_to_the_first() -> None:
    placer = Placer(3, "least_bytes")
    sizes = [100, 10, 10, 30, 0, 90, 5]
    assert [placer.place("v", nbytes) for nbytes in sizes] == [0, 1, 2, 1, 2, 2, 1]


def test_what_is_small_lies_on_ps_0_together_until_that_is_full() -> None:
    placer = Placer(3, "packed")
    sizes = [8 << 20, 8, PACKED_BYTES - 8, 1, 2, 8 << 20]
    assert [placer.place("v", nbytes) for nbytes in sizes] == [2, 0, 0, 1, 1, 1]
    assert Placer(1, "packed").place("v", 8 << 20) == 0


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 1000), min_size=1))
def test_by_bytes_no_ps_has_more_than_the_largest_shard_above_another(
    num_ps: int, sizes: list[int]
) -> None:
    placer = Placer(num_ps, "least_bytes")
    loads = [0] * num_ps
    for nbytes in sizes:
        loads[placer.place("v", nbytes)] += nbytes
    assert max(loads) - min(loads) <= max(sizes)


def test_what_is_pinned_or_beside_another_weighs_where_it_lies() -> None:
    placer = Placer(2, "least_bytes")
    assert placer.place("big", 100, placer.pinned(0)) == 0
    placer.note(1, 60)
    assert [placer.place("v", 30) for _ in range(3)] == [1, 1, 0]


def test_a_placement_of_the_users_own_is_asked_and_may_answer_with_a_numpy_integer() -> None:
    asked = []

    class Last:
        def place(self, nbytes: int) -> int:
            asked.append(nbytes)
            return np.int64(2)  # type: ignore[return-value]

    placer = Placer(3, Last())
    answer = placer.place("v", 12)
    assert (answer, type(answer), asked) == (2, int, [12])


@pytest.mark.parametrize("answer", [3, -1, None, "0", 1.0, True])
def test_an_answer_that_is_no_ps_names_the_variable(answer: object) -> None:
    class Wrong:
        def place(self, nbytes: int) -> Any:
            return answer

    with pytest.raises(ConfigurationError) as caught:
        Placer(3, Wrong()).place("w", 12)
    assert caught.value.message == (
        f'variable "w": expected the placement to return the index of a ps, 0 to 2, got {answer!r}'
    )


def test_a_placement_is_a_known_name_or_has_place() -> None:
    for placement in ["least", "", None, 3]:
        with pytest.raises(
            ConfigurationError,
            match="placement: expected 'round_robin', 'least_bytes', 'packed' or an object",
        ):
            Placer(2, placement)


def test_a_ps_is_named_by_its_index_or_its_device() -> None:
    for where in [1, np.int32(1), "/job:ps/replica:0/task:1/device:CPU:0", "/job:ps/task:1"]:
        assert Placer(2).pinned(where) == 1


def test_what_names_no_ps_of_the_cluster_is_an_error() -> None:
    for where in [
        2, -1, True, None, 1.0, "1", "", "/job:ps/task:2", "/job:worker/task:0", "/job:ps",
        "/job:ps/replica:1/task:0", "/job:ps/task:0/device:GPU:0", "/job:ps/task:0 ",
    ]:  # fmt: skip
        with pytest.raises(
            ConfigurationError, match="pinned: expected a ps, 0 to 1, or its device"
        ):
            Placer(2).pinned(where)
