"""The training modes that are compared.

A gradient weighs the same in all of them: an asynchronous push is applied with the learning rate
of the whole cluster divided by the number of workers, and the mean of R gradients with R times
that. So what differs is when gradients are applied, and to which values they belong.
"""

from __future__ import annotations

from dataclasses import dataclass

from psync.api.optimizers import StalenessBound
from psync.api.sync_replicas import SyncReplicasOptimizer
from psync.optimizers import SGD, Optimizer

BOUNDS = (2, 8)  # rounds that a worker may be ahead


@dataclass(frozen=True, slots=True)
class Mode:
    """One of them, on some number of workers."""

    num_workers: int
    bound: int | None = None  # rounds that a worker may be ahead; asynchronous modes only
    backups: int | None = None  # gradients of a step that are dispensable; None: asynchronous

    @property
    def name(self) -> str:
        """What tables and plots call it."""
        if self.backups:
            return f"sync, {self.backups} backup" + "s" * (self.backups > 1)
        if self.backups == 0:
            return "sync"
        return "async" if self.bound is None else f"bounded {self.bound}"

    @property
    def synchronous(self) -> bool:
        """Whether gradients are averaged."""
        return self.backups is not None

    @property
    def aggregated(self) -> int:
        """R: gradients that one update takes."""
        return 1 if self.backups is None else self.num_workers - self.backups

    def rate(self, cluster_rate: float) -> float:
        """Return the learning rate of one update."""
        return cluster_rate * self.aggregated / self.num_workers

    def optimizer(self, cluster_rate: float) -> Optimizer | SyncReplicasOptimizer:
        """Return the optimizer: plain gradient descent."""
        rate = self.rate(cluster_rate)
        if self.synchronous:
            return SyncReplicasOptimizer(
                SGD(rate),
                replicas_to_aggregate=self.aggregated,
                total_num_replicas=self.num_workers,
            )
        bound = None if self.bound is None else StalenessBound(self.bound)
        return SGD(rate, staleness_bound=bound)


def modes_of(num_workers: int, max_backups: int) -> list[Mode]:
    """Return all modes for so many workers, with 0 to ``max_backups`` backup replicas."""
    asynchronous = [Mode(num_workers, bound=bound) for bound in (None, *BOUNDS)]
    return asynchronous + [Mode(num_workers, backups=count) for count in range(max_backups + 1)]
