"""Training sessions: every task runs its own loop, on a network in memory.

What stands for a process here shares the optimizers with the others: they are known by their
numbers, and each process would make the same ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import session_cluster, until
from psync import MonitoredTrainingSession, SessionHook
from psync.net.secret import Secret

Strategy = psync.ParameterServerStrategy
GRACE_S = 5.0  # after which a task without a connection is lost
ONES = np.full(4, -1, np.float32)  # a gradient: each push through SGD(1.0) adds one


def declare(strategy: Strategy) -> tuple[Any, Any]:
    """The variables of every program here: a vector of zeros, and the global step."""
    with strategy.scope():
        w = psync.Variable(np.zeros(4, np.float32), name="w")
        return w, psync.get_or_create_global_step()


class Program:
    """What every task runs: counts what became of its pushes.

    Args:
        optimizer: Of all tasks.
        pause_s: How long a gradient takes to compute.
        options: Of the session.
    """

    def __init__(self, optimizer: Any, pause_s: float = 0.0, **options: Any) -> None:
        self.optimizer = optimizer
        self.pause_s = pause_s
        self.options = options
        self.outcomes: dict[str, Counter[str]] = {}
        self.steps = asyncio.Event()  # set when somebody has made a step
        self.final: Any = None  # (w, global step) as the chief reads them at the end

    async def __call__(self, strategy: Strategy) -> str:
        w, global_step = declare(strategy)
        resolver = strategy.cluster_resolver
        name = f"{resolver.task_type}-{resolver.task_id}"
        outcomes = self.outcomes[name] = Counter()

        async def step() -> None:
            await psync.pull(w)
            await asyncio.sleep(self.pause_s)
            push = await self.optimizer.apply_gradients([(ONES, w)], global_step)
            outcomes[push.outcome.value] += 1
            self.steps.set()

        async with MonitoredTrainingSession(strategy, **self.options) as session:
            while not session.should_stop():
                await session.run(step)
            if session.is_chief:
                value, count = await psync.pull((w, global_step))
                self.final = value.tolist(), int(count)
        return name


def sync(count: int, total: int | None = None, **options: Any) -> psync.SyncReplicasOptimizer:
    return psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), count, total, **options)


# --- a run to its end --------------------------------------------------------------------------


@pytest.mark.parametrize("chief", [False, True])
async def test_asynchronous_training_by_all_tasks(chief: bool) -> None:
    program = Program(psync.optimizers.SGD(1.0), stop_at_step=20)
    async with session_cluster(2, 2, chief=chief) as cluster:
        names = await cluster.run_all(program)
    assert names == ["chief-0"] * chief + ["worker-0", "worker-1"]
    value, step = program.final
    accepted = sum(outcomes["accepted"] for outcomes in program.outcomes.values())
    assert step >= 20
    assert accepted >= value[0] >= 20  # the others were still at it when the chief read


@pytest.mark.parametrize("chief", [False, True])
async def test_synchronous_steps_take_one_gradient_of_each_task(chief: bool) -> None:
    tasks = 3 if chief else 2
    program = Program(sync(tasks), stop_at_step=10)
    async with session_cluster(2, 2, chief=chief) as cluster:
        await cluster.run_all(program)
    assert program.final == ([10.0] * 4, 10)
    assert [outcomes["accepted"] for outcomes in program.outcomes.values()] == [10] * tasks


async def test_a_chief_that_does_not_train_starts_and_ends_it() -> None:
    optimizer = sync(2)

    async def main(strategy: Strategy) -> list[float] | None:
        w, global_step = declare(strategy)
        trains = strategy.cluster_resolver.task_type == "worker"

        async def step() -> None:
            await optimizer.apply_gradients([(ONES, w)], global_step)

        async with MonitoredTrainingSession(strategy, trains=trains, stop_at_step=5) as session:
            if trains:
                while not session.should_stop():
                    await session.run(step)
                return None
            with pytest.raises(psync.UsageError, match="run on a chief that does not train"):
                await session.run(step)
            await session.wait_until_stopped()
            return (await w.read()).tolist()

    async with session_cluster(1, 2, chief=True) as cluster:
        assert await cluster.run_all(main) == [[5.0] * 4, None, None]


# --- what a session is -------------------------------------------------------------------------


async def test_a_step_returns_its_result_and_nothing_runs_once_training_has_ended() -> None:
    async def main(strategy: Strategy) -> None:
        declare(strategy)
        ran = []

        async def step(value: int, *, more: int = 0) -> int:
            ran.append(value)
            return value + more

        session = MonitoredTrainingSession(strategy)
        with pytest.raises(psync.UsageError, match="run outside the training session"):
            await session.run(step, 1)
        async with session:
            assert await session.run(step, 1, more=2) == 3
            session.request_stop()
            assert session.should_stop()
            assert await session.run(step, 2) is None
        assert ran == [1]

    async with session_cluster(1, 1) as cluster:
        await cluster.run_all(main)


async def test_one_task_that_stops_leaves_the_others_at_work() -> None:
    optimizer = sync(2)

    async def main(strategy: Strategy) -> int:
        w, global_step = declare(strategy)
        async with MonitoredTrainingSession(strategy) as session:

            async def step() -> None:
                push = await optimizer.apply_gradients([(ONES, w)], global_step)
                if push.step == (5 if session.is_chief else 2):
                    session.request_stop()

            while not session.should_stop():
                await session.run(step)
            return int(await global_step.read())

    async with session_cluster(1, 2) as cluster:
        assert (await cluster.run_all(main))[0] == 5


async def test_hooks_hear_of_each_stage_in_order() -> None:
    log: list[str] = []

    class Hook(SessionHook):
        def begin(self) -> None:
            log.append("begin")

        async def after_create_session(self, session: Any) -> None:
            log.append(f"created, {float((await w.read())[0])}")

        async def after_run(self, session: Any, result: Any) -> None:
            log.append(f"run, {result}")
            if result == 2:
                session.request_stop()

        async def end(self, session: Any) -> None:
            log.append("end")

    async def step() -> int:
        return sum(line.startswith("run") for line in log) + 1

    async with session_cluster(1, 1) as cluster:
        strategy = cluster.strategy(job="worker")
        w, _ = declare(strategy)
        async with MonitoredTrainingSession(strategy, hooks=[Hook()]) as session:
            while not session.should_stop():
                await session.run(step)
    assert log == ["begin", "created, 0.0", "run, 1", "run, 2", "end"]


async def test_an_error_of_a_step_goes_to_the_program_and_ends_training() -> None:
    async def main(strategy: Strategy) -> None:
        declare(strategy)

        async def step() -> None:
            raise ValueError("no luck")

        async with MonitoredTrainingSession(strategy) as session:
            if session.is_chief:
                await session.run(step)
            await session.wait_until_stopped()

    async with session_cluster(1, 2) as cluster:
        chief, other = cluster.run(main, "worker", 0), cluster.run(main, "worker", 1)
        with pytest.raises(ValueError, match="no luck"):
            await chief
        with pytest.raises(psync.TrainingEnded, match=r"^the chief failed: ValueError: no luck$"):
            await other


class FiveSteps(Program):
    """Worker 1 does something of its own after five steps; the chief does not train."""

    def __init__(self, then: Callable[[], object], optimizer: Any = None, **options: Any) -> None:
        super().__init__(optimizer or sync(2), stop_at_step=10_000, **options)
        self.then = then

    async def __call__(self, strategy: Strategy) -> str:
        w, global_step = declare(strategy)
        resolver = strategy.cluster_resolver
        name = f"{resolver.task_type}-{resolver.task_id}"
        trains = resolver.task_type == "worker"
        made = 0

        async def step() -> None:
            nonlocal made
            if name == "worker-1" and made == 5:
                self.then()
            await asyncio.sleep(self.pause_s)
            await self.optimizer.apply_gradients([(ONES, w)], global_step)
            made += 1
            self.steps.set()

        async with MonitoredTrainingSession(strategy, trains=trains, **self.options) as session:
            while trains and not session.should_stop():
                await session.run(step)
            await session.wait_until_stopped()
        return name


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.promise("failures.session-worker-raises")
@pytest.mark.parametrize("backups", [0, 1])
@pytest.mark.parametrize(
    "error", [NameError("name 'typo' is not defined"), psync.ValueMismatchError("bad")]
)
@pytest.mark.virtual_time
async def test_an_error_by_which_a_worker_leaves_is_raised_by_the_chief_at_once(
    error: Exception, backups: int
) -> None:
    program = FiveSteps(raising(error), sync(3 - backups, 3))
    name = type(error).__name__
    async with session_cluster(2, 3, chief=True) as cluster:
        began = asyncio.get_running_loop().time()
        chief = cluster.run(program, "chief")
        workers = [cluster.run(program, "worker", index) for index in range(3)]
        with pytest.raises(psync.RemoteError) as caught:
            await chief
        assert caught.value.task == "/job:worker/task:1"
        assert caught.value.type_name == name or caught.value.type_name == f"psync.errors.{name}"
        assert str(error) in caught.value.message
        assert "raise error" in caught.value.traceback_text
        with pytest.raises(type(error)):
            await workers[1]
        for worker in (workers[0], workers[2]):
            with pytest.raises(
                psync.TrainingEnded, match=rf"^/job:worker/task:1 failed: \S*{name}: "
            ):
                await worker
        assert asyncio.get_running_loop().time() - began < 1


async def test_an_error_outside_of_a_step_or_after_the_last_one_is_the_chiefs_as_well() -> None:
    async def main(strategy: Strategy) -> None:
        _, global_step = declare(strategy)
        trains = strategy.cluster_resolver.task_type == "worker"
        async with MonitoredTrainingSession(strategy, trains=trains, stop_at_step=5) as session:
            while trains and not session.should_stop():
                await session.run(global_step.assign_add, 1)
            if trains:
                await asyncio.wait([chief], timeout=0.1)  # it waits for this worker
                raise KeyError("report")
            await session.wait_until_stopped()

    async with session_cluster(1, 1, chief=True) as cluster:
        chief, worker = cluster.run(main, "chief"), cluster.run(main, "worker")
        with pytest.raises(psync.RemoteError, match="KeyError on /job:worker/task:0: 'report'"):
            await chief
        with pytest.raises(KeyError):
            await worker


@pytest.mark.parametrize(
    "end",
    [raising(psync.EndOfData("no more")), raising(StopAsyncIteration()), lambda: next(iter(()))],
    ids=["EndOfData", "StopAsyncIteration", "StopIteration"],
)
async def test_a_worker_without_further_data_leaves_in_order_and_the_others_go_on(
    end: Callable[[], object],
) -> None:
    ended: list[str] = []

    class Hook(SessionHook):
        async def end(self, session: Any) -> None:
            ended.append(repr(session).split()[2])

    program = FiveSteps(end, sync(2), hooks=[Hook()])
    program.options["stop_at_step"] = 20
    async with session_cluster(1, 2, chief=True) as cluster:
        assert await cluster.run_all(program) == ["chief-0", "worker-0", "worker-1"]
    assert ended[0] == "/job:worker/task:1,"
    assert len(ended) == 3


async def test_an_error_that_only_comes_from_the_end_of_an_iterator_is_an_error() -> None:
    def act() -> None:
        try:
            next(iter(()))
        except StopIteration as exc:
            raise RuntimeError("the data is broken") from exc

    async with session_cluster(1, 2, chief=True) as cluster:
        with pytest.raises((psync.RemoteError, RuntimeError), match="the data is broken"):
            await cluster.run_all(FiveSteps(act))


@pytest.mark.virtual_time
async def test_a_worker_that_is_cancelled_leaves_and_the_others_go_on() -> None:
    program = FiveSteps(lambda: leaving[0].cancel())
    program.options["stop_at_step"] = 20
    leaving: list[Any] = []
    async with session_cluster(1, 2, chief=True) as cluster:
        chief, first = cluster.run(program, "chief"), cluster.run(program, "worker", 0)
        leaving.append(cluster.run(program, "worker", 1))
        assert await asyncio.gather(chief, first) == ["chief-0", "worker-0"]
        with pytest.raises(asyncio.CancelledError):
            await leaving[0]


@pytest.mark.virtual_time
async def test_a_worker_that_cannot_reach_a_ps_is_lost_and_the_others_go_on() -> None:
    program = FiveSteps(raising(psync.ParameterServerLost("/job:ps/task:1")))
    program.options["stop_at_step"] = 20
    async with session_cluster(2, 2, chief=True) as cluster:
        chief, first = cluster.run(program, "chief"), cluster.run(program, "worker", 0)
        with pytest.raises(psync.ParameterServerLost):
            await cluster.run(program, "worker", 1)
        assert await asyncio.gather(chief, first) == ["chief-0", "worker-0"]


@pytest.mark.virtual_time
async def test_an_error_of_a_hook_of_the_chief_reaches_those_who_wait_for_it() -> None:
    class Hook(SessionHook):
        async def after_create_session(self, session: Any) -> None:
            if session.is_chief:
                await asyncio.sleep(1)  # the other waits by then
                raise ValueError("no luck")

    async def main(strategy: Strategy) -> None:
        declare(strategy)
        async with MonitoredTrainingSession(strategy, hooks=[Hook()]):
            pass

    async with session_cluster(1, 2) as cluster:
        chief, other = cluster.run(main, "worker", 0), cluster.run(main, "worker", 1)
        with pytest.raises(ValueError, match="no luck"):
            await chief
        with pytest.raises(psync.TrainingEnded, match="the chief failed: ValueError: no luck"):
            await other


@pytest.mark.virtual_time
async def test_a_startup_delay_passes_before_the_first_step() -> None:
    async with session_cluster(1, 1) as cluster:
        strategy = cluster.strategy(job="worker")
        now = asyncio.get_running_loop().time
        began = now()
        async with MonitoredTrainingSession(strategy, startup_delay_s=7.5):
            assert now() - began == pytest.approx(7.5, abs=0.1)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            True,
            'the chief has declared variable "w" (float32, shard 0 of shape (4,)), but this task '
            'declared variable "extra" (float32, shard 0 of shape (2,))',
        ),
        (
            False,
            'the chief did not declare variable "extra" (float32, shard 0 of shape (2,)) before '
            "training began",
        ),
    ],
)
async def test_variables_that_differ_from_the_chiefs_are_an_error(first: bool, said: str) -> None:
    async def main(strategy: Strategy) -> None:
        with strategy.scope():
            names = ["w"] if strategy.cluster_resolver.task_id == 0 else ["w", "extra"]
            for name in reversed(names) if first else names:
                psync.Variable(np.zeros(4 if name == "w" else 2, np.float32), name=name)
        async with MonitoredTrainingSession(strategy) as session:
            await session.wait_until_stopped()

    async with session_cluster(1, 2) as cluster:
        chief, other = cluster.run(main, "worker", 0), cluster.run(main, "worker", 1)
        with pytest.raises(psync.ConfigurationError) as caught:
            await other
        assert caught.value.message == said
        with pytest.raises(psync.RemoteError, match="the chief "):
            await chief


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("job", "stopped", "said"),
    [
        (
            "worker",
            "",
            "the chief has not begun a training session within 5 s\n"
            "hint: is the chief running, and does it wait for others?",
        ),
        ("worker", "ps-0", "no connection to /job:ps/task:0 at ps-0:1 within 5 s\nhint: is "),
        (
            "chief",
            "ps-0",
            "the cluster did not come up within 5 s: no connection to /job:ps/task:0 at ps-0:1\n",
        ),
        (
            "chief",
            "ps-1",
            "the cluster did not come up within 5 s: no connection to /job:ps/task:1 at ps-1:1\n"
            "hint: are these tasks running, and are these their addresses?",
        ),
    ],
)
async def test_who_misses_another_task_says_which(job: str, stopped: str, said: str) -> None:
    program = Program(psync.optimizers.SGD(1.0), connect_timeout=5.0)
    async with session_cluster(2, 1, chief=True) as cluster:
        if stopped:
            await cluster.stop(stopped)
        with pytest.raises(psync.ConnectFailed) as caught:
            await cluster.run(program, job)
        assert str(caught.value).startswith(said)


@pytest.mark.virtual_time
async def test_a_chief_whose_workers_do_not_come_says_who_has() -> None:
    hasty, patient = (Program(psync.optimizers.SGD(1.0), connect_timeout=s) for s in (5.0, 100.0))
    async with session_cluster(1, 2, chief=True) as cluster:
        chief, worker = cluster.run(hasty, "chief"), cluster.run(patient, "worker", 1)
        with pytest.raises(psync.ConnectFailed) as caught:
            await chief
        assert str(caught.value) == (
            "2 workers were to take part in training, and within 5 s there came "
            "/job:worker/task:1\n"
            "hint: check that each of them runs this program: psync.run(main, on_workers=True)"
        )
        with pytest.raises(psync.TrainingEnded, match="the chief failed: ConnectFailed"):
            await worker


async def test_another_secret_is_an_error_at_once() -> None:
    program = Program(psync.optimizers.SGD(1.0))
    async with session_cluster(chief=True) as cluster:
        cluster.secret = Secret(b"another secret of the whole cluster")
        for job in ("worker", "chief"):
            with pytest.raises(psync.AuthenticationError):
                await cluster.run(program, job)


async def test_outside_its_session_a_strategy_serves_no_more() -> None:
    async with session_cluster(1, 1) as cluster:
        strategy = cluster.strategy(job="worker")
        w, _ = declare(strategy)
        async with MonitoredTrainingSession(strategy):
            with pytest.raises(psync.UsageError, match="is already running"):
                await MonitoredTrainingSession(strategy).__aenter__()
        with pytest.raises(psync.ClosedError):
            await w.read()
        with pytest.raises(psync.ClosedError, match="the coordinator or session was closed"):
            await MonitoredTrainingSession(strategy).__aenter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startup_delay_s": -1}, "startup_delay_s: expected seconds, 0 or above, got -1"),
        ({"stop_at_step": 0}, "stop_at_step: expected at least 1, got 0"),
        ({"min_workers": 2}, "min_workers: expected 0 to 1, got 2"),
        ({"min_workers": 0, "trains": False}, "min_workers: expected 1 to 1, got 0"),
        ({"is_chief": False, "trains": False}, "trains: only the chief may set trains=False"),
        ({"trains": False}, "trains: the cluster has no other task that would train"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    tasks = {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    job = "chief"
    if options == {"trains": False}:
        del tasks["chief"]
        job = "worker"
    resolver = psync.SimpleClusterResolver(psync.ClusterSpec(tasks), task_type=job, task_id=0)
    with pytest.raises(psync.ConfigurationError, match=f"^{message}$"):
        MonitoredTrainingSession(Strategy(resolver), **options)


def test_copies_of_ps_tasks_are_refused_as_no_session_makes_them() -> None:
    tasks = {"ps": ["localhost:1", "localhost:2"], "worker": ["localhost:3"]}
    resolver = psync.SimpleClusterResolver(psync.ClusterSpec(tasks), task_type="worker", task_id=0)
    with pytest.raises(psync.ConfigurationError, match=r'^ps_recovery="backup": ') as caught:
        MonitoredTrainingSession(Strategy(resolver, ps_recovery="backup"))
    assert "What a session survives" in str(caught.value.hint)


def test_a_session_is_for_tasks_that_train() -> None:
    with pytest.raises(psync.ConfigurationError, match="expected a ParameterServerStrategy, got "):
        MonitoredTrainingSession(None)  # type: ignore[arg-type]
    cluster = psync.ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
    resolver = psync.SimpleClusterResolver(cluster, task_type="ps", task_id=0)
    with pytest.raises(psync.ConfigurationError, match=r"says that this process is ps$"):
        MonitoredTrainingSession(Strategy(resolver))


# --- who takes part ----------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_worker_that_comes_later_takes_part_at_once() -> None:
    program = Program(sync(2), stop_at_step=20, pause_s=0.5, min_workers=1)
    async with session_cluster(1, 3) as cluster:
        first = [cluster.run(program, "worker", index) for index in (0, 1)]
        await until_step(program, 4)
        late = cluster.run(program, "worker", 2)
        await asyncio.gather(*first, late)
    assert program.outcomes["worker-2"]["accepted"] > 0
    assert program.final[1] == 20


@pytest.mark.virtual_time
@pytest.mark.parametrize("away_s", [50, 80])
async def test_the_last_replica_that_is_lost_has_a_minute_to_come_back(away_s: float) -> None:
    program = FiveSteps(lambda: None, sync(1), pause_s=0.1)
    program.options["stop_at_step"] = 20
    async with session_cluster(1, 1, chief=True) as cluster:
        chief, worker = cluster.run(program, "chief"), cluster.run(program, "worker")
        await until_step(program, 4)
        await cluster.kill_program(worker, "worker-0")
        await asyncio.sleep(away_s)
        if away_s < 60:
            await asyncio.gather(chief, cluster.run(program, "worker"))
        else:
            lost = "no replica is left: /job:worker/task:0 did not come back"
            with pytest.raises(psync.TrainingEnded, match=lost):
                await chief


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "seed", [*range(4), 20]
)  # 20: a worker's last post comes after the chief's
async def test_training_ends_when_all_replicas_have_left(seed: int) -> None:
    async def main(strategy: Strategy) -> str:
        declare(strategy)
        trains = strategy.cluster_resolver.task_type == "worker"
        async with MonitoredTrainingSession(strategy, trains=trains) as session:
            if trains:
                raise psync.EndOfData
            await session.wait_until_stopped()
        return "ended"

    async with session_cluster(1, 2, chief=True, seed=seed, latency=(0.0001, 1.0)) as cluster:
        assert await cluster.run_all(main) == ["ended"] * 3
        with pytest.raises(psync.ConnectFailed, match="there came none"):  # of the next training
            await cluster.run(main, "chief")


@pytest.mark.virtual_time
async def test_a_worker_that_comes_when_a_chief_that_failed_has_gone_waits_for_the_next() -> None:
    program = Program(sync(2), stop_at_step=5)

    class Hook(SessionHook):
        async def after_create_session(self, session: Any) -> None:
            raise ValueError("no luck")

    failing = Program(sync(2), hooks=[Hook()])
    async with session_cluster(1, 1, chief=True) as cluster:
        with pytest.raises(ValueError, match="no luck"):
            await cluster.run(failing, "chief")
        worker = cluster.run(program, "worker")
        await asyncio.sleep(1)
        assert await asyncio.gather(cluster.run(program, "chief"), worker) == [
            "chief-0",
            "worker-0",
        ]


# --- tasks die ---------------------------------------------------------------------------------


async def until_step(program: Program, count: int) -> None:
    """Let them train until some more steps are made."""
    for _ in range(count):
        program.steps.clear()
        await program.steps.wait()


@pytest.mark.virtual_time
@pytest.mark.parametrize("again", [False, True])
async def test_synchronous_training_goes_on_when_a_worker_is_killed_and_it_may_come_again(
    again: bool,
) -> None:
    # Bound tokens: with free ones a survivor may take the dead one's, and count twice in a step.
    program = Program(sync(3, strict=True), stop_at_step=60)
    async with session_cluster(2, 3) as cluster:
        tasks = [cluster.run(program, "worker", index) for index in range(3)]
        await until_step(program, 10)
        await cluster.kill_program(tasks[2], "worker-2")
        before = program.outcomes["worker-2"]["accepted"]
        living = tasks[:2] + ([cluster.run(program, "worker", 2)] if again else [])
        names = await asyncio.gather(*living)
        assert names == ["worker-0", "worker-1", "worker-2"][: len(living)]
    assert program.final == ([60.0] * 4, 60)
    counts = [outcomes["accepted"] for outcomes in program.outcomes.values()]
    assert counts[:2] == [60, 60]
    assert 0 < before < 60
    assert counts[2] > 10 if again else counts[2] < 60  # in its second life, or its only one


@pytest.mark.virtual_time
@pytest.mark.parametrize("trains", [True, False])
async def test_when_the_chief_is_killed_the_others_end_with_an_error(trains: bool) -> None:
    async def main(strategy: Strategy) -> None:
        declare(strategy)
        is_chief = strategy.cluster_resolver.task_type == "chief"
        async with MonitoredTrainingSession(strategy, trains=trains or not is_chief) as session:
            entered.append(session)
            await session.wait_until_stopped()

    entered: list[Any] = []
    async with session_cluster(1, 2, chief=True) as cluster:
        chief = cluster.run(main, "chief")
        workers = [cluster.run(main, "worker", index) for index in range(2)]
        await until(lambda: len(entered) == 3)
        began = asyncio.get_running_loop().time()
        await cluster.kill_program(chief, "chief-0")
        for worker in workers:
            with pytest.raises(psync.TrainingEnded, match=r"^the chief, /job:chief/task:0, was lo"):
                await worker
        assert asyncio.get_running_loop().time() - began < GRACE_S + 3


@pytest.mark.virtual_time
async def test_the_end_reaches_who_waits_for_a_token_although_others_are_still_in_a_step() -> None:
    optimizer = sync(2)
    pushed = asyncio.Event()

    async def main(strategy: Strategy) -> float:
        w, global_step = declare(strategy)
        trains = strategy.cluster_resolver.task_type == "worker"

        async def step() -> None:
            if strategy.cluster_resolver.task_id == 1:
                await asyncio.sleep(20)
            pushed.set()
            await optimizer.apply_gradients([(ONES, w)], global_step)

        async with MonitoredTrainingSession(strategy, trains=trains) as session:
            if not trains:
                await pushed.wait()
                await asyncio.sleep(1)  # and leave, which ends training
            while trains and not session.should_stop():
                await session.run(step)
            return asyncio.get_running_loop().time() - began

    async with session_cluster(1, 2, chief=True) as cluster:
        began = asyncio.get_running_loop().time()
        chief, waiting, slow = await cluster.run_all(main)
        assert (chief, waiting, slow) == pytest.approx((1, 1, 20), abs=0.5)


@pytest.mark.virtual_time
async def test_a_session_outlives_any_number_of_connections() -> None:
    program = Program(sync(2), pause_s=1.0, stop_at_step=60)
    async with session_cluster(2, 2) as cluster:
        tasks = [cluster.run(program, "worker", index) for index in range(2)]
        await until_step(program, 2)
        for _ in range(32):
            cluster.network.cut("ps-0")
            await asyncio.sleep(1.5)
        await asyncio.gather(*tasks)
    assert program.final == ([60.0] * 4, 60)


@pytest.mark.promise("updates.outside-closures")
@pytest.mark.virtual_time
async def test_a_worker_that_was_cut_off_too_long_is_refused() -> None:
    program = Program(sync(2), pause_s=0.1, stop_at_step=10_000)
    async with session_cluster(1, 2) as cluster:
        tasks = [cluster.run(program, "worker", index) for index in range(2)]
        await until_step(program, 10)
        cluster.network.partition("worker-1")
        cluster.network.cut("worker-1")
        await asyncio.sleep(GRACE_S + 1)
        cluster.network.heal("worker-1")
        with pytest.raises(
            psync.FencedError, match=r"incarnation .* of /job:worker/task:1 has been"
        ):
            await tasks[1]
        tasks[0].cancel()


@pytest.mark.virtual_time
async def test_a_chief_that_is_started_again_ends_what_was_before() -> None:
    program = Program(sync(2), stop_at_step=5)

    async def main(strategy: Strategy) -> None:
        declare(strategy)
        async with MonitoredTrainingSession(strategy) as session:
            entered.append(session)
            await session.wait_until_stopped()

    entered: list[Any] = []
    async with session_cluster(1, 2, chief=False) as cluster:
        chief, old = cluster.run(main, "worker", 0), cluster.run(main, "worker", 1)
        await until(lambda: len(entered) == 2)
        await cluster.kill_program(chief, "worker-0")
        new = cluster.run(program, "worker", 0)
        with pytest.raises(psync.TrainingEnded, match="a new chief has attached the ps tasks"):
            await old
        again = cluster.run(program, "worker", 1)
        assert await asyncio.gather(new, again) == ["worker-0", "worker-1"]
    assert program.final == ([5.0] * 4, 5)


@pytest.mark.virtual_time
@pytest.mark.parametrize("next_chief", [True, False])
@pytest.mark.parametrize("how", ["last step", "no more data"])
async def test_a_worker_that_has_finished_while_the_chief_is_gone_trains_again_with_the_next_one(
    how: str, next_chief: bool
) -> None:
    optimizer = sync(2)
    made: Counter[str] = Counter()
    go_on = asyncio.Event()  # the chief was killed

    async def main(strategy: Strategy) -> list[float] | None:
        w, global_step = declare(strategy)
        name = f"{strategy.cluster_resolver.task_type}-{strategy.cluster_resolver.task_id}"
        trains = name != "chief-0"

        async def step() -> int:
            push = await optimizer.apply_gradients([(ONES, w)], global_step)
            if push.step == 3:
                await go_on.wait()
            made[name] += 1
            return push.step

        last = 5 if how == "last step" else None
        async with MonitoredTrainingSession(strategy, trains=trains, stop_at_step=last) as session:
            while trains and not session.should_stop():
                if await session.run(step) == 5 and how == "no more data":
                    raise psync.EndOfData
            await session.wait_until_stopped()
            return None if trains else (await w.read()).tolist()

    async with session_cluster(1, 2, chief=True) as cluster:
        chief = cluster.run(main, "chief")
        workers = [cluster.run(main, "worker", index) for index in range(2)]
        await until(lambda: made == {"worker-0": 2, "worker-1": 2})
        await cluster.kill_program(chief, "chief-0")
        go_on.set()
        await until(lambda: made == {"worker-0": 5, "worker-1": 5})
        await asyncio.sleep(1)
        assert not any(worker.done() for worker in workers)
        if next_chief:
            chief = cluster.run(main, "chief")
        expected = "a new chief has attached the ps tasks" if next_chief else "the chief, .* was l"
        for worker in workers:
            with pytest.raises(psync.TrainingEnded, match=expected):
                await worker
        if not next_chief:
            chief = cluster.run(main, "chief")
            await asyncio.sleep(10)
            assert not chief.done()
        await asyncio.gather(*(cluster.run(main, "worker", index) for index in range(2)))
        assert await chief == [5.0] * 4


class Ending(SessionHook):
    """The chief has come to its end, and saves its checkpoint for ever."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def end(self, session: Any) -> None:
        if session.is_chief:
            self.begun.set()
            await asyncio.Event().wait()


@pytest.mark.virtual_time
async def test_the_next_chief_does_not_wait_for_a_worker_that_has_no_more_data() -> None:
    program = FiveSteps(raising(psync.EndOfData("no more")), sync(2), pause_s=0.1)
    program.options["stop_at_step"] = 20
    async with session_cluster(1, 2, chief=True) as cluster:
        chief, first = cluster.run(program, "chief"), cluster.run(program, "worker", 0)
        assert await cluster.run(program, "worker", 1) == "worker-1"
        await until_step(program, 2)
        for _ in range(2):  # the second one has heard of it from nobody who still lives
            await cluster.kill_program(chief, "chief-0")
            chief = cluster.run(program, "chief")
            with pytest.raises(psync.TrainingEnded, match="a new chief has attached"):
                await first
            first = cluster.run(program, "worker", 0)
            await until_step(program, 2)
        assert await asyncio.gather(chief, first) == ["chief-0", "worker-0"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["last step", "no more data"])
async def test_a_chief_that_dies_while_it_saves_is_replaced_by_one_that_may_need_no_workers(
    how: str,
) -> None:
    ending = Ending()

    async def main(strategy: Strategy, *hooks: SessionHook) -> int:
        _, global_step = declare(strategy)
        trains = strategy.cluster_resolver.task_type == "worker"
        last = 5 if how == "last step" else None
        async with MonitoredTrainingSession(
            strategy, trains=trains, stop_at_step=last, hooks=hooks
        ) as session:
            while trains and not session.should_stop():
                await session.run(global_step.assign_add, 1)
                if how == "no more data":
                    raise psync.EndOfData
            await session.wait_until_stopped()
            return int(await global_step.read())

    async with session_cluster(1, 2, chief=True) as cluster:
        chief = cluster.run(lambda strategy: main(strategy, ending), "chief")
        await asyncio.gather(*(cluster.run(main, "worker", index) for index in range(2)))
        await ending.begun.wait()
        await cluster.kill_program(chief, "chief-0")
        chief = cluster.run(main, "chief")
        if how == "last step":  # whose steps are lost
            await asyncio.sleep(10)
            assert not chief.done()
            await asyncio.gather(*(cluster.run(main, "worker", index) for index in range(2)))
        assert await chief >= (5 if how == "last step" else 0)


@pytest.mark.virtual_time
async def test_after_an_end_in_order_the_next_training_waits_for_all_again() -> None:
    program = FiveSteps(raising(psync.EndOfData("no more")), sync(2), connect_timeout=5.0)
    program.options["stop_at_step"] = 20
    async with session_cluster(1, 2, chief=True) as cluster:
        await cluster.run_all(program)
        first = cluster.run(program, "worker", 0)
        with pytest.raises(psync.ConnectFailed, match=r"there came /job:worker/task:0\n"):
            await cluster.run(program, "chief")
        with pytest.raises(psync.PsyncError):
            await first


@pytest.mark.promise("failures.session-ps")
@pytest.mark.virtual_time
async def test_a_ps_that_is_lost_is_an_error_for_all() -> None:
    program = Program(sync(2), stop_at_step=10_000)
    async with session_cluster(1, 2) as cluster:
        tasks = [cluster.run(program, "worker", index) for index in range(2)]
        await until_step(program, 4)
        await cluster.stop("ps-0")
        for task in tasks:
            with pytest.raises(psync.ParameterServerLost) as caught:
                await task
            assert caught.value.hint is not None
            assert "session" in caught.value.hint
            assert "replica" not in caught.value.hint


@pytest.mark.virtual_time
async def test_a_ps_that_is_lost_ends_a_chief_that_does_not_train() -> None:
    program = FiveSteps(lambda: None, psync.optimizers.SGD(1.0), pause_s=0.1)
    async with session_cluster(2, 1, chief=True) as cluster:
        chief, worker = cluster.run(program, "chief"), cluster.run(program, "worker")
        await until_step(program, 4)
        await cluster.stop("ps-1")
        for task in (chief, worker):
            with pytest.raises(psync.ParameterServerLost, match="/job:ps/task:1"):
                await task


@pytest.mark.virtual_time
async def test_a_chief_does_not_wait_for_ever_for_a_step_that_does_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(strategy: Strategy) -> str:
        declare(strategy)

        async def step() -> None:
            begun.set()
            await asyncio.Event().wait()

        async with MonitoredTrainingSession(strategy) as session:
            if not session.is_chief:
                await session.run(step)
            await begun.wait()
        return "ended"

    begun = asyncio.Event()
    async with session_cluster(1, 2) as cluster:
        chief, other = cluster.run(main, "worker", 0), cluster.run(main, "worker", 1)
        with caplog.at_level(logging.WARNING):
            assert await chief == "ended"
        assert "other tasks are still in a step after 30 s" in caplog.text
        other.cancel()


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(4))
async def test_whoever_dies_whenever_each_step_is_applied_once(seed: int) -> None:
    """The mean of gradients of one is one, of how many ever: so w is the global step."""
    chance = random.Random(seed)
    last = 300
    program = Program(sync(2, 3), pause_s=0.05, stop_at_step=last)
    deaths = 0
    async with session_cluster(2, 3, chief=True, seed=seed, latency=(0.0005, 0.004)) as cluster:
        chief = cluster.run(program, "chief")
        workers = [cluster.run(program, "worker", index) for index in range(3)]
        await until_step(program, 3)
        while not chief.done():
            await asyncio.sleep(chance.uniform(0.1, 3.0))
            victim = chance.randrange(3)
            if workers[victim].done() or program.final:
                continue
            deaths += 1
            await cluster.kill_program(workers[victim], f"worker-{victim}")
            if chance.random() < 0.5:  # long enough to be given up, or not
                await asyncio.sleep(GRACE_S + 1)
            workers[victim] = cluster.run(program, "worker", victim)
        await chief
        await asyncio.gather(*workers, return_exceptions=True)
    value, step = program.final
    assert value == [step] * 4
    assert last <= step <= last + 1
    assert deaths > 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("chief", [False, True])
async def test_a_worker_that_waits_names_who_has_to_begin(
    chief: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psync.net")
    program = Program(psync.optimizers.SGD(1.0), stop_at_step=3)
    async with session_cluster(1, 2, chief=chief) as cluster:
        waiting = cluster.run(program, "worker", 1)
        await asyncio.sleep(25)
        leader = "/job:chief/task:0 at chief-0:1" if chief else "/job:worker/task:0 at worker-0:1"
        others = [cluster.run(program, "worker", 0)]
        others += [cluster.run(program, "chief", 0)] if chief else []
        await asyncio.gather(waiting, *others)
        said = [text for text in caplog.messages if "to let it begin" in text]
        assert said == [f"/job:worker/task:1 waits for {leader} to let it begin"] * 2


async def test_a_session_is_used_on_its_own_loop_only() -> None:
    told: list[str] = []

    async def program(strategy: Strategy) -> str:
        declare(strategy)
        async with MonitoredTrainingSession(strategy) as session:

            async def step() -> None: ...

            for call in (
                lambda: session.run(step),
                session.wait_until_stopped,
                lambda: session.__aexit__(None, None, None),
            ):
                with pytest.raises(psync.UsageError, match="on a different event loop") as caught:
                    await asyncio.to_thread(lambda call=call: asyncio.run(call()))
                told.append(str(caught.value))
            await session.run(step)
        return ""

    async with session_cluster(1, 1) as cluster:
        await cluster.run_all(program)
    assert len(told) == 3
