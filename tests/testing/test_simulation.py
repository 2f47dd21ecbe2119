"""The simulator: the same history each time, commands that replay, plans that are made smaller."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import psync
from psync.specs import marked_after
from psync.store.push_counts import PushCount
from psync.testing.simulation.__main__ import main
from psync.testing.simulation.drawing import SHAPES, drawn
from psync.testing.simulation.journal import Closure, Run
from psync.testing.simulation.mutants import MUTANTS, mutated
from psync.testing.simulation.plan import Batch, Call, ClosurePlan, Fault, Plan, Trigger
from psync.testing.simulation.processes import Process, ProcessLoop
from psync.testing.simulation.ps_oracle import _faults_of_count
from psync.testing.simulation.run import Report, simulate
from psync.testing.simulation.shrink import shrunk
from psync.testing.simulation.sweep import Job, hunt, run_all
from psync.testing.simulation.watch import MARKS, marks_of
from psync.testing.simulation.workload.tables import Rows, Seen
from psync.worker_task import WorkerTask

CANARY = 31
"""A seed that ``--canary`` lets fail."""

WITH_ERRORS = (4, 5)
"""Seeds in which errors of steps travel."""


async def _hashes(numbers: list[int], *, hash_seed: int) -> list[str]:
    jobs = [Job(number) for number in numbers]
    return [
        report.trace_hash
        async for _, report in run_all(jobs, 1, hash_seed=hash_seed, fresh=hash_seed > 1)
    ]


@pytest.mark.slow
def test_a_seed_has_the_same_history_in_a_fresh_process_with_another_hash_seed() -> None:
    numbers = [2, 8]
    first = asyncio.run(_hashes(numbers, hash_seed=1))
    assert asyncio.run(_hashes(numbers, hash_seed=1001)) == first
    assert len(set(first)) == len(numbers)


@pytest.mark.slow
def test_a_history_depends_on_the_seed_and_on_nothing_that_ran_before() -> None:
    plan = drawn(8)
    first = simulate(plan)
    simulate(drawn(12))
    assert simulate(plan).trace_hash == first.trace_hash
    assert simulate(dataclasses.replace(plan, seed=9)).trace_hash != first.trace_hash


def test_what_is_imported_in_the_midst_of_a_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep the sizes of that run, and later seeds in the process another history."""
    start = WorkerTask.start

    async def importing(self: WorkerTask) -> None:
        monkeypatch.setitem(sys.modules, "psync.late", types.ModuleType("psync.late"))
        await start(self)

    monkeypatch.setattr(WorkerTask, "start", importing)
    with pytest.raises(RuntimeError, match=r"imported in the midst of a run.*: psync\.late"):
        simulate(drawn(8))


def test_no_run_imports_anything_in_a_fresh_process() -> None:
    program = (
        "from psync.testing.simulation.sweep import Job\n"
        "for seed in (14190, 14194, 14200): Job(seed).run()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_history_does_not_depend_on_where_the_source_lies(tmp_path: Path) -> None:
    """Else what fails in one checkout passes in another one."""
    elsewhere = tmp_path / "a directory of another length"
    elsewhere.symlink_to(Path(psync.__file__).parents[1])
    script = (
        "from psync.testing.simulation.sweep import Job\n"
        f"print(*(Job(seed).run().trace_hash for seed in {WITH_ERRORS}))"
    )
    done = subprocess.run(
        (sys.executable, "-c", script), env=os.environ | {"PYTHONPATH": str(elsewhere)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [Job(seed).run().trace_hash for seed in WITH_ERRORS]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_plain_data(shape: str) -> None:
    plan = drawn(5, shape)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_a_canary_fails_and_is_printed_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seed", str(CANARY - 1), "--seeds", "2", "--twins", "0", "--jobs", "1"]
    assert main(options) == 0
    assert "\n2 seeds, " in capsys.readouterr().out
    assert main([*options, "--canary"]) == 1
    printed = capsys.readouterr().out
    assert f"python -m psync.testing.simulation --replay {CANARY} --canary  # canary, at" in printed
    assert "canary: fails on purpose" in printed


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seed", str(CANARY - 1), "--twins", "1", "--jobs", "1", "--keep", str(tmp_path)]
    assert main([*options, "--seeds", "1"]) == 0
    first = capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    with file.open("a") as kept:
        kept.write('[[1, 2], {"see')  # the machine stopped while it was being written
    assert main([*options, "--seeds", "2"]) == 0
    second = capsys.readouterr().out
    assert f"1 of 2 seeds have run before: {file}" in second
    assert "2 seeds ran twice and were the same" in second
    assert main([*options, "--seeds", "2"]) == 0
    assert "2 of 2 seeds have run before" in capsys.readouterr().out
    assert main([*options, "--seeds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]
    assert main([*options, "--seeds", "2", "--canary"]) == 1
    assert "have run before" not in capsys.readouterr().out


def test_one_seed_is_replayed_with_all_that_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(CANARY)]) == 0
    printed = capsys.readouterr().out
    assert f"seed {CANARY}: " in printed
    assert "chief-0    life     attached False, restored None" in printed
    assert main(["--replay", str(CANARY), "--canary"]) == 1


@pytest.mark.parametrize(
    "options",
    [
        "--seeds 0",
        "--jobs 0",
        "--seed -5",
        "--replay -5",
        "--twins 5",
        "--commit-share 3",
        "--shrink a.json",
        "--twice",
        "--plan is_not_there.json",
    ],
)
def test_what_cannot_be_simulated_is_refused(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(options.split())
    assert exited.value.code == 2
    assert "error: " in capsys.readouterr().err


def _fails_with_two_faults(plan: Plan) -> Report:
    kinds = [fault.kind for fault in plan.faults]
    calls = {call.kind for batch in plan.batches for each in batch.closures for call in each.calls}
    fails = "kill" in kinds and "stop" in kinds and "rows" in calls
    return Report(plan.seed, "lost" if fails else "", "lost: it is not there" if fails else "")


def _large_plan() -> Plan:
    faults = tuple(
        Fault(kind, Trigger(float(number)), ("ps-0",))
        for number, kind in enumerate(("cut", "kill", "cut", "stop", "stall", "cut"))
    )
    batches = tuple(
        Batch(
            tuple(
                ClosurePlan((Call("dense", column), Call("rows", column)), needs=column - 1)
                for column in range(5)
            ),
            save="hot",
        )
        for _ in range(3)
    )
    return dataclasses.replace(drawn(1), faults=faults, batches=batches, num_workers=3, num_ps=3)


def test_a_plan_is_made_smaller_as_long_as_the_same_oracle_fails() -> None:
    smaller, report = shrunk(_large_plan(), _fails_with_two_faults)
    assert report.oracle == "lost"
    assert [fault.kind for fault in smaller.faults] == ["kill", "stop"]
    assert [len(batch.closures) for batch in smaller.batches] == [1]
    assert smaller.batches[0].save == ""
    (closure,) = smaller.batches[0].closures
    assert [call.kind for call in closure.calls] == ["rows"]
    assert (closure.needs, smaller.num_workers, smaller.num_ps) == (-1, 1, 1)


def test_a_plan_that_does_not_fail_stays_as_it_is() -> None:
    plan = dataclasses.replace(_large_plan(), faults=())
    assert shrunk(plan, _fails_with_two_faults) == (plan, Report(plan.seed))


@pytest.mark.slow
def test_what_is_left_is_written_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    plan = drawn(CANARY)
    plan = dataclasses.replace(plan, faults=plan.faults[:1], batches=plan.batches[:1])
    file.write_text(plan.to_json())
    assert main(["--plan", str(file), "--canary", "--shrink", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "      time  party       what" in printed
    assert f"--plan {file}" in printed
    smaller = Plan.from_json(file.read_text())
    assert (smaller.faults, smaller.batches) == ((), ())
    assert main(["--plan", str(file), "--canary"]) == 1


# Errors that nobody awaits.


async def _fail() -> None:
    raise ZeroDivisionError


async def _drops_tasks() -> None:
    lost = asyncio.create_task(_fail())
    del lost
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(2)


@pytest.mark.parametrize("is_killed", [False, True])
def test_of_errors_that_nobody_awaits_those_of_the_living_are_heard(
    is_killed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = ProcessLoop(1)
    heard: list[str] = []
    loop.set_exception_handler(lambda _, context: heard.append(context["message"]))
    process = Process("ps-0", loop)
    loop.call_soon(process.start, _drops_tasks)
    loop.run_until_complete(asyncio.sleep(1))
    callback, *_ = heard
    assert callback.startswith("Exception in callback")
    if is_killed:
        process.kill()
    process.forget_done()
    assert heard[1:] == [] if is_killed else ["Task exception was never retrieved"]
    loop.is_over = True
    process.bury()
    loop.close()
    assert capfd.readouterr() == ("", "")


def test_an_error_that_nobody_awaits_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = WorkerTask.start

    async def start(self: WorkerTask) -> None:
        await serve(self)
        asyncio.create_task(_fail())  # noqa: RUF006

    monkeypatch.setattr(WorkerTask, "start", start)
    report = simulate(drawn(8))
    assert report.oracle == "unhandled"
    assert "Task exception was never retrieved: _fail ZeroDivisionError()" in report.violation


# Marks.


def _trace(*entries: tuple[str, str, str]) -> list[tuple[float, int, str, str, str]]:
    """Return a trace with an entry each tenth of a second."""
    return [(0.1 * number, number, *entry) for number, entry in enumerate(entries)]


SERVED = "INFO /job:ps/task:0 is served by its backup, in the process of /job:ps/task:1, at x"


def test_marks_of_a_fail_over_while_a_step_is_closing() -> None:
    found = marks_of(
        _trace(
            ("place", "ps-0", "ps0.step.decided"),
            ("kill", "ps-0", ""),
            ("log", "chief-0", "WARNING /job:ps/task:0 was restarted; its backup takes over"),
            ("start", "ps-0", ""),
            ("log", "ps-1", SERVED),
            ("event", "chief-0", "FailoverEvent(lost=(), served_by=(), seconds=1.0)"),
            ("place", "ps-1", "ps0.step.decided"),
            ("kill", "ps-1", ""),
        )
    )
    assert found.keys() >= {
        "ps 0 dies while a step is closing",
        "a fail-over while a step is closing",
        "a ps is started again during a fail-over",
        "a promoted ps 0 closes a step again",
        "a process that serves several ps tasks dies",
    }
    assert found.keys() <= set(MARKS)


# What oracles say.


@pytest.mark.parametrize(("runs", "said"), [(1, "cut"), (2, "")])
def test_what_a_rollback_has_left_of_a_run_that_was_cut_short_may_be_a_part(
    runs: int, said: str
) -> None:
    """See closures.rollback: a cut between the two runs has what the first one had sent."""
    plan = drawn(1)
    closure = Closure(0, ClosurePlan((Call("rows", 0),)), 1, undone=True)
    closure.runs += [Run(0, f"worker-{run}", (1, 0), None) for run in range(runs)]
    found, before = np.array([0.0, 1.0]), np.zeros(2)
    seen = Seen(closure, "done", "duplicate", found, before, False, True, False)
    assert Rows("rows", plan, 1).wrong(seen) == said


def _ps(index: int, count: PushCount) -> Any:
    store = SimpleNamespace(optimizers={3: SimpleNamespace(count=count)})
    return SimpleNamespace(
        task=f"/job:ps/task:{index}", index=index, services=SimpleNamespace(store=store)
    )


def test_a_ps_may_be_the_last_to_hear_that_the_number_of_pushes_was_set() -> None:
    """The number is set on ps 1 first, which has counted two pushes that ps 0 has no part of."""
    counts = [PushCount(), PushCount()]
    ps_0, ps_1 = (_ps(index, count) for index, count in enumerate(counts))

    def faults(*, at_rest: bool = False) -> list[str]:
        of_both = [(ps_0, ps_1), (ps_1, ps_0)]
        found = [_faults_of_count(one, [other], at_rest=at_rest) for one, other in of_both]
        return [said for each in found for _, said in each]

    for _ in range(2):
        counts[1].push()
    assert (
        "task:0: optimizer 3: knows of 0 pushes elsewhere, there are 2" in faults(at_rest=True)[0]
    )
    counts[0].hear(1, 0, [(0, 2)], 0)
    assert faults() == faults(at_rest=True) == []
    counts[1].set(marked_after(0, 7))
    assert faults() == []
    assert len(faults(at_rest=True)) == 1
    counts[0].set(marked_after(0, 7))
    assert faults() == faults(at_rest=True) == []
    counts[0].elsewhere += 1
    assert "knows of 1 pushes elsewhere, there are 0" in faults()[0]


# Mutants.


def test_a_mutant_is_wrong_for_one_run_only() -> None:
    for name, mutant in MUTANTS.items():
        if places := [(owner, attribute) for owner, attribute, _ in mutant.where]:
            before = [vars(owner)[attribute] for owner, attribute in places]
            with mutated(name):
                assert [vars(owner)[attribute] for owner, attribute in places] != before, name
            assert [vars(owner)[attribute] for owner, attribute in places] == before, name


@pytest.mark.slow
def test_a_mutant_is_found() -> None:
    found = asyncio.run(hunt("join_leaves_steps", 1, 60, 1))
    assert found.oracle
    assert found.job is not None
    assert f"--replay {found.job.seed} --shape sync --mutant" in found.job.command()
