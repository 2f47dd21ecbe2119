"""Takes come, are repeated, are acknowledged, and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asked import Asked, peer_of
from psync.errors import ConfigurationError, UsageError
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.takes import GradientTakes, HostedAccumulator, TakeWaits
from psync.wire.messages import DefineAccumulator, Done, EndTakes, ForgetTakes, TakeGradient

A, B = ("/job:worker/task:0", 7), ("/job:worker/task:1", 7)


class Scene:
    def __init__(self) -> None:
        self.takes = GradientTakes("ps", LongWork("ps", list), TakeWaits("ps", lambda *_: None))
        self.held = HostedAccumulator(
            DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 9)
        )

    def enter(self, client: Any = A, number: int = 1, required: int = 1, acked: int = 1) -> None:
        done(self.takes.enter(self.held, client, TakeGradient("g", number, acked, required)))

    def give(self, *values: float) -> None:
        applied = self.held.rule.offer(np.array(values, np.float32), 0, 1.0)
        asked = Asked(peer_of(A), Done())
        done(self.takes.add(asked, self.held, applied, Done(), 0))

    def answer(self, client: Any, number: int) -> Any:
        wanted = self.held.wanted(client, number)
        return wanted and wanted.answer and bytes(wanted.answer[1][0])


def done(compute: Compute | None) -> None:
    if compute is not None:
        compute.at_once()
        compute.done()


@pytest.fixture
async def scene() -> Scene:
    return Scene()


def test_a_take_that_is_asked_for_again_keeps_its_place_and_its_value(scene: Scene) -> None:
    scene.enter(A)
    scene.enter(B)
    scene.enter(A)
    scene.give(1)
    first = scene.answer(A, 1)
    assert first is not None
    assert scene.answer(B, 1) is None
    scene.give(2)
    scene.enter(A)
    assert scene.answer(A, 1) == first != scene.answer(B, 1)


def test_takes_that_end_together_leave_nothing_to_each_other(scene: Scene) -> None:
    scene.enter(A, 1, 2)
    scene.enter(A, 2)
    scene.enter(B, 1)
    scene.give(1)
    message = EndTakes([("g", 1), ("g", 2), ("g", 3), ("x", 1)])
    done(scene.takes.end({"g": scene.held}, A, message))
    assert scene.held.takers[A].takes == {}
    assert scene.answer(B, 1)


def test_the_end_of_a_take_that_has_its_value_changes_nothing(scene: Scene) -> None:
    scene.enter(A)
    scene.give(1)
    scene.takes.end({"g": scene.held}, A, EndTakes([("g", 1)]))
    assert scene.answer(A, 1)
    scene.takes.forget(scene.held, A, ForgetTakes("g", 2))
    scene.takes.forget(scene.held, B, ForgetTakes("g", 2))
    assert scene.held.wanted(A, 1) is None
    with pytest.raises(UsageError, match="has cancelled take 1"):
        scene.enter(A)


def test_a_take_of_nothing_leaves_no_trace(scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        scene.enter(A, 1, 0)
    assert not scene.held.takers


async def test_what_follows_from_a_fence_is_a_compute(scene: Scene) -> None:
    scene.enter(A, 1, 2)
    scene.enter(B)
    scene.give(1, 2)
    compute = scene.takes.fence([scene.held], A[0], 8)
    assert compute is not None
    assert (compute.keys, compute.nbytes) == (["g"], 8)
    assert scene.answer(B, 1) is None
    assert compute.in_pieces is not None
    await compute.in_pieces()
    compute.done()
    assert scene.answer(B, 1)
