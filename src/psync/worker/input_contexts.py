"""Contexts: the worker for which a dataset function is called, the replica of a value function."""

from __future__ import annotations

from dataclasses import dataclass

from psync.errors import ConfigurationError
from psync.specs import checked_integer

_REPLICAS = "num_replicas_in_sync: expected at least 1"


@dataclass(frozen=True, slots=True)
class InputContext:
    """Information for a dataset function about the worker that it runs on.

    Attributes:
        num_input_pipelines: Number of workers.
        input_pipeline_id: Index of this worker among them.
        num_replicas_in_sync: Number of replicas of a synchronous step.

    Source: ``tf.distribute.InputContext``. There every worker is pipeline 0 of 1 unless the dataset
        is distributed; here each worker gets its own index, so that it can take its share.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        last = self.num_input_pipelines - 1
        checked_integer(f"input_pipeline_id: expected 0 to {last}", self.input_pipeline_id, 0, last)
        checked_integer(_REPLICAS, self.num_replicas_in_sync, 1)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a global batch for each replica.

        Raises:
            ConfigurationError: The batch cannot be divided evenly; also a ValueError.
        """
        expected = "global_batch_size: expected an integer of at least 1"
        checked_integer(expected, global_batch_size, 1)
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ConfigurationError(
                f"global batch size {global_batch_size} is not divisible by "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        # TensorFlow's form: it stands in people's logs, and in what reads them.
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Information for a value function about the replica that its value is for.

    Attributes:
        replica_id_in_sync_group: Index of the replica.
        num_replicas_in_sync: Number of replicas of a synchronous step.

    Source: ``tf.distribute.experimental.ValueContext``.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        checked_integer(_REPLICAS, self.num_replicas_in_sync, 1)
        last = self.num_replicas_in_sync - 1
        expected = f"replica_id_in_sync_group: expected 0 to {last}"
        checked_integer(expected, self.replica_id_in_sync_group, 0, last)

    def __str__(self) -> str:  # as of InputContext
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )
