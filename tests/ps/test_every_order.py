"""All orders of three clients with three commands each, with a death at each place of the log.

A ps and its backup, without a network. In whatever order commands come, and wherever the ps dies:
after promotion, and repetition of what was not answered, answers, state and values are those of a
ps alone that got the same commands in the same order; and a ps and its backup are equal after each
entry.

There are 1,680 orders, and some 25 deaths in each: after each entry, and with or without a word of
the backup that it has the last one. ``make test`` looks at every 60th order, and at one death in
each; the slow test at all orders, one death in each (20 s of CPU); and with PSYNC_EVERY_PLACE=1 at
all deaths in all orders (5 minutes).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asked import Reply
from psync.numerics.rules import SGD
from psync.store.sync_config import SyncConfig
from psync.testing import VirtualClockLoop, settle
from psync.wire.codec import Message
from psync.wire.messages import (
    CreateShards,
    DefineAccumulator,
    DefinePlan,
    Fence,
    ReportSchedule,
    TakeGradient,
    Update,
    UpdateAccumulator,
)
from stage import CHIEF, Stage, planned

W, V, Z, STEP = (0, 0), (1, 0), (4, 0), (9, 0)
GROUP = 5
FIRST, SECOND = ("/job:worker/task:0", 1000), ("/job:worker/task:1", 1000)

CONFIG = SyncConfig(
    name="group", optimizer=SGD(1.0).to_config(), replicas_to_aggregate=2, total_num_replicas=2,
    global_step=(0, *STEP),
).to_config()  # fmt: skip


def push(sequence: int, closure: int, *keys: tuple[int, int]) -> Message:
    return Update(sequence, 0, closure, 0, planned(DefinePlan(0, list(keys), 1)).plan)


def contribute(closure: int) -> Message:
    plan = planned(DefinePlan(0, [W], GROUP, CONFIG, variable_set=b"w"))
    return Update(1, 0, closure, 0, plan.plan, local_step=0)


def assign() -> Message:
    return Update(1, 0, -1, 0, planned(DefinePlan(0, [W], op="add")).plan)


def gradient(sequence: int, closure: int) -> Message:
    return UpdateAccumulator(sequence, 0, closure, 0, "a", 0, [1])


Command = tuple[tuple[str, int], Message, list[float]]
"""Who asks, what, and what each array is filled with."""

UPDATES: list[list[Command]] = [
    [  # a worker that pushes, contributes, and repeats its push; unless it has been fenced
        (FIRST, push(1, 1, W, V), [-1, -1]),
        (FIRST, contribute(2), [-2]),
        (FIRST, push(1, 1, W, V), [-1, -1]),
    ],
    [  # one on which the same closure runs, too
        (SECOND, push(1, 1, W, V), [-1, -1]),
        (SECOND, contribute(3), [-4]),
        (SECOND, push(2, -1, V), [-16]),
    ],
    [  # the coordinator loses the first, says who is left, and has an update of its own
        (CHIEF, Fence(FIRST[0], FIRST[1] + 1), []),
        (CHIEF, ReportSchedule(1, [SECOND], [FIRST[0]], True, []), []),
        (CHIEF, assign(), [64]),
    ],
]

ACCUMULATED: list[list[Command]] = [
    [
        (FIRST, gradient(1, 1), [1]),
        (FIRST, gradient(2, 2), [2]),
        (FIRST, gradient(1, 1), [1]),
    ],
    [  # the same closure, a take, and one more gradient
        (SECOND, gradient(1, 1), [1]),
        (SECOND, TakeGradient("a", 1, 0, 2), []),
        (SECOND, gradient(2, -1), [4]),
    ],
    [  # a variable is created meanwhile, which holds up what comes after it
        (CHIEF, CreateShards([("z", *Z, 0, [1], "float32")], [bytes(4)]), []),
        (CHIEF, Fence(FIRST[0], FIRST[1] + 1), []),
        (CHIEF, assign(), [64]),
    ],
]

PLANS = {"updates": UPDATES, "accumulators": ACCUMULATED}

BATCH = {"updates": 1, "accumulators": 3}
"""A synchronous step makes entries of its own, whose places depend on when others are judged."""

ORDERS = sorted(set(itertools.permutations((0, 0, 0, 1, 1, 1, 2, 2, 2))))


def in_order(plan: str, order: Iterable[int]) -> list[Command]:
    """The commands of all three, in this order."""
    left = [iter(commands) for commands in PLANS[plan]]
    return [next(left[client]) for client in order]


@dataclass
class Run:
    """A ps with a backup, and what it was asked."""

    stage: Stage
    answers: dict[int, str] = field(default_factory=dict)  # by the place of the command
    has: int = 0  # entries, the backup

    @property
    def entries(self) -> int:
        """How many are in the log since it began."""
        return int(self.stage.serving.services.executor.log.last) - 1  # but for a definition

    async def begin(self, *, backed_up: bool) -> None:
        await self.stage.begin()
        for key, name in ((W, "w"), (V, "v")):
            self.stage.create(key, name, np.zeros(1, np.float32))
        self.stage.create(STEP, "step", np.array(0))
        services = self.stage.serving.services
        services.store.define_optimizer(1, SGD(1.0).to_config())
        services.sync.known(GROUP, CONFIG)
        define = DefineAccumulator("a", "dense", "float32", [1], "MEAN", "", False, 0)
        await self.stage.request(CHIEF, define)
        if backed_up:
            await self.stage.back_up()
        await settle()

    def send(self, place: int, command: Command) -> None:
        client, message, values = command

        def then(outcome: Reply | Exception) -> None:
            said = type(outcome).__name__
            if isinstance(outcome, Reply):
                said = f"{outcome.message} {[bytes(each) for each in outcome.segments]}"
            self.answers.setdefault(place, said)

        body = [np.full(1, value, np.float32).tobytes() for value in values]
        self.stage.ask(client, message, body, then)

    async def take(self, below: int, *, heard: int = 1 << 30, batch: int = 1) -> None:
        """Let the backup have entries up to one, so many at a time; its ps hears of some."""
        await settle()
        sender = self.stage.sender
        while sender is not None and self.has < min(below, self.entries):
            is_heard = self.has < heard
            count = min(batch, below - self.has, heard - self.has if is_heard else batch)
            self.has += await sender.take(count, heard=is_heard)
            await settle()
            if not is_heard:
                return
            digests = [each.services.digest() for each in (self.stage.serving, self.stage.backup)]
            assert digests[0] == digests[1]

    def left(self) -> tuple[Any, ...]:
        """The state and the values."""
        values = [float(self.stage.value(key)[0]) for key in (W, V)]
        control = [section.control() for section in self.stage.serving.services.sections]
        return values, int(self.stage.value(STEP)), control


async def undisturbed(commands: list[Command]) -> tuple[int, dict[int, str], tuple[Any, ...]]:
    """Return how many entries these commands make on a ps alone, the answers, and what is left."""
    run = Run(Stage())
    try:
        await run.begin(backed_up=False)
        for place, command in enumerate(commands):
            run.send(place, command)
            await settle()
        return run.entries, run.answers, run.left()
    finally:
        await run.stage.close()


async def with_death(
    commands: list[Command], at: int, batch: int, *, heard: bool
) -> tuple[dict[int, str], tuple[Any, ...]]:
    """Return the same for a ps that dies when its backup has so many entries.

    Args:
        commands: In their order.
        at: How many.
        batch: So many commands come before entries are shipped, all in one message.
        heard: Whether it has heard that its backup has the last of them.
    """
    run = Run(Stage())
    try:
        await run.begin(backed_up=True)
        for place, command in enumerate(commands):
            run.send(place, command)
            if place % batch == batch - 1:
                await run.take(at, heard=1 << 30 if heard else at - 1, batch=batch)
        answered = dict(run.answers)
        await run.stage.fail_over()
        await settle()
        for place, command in enumerate(commands):
            # Reports are not waited for: after a failover the coordinator tells ps 0 all again.
            if place not in answered or isinstance(command[1], ReportSchedule):
                run.send(place, command)
                await settle()
        return run.answers, run.left()
    finally:
        await run.stage.close()


async def look_at(plan: str, order: tuple[int, ...], places: Iterator[int] | None) -> int:
    """Look at deaths at these places, or at all; return how many were looked at."""
    commands = in_order(plan, order)
    entries, answers, left = await undisturbed(commands)
    assert left[0][1] == (1 + 16 if plan == "updates" else 0), (
        "of the two runs of closure 1 one counts, and all else once"
    )
    deaths = [(at, heard) for at in range(entries + 1) for heard in (True, False) if at or heard]
    chosen = deaths if places is None else [deaths[next(places) % len(deaths)]]
    for at, heard in chosen:
        again, found = await with_death(commands, at, BATCH[plan], heard=heard)
        where = f"{order}, death at {at} of {entries}, {'heard' if heard else 'not heard'}"
        assert again == answers, where
        assert found == left, where
    return len(chosen)


def look_at_all(plan: str, orders: Iterable[tuple[int, ...]], places: Iterator[int] | None) -> int:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return sum(runner.run(look_at(plan, order, places)) for order in orders)


@pytest.mark.parametrize("plan", PLANS)
def test_some_orders_with_a_death_each(plan: str) -> None:
    assert look_at_all(plan, ORDERS[::60], itertools.count()) == 28


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS)
def test_every_order_with_a_death(plan: str) -> None:
    assert look_at_all(plan, ORDERS, itertools.count()) == 1680


@pytest.mark.skipif("PSYNC_EVERY_PLACE" not in os.environ, reason="takes some minutes")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("part", range(8))
def test_every_order_with_a_death_at_every_place(plan: str, part: int) -> None:
    assert look_at_all(plan, ORDERS[part::8], None) > 1680
