"""A synchronous step of two workers over two ps tasks, and a death at each moment of it.

A moment is between two of what can happen: a backup takes the next entry of its ps, or the next
message between the ps tasks arrives. In whatever order these happen, and whichever ps dies, or both
of them, also with backups that were made at that moment: after promotion, and repetition of what
was not answered, the step has been made once, and everybody is told the same.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from asked import Reply
from psync.numerics.rules import SGD
from psync.store.sync_config import SyncConfig
from psync.testing import VirtualClockLoop, settle
from psync.wire.codec import Message
from psync.wire.messages import Contribute, DefinePlan, DefineWhole, StagePush, Update
from stage import Stage
from stage_words import planned

W, X, STEP = (0, 0), (2, 0), (9, 0)
GROUP = 5
WORKERS = [("/job:worker/task:0", 1000), ("/job:worker/task:1", 1000)]
MAX_EVENTS = 200

LOST = [(0,), (1,), (0, 1)]
HOW = ["heard", "not heard", "another backup"]
"""What comes last: nothing; an entry that a backup has, unknown to its ps; another backup."""

Request = tuple[int, Message, list[float]]
"""To which ps, what, and what each array is filled with."""


def config(*, clip: float | None) -> dict[str, object]:
    return SyncConfig(
        name="group", optimizer={**SGD(1.0).to_config(), "global_clipnorm": clip},
        replicas_to_aggregate=2, total_num_replicas=2, global_step=(0, *STEP),
    ).to_config()  # fmt: skip


def requests(raw: dict[str, object], *, along: bool) -> list[list[Request]]:
    """What each worker says, one after the other: a push to the group, then one outside of it."""
    said: list[list[Request]] = []
    for gradient in (-2.0, -4.0):
        members = [(0, *W), (1, *X)] if along else [(0, *W)]
        whole = planned(DefineWhole(0, members, [4] * len(members)))
        push = Contribute(GROUP, raw, 1, 0, -1, 0, b"w, x", 0, 1.0, whole.plan, -1)
        staged = StagePush(GROUP, raw, 1, 0, planned(DefinePlan(0, [X])).plan)
        after = Update(1, 0, -1, 0, planned(DefinePlan(0, [X], 1)).plan)
        parts: list[Request] = [] if along else [(1, staged, [gradient])]
        said.append([*parts, (0, push, [gradient] * len(members)), (1, after, [-16.0])])
    return said


class Story:
    """One run."""

    def __init__(self, raw: dict[str, object], *, along: bool, order: Sequence[int]) -> None:
        self.stage = Stage(2)
        self.answers: dict[tuple[int, int], str] = {}  # by worker and place
        self.events = 0
        self._raw = raw
        self._said = requests(raw, along=along)
        self._order = order
        self._sent: dict[tuple[int, int], None] = {}

    async def begin(self) -> None:
        self.stage.traced = False
        await self.stage.begin()
        self.stage.create(0, W, "w", np.zeros(1, np.float32))
        self.stage.create(0, STEP, "step", np.array(0))
        self.stage.create(1, X, "x", np.zeros(1, np.float32))
        for index, task in self.stage.serving.items():
            task.services.store.define_optimizer(1, SGD(1.0).to_config())
            task.services.sync.known(GROUP, self._raw)
            await self.stage.back_up(index)

    def _send(self, worker: int, place: int) -> None:
        ps, message, values = self._said[worker][place]

        def then(outcome: Reply | Exception) -> None:
            said = outcome.message if isinstance(outcome, Reply) else outcome
            self.answers.setdefault((worker, place), repr(said))

        self._sent[worker, place] = None
        body = [np.full(1, value, np.float32).tobytes() for value in values]
        self.stage.ask(WORKERS[worker], ps, message, body, then)

    async def send_next(self) -> None:
        """Each worker says what comes next, once all before it is answered."""
        await settle()
        for worker, said in enumerate(self._said):
            for place in range(len(said)):
                if (worker, place) not in self._sent:
                    self._send(worker, place)
                    await settle()
                if (worker, place) not in self.answers:
                    break

    async def happen(self, not_heard: Sequence[int] = ()) -> bool:
        """Let one thing happen; False: nothing can. Of these ps tasks the backups are not heard."""
        await self.send_next()
        for kind in self._order:
            sender = None if kind == 2 else self.stage.sender(kind)
            if kind == 2 and self.stage.letters.deliver():
                break
            if sender is not None and await sender.take(1, heard=kind not in not_heard):
                break
        else:
            return False
        self.events += 1
        await self.send_next()
        return True

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
            self._send(worker, place)
            await settle()

    def left(self) -> tuple[object, ...]:
        first, second = self.stage.serving[0], self.stage.serving[1]
        values = [float(self.stage.value(first, W)[0]), float(self.stage.value(second, X)[0])]
        steps = [each.services.sync.staging.steps for each in (first, second)]
        return values, int(self.stage.value(first, STEP)), steps


async def story(
    clip: float | None, along: bool, order: Sequence[int], at: int, lost: Sequence[int], how: str
) -> tuple[int, dict[tuple[int, int], str], tuple[object, ...]]:
    """Return how many things happened, the answers, and what is left; ``lost`` die at one."""
    run = Story(config(clip=clip), along=along, order=order)
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


def look_at(
    clip: float | None, along: bool, orders: Iterable[Sequence[int]], ways: Sequence[str]
) -> None:
    """Look at all deaths, in these orders and ways."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        for order in orders:
            events, answers, left = runner.run(story(clip, along, order, 0, (), ""))
            assert len(answers) == (4 if along else 6)
            assert left[1] == 1
            for at, lost, how in itertools.product(range(events + 1), LOST, ways):
                where = f"{order}: {lost} lost after {at} of {events}, {how}"
                _, again, found = runner.run(story(clip, along, order, at, lost, how))
                assert again == answers, where
                assert found == left, where


def test_a_step_is_made_once_whoever_dies() -> None:
    look_at(1.0, False, [(2, 0, 1)], ["heard"])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("along", [False, True], ids=["staged", "along"])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
def test_a_step_is_made_once_whatever_has_happened_before(clip: float | None, along: bool) -> None:
    look_at(clip, along, itertools.permutations((0, 1, 2)), HOW)
