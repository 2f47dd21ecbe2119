"""Loss scaling for replicas, so that their gradients may be summed.

Each replica sees a part of the global batch. The sum over replicas of what they compute here is the
mean over that batch; a mean over the own part would count it as often as there are replicas.
"""

from __future__ import annotations

from typing import Any

from psync.errors import ContextError, ReplicaValueError
from psync.replicas.context import in_cross_replica_context, replicas_in_sync
from psync.specs import as_integer, check_not_masked, plain_array


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """Return the sum of losses, divided by the size of the batch of all replicas.

    Args:
        per_example_loss: Losses of rank 1 or higher, examples on axis 0: a numpy array, an array of
            another library (its own operations are used, so gradients flow), or a list of numbers.
        sample_weight: A weight for each example, or for each loss; or one for all. None: 1.
        global_batch_size: Number of examples of all replicas; 0 makes the loss 0. None: the number
            of examples here, times the number of replicas (1 in a closure).

    Returns:
        A scalar of the losses' library.

    Raises:
        ReplicaValueError: The losses are a scalar, a weight does not match, or the size is invalid.
        ContextError: Called in cross-replica context without a size.

    Source: ``tf.nn.compute_average_loss``.
    """
    loss = _as_array(per_example_loss)
    if not len(loss.shape):
        raise ReplicaValueError(
            "compute_average_loss: expected a loss for each example, got a scalar",
            hint="np.reshape(loss, (1,)) for a batch of one example",
        )
    if sample_weight is not None:
        loss = loss * _fitting_weight(_as_array(sample_weight), tuple(loss.shape))
    if global_batch_size is None:
        _check_in_replica("compute_average_loss", "; or give global_batch_size")
        size: int | None = int(loss.shape[0]) * replicas_in_sync()
    else:
        size = as_integer(global_batch_size)
        if size is None or size < 0:
            raise ReplicaValueError(
                "compute_average_loss: expected global_batch_size to be a whole number, got "
                f"{global_batch_size!r}"
            )
    return loss.sum() / size if size else loss.sum() * 0.0


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return the sum of a loss that every replica has in full, divided by the number of replicas.

    Args:
        regularization_loss: A number or an array of any library.

    Raises:
        ContextError: Called in cross-replica context.

    Source: ``tf.nn.scale_regularization_loss``.
    """
    _check_in_replica("scale_regularization_loss", "")
    return _as_array(regularization_loss).sum() / replicas_in_sync()


def _as_array(value: Any) -> Any:
    try:
        check_not_masked(value)
        if hasattr(value, "shape") and hasattr(value, "sum"):
            return value
        array = plain_array(value)
    except (TypeError, ValueError) as exc:
        raise ReplicaValueError(f"a loss: expected numbers, got {value!r:.80}: {exc}") from exc
    if array.dtype.kind not in "biuf":
        raise ReplicaValueError(f"a loss: expected numbers, got {value!r:.80}")
    return array


def _fitting_weight(weight: Any, shape: tuple[int, ...]) -> Any:
    """Return weights with the axes of the losses, so that nothing else than weights is repeated."""
    rank = len(weight.shape)
    if rank == len(shape) + 1 and weight.shape[-1] == 1:
        weight = weight.reshape(tuple(weight.shape[:-1]))
    elif 0 < rank == len(shape) - 1:
        weight = weight.reshape((*weight.shape, 1))
    got = tuple(weight.shape)
    if got and not (
        len(got) == len(shape) and all(n in (1, m) for n, m in zip(got, shape, strict=True))
    ):
        raise ReplicaValueError(
            f"compute_average_loss: expected sample_weight for losses of shape {shape}: of shape "
            f"{shape[:1]}, of that of the losses, or one number; got {got}"
        )
    return weight


def _check_in_replica(operation: str, instead: str) -> None:
    if in_cross_replica_context():
        raise ContextError(
            f"{operation} in cross-replica context, where the replica of the losses is unknown",
            hint=f"call it in a step, or in the function given to strategy.run{instead}",
        )
