"""What a simulated synchronous training is made of: a plan, faults, and a journal of pushes.

Everything is drawn from a seed, and nothing else: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memory_cluster import MemoryCluster

from psync.context import current_closure

FOR_EVER_S = 10_000.0
CHAOS_S = 20.0  # then everybody is left in peace
FENCED_AFTER_S = 0.5  # that a worker was given up for: longer than a message takes

ACCEPTED, STALE, DUPLICATE = "accepted", "stale", "duplicate"


# --- what is trained -------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupPlan:
    """A synchronous optimizer, or an asynchronous one with a staleness bound."""

    options: dict[str, Any] = field(default_factory=dict)
    bound: int | None = None  # asynchronous; rounds
    weights: Sequence[float] = (1.0,)

    @property
    def reduction(self) -> str:
        return str(self.options["reduction"])

    @property
    def allowance(self) -> int:
        needed, total = self.options["replicas_to_aggregate"], self.options["total_num_replicas"]
        return -(-needed // total)

    @property
    def is_bound(self) -> bool:
        return "strict" in self.options or "deterministic" in self.options

    @property
    def is_compat(self) -> bool:
        return bool(self.options.get("tensorflow_compat"))


@dataclass(frozen=True)
class PushPlan:
    """One push of a closure. Powers of two as weights: sums are exact."""

    column: int  # of the group's table, in which it leaves its trace
    group: int
    pulls: bool  # before it
    weight: float


@dataclass(frozen=True)
class ClosurePlan:
    """One closure."""

    pushes: tuple[PushPlan, ...]
    needs: int | None = None  # the number of an earlier one whose value it takes
    cancelled_after_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """One run."""

    num_workers: int
    groups: tuple[GroupPlan, ...]
    closures: tuple[ClosurePlan, ...]
    at_once: bool  # all closures are scheduled at once, or one by one
    pause_s: float  # longest pause in a step
    first_step: int
    num_shards: int
    num_columns: int
    padding: int  # further columns, so that messages and updates are large
    fillers: int  # variables before the global step: they shift it to another ps
    fault_every_s: float

    @property
    def is_impatient(self) -> bool:
        """Whether closures may fail because too few workers live."""
        return any(g.bound is None and g.options["patience_s"] < FOR_EVER_S for g in self.groups)

    @property
    def gives_up(self) -> bool:
        """Whether closures may stop while they wait for a token."""
        cancels = any(closure.cancelled_after_s is not None for closure in self.closures)
        return cancels or self.is_impatient

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        num_workers = rng.choice((3, 3, 4))
        padding = rng.choice((0, 0, 0, 9_000, 60_000))
        may_need, may_be_cancelled = rng.choice((0.0, 0.2)), rng.choice((0.0, 0.0, 0.2))
        kinds = rng.choice(("s", "s", "s", "ss", "ss", "ss", "b", "b"))
        groups = tuple(
            _drawn_group(rng, num_workers) if kind == "s" else GroupPlan(bound=rng.randrange(4))
            for kind in kinds
        )
        columns: Counter[int] = Counter()
        closures: list[ClosurePlan] = []
        for number in range(rng.randrange(12, 25) if padding else rng.randrange(20, 45)):
            pushes = []
            for at in range(rng.choice((1, 1, 1, 2))):
                group = rng.randrange(len(groups))
                pulls = not at or rng.random() < 0.7
                pulls = pulls and rng.random() < 0.95
                weight = rng.choice(groups[group].weights)
                pushes.append(PushPlan(columns[group], group, pulls, weight))
                columns[group] += 1
            lasting = [at for at in range(number) if closures[at].cancelled_after_s is None]
            needs = rng.choice(lasting) if lasting and rng.random() < may_need else None
            cancelled = rng.random() * 5 if rng.random() < may_be_cancelled else None
            closures.append(ClosurePlan(tuple(pushes), needs, cancelled))
        return cls(
            num_workers,
            groups,
            tuple(closures),
            at_once=rng.random() < 0.7,
            pause_s=rng.choice((0.02, 0.2, 0.6)),
            first_step=rng.choice((0, 0, 5)),
            num_shards=rng.choice((2, 2, 4)),
            num_columns=max(columns.values()) + NUM_SPARE,
            padding=padding,
            fillers=rng.randrange(2),
            fault_every_s=rng.choice((0.1, 0.4, 1.0, 3.0)),
        )


NUM_SPARE = 60
"""Columns for pushes after the end."""


def _drawn_group(rng: random.Random, num_workers: int) -> GroupPlan:
    total = rng.choice((num_workers, num_workers, num_workers - 1, 1))
    needed = max(1, total + rng.choice((-2, -1, 0, 0, 0, 1, 3)))
    options: dict[str, Any] = {"reduction": rng.choice(("sum", "sum", "mean"))}
    match rng.choice(("free", "strict", "deterministic", "compat")):
        case "strict":
            options["strict"] = True
        case "deterministic":
            options["deterministic"] = True
            needed = total
        case "compat":
            options["tensorflow_compat"] = True
    options |= {
        "replicas_to_aggregate": needed,
        "total_num_replicas": total,
        "min_replicas": rng.choice((1, 1, min(2, total), total)),
        "patience_s": rng.choice((FOR_EVER_S, FOR_EVER_S, 1.0)),
    }
    return GroupPlan(options, weights=rng.choice(((1.0,), (0.5, 1.0, 2.0))))


# --- what happens to it ----------------------------------------------------------------------


class Faults:
    """Workers that die, are cut off or given up, and connections that break."""

    def __init__(self, cluster: MemoryCluster, rng: random.Random) -> None:
        self.given_up: list[tuple[str, float, float]] = []  # worker, from and to: it goes on alone
        self.over = False  # nothing more is to happen
        self._cluster = cluster
        self._network = cluster.network
        self._rng = rng
        self._num_workers = cluster.counts["worker"]
        self._num_ps = cluster.counts["ps"]
        self._away: set[str] = set()  # workers to whom something happens
        self._loop = asyncio.get_running_loop()

    async def run(self, every_s: float) -> None:
        """Let something happen now and then, and end when all is well again."""
        end = self._loop.time() + CHAOS_S
        async with asyncio.TaskGroup() as lasting:
            while self._loop.time() < end and not self.over:
                await asyncio.sleep(self._rng.uniform(0, 2 * every_s))
                lasting.create_task(self._happen())

    async def _happen(self) -> None:
        rng = self._rng
        worker = f"worker-{rng.randrange(self._num_workers)}"
        ps = f"ps-{rng.randrange(self._num_ps)}"
        seconds = rng.choice((0.0, 0.05, 0.5, 8.0)) * rng.random()
        happening = rng.randrange(10)
        if happening <= 3:
            if worker in self._away:
                return
            self._away.add(worker)
            match happening:
                case 0:
                    self._network.cut(worker)
                case 1 | 2:
                    await self._kill(worker, seconds)
                case 3:
                    await self._give_up(worker, seconds)
            self._away.discard(worker)
        elif happening == 4:
            self._cut_one(worker, ps)
        elif happening == 5:
            await self._separate(worker, ps, seconds)
        elif happening == 6:
            self._cut_one(rng.choice(("chief-0", "ps-0")), ps)
        elif happening >= 8:
            for link in self._network.links(f"{ps}:1"):
                if rng.random() < 0.5:
                    link.cut()
        else:
            await self._separate(rng.choice(("chief-0", "ps-0")), ps, seconds / 10)

    def _cut_one(self, a: str, b: str) -> None:
        links = [link for link in self._network.links(a) if link.ends.are(a, b)]
        if links:
            self._rng.choice(links).cut()

    async def _kill(self, worker: str, seconds: float) -> None:
        self._network.cut(worker)
        await self._cluster.stop(worker)
        await asyncio.sleep(seconds)
        await self._cluster.start(worker)

    async def _separate(self, a: str, b: str, seconds: float) -> None:
        if a != b:
            self._network.partition(a, b)
            await asyncio.sleep(seconds)
            self._network.heal(a, b)

    async def _give_up(self, worker: str, seconds: float) -> None:
        """The coordinator gives a worker up that does not hear of it, and goes on."""
        self._network.partition(worker, "chief-0")
        for link in self._network.links("chief-0"):
            if link.ends.are(worker, "chief-0"):
                link.client.abort()
        began = self._loop.time()
        await asyncio.sleep(seconds)
        self.given_up.append((worker, began, self._loop.time()))
        self._network.heal(worker, "chief-0")


# --- what workers saw ------------------------------------------------------------------------


@dataclass
class Note:
    """One push of one run of a closure, as its worker saw it."""

    worker: int
    session: object  # one for each incarnation of the worker
    began: float  # loop time
    local: int  # step of the values, as far as the values themselves say it; -1: of none
    outcome: str | None = None  # None: nobody was told
    staleness: int = 0
    token: int = -1


class Journal:
    """All pushes."""

    def __init__(self) -> None:
        self.notes: dict[tuple[int, int], list[Note]] = {}  # by group and column
        self._runs: Counter[tuple[int, ...]] = Counter()

    def begin_run(self, *closure: int) -> int:
        """Return how often the closure ran before."""
        self._runs[closure] += 1
        return self._runs[closure] - 1

    def push(self, group: int, column: int, local: int) -> Note:
        """Note that the closure that runs here makes a push."""
        closure = current_closure()
        assert closure is not None
        now = asyncio.get_running_loop().time()
        note = Note(closure.worker_index, closure.runtime, now, local)
        self.notes.setdefault((group, column), []).append(note)
        return note

    def told(self, group: int) -> Counter[tuple[str, str]]:
        """How often each worker was told what, as (task, outcome)."""
        return Counter(
            (f"/job:worker/task:{note.worker}", note.outcome)
            for (its_group, _), notes in self.notes.items()
            for note in notes
            if its_group == group and note.outcome is not None
        )
