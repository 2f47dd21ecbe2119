"""What can be a dataset: arrays, files and iterables, whole and in shards, and functions."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync import InputContext, TensorSpec, ValueContext, data
from psync.errors import ConfigurationError, UsageError
from psync.worker.data_sources import (
    ArrayDataset,
    FileDataset,
    IterableDataset,
    Sharded,
    dataset_of,
    iterable_of,
    open_dataset,
    policy_for,
    takes_context,
)

Pair = namedtuple("Pair", ["x", "y"])
X = np.arange(10, dtype=np.float32).reshape(5, 2)
Y = np.arange(5)


ONE = InputContext()


async def coroutine() -> list[int]:
    return []


async def async_generator() -> Any:
    yield 1


def sizes(dataset: Any) -> list[int]:
    return [len(batch) for batch in dataset]


def rows(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in np.atleast_1d(batch)]


# --- arrays -----------------------------------------------------------------------------------


def test_arrays_that_belong_together_are_cut_alike() -> None:
    batches = list(ArrayDataset((X, {"y": Y}), 2))
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    for x, rest in batches:
        assert (x[:, 0] == 2 * rest["y"]).all()
    (pair, _, _) = ArrayDataset(Pair(X, Y), 2)
    assert type(pair) is Pair


def test_the_last_batch_may_be_left_out() -> None:
    assert sizes(ArrayDataset(Y, 2, drop_remainder=True)) == [2, 2]
    assert sizes(ArrayDataset(Y, 7)) == [5]
    with pytest.raises(ConfigurationError, match=r"^batch_size: expected at most 5, .* got 7$"):
        ArrayDataset(Y, 7, drop_remainder=True)


def test_without_a_batch_size_rows_come_one_by_one() -> None:
    found = list(ArrayDataset((X, Y), None))
    assert [int(y) for _, y in found] == [0, 1, 2, 3, 4]
    assert found[3][0].tolist() == [6, 7]
    assert rows(ArrayDataset(Y, None, shuffle_seed=1)) != [0, 1, 2, 3, 4]


def test_a_step_may_change_its_batch() -> None:
    array = np.zeros(4)
    for options in ({}, {"shuffle_seed": 0}):
        for batch in ArrayDataset(array, 2, **options):  # type: ignore[arg-type]
            batch += 1
    for row in ArrayDataset(array.reshape(2, 2), None):
        row += 1
    assert not array.any()


def test_a_list_is_stacked() -> None:
    assert next(iter(ArrayDataset([np.zeros(3), np.ones(3)], 2))).shape == (2, 3)
    assert sizes(ArrayDataset([1, 2, 3], 2)) == [2, 1]
    with pytest.raises(UsageError, match=r"a list is stacked .*\nhint: pass related arrays"):
        ArrayDataset([X, Y], 2)


def test_each_epoch_has_an_order_of_its_own_and_so_has_each_pipeline() -> None:
    dataset = ArrayDataset(np.arange(50), 50, shuffle_seed=3, num_epochs=2)
    first, second = map(rows, ([batch] for batch in dataset))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    orders = [rows([next(dataset(InputContext(2, worker)))]) for worker in range(2)]
    assert orders[0] == first != orders[1]
    assert rows(dataset) == rows(dataset)


def test_epochs_may_go_on_for_ever() -> None:
    dataset = ArrayDataset(np.arange(3), 2, num_epochs=None)
    assert rows(itertools.islice(dataset, 5)) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("options", "batch"),
    [({}, None), ({"drop_remainder": True}, 2)],
)
def test_arrays_tell_their_spec_without_being_cut(options: Any, batch: int | None) -> None:
    assert ArrayDataset((X, Y), 2, **options).element_spec == (
        TensorSpec((batch, 2), "float32"), TensorSpec((batch,), "int64"),
    )  # fmt: skip
    assert ArrayDataset(X, 5).element_spec == TensorSpec((5, 2), "float32")
    assert ArrayDataset(X, None).element_spec == TensorSpec((2,), "float32")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((X, np.zeros(4)), r"the same number of rows in all, got shapes \[\(5, 2\), \(4,\)\]$"),
        (np.zeros((0, 3)), r"arrays of at least one row each, got .*\(0, 3\)\]$"),
        (np.float32(1), r"at least one row each, got shapes \[\(\)\]$"),
        ((), r"at least one row each, got shapes \[\]$"),
        ((X, None), "expected arrays, got None$"),
    ],
)
def test_what_are_no_rows_is_refused(arrays: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^arrays: .*{message}"):
        ArrayDataset(arrays, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"^batch_size: expected an integer of at least 1, got 0$"),
        ({"num_epochs": 0}, r"^num_epochs: expected an integer of at least 1, got 0$"),
        ({"shuffle_seed": -1}, r"^shuffle_seed: expected an integer of at least 0, or None, got"),
    ],
)
def test_a_number_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ArrayDataset(Y, **{"batch_size": 2, **options})
    with pytest.raises(ConfigurationError, match=r"^batch_size: expected an integer"):
        data.from_arrays(Y, None)  # type: ignore[arg-type]


# --- files ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = []
    for index in range(3):
        found.append(tmp_path / f"{index}.npy")
        np.save(found[-1], np.arange(4) + 10 * index)
    return found


def halves(file: Path) -> Iterator[Any]:
    array = np.load(file)
    yield array[:2]
    yield array[2:]


def test_files_are_read_one_after_the_other(files: list[Path]) -> None:
    dataset = FileDataset(files, halves)
    assert rows(dataset) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert dataset.element_spec == TensorSpec((2,), "int64")
    assert repr(dataset) == "<dataset of 3 files, read by halves>"


def test_files_are_shuffled_anew_in_each_epoch(files: list[Path]) -> None:
    dataset = FileDataset(files * 5, halves, shuffle_seed=1, num_epochs=2)
    seen = rows(dataset)
    assert sorted(seen[:60]) == sorted(seen[60:])
    assert seen[:60] != seen[60:]
    assert rows(dataset(InputContext(2, 1))) != seen


def test_a_dataset_without_batches_ends_although_it_is_repeated_for_ever() -> None:
    assert list(FileDataset(["a"], lambda file: [], num_epochs=None)) == []


async def asynchronous(file: str) -> None: ...


@pytest.mark.parametrize(
    ("files", "reader", "message"),
    [
        ("a.npy", halves, r"^files: expected a list of file names, got str\nhint: sorted\(glob"),
        (Path("a"), halves, r"^files: expected a list of file names, got pathlib.PosixPath"),
        ((n for n in "ab"), halves, "^files: expected a list of file names, got generator"),
        ([], halves, "^files: expected at least one file name, got an empty list$"),
        (["a"], None, "^reader: expected a function that takes a file name .* got NoneType$"),
        (["a"], asynchronous, "^reader asynchronous is asynchronous\nhint: write a plain function"),
    ],
)
def test_what_cannot_be_read_is_refused(files: Any, reader: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FileDataset(files, reader)


@pytest.mark.parametrize("returned", [None, {"x": 1}, (X, Y)])
def test_what_a_reader_returns_is_batches(returned: Any) -> None:
    with pytest.raises(UsageError, match=r"^reader <lambda> returned .* expected an iterable of"):
        list(FileDataset(["a"], lambda file: returned))


# --- iterables --------------------------------------------------------------------------------


class Loader:
    """As data loaders are: it has a length, and can be iterated over again and again."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])

    def __len__(self) -> int:
        return 3


def test_an_iterable_gives_all_of_it_to_everybody() -> None:
    dataset = iterable_of(Loader())
    assert list(dataset(InputContext(2, 1))) == list(dataset) == [1, 2, 3]
    assert dataset.element_spec == TensorSpec((), "int64")
    assert repr(dataset).endswith("Loader>")


def test_of_a_sequence_the_first_and_the_last_batch_tell_the_spec() -> None:
    batches = [np.zeros(4), np.zeros(4), np.zeros(2)]
    assert IterableDataset(batches).element_spec == TensorSpec((None,), "float64")
    assert IterableDataset(batches[:1]).element_spec == TensorSpec((4,), "float64")
    assert IterableDataset([]).element_spec is None


# --- shards -----------------------------------------------------------------------------------


@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 7),
    num_workers=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
    num_epochs=st.integers(1, 2),
)
def test_shards_cover_every_row_once_an_epoch(
    num_rows: int, batch_size: int, num_workers: int, seed: int | None, num_epochs: int
) -> None:
    dataset = ArrayDataset(
        np.arange(num_rows), batch_size, shuffle_seed=seed, num_epochs=num_epochs
    )
    sharded = Sharded(dataset, "data")
    seen = [rows(sharded(InputContext(num_workers, i))) for i in range(num_workers)]
    assert sorted(itertools.chain(*seen)) == sorted(list(range(num_rows)) * num_epochs)


def test_a_worker_takes_every_nth_element_file_or_all(files: list[Path]) -> None:
    dataset = FileDataset(files, halves)

    def seen(policy: str) -> list[list[int]]:
        return [rows(Sharded(dataset, policy)(InputContext(2, i))) for i in range(2)]

    assert seen("file") == [[0, 1, 2, 3, 20, 21, 22, 23], [10, 11, 12, 13]]
    assert seen("data") == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
    assert seen("off") == [rows(dataset)] * 2
    one, two = [
        list(Sharded(iterable_of("abcde".split()), "data")(InputContext(2, i))) for i in (0, 1)
    ]
    assert (one, two) == (["abcde"], [])


def test_a_shard_travels() -> None:
    sharded = pickle.loads(pickle.dumps(Sharded(ArrayDataset(Y, 2), "data")))
    assert takes_context(sharded)
    assert rows(open_dataset(sharded, InputContext(2, 1))) == [2, 3]


def test_auto_is_by_file_if_there_are_enough(files: list[Path]) -> None:
    dataset = FileDataset(files, halves)
    assert policy_for(dataset, "auto", 3) == "file"
    assert policy_for(dataset, "auto", 4) == "data"
    assert policy_for(iterable_of([1]), "auto", 1) == "data"
    assert policy_for(dataset, "off", 9) == "off"
    with pytest.raises(ConfigurationError, match=r"each of 4 workers, got 3 files\nh"):
        policy_for(dataset, "file", 4)
    with pytest.raises(ConfigurationError, match="got a dataset without files, <dataset of 5 rows"):
        policy_for(ArrayDataset(Y, 2), "file", 1)


# --- what a user may give ---------------------------------------------------------------------


class Callable:
    def __call__(self, context: InputContext) -> list[int]:
        return [context.input_pipeline_id]


@pytest.mark.parametrize(
    ("source", "elements"),
    [
        (lambda: [1, 2], [1, 2]),
        (lambda context: [context.input_pipeline_id], [1]),
        (functools.partial(range, 3), [0, 1, 2]),
        (Loader, [1, 2, 3]),
        (Loader(), [1, 2, 3]),
        (Callable(), [1]),
        ([1, 2], [1, 2]),
        (range(2), [0, 1]),
        (((1, 2), (3, 4)), [(1, 2), (3, 4)]),
        ([X, Y], [X, Y]),
        (ArrayDataset(Y, 5), [Y]),
        (Sharded(iterable_of([1, 2, 3]), "data"), [2]),
    ],
)
def test_a_function_or_an_iterable_is_a_dataset(source: Any, elements: list[Any]) -> None:
    found = list(open_dataset(dataset_of(source), InputContext(2, 1)))
    assert len(found) == len(elements)
    for one, other in zip(found, elements, strict=True):
        assert np.array_equal(one, other)


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"^dataset: expected a dataset function or an iterable of batches, got NoneType\nh"),
        (3, "got int\n"),
        ("batches", "got str$"),
        (generator(), r"a generator can be iterated over only once.*\nhint: pass the function"),
        (itertools.count(), "a itertools.count can be iterated over only once"),
        (map(abs, [1]), "a map can be iterated over only once"),
        ((X, Y), r"got a tuple of arrays\nhint: psync.data.from_arrays\(arrays, batch_size=…\)"),
        (Pair(X, Y), r"got a Pair of arrays\nhint: psync.data.from_arrays"),
        ({"x": X}, r"got a dict of arrays\nhint: psync.data.from_arrays"),
        (X, r"got an array\nhint: psync.data.from_arrays"),
        ({"x": 1}, r"^dataset: expected an iterable of batches, got dict$"),
        (coroutine, "^dataset_fn coroutine is asynchronous\n"),
        (async_generator, "^dataset_fn async_generator is asynchronous\n"),
        (async_generator(), "got async_generator, which is asynchronous\nhint: batches are loaded"),
        (lambda a, b: [], "needs the arguments a, b; expected none, or one"),
    ],
)
def test_what_is_no_dataset_is_refused_and_says_what_to_give(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset_of(source)
    with pytest.raises(UsageError, match="got coroutine, which is asynchronous"):
        dataset_of(coroutine())


def test_an_iterable_is_no_text() -> None:
    with pytest.raises(UsageError, match=r"^dataset: expected an iterable of batches, got str$"):
        iterable_of("text")
    assert iterable_of(dataset := ArrayDataset(Y, 2)) is dataset


# --- contexts ----------------------------------------------------------------------------------


def test_contexts_describe_a_single_pipeline_and_the_only_replica_by_default() -> None:
    assert (ONE.num_input_pipelines, ONE.input_pipeline_id, ONE.num_replicas_in_sync) == (1, 0, 1)
    assert str(InputContext(2, 1)) == "tf.distribute.InputContext(input pipeline id 1, total: 2)"
    value = ValueContext()
    assert (value.replica_id_in_sync_group, value.num_replicas_in_sync) == (0, 1)
    assert str(ValueContext(1, 3)) == (
        "tf.distribute.ValueContext(replica id 1, total replicas in sync: 3)"
    )


def test_a_global_batch_is_divided_evenly_or_not_at_all() -> None:
    context = InputContext(num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match=r"^global batch size 13 is not divisible by 6 replicas$"):
        context.get_per_replica_batch_size(13)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda i=i: InputContext(2, i), "input_pipeline_id: expected 0 to 1") for i in (-1, 2)),
        (lambda: ValueContext(2, 2), "replica_id_in_sync_group: expected 0 to 1, got 2"),
        (lambda: InputContext(num_replicas_in_sync=0), "num_replicas_in_sync: expected at least 1"),
        *(
            (lambda size=size: ONE.get_per_replica_batch_size(size), "global_batch_size: expected")
            for size in (0, -6, 2.5, True)
        ),
    ],
)
def test_numbers_out_of_their_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        make()


# --- dataset functions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset_fn", "expected"),
    [
        (lambda: [], False),
        (lambda context: [], True),
        (lambda anything, size=3: [], True),
        (lambda size=3: [], False),
        (lambda seed=None: [], False),
        (lambda input_context=None: [], True),
        (lambda *args, **kwargs: [], False),
        (lambda *, context=None: [], False),
        (functools.partial(lambda context, size: [], size=3), True),
        (range, False),
        (dict, False),
    ],
)
def test_the_signature_tells_whether_a_function_wants_the_context(
    dataset_fn: Any, expected: bool
) -> None:
    assert takes_context(dataset_fn) is expected


def test_a_function_that_needs_more_than_a_context_is_refused() -> None:
    def dataset_fn(context: Any, path: str) -> Any: ...

    with pytest.raises(UsageError) as caught:
        takes_context(dataset_fn)
    assert str(caught.value) == (
        "dataset_fn dataset_fn needs the arguments context, path; expected none, or one (an "
        "InputContext)\nhint: bind the others with functools.partial"
    )
    with pytest.raises(UsageError, match=r"needs the arguments path; expected none"):
        takes_context(lambda *, path: [])
    with pytest.raises(UsageError, match=r"^dataset_fn: expected a function, got list$"):
        takes_context([1])  # type: ignore[arg-type]


class OldSequence:
    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise IndexError
        return index


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        ([1, 2], [1, 2]),
        (iter([1, 2]), [1, 2]),
        ((n for n in [1, 2]), [1, 2]),
        (((0, 1), (2, 3)), [(0, 1), (2, 3)]),
        (np.array([5, 6]), [5, 6]),
        (OldSequence(), [0, 1]),
        ((), []),
    ],
)
def test_any_iterable_of_batches_is_a_dataset(dataset: Any, batches: list[Any]) -> None:
    assert list(open_dataset(lambda: dataset, ONE)) == batches


@pytest.mark.parametrize(
    ("dataset_fn", "message"),
    [
        (
            lambda: (np.zeros(3), np.zeros(3)),
            "returned a tuple of 2 arrays, expected an iterable of batches\n"
            r"hint: a list of one batch is \[\(x, y\)\]$",
        ),
        (lambda: None, "returned NoneType, expected an iterable of batches$"),
        (lambda: {"x": 1}, "returned dict, expected an iterable of batches$"),
        (lambda: "batches", "returned str, expected an iterable of batches$"),
        (coroutine, "^dataset_fn coroutine is asynchronous\nhint: write a plain function or gen"),
        (async_generator, "^dataset_fn async_generator is asynchronous\n"),
        (lambda: coroutine(), "^dataset_fn <lambda> is asynchronous\n"),
        (lambda: async_generator(), "^dataset_fn <lambda> is asynchronous\n"),
    ],
)
def test_what_is_no_sequence_of_batches_is_refused(dataset_fn: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_dataset(dataset_fn, ONE)
