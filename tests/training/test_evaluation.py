"""How validation data are cut into shards, and what of a batch is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync.errors import ConfigurationError, ValueMismatchError
from psync.training.evaluation import Counts, batch_size_of, shards_of

X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
Y = X.sum(axis=1)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (5, "got int"),
        ("text", "got str"),
        ([], "got list"),
        ((X, Y[:5]), "arrays of one length"),
        ((np.float32(1), np.float32(1)), "arrays of one length"),
        (({"a": X, "b": X[:5]}, Y), "arrays of one length"),
        ([X, Y], r"got a list of arrays, which is not a list of shards\nhint: .*\(x, y\)"),
    ],
)
def test_what_is_no_validation_data_is_refused(data: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        shards_of(data, 3, 8)


def test_coroutines_are_refused() -> None:
    async def shard(number: int, count: int) -> None: ...

    with pytest.raises(ConfigurationError, match="expected a plain function"):
        shards_of(shard, 3, 8)


def test_few_examples_make_few_shards() -> None:
    shards = shards_of((X[:3], Y[:3]), 10, 2)
    assert [[len(x) for (x, _) in shard] for shard in shards] == [[1], [1], [1]]
    (shard,) = shards_of((X[:5],), 1, 2)
    assert [len(x) for (x,) in shard] == [2, 2, 1]


def test_dicts_of_arrays_are_cut_together() -> None:
    shards = shards_of(({"a": X[:5], "b": Y[:5]}, Y[:5]), 2, 2)
    assert [[len(y) for _, y in shard] for shard in shards] == [[2], [2, 1]]
    for shard in shards:
        for x, y in shard:
            np.testing.assert_array_equal(x["b"], y)
            np.testing.assert_allclose(x["a"].sum(axis=1), y)


@pytest.mark.parametrize(
    ("batch", "size"),
    [((X, Y), 60), ({"x": X[:3]}, 3), ([(X[:4],), Y], 4), (5.0, 1), ((), 0), ("text", 1)],
)
def test_a_batch_has_as_many_examples_as_its_first_array_is_long(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


def test_losses_of_larger_batches_weigh_more() -> None:
    with strategy_of().scope():
        loss = psync.metrics.Mean("loss")
    counts = Counts({"loss": loss})
    counts.note((X[:10], Y[:10]), 1.0, ())
    counts.note((X[:30], Y[:30]), np.float32(2.0), ())
    assert loss.value_of(counts.sums[0]) == 1.75
    assert counts.batches == 2


def test_metrics_need_labels() -> None:
    with strategy_of().scope():
        loss, mae = psync.metrics.Mean("loss"), psync.metrics.MeanAbsoluteError("mae")
    with pytest.raises(ValueMismatchError, match=r"expected \(x, y\) or \(x, y, sample_weight\)"):
        Counts({"loss": loss, "mae": mae}).note(X, 1.0, (Y,))
