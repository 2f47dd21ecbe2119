"""What dataset functions are told, which functions can be one, and what they may return."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from psync import InputContext, ValueContext
from psync.errors import ConfigurationError, UsageError
from psync.worker.data_sources import open_dataset, takes_context

ONE = InputContext()

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


async def coroutine() -> list[int]:
    return []


async def async_generator() -> Any:
    yield 1


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
