"""A synchronous step of two workers over two ps tasks, and a death at each moment of it.

A moment is between two of what can happen: a part of a push arrives, a backup takes the next entry
of its ps, or the next message between the ps tasks arrives. In whatever order these happen, and
whichever ps dies, or both of them, also with backups that were made at that moment: after their
promotion, and repetition of what was not answered, all values are those of a run in which nobody
dies, bit for bit, everybody is told the same, and nothing is held.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from asked import Reply
from psync.numerics.rules import SGD
from psync.store.sync_config import SyncConfig
from psync.testing import VirtualClockLoop, settle
from psync.wire.messages import Contributed, DefinePlan, Update
from stage import Stage
from stage_words import planned

W, X, STEP = (0, 0), (2, 0), (9, 0)
GROUP = 5
WORKERS = [("/job:worker/task:0", 1000), ("/job:worker/task:1", 1000)]
MAX_EVENTS = 200

LETTERS, ARRIVALS = 2, (3, 4)
"""Kinds of events, after 0 and 1, the backups of both ps tasks: parts arrive there in any order."""

LOST = [(0,), (1,), (0, 1)]
HOW = ["heard", "not heard", "another backup"]
"""What comes last: nothing; an entry that a backup has, unknown to its ps; another backup."""

ORDERS = [
    [*first, *order, *last]
    for order, (first, last) in zip(
        itertools.permutations((0, 1, LETTERS)),
        itertools.cycle([(ARRIVALS, ()), (ARRIVALS[::-1], ()), (ARRIVALS[:1], ARRIVALS[1:])]),
        strict=False,
    )
]


def config(*, clip: float | None) -> dict[str, object]:
    return SyncConfig(
        name="group", optimizer={**SGD(1.0).to_config(), "global_clipnorm": clip},
        replicas_to_aggregate=2, total_num_replicas=2, global_step=(0, *STEP),
    ).to_config()  # fmt: skip


def requests(raw: dict[str, object]) -> list[list[tuple[int, Update, float]]]:
    """What each worker says, (ps, message, gradient): a push to the group, then another one."""
    own, other = (
        planned(DefinePlan(0, [key], GROUP, raw, variable_set=b"w, x", others=others)).plan
        for key, others in ((W, [1]), (X, None))
    )
    after = Update(1, 0, -1, 0, planned(DefinePlan(0, [X], 1, SGD(1.0).to_config())).plan)
    said = []
    for gradient, weight in ((-0.7, 1.0), (-1.3, 0.3)):
        to_both = [(0, own, gradient), (1, other, gradient / 3)]
        parts = [
            (ps, Update(1, 0, -1, 0, plan, local_step=0, weight=weight), value)
            for ps, plan, value in to_both
        ]
        said.append([*parts, (1, after, -16.0)])
    return said


class Story:
    """One run."""

    def __init__(self, raw: dict[str, object], order: Sequence[int]) -> None:
        self.stage = Stage(2)
        self.answers: dict[tuple[int, int], str] = {}  # by worker and place
        self.events = 0
        self._said = requests(raw)
        self._order = order
        self._sent: dict[tuple[int, int], None] = {}

    async def begin(self) -> None:
        self.stage.traced = False
        await self.stage.begin()
        self.stage.create(0, W, "w", np.zeros(1, np.float32))
        self.stage.create(0, STEP, "step", np.array(0))
        self.stage.create(1, X, "x", np.zeros(1, np.float32))
        for index in self.stage.serving:
            await self.stage.back_up(index)

    def _send(self, worker: int, place: int) -> None:
        ps, message, value = self._said[worker][place]

        def then(outcome: Reply | Exception) -> None:
            said = outcome.message if isinstance(outcome, Reply) else outcome
            is_told = isinstance(said, Contributed | Exception) or place == len(WORKERS)
            self.answers.setdefault((worker, place), repr(said) if is_told else "it is over")

        self._sent[worker, place] = None
        body = [np.full(1, value, np.float32).tobytes()]
        self.stage.ask(WORKERS[worker], ps, message, body, then)

    def _arrive(self, at: int) -> bool:
        """The next request arrives at a ps; False: there is none."""
        for worker, said in enumerate(self._said):
            for place, (ps, *_) in enumerate(said):
                is_next = place < 2 or {(worker, 0), (worker, 1)} <= self.answers.keys()
                if ps == at and is_next and (worker, place) not in self._sent:
                    self._send(worker, place)
                    return True
        return False

    async def _take(self, index: int, *, heard: bool) -> bool:
        sender = self.stage.sender(index)
        return sender is not None and await sender.take(1, heard=heard) > 0

    async def happen(self, not_heard: Sequence[int] = ()) -> bool:
        """Let one thing happen; False: nothing can. Of these ps tasks the backups are not heard."""
        for kind in self._order:
            if kind in ARRIVALS:
                happened = self._arrive(kind - ARRIVALS[0])
            elif kind == LETTERS:
                happened = self.stage.letters.deliver()
            else:
                happened = await self._take(kind, heard=kind not in not_heard)
            if happened:
                self.events += 1
                await settle()
                return True
        return False

    async def run(self, until: int = MAX_EVENTS) -> None:
        while self.events < until and await self.happen():
            assert self.events < MAX_EVENTS, "it does not come to an end"

    async def back_up_again(self, indices: Sequence[int]) -> None:
        """These ps tasks get other backups; what happens until they are complete happens."""
        for index in indices:
            await self.stage.go_on_alone(index)
            await self.stage.back_up(index)
        while not all(self.stage.is_paired(index) for index in indices):
            assert await self.happen(), "a copy is not completed"

    async def lose(self, lost: Sequence[int]) -> None:
        """These ps tasks die, and their backups serve; workers repeat what was not answered."""
        for index in lost:
            self.stage.crash(index)
        for index in lost:
            await self.stage.promote(index)
        await settle()
        for worker, place in [each for each in self._sent if each not in self.answers]:
            if self._said[worker][place][0] in lost:
                self._send(worker, place)
                await settle()

    def left(self) -> tuple[object, ...]:
        first, second = (self.stage.serving[index] for index in (0, 1))
        values = [self.stage.value(*each).tobytes() for each in ((first, W), (second, X))]
        held = [each.services.statistics()["staging"]["parts"] for each in (first, second)]
        return values, int(self.stage.value(first, STEP)), held


async def story(
    clip: float | None, order: Sequence[int], at: int, lost: Sequence[int], how: str
) -> tuple[int, dict[tuple[int, int], str], tuple[object, ...]]:
    """Return how many things happened, the answers, and what is left; ``lost`` die at one."""
    run = Story(config(clip=clip), order)
    try:
        await run.begin()
        await run.run(at if lost else MAX_EVENTS)
        if lost:
            if how == "not heard":
                await run.happen(lost)
            elif how == "another backup":
                await run.back_up_again(lost)
            await run.lose(lost)
            await run.run()
        return run.events, run.answers, run.left()
    finally:
        await run.stage.close()


def look_at(clip: float | None, order: Sequence[int], ways: Sequence[str]) -> None:
    """Look at all deaths, in this order and these ways."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        _, answers, left = runner.run(story(clip, ORDERS[0], 0, (), ""))
        assert len(answers) == 6
        assert left[1] == 1
        events, *undisturbed = runner.run(story(clip, order, 0, (), ""))
        assert undisturbed == [answers, left]
        for at, lost, how in itertools.product(range(events + 1), LOST, ways):
            where = f"{lost} lost after {at} of {events}, {how}"
            _, again, found = runner.run(story(clip, order, at, lost, how))
            assert again == answers, where
            assert found == left, where


def test_a_step_is_made_once_whoever_dies() -> None:
    look_at(1.0, ORDERS[-1], ["heard"])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
def test_a_step_is_made_once_whatever_has_happened_before(
    clip: float | None, order: Sequence[int]
) -> None:
    look_at(clip, order, HOW)
