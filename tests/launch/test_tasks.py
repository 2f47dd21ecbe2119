"""What `run` and `run_task` do in this process; tests/processes has what they do in their own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

import psync
from psync.errors import (
    ConfigurationError,
    ConnectFailed,
    PsyncError,
    TrainingEnded,
    UsageError,
)
from psync.launch.identity import own_task
from psync.launch.tasks import SETUP_ERRORS, make_task, run, run_task, serve_as
from psync.net.environment import run_over, training_over
from psync.net.platform import Platform
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork, settle
from psync.worker_task import WorkerTask


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PSYNC_", "TF_CONFIG")):
            monkeypatch.delenv(name)


pytestmark = pytest.mark.usefixtures("own_log")  # which `run` shows on stderr


def resolver(job: str | None = "chief", index: int | None = 0) -> psync.SimpleClusterResolver:
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    return psync.SimpleClusterResolver(psync.ClusterSpec(cluster), task_type=job, task_id=index)


async def nothing() -> int:
    return 7


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


@pytest.mark.parametrize(("name", "is_uvloop"), [("uvloop", True), ("asyncio", False)])
def test_the_loop_is_the_one_that_was_asked_for(
    name: str, is_uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> bool:
        return isinstance(asyncio.get_running_loop(), uvloop.Loop)

    monkeypatch.setenv("PSYNC_LOOP", name)
    assert run(main, resolver()) is is_uvloop


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

    with pytest.raises(SystemExit) as caught:
        run(main, resolver())
    assert caught.value.code == 2
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


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_cancel_main_and_then_end_the_process(signum: signal.Signals, code: int) -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            signal.raise_signal(signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    with pytest.raises(SystemExit) as caught:
        run(main, resolver())
    assert caught.value.code == code
    assert cleaned == ["yes"]


def test_a_cancellation_that_no_signal_caused_is_mains_own() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(main, resolver())


@pytest.mark.parametrize(("job", "index"), [(None, None), ("ps", None)])
def test_a_process_has_to_know_which_task_it_is(
    job: str | None, index: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver(job, index))
    assert caught.value.code == 2
    assert "psync: error: " in capsys.readouterr().err


# --- run on an evaluator -----------------------------------------------------------------------


def test_an_evaluator_runs_what_is_meant_for_it_and_exits() -> None:
    ran: list[str] = []

    async def evaluate() -> None:
        assert run_over.get() is None
        ran.append("evaluate")

    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator"), evaluator=evaluate)
    assert caught.value.code == 0
    assert ran == ["evaluate"]


def test_an_evaluator_that_no_launcher_has_counted_needs_no_index() -> None:
    async def evaluate() -> None: ...

    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator", None), evaluator=evaluate)
    assert caught.value.code == 0


def test_it_hears_of_the_end_of_the_run_from_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("PSYNC_RUN_FD", str(read_end))

    async def evaluate() -> None:
        over = run_over.get()
        assert over is not None
        os.close(write_end)
        await over.wait()

    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator"), evaluator=evaluate)
    assert caught.value.code == 0


def test_sigterm_is_its_orderly_end() -> None:
    async def evaluate() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator"), evaluator=evaluate)
    assert caught.value.code == 0


def test_an_error_of_the_evaluator_is_raised_as_it_is() -> None:
    async def evaluate() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(nothing, resolver("evaluator"), evaluator=evaluate)


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
    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator"), evaluator=evaluate_wrongly)
    assert caught.value.code == 2
    assert "psync: error: of the set-up\n" in capsys.readouterr().err


def test_an_evaluator_without_a_program_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(nothing, resolver("evaluator"))
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert "this process is the evaluator, and the program has none" in text
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

    with pytest.raises(SystemExit) as caught:
        run(main, resolver("worker"), on_workers=True)
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("psync: error: the chief was lost\nat ")
    with pytest.raises(TrainingEnded):
        run(main, resolver())


def test_a_worker_that_is_told_to_exit_in_its_training_does_so_at_once() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as caught:
        run(main, resolver("worker"), on_workers=True)
    assert caught.value.code == 143


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
    with pytest.raises(ConfigurationError, match="only ps and worker tasks serve, this process is"):
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


async def test_a_task_is_made_for_its_job() -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        platform = cluster.resolver.platform
        ps = make_task(platform, "ps", 3, "ps-3:1")
        worker = make_task(platform, "worker", 4, "worker-4:1")
        assert (type(ps), ps.task) == (PsTask, "/job:ps/task:3")
        assert (type(worker), worker.task) == (WorkerTask, "/job:worker/task:4")
        await ps.close()
        await worker.close()
