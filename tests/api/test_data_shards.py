"""Visits: every shard is done exactly once an epoch, and the account says what was seen again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import declare
from loops import for_each
from memory_cluster import coordinating, replicated
from psync.api.data_shards import Visits
from psync.closures import dispatcher
from psync.closures.closure import Closure, Identity
from psync.closures.queue import ClosureQueue
from psync.errors import (
    CheckpointMismatch,
    ClosureError,
    ConfigurationError,
    SerializationError,
    UsageError,
)
from psync.serialization.functions import FunctionTable
from psync.status import progress


@pytest.fixture(autouse=True)
def one_closure_on_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_AHEAD", 0)


class Value:
    """The handle to the result of a closure, as far as visits look at it."""

    def __init__(self, closure: Closure) -> None:
        self._closure = closure

    def done(self) -> bool:
        return self._closure.is_final


class Desk:
    """A coordinator's queue without a cluster: the test says what becomes of closures.

    They are called by their ids, from 0, and know the shard that they were scheduled for.
    """

    def __init__(self, *workers: str, **options: Any) -> None:
        self.queue = ClosureQueue(**options)
        for worker in workers or ("a",):
            self.queue.worker_joined(worker)

    def visits(self, shards: Any, num_epochs: int = 1, *, state: Any = None) -> Visits:
        async def join() -> None:
            raise AssertionError

        schedule: Callable[..., Any] = self.schedule
        return Visits(schedule, join, shards, num_epochs, None, state)

    def schedule(self, fn: Any, args: tuple[Any, ...], kwargs: Any, identity: Identity) -> Value:
        closure = Closure(self.queue.next_id, args[0], identity=identity)
        self.queue.schedule(closure)
        return Value(closure)

    def running(self) -> dict[int, Any]:
        """Send what can be sent; the shards of the closures that workers hold, by closure."""
        self.queue.dispatch()
        return {closure.id: closure.payload for _, closure in self.queue.in_flight()}

    def finish(self, *ids: int, worker: str = "a") -> None:
        for closure_id in ids:
            self.running()
            self.queue.finished(worker, (closure_id,), 1.0)

    def fail(self, closure_id: int, worker: str = "a") -> None:
        """End a closure with an error, and raise it."""
        self.running()
        self.queue.failed(worker, closure_id, ValueError("bad shard"))
        assert self.queue.collect_error() is not None

    def lose(self, worker: str) -> None:
        self.running()
        self.queue.worker_lost(worker)


async def seen(shard: Any) -> Any:
    """A step that says which shard it was given."""
    memory_cluster.shared.setdefault("seen", []).append(shard)
    return shard


async def failing(shard: Any) -> Any:
    """A step that fails for the shards that the test has named."""
    if shard in memory_cluster.shared["bad"]:
        raise ValueError(f"bad shard {shard}")
    return shard


async def test_every_shard_is_done_once_in_each_epoch():
    async with coordinating(num_workers=2) as (_, coordinator):
        visits = coordinator.distribute_once(["a", "b", "c"], num_epochs=2, shuffle_seed=1)
        await visits.run(seen)
        order = memory_cluster.shared["seen"]
        assert sorted(order[:3]) == sorted(order[3:]) == ["a", "b", "c"]
        assert visits.done()
        assert visits.epoch == 2
        assert [str(account) for account in visits.account()] == [
            "epoch 0: 3 of 3 shards done", "epoch 1: 3 of 3 shards done",
        ]  # fmt: skip
        assert visits.schedule(seen) == []
        await visits.run(seen)
        assert len(order) == 6
        assert repr(visits) == "<visits: 2 epochs of 3 shards, all done>"


@pytest.mark.virtual_time
async def test_a_run_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)

    async def slow(shard: int) -> None:
        await asyncio.sleep(1)

    async with coordinating(num_workers=1) as (_, coordinator):
        visits = coordinator.distribute_once(list(range(3)), 2)
        await visits.run(slow, verbose="lines")
        lines = capsys.readouterr().out.splitlines()
        with pytest.raises(ConfigurationError, match="verbose: expected"):
            await coordinator.distribute_once([1]).run(slow, verbose="loud")
    assert lines[0] == "epoch 1/2: 0 of 3 shards"
    assert "epoch 2/2: 2 of 3 shards" in lines
    assert lines[-1].startswith("epoch 2/2: 3 shards in ")


async def test_a_program_goes_from_epoch_to_epoch_and_has_the_results():
    async with coordinating(num_workers=2) as (_, coordinator):
        visits = coordinator.distribute_once([1, 2, 3], num_epochs=2)

        async def step(shard, scale, offset=0):
            return shard * scale + offset

        totals = []
        for epoch in visits:
            values = visits.schedule(step, args=(10**epoch,), kwargs={"offset": 1})
            await coordinator.join()
            totals.append(sum(await coordinator.fetch(values)))
        assert totals == [9, 63]


def test_a_shard_whose_step_raised_is_not_done_and_comes_again() -> None:
    desk = Desk()
    visits = desk.visits(range(4))
    visits.schedule(seen)
    desk.finish(0)
    desk.fail(1)
    (account,) = visits.account()
    assert account.undone == (1, 2, 3)
    assert account.runs == {1: 1}  # with the others nobody has begun
    assert not visits.done()
    assert [value._closure.payload for value in visits.schedule(seen)] == [1, 2, 3]
    desk.finish(4, 5, 6)
    (account,) = visits.account()
    assert account.is_complete
    assert account.restarted == {1: 2}
    assert account.runs == {1: 2}  # 0 was done before the error


def test_a_loop_that_catches_the_error_gets_the_epoch_again() -> None:
    desk = Desk()
    visits = desk.visits([1, 2], num_epochs=2)
    epochs = []
    for epoch in visits:
        *others, last = (value._closure.id for value in visits.schedule(seen))
        desk.finish(*others)
        if epochs:
            desk.finish(last)
        else:
            desk.fail(last)
        epochs.append(epoch)
    assert epochs == [0, 0, 1]


def test_a_loop_that_forgets_something_is_told() -> None:
    desk = Desk()
    visits = desk.visits([1, 2])
    with pytest.raises(UsageError, match=r"^epoch 0: nothing was scheduled\nhint: call visits"):
        list(visits)
    with pytest.raises(UsageError, match=r"^epoch 0: 2 shards are not done yet\nhint: await"):
        [visits.schedule(seen) for _ in visits]
    desk.finish(0, 1)
    assert visits.done()


def test_a_shard_that_was_cancelled_comes_again() -> None:
    desk = Desk()
    visits = desk.visits([1, 2])
    visits.schedule(seen)
    desk.queue.cancel(1)
    desk.finish(0)
    assert visits.account()[0].undone == (1,)
    assert visits.account()[0].runs == {}  # nobody has begun with it
    assert [value._closure.payload for value in visits.schedule(seen)] == [2]


def test_a_shard_whose_worker_is_lost_is_done_elsewhere_and_named() -> None:
    desk = Desk("a", "b")
    visits = desk.visits(["a", "b"])
    visits.schedule(seen)
    assert desk.running() == {0: "a", 1: "b"}
    desk.lose("b")
    assert visits.account()[0].runs == {1: 1}
    desk.finish(0, 1)
    assert visits.account()[0].restarted == {1: 2}
    assert visits.done()


@pytest.mark.virtual_time
async def test_shards_that_run_again_after_a_fail_over_are_named() -> None:
    async with replicated(num_workers=2) as (cluster, coordinator):

        async def step(shard: str) -> str:
            memory_cluster.shared.setdefault("begun", []).append(shard)
            await asyncio.sleep(10)
            return shard

        declared = declare(coordinator.strategy, declared=np.zeros(2))
        await declared.read()
        visits = coordinator.distribute_once(["a", "b"])
        visits.schedule(step)
        await asyncio.sleep(5)
        await cluster.kill("ps-1")
        await coordinator.join()
        assert Counter(memory_cluster.shared["begun"]) == {"a": 2, "b": 2}
        assert visits.account()[0].restarted == {0: 2, 1: 2}


def test_a_shard_that_takes_too_many_workers_with_it_is_an_error_and_stays_undone() -> None:
    desk = Desk("a", "b", "c", max_losses=2)
    visits = desk.visits(["a"])
    (value,) = visits.schedule(seen)
    desk.lose("a")
    desk.lose("b")
    assert isinstance(value._closure.error, ClosureError)
    assert "was lost with its worker 2 times" in str(value._closure.error)
    assert desk.queue.collect_error() is not None
    assert visits.account()[0].runs == {0: 2}
    visits.schedule(seen)
    desk.finish(1, worker="c")
    assert visits.account()[0].restarted == {0: 3}


def test_what_runs_when_the_state_is_kept_is_done_again_there() -> None:
    desk = Desk()
    visits = desk.visits([1, 2])
    visits.schedule(seen)
    desk.finish(0)
    assert desk.running() == {1: 2}
    later = desk.visits([1, 2], state=visits.state())
    assert later.account()[0].undone == (1,)
    assert later.account()[0].runs == {1: 1}
    desk.finish(1)
    assert visits.done()


def test_a_state_of_other_shards_is_refused() -> None:
    visits = Desk().visits
    state = visits(["a", Path("b"), (1, range(3)), None]).state()
    visits(["a", Path("b"), (1, range(3)), None], state=state)
    for shards in (["x", Path("b"), (1, range(3)), None], ["a", "b", (1, range(3)), None]):
        with pytest.raises(ConfigurationError, match=r"^state: saved for other"):
            visits(shards, state=state)
    with pytest.raises(ConfigurationError, match=r"^state: expected a state of 1 shards"):
        visits(["a"], state=state)
    # What cannot be told apart by its text is not compared.
    arrays = [np.zeros(2), np.ones(2)]
    state = visits(arrays).state()
    assert state["digest"] is None
    visits(arrays, state=state)


@for_each(
    "shards, message",
    [
        ("a.txt", r"^shards: expected a list, got str\nhint: sorted\(glob.glob"),
        ({"a", "b"}, "^shards: expected a list, got set"),
        ({"a": 1}, "^shards: expected a list, got dict"),
        (iter("ab"), "^shards: expected a list, got str_"),
        (None, "^shards: expected a list, got NoneType"),
        (np.array(3), "^shards: expected a list, got numpy.ndarray"),
        ([], "^shards: expected at least one, got an empty list$"),
        (
            range(10**12),
            r"^shards: expected at most 1048576, got 1000000000000: each .*\nhint: make",
        ),
    ],
)
def test_what_is_no_list_of_shards_is_refused(shards: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Desk().visits(shards)


def test_a_shard_that_cannot_be_sent_is_named_at_once() -> None:
    desk = Desk()
    with pytest.raises(
        SerializationError, match=r"^the list of shards holds \[1\] \(_thread.lock\)"
    ):
        desk.visits([1, threading.Lock()])
    visits = desk.visits(np.arange(2))
    with pytest.raises(SerializationError, match="it lives on the coordinator; its shards are arg"):
        FunctionTable().register(lambda shard: visits.epoch)
    assert [value._closure.payload for value in visits.schedule(seen)] == [0, 1]


@pytest.mark.virtual_time
async def test_a_run_that_is_cancelled_at_any_point_can_be_taken_up_again():
    async with coordinating(num_workers=2) as (_, coordinator):
        for turns in range(200):
            memory_cluster.shared.clear()
            visits = coordinator.distribute_once([1, 2, 3], num_epochs=2)
            running = asyncio.create_task(visits.run(seen))
            for _ in range(turns):
                await asyncio.sleep(0)
            ended = running.done()
            running.cancel()
            await asyncio.wait([running])
            await visits.run(seen)
            assert sorted(memory_cluster.shared["seen"]) == [1, 1, 2, 2, 3, 3]
            assert [account.runs for account in visits.account()] == [{}, {}]
            if ended:
                return
        raise AssertionError("it never ended by itself")


async def test_a_checkpoint_holds_visits(tmp_path: Path):
    async with coordinating(num_workers=2) as (_, coordinator):
        visits = coordinator.distribute_once(["a", "b", "c"], num_epochs=2)
        memory_cluster.shared["bad"] = {"b"}
        with pytest.raises(ValueError, match="bad shard b"):
            await visits.run(failing)
        before = visits.account()
        checkpoint = psync.Checkpoint(visits=visits)
        path = await checkpoint.save(tmp_path)
        later = coordinator.distribute_once(["a", "b", "c"], num_epochs=2)
        await psync.Checkpoint(visits=later).restore(path)
        assert later.account() == before
        later.schedule(seen)
        with pytest.raises(UsageError, match="shards are running"):
            later.restore_checkpoint_state(visits.state())
        await coordinator.join()
        assert later.epoch == 1
        other = coordinator.distribute_once(["a", "b", "d"], num_epochs=2)
        with pytest.raises(CheckpointMismatch, match="for other shards"):
            await psync.Checkpoint(visits=other).restore(path)
