"""What a training program sees of schedule, join and fetch."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import at_once, declare, strategy_of, training
from memory_cluster import cluster_of, coordinating, event_of, until
from psync import StaleCaptureWarning
from psync.errors import (
    ClosedError,
    ClosureCancelled,
    ClosureInputError,
    ConfigurationError,
    ConnectFailed,
    DeadlineExceeded,
    RemoteError,
    SerializationError,
    UsageError,
)
from psync.wire.limits import Limits


class Custom(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return Custom, (self.code,)


# --- values ----------------------------------------------------------------------------------


async def double(x):
    return 2 * x


async def seven():
    return 7


async def difference(a, *, b=0):
    return a - b


CALLS = {
    "a coroutine function": [(double, (i,), None, 2 * i) for i in range(300)],
    "a lambda made anew for each call": [(lambda i=i: i, (), None, i) for i in range(30)],
    "a plain function that returns a coroutine": [
        (lambda: seven(), (), None, 7), (functools.partial(seven), (), None, 7),
    ],
    "keyword arguments": [(difference, (), {"a": 5, "b": 4}, 1), (difference, [2], None, 2)],
}  # fmt: skip


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
async def test_values_come_back_in_the_order_of_schedule(calls):
    async with coordinating() as (_, coordinator):
        values = [coordinator.schedule(fn, args, kwargs) for fn, args, kwargs, _ in calls]
        assert await coordinator.fetch(values) == [expected for *_, expected in calls]


@pytest.mark.promise("schedule.never-blocks")
async def test_schedule_never_blocks_and_nothing_runs_before_the_program_awaits():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step():
            memory_cluster.shared["ran"] = True

        values = [coordinator.schedule(step) for _ in range(10_000)]
        assert not coordinator.done()
        assert "ran" not in memory_cluster.shared
        assert not values[0].done()
        await coordinator.join()
        assert coordinator.done()
        assert values[-1].done()
        assert coordinator.statistics()["closures"].finished == 10_000


async def test_a_plain_step_runs_in_a_thread_and_waits_through_psync():
    async with coordinating() as (_, coordinator):
        loop_thread = threading.get_ident()

        def step(x):
            psync.wait(asyncio.sleep(0))
            return x + 1, threading.get_ident(), psync.get_worker_index()

        value, thread, worker = await coordinator.schedule(step, args=(1,))
        assert value == 2
        assert thread != loop_thread
        assert worker in (0, 1)


async def test_arguments_are_captured_when_schedule_is_called():
    async with coordinating() as (_, coordinator):
        array = np.zeros(10_000)
        items = [1]

        async def step(array, items):
            return float(array.sum()), items

        value = coordinator.schedule(step, args=(array, items))
        array += 1
        items.append(2)
        assert await value == (0.0, [1])


async def test_large_arguments_and_results_travel():
    async with coordinating() as (_, coordinator):
        array = np.arange(8 << 20, dtype=np.float64)  # 64 MiB

        async def last(array):
            return array[-1], array.flags.writeable

        async def full(n):
            return np.full(n, 3.0)

        assert await coordinator.schedule(last, args=(array,)) == ((8 << 20) - 1, True)
        values = [coordinator.schedule(full, args=(1 << 18,)) for _ in range(6)]
        small = coordinator.schedule(full, args=(2,))
        await coordinator.join()
        for value in values:
            assert (await value == 3.0).all()
        assert (await small).shape == (2,)


# --- RemoteValues as arguments ---------------------------------------------------------------


async def test_remote_values_are_replaced_by_their_values_at_any_depth():
    async with coordinating() as (_, coordinator):

        async def make(n):
            return np.full(n, n)

        async def nothing():
            return None

        async def total(items, *, more, none=None):
            assert none is None
            return sum(int(item.sum()) for item in items["arrays"]) + int(more.sum())

        small = coordinator.schedule(make, args=(2,))
        large = coordinator.schedule(make, args=(10_000,))
        none = coordinator.schedule(nothing)  # a value like any other
        result = coordinator.schedule(
            total,
            args=({"arrays": [small, large, small]},),
            kwargs=ChainMap({"more": small}, {"none": none}),
        )
        assert await result == 4 + 10_000**2 + 4 + 4
        # Once more, when the inputs have ended.
        again = coordinator.schedule(total, args=({"arrays": [large]},), kwargs={"more": small})
        assert await again == 10_000**2 + 4


async def test_a_closure_whose_input_fails_is_not_run():
    async with coordinating() as (_, coordinator):

        async def bad():
            raise Custom(3)

        async def use(x):
            memory_cluster.shared["ran"] = True

        failed = coordinator.schedule(bad)
        user = coordinator.schedule(use, args=([failed],))
        with pytest.raises(Custom, match="code 3"):
            await coordinator.join()
        with pytest.raises(ClosureInputError, match=r"was not run: its input, closure 0") as info:
            await user
        assert isinstance(info.value.__cause__, Custom)
        # After join, the failed value is still no value.
        late = coordinator.schedule(use, args=(failed,))
        with pytest.raises(ClosureInputError, match="its input, closure 0"):
            await coordinator.join()
        with pytest.raises(ClosureInputError):
            await late
        assert "ran" not in memory_cluster.shared


async def test_a_remote_value_of_another_coordinator_is_refused():
    async with coordinating() as (_, one), coordinating() as (_, two):

        async def step(x=0):
            return x

        value = one.schedule(step)
        with pytest.raises(UsageError, match="belongs to another coordinator"):
            two.schedule(step, args=(value,))


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.promise("errors.original-exception")
async def test_join_raises_the_users_own_exception_with_the_remote_traceback_as_cause():
    async with coordinating() as (_, coordinator):

        async def step():
            raise Custom(42)

        value = coordinator.schedule(step)
        with pytest.raises(Custom) as info:
            await coordinator.join()
        assert info.value.code == 42
        cause = info.value.__cause__
        assert isinstance(cause, RemoteError)
        assert cause.task.startswith("/job:worker/task:")
        assert "raise Custom(42)" in cause.traceback_text
        with pytest.raises(Custom):
            await value
        await coordinator.join()  # raised once
        assert await coordinator.schedule(lambda: 1) == 1


@pytest.mark.promise("errors.none-lost")
async def test_further_errors_are_notes():
    async with coordinating(num_workers=2) as (_, coordinator):

        def bad(i):  # in a thread, so that the first error does not stop the other one
            memory_cluster.shared["barrier"].wait(20)
            raise Custom(i)

        memory_cluster.shared["barrier"] = threading.Barrier(2)
        for i in range(2):
            coordinator.schedule(bad, args=(i,))
        with pytest.raises(Custom) as info:
            await coordinator.join()
        other = 1 - info.value.code
        notes = getattr(info.value, "__notes__", [])
        # One that ends after it was asked to stop is cancelled, whatever it raises.
        assert notes in ([], [f"also failed: Custom: code {other}"])


async def raises_what_cannot_be_imported():
    class Local(Exception):
        def __reduce__(self):
            raise TypeError("no")

    raise Local("deep")


async def times_out():
    async with asyncio.timeout(0.001):
        await asyncio.sleep(10)


async def returns_a_lock():
    return threading.Lock()


async def declares():
    psync.Variable(np.zeros(3))


async def coordinates():
    psync.ClusterCoordinator(None)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (
            raises_what_cannot_be_imported,
            RemoteError,
            r"Local on /job:worker/task:.*: deep",
        ),
        (times_out, TimeoutError, None),  # not DeadlineExceeded, which is the join's own
        (
            returns_a_lock,
            SerializationError,
            r'the result of step "returns_a_lock".*the coordinator',
        ),
        (declares, UsageError, "inside a step"),
        (coordinates, ConfigurationError, "expected a ParameterServerStrategy"),
    ],
)
async def test_join_raises_what_a_step_has_failed_with(step, error, text):
    async with coordinating() as (_, coordinator):
        coordinator.schedule(step)
        with pytest.raises(error, match=text) as info:
            await coordinator.join(timeout=20)
        assert type(info.value) is error
        assert (error is RemoteError) == (info.value.__cause__ is None)


async def test_an_error_cancels_what_is_queued_and_what_runs():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def forever():
            event_of("running").set()
            try:
                await asyncio.Event().wait()
            finally:
                memory_cluster.shared["stopped"] = True

        async def bad():
            await event_of("running").wait()
            raise Custom(1)

        coordinator.schedule(bad)
        others = [coordinator.schedule(forever) for _ in range(101)]
        with pytest.raises(Custom):
            await coordinator.join()
        assert memory_cluster.shared["stopped"]
        for value in others:
            with pytest.raises(ClosureCancelled, match="was cancelled: closure 0"):
                await value
        assert coordinator.statistics()["closures"].cancelled == 101


async def test_what_is_scheduled_after_an_error_ends_cancelled_and_only_join_raises():
    async with coordinating() as (_, coordinator):

        async def bad():
            raise Custom(1)

        failed = coordinator.schedule(bad)
        with pytest.raises(Custom):
            await failed
        assert coordinator.done()  # neither blocks nor raises
        late = coordinator.schedule(bad)
        with pytest.raises(ClosureCancelled, match="schedule it again after join"):
            await late
        with pytest.raises(Custom):
            await coordinator.join()
        await coordinator.join()


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (1, Custom),  # as in a notebook, where no join follows in the cell that has failed
        (0, ClosureCancelled),  # by the error of another one, which it names
    ],
)
async def test_fetch_of_what_has_failed_or_was_cancelled_by_an_error_collects_the_error(
    first, error
):
    async with coordinating() as (_, coordinator):

        async def step(i):
            if i == 1:
                raise Custom(1)
            await event_of("never").wait()

        values = [coordinator.schedule(step, args=(i,)) for i in range(20)]
        with pytest.raises(error) as caught:
            await coordinator.fetch({"losses": values[first:]})
        custom = caught.value if error is Custom else caught.value.__cause__
        assert isinstance(custom, Custom)
        assert custom.code == 1
        assert all(value.done() for value in values)
        assert await coordinator.fetch(coordinator.schedule(lambda: 2)) == 2
        await coordinator.join()
        with pytest.raises(error):
            await coordinator.fetch(values[first])


@pytest.mark.promise("errors.first-raised-once")
@pytest.mark.parametrize("fetches", [False, True])
async def test_all_joins_that_wait_get_the_error_that_one_of_them_or_fetch_collects(fetches):
    async with coordinating() as (_, coordinator):

        async def bad():
            await event_of("go on").wait()
            raise Custom(1)

        value = coordinator.schedule(bad)
        waiting = [asyncio.create_task(coordinator.join()) for _ in range(3)]
        if fetches:
            waiting.append(asyncio.create_task(coordinator.fetch(value)))
        await asyncio.sleep(0)  # they wait
        event_of("go on").set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [Custom] * len(waiting)
        await coordinator.join()


async def test_fetch_of_a_value_that_was_cancelled_alone_leaves_the_others():
    async with coordinating() as (_, coordinator):

        async def step():
            await event_of("go on").wait()
            return 1

        cancelled, other = coordinator.schedule(step), coordinator.schedule(step)
        cancelled.cancel()
        with pytest.raises(ClosureCancelled):
            await coordinator.fetch(cancelled)
        event_of("go on").set()
        assert await coordinator.fetch(other) == 1


@pytest.mark.virtual_time
async def test_a_join_that_times_out_says_what_runs_where():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def slow():
            await asyncio.sleep(100)

        await coordinator.join(timeout=1)  # nothing was scheduled
        for _ in range(3):
            coordinator.schedule(slow)
        with pytest.raises(DeadlineExceeded) as info:
            await coordinator.join(timeout=5)
        text = str(info.value)
        assert text.startswith("join did not end within 5 s: closure 0 (")
        assert "slow) on /job:worker/task:0; " in text
        assert "2 more wait for their turn" in text
        assert "scheduled closures continue" in text
        await coordinator.join()


@pytest.mark.promise("schedule.join-reports-waiting")
@pytest.mark.virtual_time
async def test_a_join_without_news_says_on_whom_it_waits(caplog):
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def slow():
            await asyncio.sleep(35)

        coordinator.schedule(slow)
        asyncio.get_running_loop().call_later(8, cluster.network.partition, "ps-0")
        asyncio.get_running_loop().call_later(12, cluster.network.heal, "ps-0")
        with caplog.at_level(logging.WARNING):
            await coordinator.join()
        lines = [r.getMessage() for r in caplog.records if "join waits" in r.getMessage()]
        assert len(lines) == 3
        assert "slow) on /job:worker/task:0; /job:ps/task:0 does not answer" in lines[0]
        assert "answer" not in lines[1]


@pytest.mark.promise("errors.uncancellable-step-named")
@pytest.mark.virtual_time
async def test_a_step_that_swallows_cancellation_is_waited_for_and_named(caplog):
    async with coordinating(num_workers=2) as (_, coordinator):

        async def stubborn():
            for _ in range(3):
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    memory_cluster.shared["asked"] = True
            memory_cluster.shared["over"] = True

        async def bad():
            await asyncio.sleep(1)
            raise Custom(1)

        stays = coordinator.schedule(stubborn)
        coordinator.schedule(bad)
        with caplog.at_level(logging.WARNING), pytest.raises(Custom):
            await coordinator.join()
        assert memory_cluster.shared == {"asked": True, "over": True}
        with pytest.raises(ClosureCancelled):
            await stays
        assert "raised as soon as these steps have stopped: closure 0" in caplog.text

        async def after():
            # The task in which steps run is not left cancelled.
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
            async with asyncio.timeout(5):
                await asyncio.sleep(0)
            return asyncio.current_task().cancelling()

        assert await coordinator.fetch([coordinator.schedule(after) for _ in range(4)]) == [0] * 4


async def test_pushes_of_a_plain_step_are_refused_from_the_error_on():
    async with coordinating() as (cluster, coordinator):
        w = declare(coordinator.strategy, w=np.zeros(4, np.float32))
        released = memory_cluster.shared["released"] = threading.Event()

        def plain():
            psync.wait(memory_cluster.note("plain"))
            memory_cluster.shared["released"].wait(30)
            try:
                psync.wait(w.assign_add(np.ones(4, np.float32)))
            except psync.errors.ClosureCancelled as exc:
                memory_cluster.shared["refused"] = str(exc)
                raise

        async def bad():
            await event_of("plain").wait()
            raise Custom(1)

        coordinator.schedule(plain)
        failed = coordinator.schedule(bad)
        with pytest.raises(Custom):
            await failed
        join = asyncio.create_task(coordinator.join())
        workers = [cluster.tasks[f"worker-{index}"] for index in range(2)]
        await until(lambda: "asked to stop" in str([each.describe() for each in workers]))
        assert not join.done()
        released.set()
        with pytest.raises(Custom):
            await join
        assert "cancelled" in memory_cluster.shared["refused"]
        assert (await w.read() == 0).all()


# --- cancelling one value ---------------------------------------------------------------------


async def test_one_value_can_be_cancelled_queued_or_running():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def wait():
            event_of("started").set()
            await asyncio.sleep(3600)

        async def quick():
            return 1

        running = coordinator.schedule(wait)
        queued = coordinator.schedule(wait)
        last = coordinator.schedule(quick)
        await event_of("started").wait()
        queued.cancel()
        running.cancel()
        running.cancel()
        assert await last == 1
        for value in (running, queued):
            with pytest.raises(ClosureCancelled, match=r"closure \d \(.*wait\) was cancelled"):
                await value
        last.cancel()  # too late: nothing happens
        assert await last == 1
        await coordinator.join()  # no error


@pytest.mark.parametrize("takes_s", [0.0, 0.001])
async def test_a_step_that_cancels_itself_fails_its_closure_and_the_worker_goes_on(takes_s):
    """Also where the loop gets a turn before the next step, as after one that took its time."""
    async with coordinating(num_workers=1) as (_, coordinator):

        async def suicidal():
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

        async def late():
            time.sleep(takes_s)  # noqa: ASYNC251  as a step that computes
            asyncio.current_task().cancel()
            return 5

        coordinator.schedule(suicidal)
        with pytest.raises(ClosureCancelled, match=r'step ".*suicidal" cancelled itself'):
            await coordinator.join()
        values = [coordinator.schedule(late) for _ in range(3)]
        values.append(coordinator.schedule(lambda: 6))
        assert await coordinator.fetch(values) == [5, 5, 5, 6]


@pytest.mark.parametrize("kind", ["task", "pull", "thread"])
async def test_join_raises_an_update_that_was_refused_because_its_step_had_returned(
    kind: str, caplog: pytest.LogCaptureFixture
):
    async with coordinating(num_workers=1) as (_, coordinator):
        with coordinator.strategy.scope():
            w, b = (psync.Variable(np.zeros(4, np.float32), name=name) for name in "wb")
        sgd = psync.optimizers.SGD(1.0)
        left: list[asyncio.Task] = memory_cluster.shared.setdefault("left", [])

        async def background_push():
            grads = [(np.ones(4, np.float32), variable) for variable in (w, b)]
            if kind == "pull":
                await psync.pull((w, b))
            if kind == "thread":
                await asyncio.to_thread(lambda: psync.wait(sgd.apply_gradients(grads)))
            await sgd.apply_gradients(grads)

        async def step():
            memory_cluster.shared["left"].append(asyncio.create_task(background_push()))

        async def fine():
            return 1

        values = [coordinator.schedule(fine) for _ in range(3)]
        steps = [coordinator.schedule(step) for _ in range(3)]
        if kind == "thread":
            await coordinator.fetch(steps)
            await asyncio.wait(left)
            coordinator.schedule(fine)  # its result comes after what was refused before
        operation = "pull" if kind == "pull" else "apply_gradients"
        with pytest.raises(UsageError) as caught:
            await coordinator.join()
        text = f'refused, because the step had returned: {operation} ("w", "b") in step "'
        assert caught.value.message.startswith(text)
        assert caught.value.message.endswith('step" (3 times)')
        assert "await, inside the step, every task" in str(caught.value)
        assert await coordinator.fetch(values) == [1] * 3, "it ends nothing else"
        await coordinator.join()
        assert not any(await w.read())
        assert [isinstance(task.exception(), UsageError) for task in left] == [True] * 3
        warnings = [each for each in caplog.records if "was refused" in each.getMessage()]
        assert len(warnings) == 1, "when it happens, and once"


made: str | None = None  # a global of the script, as it were


async def test_a_step_keeps_its_own_globals_and_shares_those_of_imported_modules():
    """As docs/howto/steps.md says: a worker's state between closures."""
    async with coordinating(num_workers=1) as (_, coordinator):

        def one() -> str | None:
            global made
            found, made = made, "set by one"
            return found

        def other() -> str | None:
            memory_cluster.shared["kept"] = memory_cluster.shared.get("kept", 0) + 1
            return made

        def third() -> int:
            return memory_cluster.shared["kept"]

        for fn in (one, other):
            fn.__module__ = "__main__"  # pickled by value, as functions of a script are
        values = [coordinator.schedule(fn) for fn in (one, one, other, third)]
        assert await coordinator.fetch(values) == [None, "set by one", None, 1]
    assert made is None, "nor is it the program's"


async def test_what_a_failed_step_has_left_running_is_no_error_of_a_later_join():
    async with coordinating(num_workers=1) as (_, coordinator):
        w = declare(coordinator.strategy, w=np.zeros(4, np.float32))

        async def step():
            memory_cluster.shared["left"] = asyncio.create_task(w.assign_add(np.ones(4)))
            raise Custom(1)

        coordinator.schedule(step)
        with pytest.raises(Custom):
            await coordinator.join()
        with pytest.raises(UsageError, match="after the step has returned"):
            await memory_cluster.shared["left"]
        coordinator.schedule(lambda: 1)
        await coordinator.join()


# --- bad input -------------------------------------------------------------------------------


def test_arguments_of_a_step_are_a_tuple_and_a_dict():
    coordinator = psync.ClusterCoordinator(strategy_of())
    with pytest.raises(SerializationError, match="args: expected a tuple, got int"):
        coordinator.schedule(double, args=3)
    with pytest.raises(SerializationError, match="kwargs: expected a mapping, got list"):
        coordinator.schedule(double, kwargs=["x"])


async def test_what_is_no_step_or_cannot_be_sent_is_refused() -> None:
    async with coordinating() as (_, coordinator):
        with pytest.raises(SerializationError, match="expected a function, got int"):
            coordinator.submit(5)
        with pytest.raises(SerializationError, match="lock"):
            coordinator.submit(told, threading.Lock())
        assert coordinator.done()
    with pytest.raises(TypeError, match="step"):
        coordinator.submit()


async def test_what_no_message_can_carry_is_refused_with_its_size():
    limits = Limits(segment_bytes=100_000, body_bytes=150_000)
    async with coordinating(limits=limits) as (_, coordinator):

        async def make(n, parts=1):
            return [np.zeros(n, np.uint8) for _ in range(parts)]

        assert len(await coordinator.schedule(make, args=(90_000,))) == 1
        coordinator.schedule(make, args=(200_000,))
        with pytest.raises(
            SerializationError, match=r"the result of .* one part takes 200000 bytes"
        ):
            await coordinator.join()
        coordinator.schedule(make, args=(90_000, 2))
        with pytest.raises(SerializationError, match=r"all of it takes .* expected at most 150000"):
            await coordinator.join()
        with pytest.raises(
            SerializationError, match=r"the arguments of step .*make.*: too large: "
        ):
            coordinator.schedule(make, args=(np.zeros(100_001, np.uint8),))


async def test_a_coordinator_that_starts_or_runs_cannot_be_started_again():
    async with cluster_of() as cluster:
        coordinator = psync.ClusterCoordinator(cluster.strategy())
        start = asyncio.create_task(coordinator.start())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="is running already"):
            await coordinator.start()
        await start
        with pytest.raises(UsageError, match="is running already"):
            await coordinator.start()
        await coordinator.close()


async def test_what_lives_on_the_coordinator_cannot_be_captured(tmp_path: Path) -> None:
    async with coordinating() as (_, coordinator):
        strategy = coordinator.strategy
        dataset = coordinator.create_per_worker_dataset(lambda: [1])
        variable = declare(strategy, variable=1.0)
        checkpoint = psync.Checkpoint(v=variable)
        trainer = psync.Trainer(strategy, [variable], print, psync.optimizers.SGD(1.0))
        for captured, text, hint in (
            (coordinator, "the coordinator lives on the chief", "return a value from the step"),
            (strategy, "the strategy lives on the coordinator", "call psync.get_strategy()"),
            (strategy.extended, "the strategy lives on the coordinator", "call psync.get_str"),
            (
                psync.LocalCluster(1, 1, processes=False),
                "the cluster's processes belong to the chief", "call it in the program",
            ),
            (dataset, "each worker reads it through an iterator", "iterator = iter(dataset)"),
            (checkpoint, "checkpoints are saved by the program", "call it in the program"),
            (
                psync.CheckpointManager(checkpoint, tmp_path),
                "checkpoints are saved by the program", "call it in the program",
            ),
            (trainer, "the trainer lives in the program", "give a name to what the step"),
            (
                psync.MonitoredTrainingSession(strategy),
                "the session belongs to this task", "call it in the program",
            ),
        ):  # fmt: skip
            with pytest.raises(SerializationError, match=text) as caught:
                coordinator.schedule(lambda captured=captured: captured)
            assert caught.value.hint is not None
            assert caught.value.hint.startswith(hint)


async def test_a_capture_error_begins_where_the_program_has_called() -> None:
    async with coordinating() as (_, coordinator):
        strategy = coordinator.strategy

        async def step() -> object:
            return strategy

        def batches() -> list[object]:
            return [strategy]

        async def argued(value: object) -> None: ...

        calls: dict[str, Callable[[], Any]] = {
            "schedule": lambda: coordinator.schedule(step),
            "submit": lambda: coordinator.submit(argued, strategy),
            "create_per_worker_dataset": lambda: coordinator.create_per_worker_dataset(batches),
            "distribute_once": lambda: coordinator.distribute_once([strategy]),
            "run": lambda: strategy.run(step),
        }
        for name, call in calls.items():
            with pytest.raises(SerializationError) as caught:
                await call()
            frames = traceback.extract_tb(caught.value.__traceback__)
            ours = [frame.name for frame in frames if frame.filename != __file__]
            assert ours == [name]
            said = "".join(traceback.format_exception(caught.value))
            assert said.count("Traceback") == 1


async def test_what_a_capture_error_says_to_do_works(tmp_path: Path) -> None:
    async with coordinating() as (_, coordinator), coordinating() as (_, other):
        dataset = coordinator.create_per_worker_dataset(lambda: [7])
        path = tmp_path / "file"
        path.write_text("contents")
        foreign = declare(other.strategy, foreign=np.ones(2))

        async def step(iterator: Any, value: Any) -> tuple[Any, ...]:
            async def replica() -> int:
                return 1

            first = await psync.get_strategy().run(replica)
            return first, next(iterator), path.read_text(), value.tolist()

        async def reads_foreign() -> None:
            await foreign.read()

        iterator, value = iter(dataset), await foreign.read()
        done = coordinator.schedule(step, args=(iterator, value))
        assert await done.fetch() == (1, 7, "contents", value.tolist())
        with pytest.raises(psync.UsageError, match="pass its value as an argument"):
            await coordinator.schedule(reads_foreign).fetch()
        with pytest.raises(psync.UsageError):
            await coordinator.join()


@pytest.mark.parametrize("method", ["schedule", "submit"])
async def test_a_captured_name_that_is_rebound_is_warned_of_at_the_call(method):
    async with coordinating() as (_, coordinator):
        rate, call = 1, getattr(coordinator, method)

        async def step():
            return rate

        assert await call(step) == 1
        rate = 2
        with pytest.warns(StaleCaptureWarning, match='"rate"') as seen:
            assert await call(step) == 1
        assert seen[0].filename == __file__


# --- life ------------------------------------------------------------------------------------


def test_before_it_runs_everything_says_so() -> None:
    coordinator = psync.ClusterCoordinator(strategy_of())
    for call in (
        lambda: coordinator.schedule(lambda: 1),
        lambda: coordinator.submit(lambda: 1),
        coordinator.done,
        coordinator.statistics,
        lambda: coordinator.create_per_worker_dataset(lambda: [1]),
    ):
        with pytest.raises(ClosedError, match="the coordinator is not running") as info:
            call()
        assert "use it inside `async with ClusterCoordinator" in str(info.value)
    with pytest.raises(ClosedError, match="join: the coordinator is not running"):
        at_once(coordinator.join())


def test_there_is_one_coordinator_for_a_strategy() -> None:
    strategy = strategy_of()
    coordinator = psync.ClusterCoordinator(strategy, min_workers=1)
    assert psync.ClusterCoordinator(strategy) is coordinator
    assert psync.ClusterCoordinator(strategy_of()) is not coordinator


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ("ps", r"(?s)this process is a ps, .*psync\.run"),
        ("worker", r"(?s)this process is a worker, .*psync\.run"),
        ("evaluator", "the evaluator, which takes no part in training"),
    ],
)
def test_a_task_that_is_not_the_chief_opens_no_coordinator(job, text):
    cluster = psync.ClusterSpec({"chief": ["c:1"], "ps": ["a:1"], "worker": ["b:1"]})
    strategy = psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(cluster, task_type=job, task_id=0)
    )
    with pytest.raises(ConfigurationError, match=text):
        psync.ClusterCoordinator(strategy)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"min_workers": 0}, "min_workers: expected 1 to 1, got 0"),
        ({"min_workers": 3}, "min_workers: expected 1 to 1, got 3"),
        ({"closure_timeout": 0}, "closure_timeout: expected seconds above 0, got 0"),
        ({"max_losses": 0}, "max_losses: expected at least 1, got 0"),
        ({"max_flaps": -1}, "max_flaps"),
        ({"watchdog_timeout": -1}, "watchdog_timeout: expected seconds, 0 or above, got -1"),
        ({"watchdog_timeout": float("inf")}, "watchdog_timeout: expected seconds"),
        ({"watchdog_timeout": float("nan")}, "watchdog_timeout: expected seconds"),
    ],
)
def test_options_out_of_range_are_refused(given, text):
    with pytest.raises(ConfigurationError, match=text):
        psync.ClusterCoordinator(strategy_of(), **given)


async def test_it_is_used_on_its_own_loop_only():
    async with coordinating() as (_, coordinator):
        found: list[BaseException] = []

        def call():
            try:
                coordinator.schedule(lambda: 1)
            except UsageError as exc:
                found.append(exc)

        async def on_another_loop():
            call()

        await asyncio.to_thread(call)
        await asyncio.to_thread(asyncio.run, on_another_loop())
        for error in found:
            assert "schedule on a different event loop" in str(error)
        assert len(found) == 2


async def test_closing_in_the_middle_ends_everything_and_frees_the_workers():
    async with cluster_of() as cluster:

        async def forever():
            event_of("running").set()
            try:
                await asyncio.sleep(3600)
            finally:
                event_of("stopped").set()

        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            values = [coordinator.schedule(forever) for _ in range(20)]
            join = asyncio.create_task(coordinator.join())
            waiting = asyncio.create_task(values[0].fetch())
            await event_of("running").wait()
        with pytest.raises(ClosedError, match="the coordinator was closed"):
            await join
        for value in values:
            with pytest.raises((ClosureCancelled, ClosedError), match="coordinator was closed"):
                await value
        with pytest.raises((ClosureCancelled, ClosedError)):
            await waiting
        with pytest.raises(ClosedError, match="schedule: the coordinator is not running"):
            coordinator.schedule(forever)
        with pytest.raises(ClosedError, match="was closed, and its variables with it"):
            await coordinator.start()
        await event_of("stopped").wait()
        async with psync.ClusterCoordinator(cluster.strategy()) as second:
            assert await second.fetch([second.schedule(lambda: 1) for _ in range(4)]) == [1] * 4


# --- start-up --------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_tasks_may_start_in_any_order_and_late():
    cluster = memory_cluster.MemoryCluster(2, 2)
    start = asyncio.create_task(psync.ClusterCoordinator(cluster.strategy()).__aenter__())
    for name in ("worker-1", "ps-1", "worker-0", "ps-0"):
        await asyncio.sleep(10)  # a ps that is later than its timeout is not lost
        assert not start.done()
        await cluster.start(name)
    coordinator = await start
    assert await coordinator.schedule(lambda: 1) == 1
    await coordinator.close()
    await cluster.stop_all()


@pytest.mark.virtual_time
async def test_a_missing_task_is_named_with_its_address():
    async with cluster_of(num_ps=2, num_workers=2) as cluster:
        await cluster.stop("worker-1")
        await cluster.stop("ps-0")
        coordinator = psync.ClusterCoordinator(cluster.strategy(), connect_timeout=30)
        with pytest.raises(ConnectFailed) as info:
            await coordinator.start()
        text = str(info.value)
        assert "did not come up within 30 s" in text
        assert "/job:ps/task:0 at ps-0:1, /job:worker/task:1 at worker-1:1" in text
        assert "are these tasks running" in text


@pytest.mark.virtual_time
async def test_with_min_workers_work_begins_and_the_others_come_later():
    async with cluster_of() as cluster:
        await cluster.stop("worker-1")
        async with psync.ClusterCoordinator(cluster.strategy(), min_workers=1) as coordinator:
            assert await coordinator.schedule(psync.get_worker_index) == 0
            await cluster.start("worker-1")
            await asyncio.sleep(10)

            async def both():
                await memory_cluster.note(f"worker {psync.get_worker_index()}")
                await event_of("worker 0").wait()
                await event_of("worker 1").wait()

            coordinator.schedule(both)
            coordinator.schedule(both)
            await coordinator.join(timeout=5)


@pytest.mark.virtual_time
async def test_a_late_worker_with_another_secret_is_reported_and_tried_again(caplog):
    async with cluster_of() as cluster:
        await cluster.stop("worker-1")
        async with psync.ClusterCoordinator(cluster.strategy(), min_workers=1) as coordinator:
            await cluster.start("worker-1", b"f" * 32)
            await asyncio.sleep(10)
            assert "/job:worker/task:1 cannot join" in caplog.text
            await cluster.stop("worker-1")
            await cluster.start("worker-1")
            await asyncio.sleep(10)
            assert len(coordinator.statistics()["closures"].workers) == 2


async def test_leaving_without_join_says_what_is_thrown_away(caplog):
    async def unheard():
        raise ValueError("unheard of")

    async def endless():
        await asyncio.Event().wait()

    async with training(1, 1) as (_, coordinator):
        value = coordinator.schedule(unheard)
        with pytest.raises(ValueError, match="unheard"):
            await value
    assert "closing without join; join would have raised ValueError: unheard of" in caplog.text
    caplog.clear()
    async with training(1, 1) as (_, coordinator):
        coordinator.schedule(endless)
        coordinator.schedule(endless)
    assert [record.message for record in caplog.records] == [
        "closing cancels 2 unfinished closures; join was not awaited"
    ]
    caplog.clear()

    async def breaks() -> None:
        async with training(1, 1) as (_, coordinator):
            coordinator.schedule(endless)
            raise KeyError

    with pytest.raises(KeyError):
        await breaks()
    assert not caplog.records  # the program has an error of its own


# --- submit: schedule in the form of concurrent.futures ----------------------------------------


async def told(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


async def test_arguments_go_to_the_step_as_they_are() -> None:
    async with coordinating() as (_, coordinator):
        calls = [
            coordinator.submit(told),
            coordinator.submit(told, 1, (2, 3), a=(1,)),
            # Names that methods here have for arguments of their own.
            coordinator.submit(told, self=1, step=2, fn=3, args=4, kwargs=5),
        ]
        assert await coordinator.fetch(calls) == [
            ((), {}),
            ((1, (2, 3)), {"a": (1,)}),
            ((), {"self": 1, "step": 2, "fn": 3, "args": 4, "kwargs": 5}),
        ]


async def test_fetch_takes_any_nesting_and_returns_what_is_no_remote_value() -> None:
    async with coordinating() as (_, coordinator):
        one = coordinator.submit(int, "1")
        array = np.ones(2)
        found = await coordinator.fetch({"x": [(one, "text")], "y": {"z": [one, array]}})
        assert found == {"x": [(1, "text")], "y": {"z": [1, array]}}
        assert await coordinator.fetch(5) == 5
