"""What travels for one operation: messages and bytes by link, as the taps of all endpoints show it.

A whole cluster in this process, on a network in memory and in virtual time. Its workers do an
operation some times to warm up, fall silent, do it ``TIMES`` more, and fall silent again: what was
sent in between, divided by ``TIMES``, is what one takes.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import psync
from psync.net.connection import Connection, Tap
from psync.net.endpoint import Endpoint
from psync.wire.codec import decode
from psync.wire.frames import PREFIX_BYTES, SENT, Kind
from psync.wire.messages import BeginBackup

WARM_UP, TIMES = 5, 10
CLOSURES = 1_000
SILENCE_S = 0.5
SMALL, LARGE = (16, 32), (64, 256)  # 2 KiB and 64 KiB, of which six are more than 64 KiB
IDS, COLUMNS = 600, 16


class Link(NamedTuple):
    """Of which tasks, and whether with a backup; see ``of``."""

    one: str
    other: str

    @classmethod
    def of(cls, peer: Connection, own: str) -> Link:
        jobs = sorted(re.findall(r"/job:(\w+)/", own + peer.task))
        return cls(*("coordinator" if job == "chief" else job for job in jobs))


@dataclass
class Traffic:
    """On one link."""

    messages: float = 0
    tensors: float = 0  # bytes of bodies
    others: float = 0  # bytes of prefixes, headers, and lengths of segments


@dataclass
class Counting:
    """What has been sent while it is on."""

    on: bool = False
    garbage: Counter[str] | None = None  # what only the collector finds, if it is looked for
    links: defaultdict[Link, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def begin(self) -> None:
        self.on = True
        if self.garbage is not None:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)

    def end(self) -> None:
        self.on = False
        if self.garbage is not None:
            gc.collect()
            self.garbage.update(f"{type(each).__qualname__} {each!r:.80}" for each in gc.garbage)
            gc.set_debug(0)
            gc.garbage.clear()

    def tap_of(self, own: str, peer: Connection) -> Tap:
        """Each message is shown twice: the sender counts it, the receiver knows its body."""
        feeds_backup = False

        def tap(kind: int, _: int, header: bytes, nbytes: int) -> None:
            nonlocal feeds_backup
            feeds_backup |= bool(header) and isinstance(decode(header), BeginBackup)
            if not self.on or kind & ~SENT in (Kind.PING, Kind.PONG):
                return
            link = Link("ps", "backup") if feeds_backup else Link.of(peer, own)
            traffic = self.links[link]
            if kind & SENT:
                traffic.messages += 1
                traffic.others += PREFIX_BYTES + len(header) + nbytes
            else:
                traffic.tensors += nbytes
                traffic.others -= nbytes

        return tap

    def each(self, times: int) -> dict[Link, Traffic]:
        """What one of so many operations took."""
        return {
            link: Traffic(traffic.messages / times, traffic.tensors / times, traffic.others / times)
            for link, traffic in self.links.items()
        }


counting = Counting()


def count_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tap each endpoint that is made from now on."""
    counting.on = False
    counting.links.clear()
    begin = Endpoint.__init__

    def begin_tapped(self: Endpoint, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.tap(lambda peer: counting.tap_of(self.task, peer))

    monkeypatch.setattr(Endpoint, "__init__", begin_tapped)


async def counted(operation: Callable[[], Awaitable[Any]]) -> None:
    """In a closure on each worker, all at the same time: do it again and again."""
    for _ in range(WARM_UP):
        await operation()
    await asyncio.sleep(SILENCE_S)
    counting.begin()
    await asyncio.sleep(SILENCE_S)
    for _ in range(TIMES):
        await operation()
    await asyncio.sleep(SILENCE_S)
    counting.end()


# Operations: each is made of what it works on, and is done in the closures of all its workers.

Model = list[psync.Variable]
Operation = Callable[[], Awaitable[Any]]


def pairs_of(model: Model) -> list[tuple[np.ndarray, psync.Variable]]:
    return [(np.ones(variable.shape, np.float32), variable) for variable in model]


def pulling(model: Model, *_: Any) -> Operation:
    return lambda: psync.pull(model)


def pushing(model: Model, optimizer: Any, *_: Any) -> Operation:
    return lambda: optimizer.apply_gradients(pairs_of(model))


def pushing_and_pulling(model: Model, optimizer: Any, *_: Any) -> Operation:
    return lambda: optimizer.push_pull(pairs_of(model), pull=model)


def with_a_global_step(model: Model, optimizer: Any, step: psync.Variable) -> Operation:
    return lambda: optimizer.push_pull(pairs_of(model), pull=model, global_step=step)


def looking_up(model: Model, *_: Any) -> Operation:
    ids = np.arange(IDS)[::-1] * (model[0].shape[0] // IDS)
    return lambda: psync.embedding_lookup(model[0], ids)


@dataclass(frozen=True)
class Work:
    """An operation, and what it is done with.

    Attributes:
        shape: Of each of the variables; None: of one table, with a shard on each ps.
        by_all: Whether all workers do it, in step.
    """

    operation: Callable[..., Operation]
    shape: tuple[int, int] | None = SMALL
    by_all: bool = False


WORKS = {
    "pull": Work(pulling),
    "push": Work(pushing),
    "`push_pull`": Work(pushing_and_pulling),
    "`push_pull` with a global step": Work(with_a_global_step),
    "lookup of `k` rows": Work(looking_up, None),
    "synchronous step, to 64 KiB": Work(with_a_global_step, SMALL, by_all=True),
    "synchronous step, above 64 KiB": Work(with_a_global_step, LARGE, by_all=True),
}


class Case(NamedTuple):
    """A cluster and a model, by the letters that the page has for them."""

    p: int  # ps tasks
    w: int  # workers
    n: int  # variables, as many on each ps
    backup: bool = False


async def traffic_of(name: str, case: Case) -> tuple[dict[Link, Traffic], dict[str, int]]:
    """Return what one operation takes, by link, and the sizes of what it is done with."""
    work = WORKS.get(name)
    is_table = work is not None and work.shape is None
    async with psync.LocalCluster(case.p, case.w, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(
            cluster.resolver,
            psync.FixedShardsPartitioner(case.p) if is_table else None,
            ps_recovery="backup" if case.backup else "checkpoint",
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            if work is None:
                return await _closures(coordinator)
            return await _steps(work, case, coordinator, strategy)


async def _steps(
    work: Work, case: Case, coordinator: psync.ClusterCoordinator, strategy: Any
) -> tuple[dict[Link, Traffic], dict[str, int]]:
    with strategy.scope():
        if work.shape is None:
            model = [psync.Variable(np.zeros((2 * IDS, COLUMNS), np.float32))]
        else:
            model = [psync.Variable(np.zeros(work.shape, np.float32)) for _ in range(case.n)]
        step = psync.get_or_create_global_step()
    optimizer: Any = psync.optimizers.SGD(0.1)
    if work.by_all:
        optimizer = psync.SyncReplicasOptimizer(optimizer, case.w)

    async def closure() -> None:
        await counted(work.operation(model, optimizer, step))

    for _ in range(case.w if work.by_all else 1):
        coordinator.schedule(closure)
    await coordinator.join()
    model_bytes = sum(gradient.nbytes for gradient, _ in pairs_of(model))
    return counting.each(TIMES), {"m": model_bytes, "k": IDS, "r": COLUMNS * 4}


async def _closures(
    coordinator: psync.ClusterCoordinator,
) -> tuple[dict[Link, Traffic], dict[str, int]]:
    async def nothing() -> int:
        return 1

    for count in (8, CLOSURES):
        for _ in range(count):
            coordinator.schedule(nothing)
        await coordinator.join()
        await asyncio.sleep(SILENCE_S)
        (counting.end if counting.on else counting.begin)()
    return counting.each(CLOSURES), {}
