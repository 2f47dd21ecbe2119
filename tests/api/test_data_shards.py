"""Visits: every shard is done exactly once an epoch, and the account says what was seen again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import coordinating, replicated
from psync.errors import CaptureError, ClosureCancelled, ConfigurationError, UsageError


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


@pytest.mark.virtual_time
async def test_an_epoch_begins_only_when_the_last_one_is_complete():
    async with coordinating(num_workers=2) as (_, coordinator):
        visits = coordinator.distribute_once([1, 20], num_epochs=2)

        async def step(shard):
            await asyncio.sleep(shard)

        visits.schedule(step)
        await asyncio.sleep(5)
        assert visits.epoch == 0
        assert visits.account()[0].undone == (1,)
        assert visits.schedule(step) == []  # what is left is running
        assert repr(visits) == "<visits: epoch 0 of 2, 1 of 2 shards done, 1 handed out>"
        await coordinator.join()
        assert visits.epoch == 1
        assert len(visits.schedule(step)) == 2
        await coordinator.join()
        assert visits.done()


async def test_a_shard_whose_step_raised_is_not_done_and_comes_again():
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["bad"] = {1}
        visits = coordinator.distribute_once(range(4))
        with pytest.raises(ValueError, match="bad shard 1"):
            await visits.run(failing)
        (account,) = visits.account()
        assert 1 in account.undone
        assert account.runs[1] == 1
        assert not visits.done()
        memory_cluster.shared["bad"] = set()
        await visits.run(failing)
        (account,) = visits.account()
        assert account.is_complete
        assert account.restarted[1] == 2
        assert 0 not in account.runs  # it was done before the error


async def test_a_loop_that_catches_the_error_gets_the_epoch_again():
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["bad"] = {2}
        visits = coordinator.distribute_once([1, 2], num_epochs=2)
        epochs = []
        for epoch in visits:
            epochs.append(epoch)
            visits.schedule(failing)
            try:
                await coordinator.join()
            except ValueError:
                memory_cluster.shared["bad"] = set()
        assert epochs == [0, 0, 1]


async def test_a_loop_that_forgets_something_is_told():
    async with coordinating(num_workers=1) as (_, coordinator):
        visits = coordinator.distribute_once([1, 2])
        with pytest.raises(UsageError, match=r"^epoch 0: nothing was scheduled\nhint: call visits"):
            list(visits)
        with pytest.raises(UsageError, match=r"^epoch 0: 2 shards are not done yet\nhint: await"):
            [visits.schedule(seen) for _ in visits]
        await coordinator.join()
        assert visits.done()


async def test_a_shard_that_was_cancelled_comes_again():
    async with coordinating(num_workers=1) as (_, coordinator):
        visits = coordinator.distribute_once([1, 2])
        first, second = visits.schedule(seen)
        second.cancel()
        await coordinator.join()
        with pytest.raises(ClosureCancelled):
            await second
        assert await first == 1
        assert visits.account()[0].undone == (1,)
        assert visits.account()[0].runs == {}  # nobody has begun with it
        await visits.run(seen)
        assert memory_cluster.shared["seen"] == [1, 2]


@pytest.mark.virtual_time
async def test_a_shard_whose_worker_is_lost_is_done_elsewhere_and_named():
    async with coordinating(num_workers=2) as (cluster, coordinator):
        visits = coordinator.distribute_once(["a", "b"])

        async def step(shard):
            memory_cluster.shared.setdefault("begun", []).append(shard)
            await asyncio.sleep(10)
            return psync.get_worker_index()

        values = visits.schedule(step)
        await asyncio.sleep(5)
        assert sorted(memory_cluster.shared["begun"]) == ["a", "b"]
        await cluster.stop("worker-1")
        await asyncio.sleep(1)
        assert list(visits.account()[0].runs.values()) == [1]
        await coordinator.join()
        assert await coordinator.fetch(values) == [0, 0]
        ((lost, runs),) = visits.account()[0].restarted.items()
        assert runs == 2
        assert Counter(memory_cluster.shared["begun"])[visits.shards[lost]] == 2


@pytest.mark.virtual_time
async def test_shards_that_run_again_after_a_fail_over_are_named() -> None:
    async with replicated(num_workers=2) as (cluster, coordinator):

        async def step(shard: str) -> str:
            memory_cluster.shared.setdefault("begun", []).append(shard)
            await asyncio.sleep(10)
            return shard

        with coordinator.strategy.scope():
            declared = psync.Variable(np.zeros(2))
        await declared.read()
        visits = coordinator.distribute_once(["a", "b"])
        visits.schedule(step)
        await asyncio.sleep(5)
        await cluster.kill("ps-1")
        await coordinator.join()
        assert Counter(memory_cluster.shared["begun"]) == {"a": 2, "b": 2}
        assert visits.account()[0].restarted == {0: 2, 1: 2}


@pytest.mark.virtual_time
async def test_a_shard_that_takes_too_many_workers_with_it_is_an_error_and_stays_undone():
    async with coordinating(num_workers=1, max_losses=2) as (cluster, coordinator):
        visits = coordinator.distribute_once(["a"])

        async def step(shard):
            await asyncio.sleep(10)

        visits.schedule(step)
        for _ in range(2):
            await asyncio.sleep(5)
            await cluster.stop("worker-0")
            await cluster.start("worker-0")
            await asyncio.sleep(1)
        with pytest.raises(psync.ClosureError, match="was lost with its worker 2 times"):
            await coordinator.join()
        assert visits.account()[0].runs == {0: 2}
        await visits.run(step)
        assert visits.account()[0].restarted == {0: 3}


async def test_a_later_program_goes_on_in_the_middle_of_an_epoch():
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["bad"] = {3}
        visits = coordinator.distribute_once([1, 2, 3], num_epochs=2)
        with pytest.raises(ValueError, match="bad shard"):
            await visits.run(failing)
        state = json.loads(json.dumps(visits.state()))
    async with coordinating(num_workers=1) as (_, coordinator):
        later = coordinator.distribute_once([1, 2, 3], num_epochs=2, state=state)
        assert later.epoch == 0
        await later.run(seen)
        assert memory_cluster.shared["seen"] == [3, 1, 2, 3]
        assert later.account()[0].restarted == {2: 2}


@pytest.mark.virtual_time
async def test_what_runs_when_the_state_is_kept_is_done_again_there():
    async with coordinating(num_workers=1) as (_, coordinator):
        visits = coordinator.distribute_once([1, 2])

        async def step(shard):
            await asyncio.sleep(10)

        visits.schedule(step)
        await asyncio.sleep(15)
        later = coordinator.distribute_once([1, 2], state=visits.state())
        assert later.account()[0].undone == (1,)
        assert later.account()[0].runs == {1: 1}
        await coordinator.join()
        assert visits.done()


async def test_a_state_of_other_shards_is_refused():
    async with coordinating(num_workers=1) as (_, coordinator):
        state = coordinator.distribute_once(["a", Path("b"), (1, range(3)), None]).state()
        coordinator.distribute_once(["a", Path("b"), (1, range(3)), None], state=state)
        for shards in (["x", Path("b"), (1, range(3)), None], ["a", "b", (1, range(3)), None]):
            with pytest.raises(ConfigurationError, match=r"^state: it is of other shards than are"):
                coordinator.distribute_once(shards, state=state)
        with pytest.raises(ConfigurationError, match=r"^state: expected one of 1 shards"):
            coordinator.distribute_once(["a"], state=state)
        # What cannot be told apart by its text is not compared.
        arrays = [np.zeros(2), np.ones(2)]
        state = coordinator.distribute_once(arrays).state()
        assert state["digest"] is None
        coordinator.distribute_once(arrays, state=state)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("a.txt", r"^shards: expected a list, got str\nhint: sorted\(glob.glob"),
        ({"a", "b"}, "^shards: expected a list, got set"),
        ({"a": 1}, "^shards: expected a list, got dict"),
        ((n for n in "ab"), "^shards: expected a list, got generator"),
        (None, "^shards: expected a list, got NoneType"),
        (3, "^shards: expected a list, got int"),
        (np.array(3), "^shards: expected a list, got numpy.ndarray"),
        ([], "^shards: expected at least one, got an empty list$"),
        (
            range(10**12),
            r"^shards: expected at most 1048576, got 1000000000000: each .*\nhint: let",
        ),
    ],
)
async def test_what_is_no_list_of_shards_is_refused(shards, message):
    async with coordinating(num_workers=1) as (_, coordinator):
        with pytest.raises(UsageError, match=message):
            coordinator.distribute_once(shards)


async def test_a_shard_that_cannot_be_sent_is_named_at_once():
    async with coordinating(num_workers=1) as (_, coordinator):
        with pytest.raises(CaptureError, match=r"^the list of shards holds \[1\] \(_thread.lock\)"):
            coordinator.distribute_once([1, threading.Lock()])
        visits = coordinator.distribute_once(np.arange(2))
        with pytest.raises(CaptureError, match="it lives on the coordinator; its shards are arg"):
            visits.schedule(lambda shard: visits.epoch)
        with pytest.raises(CaptureError, match="expected a function, got int"):
            visits.schedule(3)  # type: ignore[arg-type]
        await visits.run(seen)
        assert memory_cluster.shared["seen"] == [0, 1]


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
        with pytest.raises(ConfigurationError, match="of other shards"):
            await psync.Checkpoint(visits=other).restore(path)
