"""What users make datasets with."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from psync.errors import ConfigurationError


def test_arrays_become_batches_that_can_be_iterated_over_anywhere() -> None:
    x, y = np.arange(6).reshape(3, 2), np.arange(3)
    dataset = psync.data.from_arrays((x, y), batch_size=2)
    for _ in range(2):
        assert [(a.tolist(), b.tolist()) for a, b in dataset] == [
            ([[0, 1], [2, 3]], [0, 1]),
            ([[4, 5]], [2]),
        ]
    assert dataset.element_spec[0] == psync.TensorSpec((None, 2), "int64")


def test_files_become_the_batches_that_a_reader_finds_in_them() -> None:
    dataset = psync.data.from_files(["ab", "c"], list, num_epochs=2)
    assert list(dataset) == ["a", "b", "c"] * 2


def test_a_batch_has_a_size() -> None:
    for batch_size in [None, 0, "2"]:
        with pytest.raises(
            ConfigurationError, match=r"^batch_size: expected an integer of at least 1"
        ):
            psync.data.from_arrays(np.arange(3), batch_size)


def test_its_names_are_documented() -> None:
    for name in psync.data.__all__:
        assert getattr(psync.data, name).__doc__
