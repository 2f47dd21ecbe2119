"""What a process does as its task; tests/processes has what it does in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import psync
from memory_cluster import SECRET, MemoryCluster, cluster_of
from psync.errors import ConfigurationError, ConnectFailed, PsyncError, TrainingEnded, UsageError
from psync.launch.tasks import (
    SETUP_ERRORS,
    OwnTask,
    own_task,
    run,
    run_task,
    serve_as,
    shut_down,
)
from psync.net.environment import (
    added_workers,
    newest_incarnation,
    note_incarnation,
    run_over,
    training_over,
)
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.testing import MemoryNetwork, settle
from tasks_by_hand import by_hand, ended, script, wait_for_line

pytestmark = pytest.mark.usefixtures("own_log")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PSYNC_", "TF_CONFIG")):
            monkeypatch.delenv(name)


def resolver(job: str | None = "chief", index: int | None = 0) -> psync.SimpleClusterResolver:
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    return psync.SimpleClusterResolver(psync.ClusterSpec(cluster), task_type=job, task_id=index)


async def nothing() -> int:
    return 7


def exit_code(main: Any, resolver: psync.ClusterResolver, **options: Any) -> object:
    with pytest.raises(SystemExit) as caught:
        run(main, resolver, **options)
    return caught.value.code


# --- run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: lambda: None, nothing, lambda: None])
def test_run_wants_a_coroutine_function(make: Any) -> None:
    main = make()
    with pytest.raises(UsageError) as caught:
        run(main)
    assert str(caught.value) == (
        f"run: expected a coroutine function, got {type(main).__name__}\n"
        "hint: psync.run(main) with `async def main():`"
    )
    if asyncio.iscoroutine(main):
        main.close()


def test_on_the_chief_run_returns_what_main_does() -> None:
    assert run(nothing, resolver()) == 7


def test_what_it_was_given_is_the_default_inside() -> None:
    given = resolver()

    async def main() -> psync.ClusterResolver:
        return psync.ParameterServerStrategy().cluster_resolver

    assert run(main, given) is given
    with pytest.raises(ConfigurationError, match="this process belongs to no cluster"):
        psync.resolve_cluster({})


def test_an_error_of_main_is_raised_as_it_is() -> None:
    async def main() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main, resolver())


def test_an_error_of_the_setup_is_said_and_ends_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        raise ConnectFailed("no task there", hint="start it")

    assert exit_code(main, resolver()) == 2
    first, hint, place = capsys.readouterr().err.splitlines()
    assert first == "psync: error: no task there"
    assert hint == "hint: start it"
    assert re.fullmatch(rf"at {re.escape(__file__)}:\d+, in main", place)


@pytest.mark.parametrize("error", SETUP_ERRORS)
@pytest.mark.parametrize(
    "member",
    [psync.ClusterCoordinator, partial(psync.MonitoredTrainingSession, min_workers=0)],
    ids=["coordinator", "session"],
)
def test_such_an_error_is_the_programs_own_once_training_has_begun(
    member: Callable[..., Any], error: type[PsyncError]
) -> None:
    """Also when it is raised where the coordinator or session has ended."""

    async def main() -> None:
        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            async with member(psync.ParameterServerStrategy(cluster.resolver)):
                pass
            raise error("of the program")

    with pytest.raises(error, match="of the program"):
        run(main, resolver())


def test_a_cancellation_that_no_signal_caused_is_mains_own() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(main, resolver())


@pytest.mark.parametrize(("job", "index"), [(None, None), ("ps", None)])
def test_a_process_has_to_know_which_task_it_is(
    job: str | None, index: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(nothing, resolver(job, index)) == 2
    assert "psync: error: " in capsys.readouterr().err


# --- run on an evaluator -----------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, None])  # which none has that no launcher has counted
def test_an_evaluator_runs_what_is_meant_for_it_and_exits(index: int | None) -> None:
    ran: list[str] = []

    async def evaluate() -> None:
        assert run_over.get() is None
        ran.append("evaluate")

    assert exit_code(nothing, resolver("evaluator", index), evaluator=evaluate) == 0
    assert ran == ["evaluate"]


def test_it_hears_of_the_end_of_the_run_from_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("PSYNC_RUN_FD", str(read_end))

    async def evaluate() -> None:
        over = run_over.get()
        assert over is not None
        os.close(write_end)
        await over.wait()

    assert exit_code(nothing, resolver("evaluator"), evaluator=evaluate) == 0


def test_an_option_that_is_wrong_is_an_error_of_the_setup_until_a_checkpoint_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy):
                with strategy.scope():
                    v = psync.Variable(0.0, name="v")
                await psync.CheckpointManager(psync.Checkpoint(v=v), tmp_path).save()

    async def evaluate() -> None:
        strategy = psync.ParameterServerStrategy(resolver("evaluator"))
        with strategy.scope():
            v = psync.Variable(0.0, name="v")

        def wrong(values: Any) -> dict[str, float]:
            raise ConfigurationError("of the program")

        await psync.SidecarEvaluator(psync.Checkpoint(v=v), wrong, tmp_path).run()

    async def evaluate_wrongly() -> None:
        raise ConfigurationError("of the set-up")

    run(main, resolver())
    with pytest.raises(ConfigurationError, match="of the program"):
        run(nothing, resolver("evaluator"), evaluator=evaluate)
    assert exit_code(nothing, resolver("evaluator"), evaluator=evaluate_wrongly) == 2
    assert "psync: error: of the set-up\n" in capsys.readouterr().err


def test_an_evaluator_without_a_program_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(nothing, resolver("evaluator")) == 2
    text = capsys.readouterr().err
    assert "this process is the evaluator, but the program has no evaluate function" in text
    assert "hint: psync.run(main, evaluator=evaluate)" in text


def test_everybody_else_has_no_use_of_the_evaluator() -> None:
    async def evaluate() -> None:
        raise AssertionError

    assert run(nothing, resolver(), evaluator=evaluate) == 7
    with pytest.raises(UsageError, match="expected a coroutine function, got int"):
        run(nothing, resolver(), evaluator=7)  # type: ignore[arg-type]


# --- run on workers ----------------------------------------------------------------------------


def test_on_a_worker_too_run_returns_what_main_does_if_it_is_told_to() -> None:
    assert run(nothing, resolver("worker"), on_workers=True) == 7


def test_training_that_ended_before_its_time_is_said_and_ends_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        raise TrainingEnded("the chief was lost")

    assert exit_code(main, resolver("worker"), on_workers=True) == 1
    assert capsys.readouterr().err.startswith("psync: error: the chief was lost\nat ")
    with pytest.raises(TrainingEnded):
        run(main, resolver())


def test_a_worker_that_is_told_to_exit_in_its_training_does_so_at_once() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    assert exit_code(main, resolver("worker"), on_workers=True) == 143


def test_a_worker_that_is_told_to_exit_after_its_training_may_say_its_last_words() -> None:
    async def main() -> str:
        over = training_over.get()
        assert over is not None
        over.set()
        signal.raise_signal(signal.SIGTERM)
        await settle()  # a cancellation would come in the next turn
        return "last words"

    assert run(main, resolver("worker"), on_workers=True) == "last words"


# --- serve -------------------------------------------------------------------------------------


async def test_serve_refuses_to_be_the_chief() -> None:
    with pytest.raises(
        ConfigurationError, match="only ps and worker tasks serve, but this process is"
    ):
        await run_task(resolver(), insecure=True)
    with pytest.raises(ConfigurationError, match="this process is /job:evaluator/task:0"):
        await run_task(resolver("evaluator"), insecure=True)


async def test_serve_serves_until_it_is_cancelled() -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        spec = psync.ClusterSpec(
            {**cluster.resolver.cluster_spec().as_dict(), "ps": ["ps-0:1", "ps-1:1"]}
        )
        mine = psync.SimpleClusterResolver(spec, task_type="ps", task_id=1)
        mine.platform = cluster.resolver.platform  # type: ignore[attr-defined]
        serving = asyncio.create_task(run_task(mine))
        chief = psync.SimpleClusterResolver(spec, task_type="chief", task_id=0)
        chief.platform = cluster.resolver.platform  # type: ignore[attr-defined]
        strategy = psync.ParameterServerStrategy(chief)
        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                variables = [psync.Variable(number) for number in range(2)]
            assert await psync.pull(variables) == [0, 1]
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


@pytest.mark.virtual_time
@pytest.mark.parametrize("job", ["worker", "chief"])
async def test_a_worker_whose_cluster_has_no_chief_says_every_ten_seconds_what_it_waits_for(
    job: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psync.net.chief_presence")
    cluster = {"worker": {3: "worker-3:1"}, **({"chief": ["chief-0:1"]} if job == "chief" else {})}
    own = psync.SimpleClusterResolver(psync.ClusterSpec(cluster), task_type="worker", task_id=3)
    own.platform = Platform(MemoryNetwork(), threads=False)  # type: ignore[attr-defined]
    serving = asyncio.create_task(run_task(own, insecure=True))
    await asyncio.sleep(35)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    said = [record.getMessage() for record in caplog.records if "presence" in record.name]
    text = (
        "/job:worker/task:3 waits for a chief, and its cluster's description names none: a chief "
        "takes it in with add_worker('worker-3:1', index=3)"
    )
    assert said == ([text] * 3 if job == "worker" else [])


@pytest.mark.virtual_time
@pytest.mark.parametrize("job", ["worker", "ps"])
async def test_under_run_a_task_whose_cluster_has_no_chief_warns_ever_more_rarely(
    job: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = psync.ClusterSpec({"ps": ["ps-0:1"], "worker": ["worker-0:1"]})
    resolver = psync.SimpleClusterResolver(cluster, task_type=job, task_id=0)
    resolver.platform = Platform(MemoryNetwork(), threads=False)  # type: ignore[attr-defined]
    serving = asyncio.create_task(serve_as(own_task(resolver), insecure=True, shared=True))
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(1000)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    said = [each for each in caplog.records if "presence" in each.name]
    text = (
        f"/job:{job}/task:0 waits for a chief, and its cluster's description names none: a task of "
        "type chief, where psync.run(main) runs main, is to be described in SimpleClusterResolver"
    )
    more = ", or a chief takes it in with add_worker('worker-0:1', index=0)"
    assert {(each.levelname, each.getMessage()) for each in said} == {
        ("WARNING", text + (more if job == "worker" else ""))
    }
    assert len(said) == 6  # after 10, 30, 70, 150, 310 and 630 s
    assert began == 0.0


CLUSTER = {"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1", "w:2"]}


def described(
    job: str | None, index: int | None, *, chief: bool = True
) -> psync.SimpleClusterResolver:
    jobs = {name: each for name, each in CLUSTER.items() if chief or name != "chief"}
    return psync.SimpleClusterResolver(psync.ClusterSpec(jobs), task_type=job, task_id=index)


def test_the_others_exit_with_the_chief_or_with_worker_0_where_there_is_none() -> None:
    for job, index, chief, leads in [
        ("chief", 0, True, True),
        ("worker", 0, True, False),
        ("ps", 0, True, False),
        ("worker", 0, False, True),
        ("worker", 1, False, False),
    ]:
        assert own_task(described(job, index, chief=chief)).leads is leads


@pytest.fixture(autouse=True)
def _no_coordinator_before() -> Iterator[None]:
    before = newest_incarnation()
    note_incarnation(0)
    yield
    note_incarnation(before)


def chief_of(cluster: MemoryCluster, secret: Secret = SECRET) -> OwnTask:
    resolver = cluster.strategy().cluster_resolver
    resolver.platform = cluster.platform(secret, "chief-0")
    return OwnTask(resolver, resolver.cluster_spec(), "chief", 0)


def told(cluster: MemoryCluster) -> list[str]:
    return [name for name, task in cluster.tasks.items() if task.stopped.is_set()]


@pytest.mark.virtual_time
async def test_every_task_of_the_jobs_is_told() -> None:
    async with cluster_of(2, 1) as cluster:
        await shut_down(chief_of(cluster), ("ps",), 10**18)
        assert told(cluster) == ["ps-0", "ps-1"]
        await shut_down(chief_of(cluster), ("worker", "ps"), 10**18)
        assert told(cluster) == ["ps-0", "ps-1", "worker-0"]


@pytest.mark.virtual_time
async def test_a_worker_that_was_added_is_told_too() -> None:
    async with cluster_of(1, 1) as cluster:
        await cluster.start("worker-7")
        token = added_workers.set({"/job:worker/task:7": "worker-7:1"})
        try:
            await shut_down(chief_of(cluster), ("worker",), 10**18)
        finally:
            added_workers.reset(token)
        assert told(cluster) == ["worker-0", "worker-7"]


@pytest.mark.virtual_time
async def test_tasks_that_serve_a_newer_chief_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync.launch.tasks")
    async with cluster_of(1, 1) as cluster:
        own = chief_of(cluster)
        async with psync.ClusterCoordinator(cluster.strategy()):
            newer = newest_incarnation()
        note_incarnation(0)
        await shut_down(own, ("ps",), newer - 1)
        assert told(cluster) == []
        assert "/job:ps/task:0 was not told to exit" in caplog.text
        note_incarnation(newer)  # it was this program that had the coordinator
        await shut_down(own, ("ps",), newer - 1)
        assert told(cluster) == ["ps-0"]


@pytest.mark.virtual_time
async def test_a_task_that_cannot_be_reached_holds_nobody_up() -> None:
    async with cluster_of(2, 1) as cluster:
        cluster.network.partition("chief-0", "ps-0")
        await shut_down(chief_of(cluster), ("ps",), 10**18)
        assert told(cluster) == ["ps-1"]
        cluster.network.heal("chief-0", "ps-0")


@pytest.mark.virtual_time
async def test_who_holds_another_secret_is_not_listened_to() -> None:
    async with cluster_of(1, 1) as cluster:
        await shut_down(
            chief_of(cluster, Secret(b"another secret of thirty-two bytes..")), ("ps",), 1
        )
        assert told(cluster) == []


SUPERVISED = {"PSYNC_SUPERVISED": "1"}


@pytest.mark.parametrize(("environ", "code"), [({}, 0), (SUPERVISED, 143)])
@pytest.mark.parametrize("command", [("-m", "psync", "task"), script("anywhere.py", "/nowhere")])
def test_a_worker_that_leaves_says_whether_it_is_needed_again(
    environ: dict[str, str], code: int, command: tuple[str, ...]
) -> None:
    with by_hand() as cluster:
        worker = cluster.start("worker", 0, command, environ=environ)
        wait_for_line(worker, " serves at ")
        worker.send_signal(signal.SIGTERM)
        assert ended(worker).code == code


def test_a_chief_that_comes_back_leaves_the_others() -> None:
    for environ, others in [({}, [0, 0]), (SUPERVISED, [None, None])]:
        with by_hand() as cluster:
            tasks = cluster.serve_all()
            chief = cluster.start("chief", 0, script("idle.py"), environ=environ)
            wait_for_line(chief, "connected", "stdout")
            chief.send_signal(signal.SIGTERM)
            assert ended(chief).code == 143
            if others == [0, 0]:
                assert [ended(task).code for task in tasks] == others
            else:
                again = cluster.start("chief", 0, script("idle.py"), environ=environ)
                wait_for_line(again, "connected", "stdout")
                assert [task.poll() for task in tasks] == others


def test_it_is_one_or_not() -> None:
    with by_hand() as cluster:
        run = cluster.run("ps", 0, environ={"PSYNC_CHIEF_TIMEOUT": "0.1", "PSYNC_SUPERVISED": "x"})
        assert run.code == 2
        assert "PSYNC_SUPERVISED: expected 0 or 1, got 'x'" in run.err
