"""Losses of replicas: the sum over replicas is the mean over the global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from psync.client.context import ClosureContext, inside
from psync.errors import ReplicaValueError
from psync.replicas.context import cross_replica

LOSSES = np.array([1.0, 2.0, 6.0], np.float32)


class Member:
    """One replica of three."""

    replica_id, num_replicas = 0, 3


def replica(gang: Any = None) -> Any:
    return inside(ClosureContext(worker_index=0, closure_id=1, gang=gang))


def test_one_replica_has_the_mean_of_its_batch() -> None:
    with replica():
        assert psync.compute_average_loss(LOSSES) == 3.0
        assert psync.compute_average_loss(LOSSES).dtype == np.float32
    assert psync.compute_average_loss([1.0, 3.0]) == 2.0


def test_each_of_three_replicas_has_its_part_of_the_mean() -> None:
    with replica(Member()):
        assert psync.compute_average_loss(LOSSES) == 1.0
        assert psync.compute_average_loss(LOSSES, global_batch_size=18) == 0.5
        assert psync.scale_regularization_loss([3.0, 6.0]) == 3.0
        assert psync.scale_regularization_loss(6.0) == 2.0


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(2.0, 6.0), ([1, 0, 1], 7 / 3), ([[1], [0], [1]], 7 / 3), (np.zeros(3, np.float32), 0.0)],
)
def test_losses_are_weighted_one_by_one(weight: Any, expected: float) -> None:
    assert psync.compute_average_loss(LOSSES, weight) == pytest.approx(expected)


def test_a_weight_for_each_example_holds_for_all_its_losses() -> None:
    losses = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert psync.compute_average_loss(losses, [1.0, 0.5]) == pytest.approx((3 + 3.5) / 2)
    assert psync.compute_average_loss(losses, [[1.0, 0.0], [0.0, 1.0]]) == pytest.approx(2.5)


def test_an_empty_batch_has_no_loss() -> None:
    assert psync.compute_average_loss(np.zeros(0)) == 0.0
    assert psync.compute_average_loss(LOSSES, global_batch_size=0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ((LOSSES, weight), r"sample_weight for losses of shape \(3,\)")
            for weight in ([1.0, 2.0], np.ones((3, 2)), np.ones((1, 3)))  # never broadcast
        ),
        ((3.0,), "a loss for each example, got a scalar"),
        *(
            ((losses,), "a loss: expected numbers")
            for losses in (["a"], [[1], [1, 2]], [None], [1j])
        ),
        *(
            ((LOSSES, None, size), "expected global_batch_size to be a whole number")
            for size in (-1, 2.5, True, "4", [4])
        ),
    ],
)
def test_what_is_no_loss_weight_or_size_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ReplicaValueError, match=message):
        psync.compute_average_loss(*arguments)


def test_in_cross_replica_context_it_is_not_known_whose_losses_these_are() -> None:
    with cross_replica(None, num_replicas=3):
        with pytest.raises(
            RuntimeError, match=r"compute_average_loss in cross-replica .*\nhint: .*gl"
        ):
            psync.compute_average_loss(LOSSES)
        with pytest.raises(
            RuntimeError, match="scale_regularization_loss in cross-replica context"
        ):
            psync.scale_regularization_loss(1.0)
        assert psync.compute_average_loss(LOSSES, global_batch_size=9) == 1.0
