"""The identity of this process in its cluster, and what a chief does for its program.

While the program runs, workers may join; at its end, its tasks are told to exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError, PsyncError
from psync.launch.door import Door
from psync.net.discovery.default import resolve_cluster
from psync.net.endpoint import Endpoint
from psync.net.environment import (
    added_workers,
    is_supervised,
    newest_incarnation,
    platform_of,
)
from psync.net.platform import Platform
from psync.net.resolvers import ClusterResolver, TFConfigClusterResolver, training_cluster
from psync.net.secret import load_secret
from psync.net.workforce import Workforce
from psync.wire.messages import Shutdown


@dataclass(frozen=True, slots=True)
class OwnTask:
    """Who this process is."""

    resolver: ClusterResolver
    cluster: ClusterSpec
    job: str
    index: int
    is_found: bool = False  # in the surroundings, where nobody has described the cluster
    is_supervised: bool = False  # see ``environment.is_supervised``

    @property
    def name(self) -> str:
        """As in ``/job:worker/task:0``."""
        return task_name(self.job, self.index)

    @property
    def leads(self) -> bool:
        """Whether the others exit when it does: the chief, or worker 0 where there is none."""
        first = (self.job, self.index) == ("worker", 0) and "chief" not in self.cluster.jobs
        return self.job == "chief" or first

    @property
    def address(self) -> str:
        """Where it is known."""
        return self.cluster.task_address(self.job, self.index)

    def addresses_of(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return where the tasks of these jobs are, by name, so far as the cluster has them."""
        return {
            task_name(job, index): self.cluster.task_address(job, index)
            for job in jobs
            if job in self.cluster.jobs
            for index in self.cluster.task_indices(job)
        }


def own_task(resolver: ClusterResolver | None) -> OwnTask:
    """Return which task a resolver says this process is; without one, its surroundings say it.

    Raises:
        ConfigurationError: There is no cluster, or its description is wrong or does not say which
            task it is; or ``PSYNC_SUPERVISED`` is malformed.
    """
    is_found = resolver is None
    resolver = resolver or resolve_cluster()
    is_found = is_found and not isinstance(resolver, TFConfigClusterResolver)
    cluster, job, index = training_cluster(resolver)
    if job == "evaluator" and index is None:
        index = 0
    if job is None or index is None:
        raise ConfigurationError(
            "the cluster's description does not say which task this process is",
            hint='TF_CONFIG needs a task, such as "task": {"type": "worker", "index": 0}',
        )
    return OwnTask(resolver, cluster, job, index, is_found, is_supervised(os.environ))


logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""How long the chief waits, at its end, for each task to hear that it should exit."""


async def shut_down(own: OwnTask, jobs: Sequence[str], began: int) -> None:
    """Tell every task of these jobs that training is over; those that do not hear it stay.

    It is said in the name of the program's last coordinator; if there was none, of the moment in
    which the program ``began``: tasks that serve a newer chief meanwhile are not ours to end.

    Args:
        own: This process.
        jobs: As in ``("worker", "ps")``.
        began: Nanoseconds, of the time of day.

    Cancellation: Who has not heard it stays.
    """
    try:
        # If there is no secret, main() has allowed that or has failed: it was said before.
        platform = platform_of(own.resolver, own.address, insecure=True, warn=logger.debug)
    except ConfigurationError as exc:
        logger.debug("nobody was told to exit: %s", exc)
        return
    tasks = own.addresses_of(jobs) | (added_workers.get() or {})
    await tell_to_end(platform, newest_incarnation() or began, tasks)


async def tell_to_end(platform: Platform, incarnation: int, tasks: Mapping[str, str]) -> None:
    """Tell some tasks that training is over.

    Args:
        platform: Of the chief.
        incarnation: In whose name it is said.
        tasks: Address of each, by name.

    Cancellation: Who has not heard it stays.
    """
    endpoint = Endpoint(platform, task_name("chief", 0), incarnation, {})

    async def tell(name: str, address: str) -> None:
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    peer = await endpoint.connect(address, name)
                    await peer.call(Shutdown("the chief has ended"))
            except PsyncError as exc:
                logger.info("%s was not told to exit: %s", name, exc)

    try:
        await asyncio.gather(*(tell(name, address) for name, address in tasks.items()))
    finally:
        await endpoint.close()


@contextlib.asynccontextmanager
async def open_to_joiners(
    own: OwnTask, workforce: Workforce, added: MutableMapping[str, str]
) -> AsyncIterator[None]:
    """Return a context in which workers may join the chief's program.

    Without a secret none may. Where the chief cannot listen at its address, training goes on all
    the same.

    Args:
        own: The chief.
        workforce: Told of those that come and leave.
        added: See ``Door``.
    """
    door = _door_of(own, workforce, added) if own.job == "chief" else None
    async with contextlib.AsyncExitStack() as stack:
        if door is not None:
            try:
                await stack.enter_async_context(door)
            except ConfigurationError as exc:
                logger.info("workers cannot join this program: %s", exc.message)
        yield


def _door_of(own: OwnTask, workforce: Workforce, added: MutableMapping[str, str]) -> Door | None:
    """Return the chief's door; None: without a secret, or where the set-up is wrong.

    Of that the program hears when it starts its coordinator, in one error that is no log line.
    """
    with contextlib.suppress(ConfigurationError):
        if load_secret(os.environ) is not None:
            platform = platform_of(own.resolver, own.address, listens=True)
            return Door(platform, own.address, workforce, added)
    return None
