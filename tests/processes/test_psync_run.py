"""`psync run` from outside: a launcher with real tasks, which are killed, stopped and left alone.

The tasks run scripts/task.py: it says that it is ready, and the chief does what its stdin says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks_by_hand import by_hand, ended, plain_environ

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Run:
    """A launcher with one chief, one ps and some workers."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.popen = popen
        self._stdin, self._stdout, self._stderr = popen.stdin, popen.stdout, popen.stderr
        self.pids: dict[str, int] = {}  # the latest process of each task
        self.errors = ""  # what has been read of stderr
        self._ends: dict[int, str] = {}  # descriptors that can be read when their process has ended

    def wait_ready(self, *names: str) -> None:
        """Read stdout until each of these tasks has said that it is ready."""
        missing = set(names)
        while missing:
            line = self._stdout.readline()
            found = re.fullmatch(r"(?:\[([a-z]+-\d)\] )?ready (\d+)\n", line)
            assert found, f"got {line!r} while waiting for {missing}: {self._stderr.read()}"
            name = found[1] or "chief-0"
            self.pids[name] = int(found[2])
            with contextlib.suppress(ProcessLookupError):  # it had nothing to wait for
                self._ends[os.pidfd_open(self.pids[name])] = name
            missing.discard(name)

    def wait_error(self, text: str) -> None:
        """Read stderr until this line."""
        while not self.errors.endswith(text):
            line = self._stderr.readline()
            assert line, f"no {text!r} in {self.errors!r}"
            self.errors += line

    def read_output(self) -> str:
        """The rest of stdout, when the launcher has ended."""
        return self._stdout.read()

    def tell_chief(self, command: str) -> None:
        self._stdin.write(command + "\n")
        self._stdin.flush()

    def wait(self) -> int:
        """The launcher's exit code. No task may be there any more when it has gone."""
        code = self.popen.wait()
        left = [name for end, name in self._ends.items() if not select.select([end], [], [], 0)[0]]
        assert left == []
        self.errors += self._stderr.read()
        return code

    def wait_for_all_tasks(self) -> None:
        for end in self._ends:
            select.select([end], [], [])

    def close(self) -> None:
        """Kill the launcher; the lifeline takes along what a failed test has left."""
        self.popen.kill()
        self.wait_for_all_tasks()
        for end in self._ends:
            os.close(end)


ALL = ("chief-0", "ps-0", "worker-0", "worker-1")


@contextlib.contextmanager
def launched(
    *args: str,
    ready: Sequence[str] = ALL,
    prelude: Sequence[str] = (),
    environ: Mapping[str, str] = {},
    **options: Any,
) -> Iterator[Run]:
    options = {"num_workers": 2, **options}
    command = [sys.executable, str(SCRIPTS / "launch.py"), json.dumps(options), *args]
    own_environ = {k: v for k, v in os.environ.items() if not k.startswith("PSYNC_")}
    with subprocess.Popen(
        [*prelude, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own_environ, **environ},
    ) as popen:
        run = Run(popen)
        try:
            run.wait_ready(*ready)
            yield run
        finally:
            run.close()


# --- the chief decides -------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("exit 0", 0, ""),
        ("exit 3", 3, ""),
        ("abort", 128 + signal.SIGABRT, "psync: the chief was killed by SIGABRT\n"),
    ],
)
def test_the_run_ends_when_the_chief_does_with_its_exit_code(
    command: str, code: int, said: str
) -> None:
    with launched() as run:
        run.tell_chief(command)
        assert (run.wait(), run.errors) == (code, said)


def test_each_worker_sees_gpus_of_its_own_also_when_it_is_started_again() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    with launched(gpus_per_worker=1, environ=visible) as run:
        assert [gpus_of(run.pids[name]) for name in ALL] == ["4,5,6", "", "4", "5"]
        os.kill(run.pids["worker-1"], signal.SIGKILL)
        run.wait_ready("worker-1")
        assert gpus_of(run.pids["worker-1"]) == "5"
        run.tell_chief("exit 0")
        assert run.wait() == 0


def gpus_of(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.partition("=")[::2] for line in environ)["CUDA_VISIBLE_DEVICES"]


# --- tasks die ---------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["worker-1", "ps-0"])
def test_a_task_that_is_killed_is_started_again(name: str) -> None:
    with launched() as run:
        first = run.pids[name]
        os.kill(first, signal.SIGKILL)
        run.wait_ready(name)
        assert run.pids[name] != first
        run.tell_chief("exit 0")
        assert run.wait() == 0
        again = "was killed by SIGKILL and is started again (at most 3 times a minute)"
        assert run.errors == f"psync: {name} {again}\n"


@pytest.mark.parametrize(
    ("max_restarts", "why"), [(2, "3 deaths within a minute"), (0, "restarts are off")]
)
def test_a_worker_that_dies_too_often_ends_the_run(max_restarts: int, why: str) -> None:
    options = {"num_workers": 1, "max_restarts": max_restarts, "quiet": not max_restarts}
    with launched("workers-exit", "7", ready=(), **options) as run:
        assert run.wait() == 1
        again = "psync: worker-0 exited with code 7 and is started again (at most 2 times a minute)"
        end = f"psync: error: worker-0 exited with code 7, {why}: the run ends"
        if not max_restarts:
            end += "; run without --quiet to see what it prints"
        assert run.errors.splitlines() == [*[again] * max_restarts, end]


def test_a_worker_that_ends_by_itself_is_not_started_again() -> None:
    with launched("workers-exit", "0", ready=(), num_workers=1) as run:
        run.wait_error(
            "psync: worker-0 exited with code 0: it has ended by itself and is not started again\n"
        )
        run.tell_chief("exit 0")
        assert run.wait() == 0


@pytest.mark.parametrize(
    ("max_restarts", "why"), [(1, "2 deaths within a minute"), (0, "restarts are off")]
)
def test_a_ps_that_dies_too_often_is_left_to_the_chief(max_restarts: int, why: str) -> None:
    with launched(max_restarts=max_restarts) as run:
        for _ in range(max_restarts):
            os.kill(run.pids["ps-0"], signal.SIGKILL)
            run.wait_error("is started again (at most 1 times a minute)\n")
            run.wait_ready("ps-0")
        os.kill(run.pids["ps-0"], signal.SIGKILL)
        run.wait_error(f"psync: ps-0 was killed by SIGKILL, {why}: it is not started again\n")
        run.tell_chief("exit 4")
        assert run.wait() == 4


def test_a_ps_whose_setup_is_wrong_is_not_started_again() -> None:
    with launched(ready=(), ps_command=[sys.executable, "-c", "raise SystemExit(2)"]) as run:
        run.wait_error("psync: ps-0 exited with code 2: it is not started again\n")
        run.tell_chief("exit 1")
        assert run.wait() == 1


# --- the chief dies ----------------------------------------------------------------------------


def test_a_chief_that_fails_is_started_again_and_told_how_often() -> None:
    with launched(chief_restarts=2) as run:
        others = {name: pid for name, pid in run.pids.items() if name != "chief-0"}
        counts = []
        for command in ("exit 1", "abort", "exit 0"):
            environ = dict(v.split("=", 1) for v in words(run.pids["chief-0"], "environ"))
            counts.append(environ["PSYNC_RESTART_COUNT"])
            run.tell_chief(command)
            if command != "exit 0":
                run.wait_ready("chief-0")
        assert run.wait() == 0
        assert counts == ["0", "1", "2"]
        assert {name: pid for name, pid in run.pids.items() if name != "chief-0"} == others
        assert run.errors.splitlines() == [
            "psync: the chief exited with code 1 and is started again (1 of at most 2 times)",
            "psync: the chief was killed by SIGABRT and is started again (2 of at most 2 times)",
        ]


def test_a_chief_that_fails_too_often_ends_the_run_with_its_exit_code() -> None:
    with launched(chief_restarts=1) as run:
        run.tell_chief("exit 3")
        run.wait_ready("chief-0")
        run.tell_chief("exit 5")
        assert run.wait() == 5
        assert run.errors.splitlines()[1:] == [
            "psync: the chief exited with code 5, after 1 restart"
        ]


@pytest.mark.parametrize("code", [0, 2])
def test_a_chief_that_has_ended_or_whose_setup_is_wrong_is_not_started_again(code: int) -> None:
    with launched(chief_restarts=2) as run:
        run.tell_chief(f"exit {code}")
        assert run.wait() == code
        assert run.errors == ""


def test_a_signal_ends_the_run_although_the_chief_could_be_started_again() -> None:
    with launched(chief_restarts=9) as run:
        run.popen.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.errors == "psync: SIGINT: stopping all tasks; once more to kill them\n"


# --- what cannot be started --------------------------------------------------------------------


def test_a_task_that_cannot_be_started_ends_the_run() -> None:
    with launched(ready=(), ps_command=["/nonexistent/program"]) as run:
        assert run.wait() == 1
        assert run.errors == (
            "psync: error: ps-0 could not be started: "
            "[Errno 2] No such file or directory: '/nonexistent/program': the run ends\n"
        )


# --- the evaluator -------------------------------------------------------------------------------


def test_an_evaluator_that_does_not_end_with_the_run_is_named_and_ctrl_c_ends_it() -> None:
    with launched(ready=(*ALL, "evaluator-0"), evaluator=True) as run:
        run.tell_chief("exit 0")
        run.wait_error(
            "psync: waiting for evaluator-0, which evaluates the last checkpoint; Ctrl-C ends it\n"
        )
        run.popen.send_signal(signal.SIGINT)
        assert run.wait() == 0


def test_a_run_that_fails_does_not_wait_for_its_evaluator() -> None:
    with launched(ready=(*ALL, "evaluator-0"), evaluator=True) as run:
        run.tell_chief("exit 3")
        assert run.wait() == 3
        assert run.errors == ""


def test_an_evaluator_that_is_killed_too_often_is_left_alone() -> None:
    with launched(ready=(*ALL, "evaluator-0"), evaluator=True, max_restarts=1) as run:
        os.kill(run.pids["evaluator-0"], signal.SIGKILL)
        run.wait_ready("evaluator-0")
        os.kill(run.pids["evaluator-0"], signal.SIGKILL)
        run.wait_error("psync: evaluator-0 was killed by SIGKILL and is started again\n")
        run.wait_error(
            "psync: evaluator-0 was killed by SIGKILL and is not started again; training goes on\n"
        )
        run.tell_chief("exit 0")
        assert run.wait() == 0


# --- signals -----------------------------------------------------------------------------------


def test_a_second_signal_kills_tasks_that_do_not_stop() -> None:
    with launched("stubborn") as run:
        run.popen.send_signal(signal.SIGINT)
        run.wait_error("psync: SIGINT: stopping all tasks; once more to kill them\n")
        run.popen.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGINT


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    with launched(prelude=["sh", "-c", "trap '' HUP; exec \"$@\"", "nohup"]) as run:
        run.popen.send_signal(signal.SIGHUP)
        run.tell_chief("exit 5")
        assert run.wait() == 5
        assert run.errors == ""


@pytest.mark.promise("failures.launcher")
@pytest.mark.parametrize("kind", [(), ("stubborn",)])
def test_a_launcher_that_is_killed_leaves_no_task_behind(kind: tuple[str, ...]) -> None:
    with launched(*kind) as run:
        run.popen.kill()
        run.wait_for_all_tasks()


# --- what tasks are given ----------------------------------------------------------------------


def words(pid: int, name: str) -> list[str]:
    """The words of a file of ``/proc``, where null bytes separate them."""
    return Path(f"/proc/{pid}/{name}").read_text().rstrip("\0").split("\0")


def secrets_of(run: Run) -> set[str]:
    environs = [dict(v.split("=", 1) for v in words(pid, "environ")) for pid in run.pids.values()]
    return {environ["PSYNC_SECRET"] for environ in environs}


def test_a_secret_of_its_own_is_given_to_each_run_and_shown_to_nobody() -> None:
    with launched() as run, launched() as other:
        (secret,), (other_secret,) = secrets_of(run), secrets_of(other)
        assert secret != other_secret
        assert len(secret) >= 32
        for pid in (run.popen.pid, *run.pids.values()):
            assert secret not in " ".join(words(pid, "cmdline"))
        run.tell_chief("exit 0")
        assert run.wait() == 0
        assert secret not in run.errors + run.read_output()


def test_the_secret_of_the_user_is_kept() -> None:
    with launched(environ={"PSYNC_SECRET": "hunter2 hunter2 hunter2"}) as run:
        assert secrets_of(run) == {"hunter2 hunter2 hunter2"}


def test_quiet_shows_the_output_of_the_chief_alone() -> None:
    with launched(ready=["chief-0"], quiet=True) as run:
        run.tell_chief("exit 0")
        assert run.wait() == 0
        assert run.pids.keys() == {"chief-0"}
        assert run.read_output() == ""


def report_of(*args: str, stdin: int = subprocess.DEVNULL) -> dict[str, Any]:
    """What `psync run report.py` is given as the chief."""
    command = [sys.executable, "-m", "psync", "run", "--quiet", str(SCRIPTS / "report.py"), *args]
    result = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_the_command_line_hands_on_arguments_and_log_level() -> None:
    report = report_of("--workers", "2", "--log-level", "DEBUG", "--", "--epochs", "3")
    config = json.loads(report["environ"]["TF_CONFIG"])
    assert report["argv"] == ["--epochs", "3"]
    assert report["environ"]["PSYNC_LOG_LEVEL"] == "debug"
    assert config["task"] == {"type": "chief", "index": 0}
    assert {job: len(tasks) for job, tasks in config["cluster"].items()} == {
        "chief": 1,
        "ps": 1,
        "worker": 2,
    }


def test_the_chief_does_not_read_from_the_terminal_that_belongs_to_the_launcher() -> None:
    controller, terminal = os.openpty()
    with open(controller, "rb"), open(terminal, "rb"):
        assert report_of(stdin=terminal)["files"]["0"] == "/dev/null"


def test_a_script_that_never_calls_psync_run_is_told_of(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text("import psync\nasync def main(): pass\nprint('done')\n")
    command = [sys.executable, "-m", "psync", "run", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert (
        f"psync: {script} ended without psync.run(main), so it has used no ps and no worker; end "
        "it in: psync.run(main)\n"
    ) in run.stderr


def test_a_script_may_have_a_cluster_of_its_own(tmp_path: Path) -> None:
    """The tasks of that one have the script's environment, and not the files that it names."""
    script = tmp_path / "own.py"
    script.write_text(
        "import asyncio, psync\n"
        "async def main():\n"
        "    async with psync.LocalCluster(1, 1) as cluster:\n"
        "        strategy = psync.ParameterServerStrategy(cluster.resolver)\n"
        "        async with psync.ClusterCoordinator(strategy) as coordinator:\n"
        "            await coordinator.join()\n"
        "            print('joined')\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    command = [sys.executable, "-m", "psync", "run", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "joined\n" in run.stdout.splitlines(keepends=True), run.stderr


# --- a module of a package ---------------------------------------------------------------------


def test_a_module_of_a_package_runs_with_m() -> None:
    options = ["--ps", "1", "--workers", "2", "--log-level", "error"]
    run = subprocess.run(
        [sys.executable, "-m", "psync", "run", "-m", "packaged.train", *options, "--", "--lr", "1"],
        cwd=SCRIPTS, env=plain_environ(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "[10.0, 10.0, 10.0] --lr 1\n", "")


def test_a_module_of_a_package_runs_under_tf_config() -> None:
    module = ("-m", "packaged.train")
    with by_hand() as cluster:
        environ = {"PYTHONPATH": str(SCRIPTS)}
        tasks = [cluster.start(job, 0, module, environ=environ) for job in ("ps", "worker")]
        chief = cluster.run("chief", 0, module, environ=environ)
        assert (chief.code, chief.out) == (0, "[10.0, 10.0, 10.0]\n"), chief.err
        assert [ended(task).code for task in tasks] == [0, 0]
