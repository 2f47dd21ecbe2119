"""Clusters that are not as they should be: one reason on stderr, a remedy, and exit code 2."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from tasks_by_hand import (
    SECRET,
    SERVE,
    Ended,
    by_hand,
    ended,
    interrupt,
    plain_environ,
    script,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

IDLE = script("idle.py")
TASK = '"task": {"type": "ps", "index": 0}'
EITHER_WAY = pytest.mark.parametrize("command", [SERVE, IDLE], ids=["serve", "script"])


def reason_of(run: Ended) -> str:
    """The reason that a process has given; all else on stderr are hints and places."""
    assert run.code == 2, run
    assert run.out == ""
    first, *others = run.err.splitlines()
    assert all(re.match(r"hint: |at (?!.*contextlib)", line) for line in others), run.err
    return first.removeprefix("psync: error: ")


# --- TF_CONFIG ---------------------------------------------------------------------------------


@EITHER_WAY
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"cluster": {"ps": ', "TF_CONFIG: expected a JSON object, got text that is not JSON"),
        (f'{{"cluster": {{"sp": ["h:1"]}}, {TASK}}}', "TF_CONFIG: cluster.sp: expected the jobs"),
        (f'{{"cluster": {{"ps": ["h"]}}, {TASK}}}', "address 'h': expected a port"),
        (f'{{"cluster": {{"ps": ["h:0"]}}, {TASK}}}', "address 'h:0' has no port"),
        ('{"cluster": {"ps": ["h:1"]}}', "TF_CONFIG: task.type is missing"),
        (
            '{"cluster": {"ps": ["h:1"]}, "task": {"type": "ps", "index": 1}}',
            "TF_CONFIG: task.index is 1, and the job 'ps' has only task 0",
        ),
    ],
)
def test_a_mistake_in_tf_config_is_named(
    config: str, reason: str, command: tuple[str, ...]
) -> None:
    with by_hand() as cluster:
        run = cluster.run("ps", 0, command, environ={"TF_CONFIG": config})
    assert reason in reason_of(run)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PSYNC_LOOP", "trio", "PSYNC_LOOP: expected uvloop or asyncio, got 'trio'"),
        ("PSYNC_LIMIT_CONNECTIONS", "no", "PSYNC_LIMIT_CONNECTIONS: expected an integer from 1"),
        ("PSYNC_INSECURE", "yes", "PSYNC_INSECURE: expected 0 or 1, got 'yes'"),
        ("PSYNC_FAILPOINTS", "here=kill", "unknown failpoint 'here'"),
        ("PSYNC_LOG_LEVEL", "loud", "loud"),
    ],
)
@EITHER_WAY
def test_a_variable_that_makes_no_sense_is_named(
    name: str, value: str, reason: str, command: tuple[str, ...]
) -> None:
    with by_hand() as cluster:
        run = cluster.run("ps", 0, command, environ={name: value})
    assert run.code == 2
    assert "Traceback" not in run.err
    assert reason in run.err


# --- secrets -----------------------------------------------------------------------------------


@pytest.mark.promise("security.no-secret-no-start")
@pytest.mark.parametrize("job", ["ps", "worker", "chief"])
def test_without_a_secret_no_task_starts(job: str) -> None:
    with by_hand() as cluster:
        run = cluster.run(job, 0, IDLE, secret=None)
        address = cluster.cluster[job][0]
    assert reason_of(run) == (
        f"no secret is set, so every user of this machine could run code on this task ({address})"
    )
    assert "hint: set PSYNC_SECRET, or PSYNC_SECRET_FILE" in run.err
    assert "--insecure" in run.err


def test_a_whole_cluster_runs_without_a_secret_if_that_is_asked_for() -> None:
    with by_hand() as cluster:
        insecure = {"PSYNC_INSECURE": "1"}
        tasks = [
            cluster.start(job, 0, SERVE, secret=None, environ=insecure) for job in ("ps", "worker")
        ]
        run = cluster.run("chief", 0, script("steps.py", "counts"), secret=None, environ=insecure)
        assert run.code == 0, run.err
        assert run.err.count("running without a secret") == 1
        assert [ended(task).code for task in tasks] == [0, 0]


@pytest.mark.promise("security.open-address-needs-secret")
@pytest.mark.smoke
@pytest.mark.parametrize("secret", ["another secret, and a long one", None])
def test_a_chief_with_another_secret_or_none_is_turned_away(secret: str | None) -> None:
    with by_hand() as cluster:
        ps, worker = cluster.serve_all()
        environ = {} if secret else {"PSYNC_INSECURE": "1"}
        run = cluster.run("chief", 0, IDLE, secret=secret, environ=environ)
        assert run.code == 2
        assert "Traceback" not in run.err
        assert re.search(r"^psync: error: .*/job:(ps|worker)/task:0 ", run.err, re.MULTILINE)
        assert "hint: give all tasks of the cluster the same PSYNC_SECRET" in run.err
        assert SECRET not in run.err
        for task in (ps, worker):  # they wait for somebody better
            assert task.poll() is None
            assert SECRET not in interrupt(task).err


# --- addresses ---------------------------------------------------------------------------------


@EITHER_WAY
def test_an_address_that_is_taken_is_named(command: tuple[str, ...]) -> None:
    with by_hand() as cluster:
        address = cluster.cluster["ps"][0]
        host, port = address.split(":")
        with socket.create_server((host, int(port))):
            run = cluster.run("ps", 0, command)
    assert reason_of(run) == f"/job:ps/task:0 cannot listen on {address}: address already in use"


def test_a_task_that_answers_at_the_address_of_another_is_not_taken_for_it() -> None:
    with by_hand() as cluster:
        cluster.serve_all()
        cluster.cluster["ps"], cluster.cluster["worker"] = (
            cluster.cluster["worker"],
            cluster.cluster["ps"],
        )
        run = cluster.run("chief", 0, IDLE, environ={"CONNECT_TIMEOUT": "2"})
    assert re.fullmatch(
        "expected /job:(ps|worker)/task:0 at this address, /job:(ps|worker)/task:0 answered",
        reason_of(run),
    )


# --- once training has begun ---------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["wrong_option", "nobody_to_add"])
def test_a_mistake_after_the_start_has_a_traceback_and_ends_the_other_tasks(mistake: str) -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        run = cluster.run("chief", 0, script("steps.py", mistake))
        assert run.code == 1
        assert "Traceback" in run.err
        assert f", in {mistake}\n" in run.err
        assert [ended(task).code for task in tasks] == [0, 0]


def test_after_a_mistake_in_the_set_up_the_others_wait_for_a_chief_that_has_none() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        steps = script("steps.py", "counts")
        wrong = cluster.run("chief", 0, steps, environ={"PSYNC_LIMIT_SEGMENTS": "many"})
        assert reason_of(wrong).endswith("expected an integer from 1 (digits only), got 'many'")
        assert cluster.run("chief", 0, steps).code == 0
        assert [ended(task).code for task in tasks] == [0, 0]


# --- without psync.run -------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
def test_a_program_without_psync_run_ends_at_once_and_is_told_so_once(quiet: bool) -> None:
    command = ("-m", "psync", "run", *["--quiet"] * quiet, *script("no_run.py"))
    run = subprocess.run(
        [sys.executable, *command, "--ps", "2", "--workers", "2"],
        env=plain_environ(),
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert re.fullmatch(
        r"psync: error: worker-[01] runs main instead of serving: the run ends; end "
        r".*no_run\.py in psync\.run\(main\), not in asyncio\.run\(main\(\)\)",
        line,
    )


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_without_a_launcher_the_task_is_told(job: str) -> None:
    with by_hand() as cluster:
        run = cluster.run(job, 0, script("no_run.py"))
    assert run.code == 1
    assert run.err.splitlines()[-2:] == [
        f"psync.errors.ConfigurationError: this process is a {job}, which serves the chief's "
        "coordinator and cannot open its own",
        "hint: psync.run(main), instead of asyncio.run(main()), runs main on the chief and serves "
        "on all other tasks",
    ]
