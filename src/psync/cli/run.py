"""``psync run``: all tasks of a cluster on this machine, from one command; and ``psync scale``.

The launcher starts every task at once and then only watches. Tasks that die are started again; what
follows from that is for the chief to decide. The run ends when the chief does, and is not to be
started again, when a worker cannot be kept alive, or when a signal says so; whichever comes first
decides the exit code, and all after that is stopping. The launcher must not import what tasks
import (numpy): they start the sooner for it, and so does the first training step.

It listens at a Unix socket in a directory that only its user can enter, beside a file that names
it, as coordinators do for ``psync top`` (``status.run_files``): there ``psync scale`` asks for more
or fewer workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psync.closures.scaling import changes
from psync.errors import ConfigurationError
from psync.launch import processes
from psync.launch.plugins import check_found, plugins_environ
from psync.launch.process import release_blocked_output, say
from psync.net.platform import MISPLACED, flag, named_file, new_pipe
from psync.net.secret import load_secret, mint_secret
from psync.status import run_files

if TYPE_CHECKING:
    from psync.integrations.ssh import HostsPlan

ALONE_S = 1.0  # how long the chief may outlive a worker before that is worth a word
FAILED = 1  # exit code when a worker could not be kept alive
RAISE_LIMIT = "; raise `ulimit -n`"  # a remedy
SETUP_ERROR = 2  # exit code of a task whose set-up is wrong: once more would be no better


@dataclass(eq=False)
class Launcher:
    """Runs a script as the chief and the workers of a new cluster, and waits for the chief.

    The chief has this process's own stdin, stdout and stderr; lines of the other tasks get a
    prefix. SIGUSR1 is passed on to all tasks, which answer with reports.

    A worker or ps that dies is started again at its old address. A ps comes back empty, and
    what follows from that is for the chief to decide; one that dies too often is left, and the
    chief finds nobody there. A chief that fails is started again if that is wanted, and finds the
    other tasks as they are; ``PSYNC_RESTART_COUNT`` tells it how many chiefs there were before. An
    evaluator that is killed is started again; one that fails is not, and training goes on. When the
    chief has ended well, the evaluator is told, and waited for until it has evaluated the last
    checkpoint. The first SIGINT, SIGTERM or SIGHUP stops all tasks in order, the second kills them.

    Args:
        command: Runs the script; see ``script_command``.
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        evaluator: Whether the script also runs as an evaluator, beside the training cluster.
        max_restarts: How often each worker and each ps may be started again within a minute; one
            more death of a worker ends the run.
        chief_restarts: How often, in all, a chief may be started again that a signal has killed or
            that has ended with another code than 0 and 2.
        quiet: Drop what ps tasks and workers print.
        gpus_per_worker: GPUs that each worker sees, and no other worker does; ps tasks see none.
            None: all tasks see what this process does.
        hosts: Where ps tasks and workers run; None: here.
        environ: What tasks inherit. A secret is minted unless there is one.
        ps_command: What a ps runs.
    """

    command: Sequence[str]
    num_ps: int = 1
    num_workers: int = 1
    evaluator: bool = False
    max_restarts: int = 3
    chief_restarts: int = 0
    quiet: bool = False
    gpus_per_worker: int | None = None
    hosts: HostsPlan | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    ps_command: Sequence[str] = processes.SERVE_COMMAND

    def launch(self) -> int:
        """Do it.

        Returns:
            The exit code: the chief's (128 + n if signal n killed it), 128 + n if signal n
            stopped the run, 1 if a worker died too often or this process may open too few files.

        Raises:
            ConfigurationError: If the secret cannot be used, there are fewer GPUs, or a host cannot
                be reached or used.
        """
        is_module = self.command[1] == "-m"
        self.program = self.command[2 if is_module else 1]
        known = load_secret(self.environ)
        self.joinable = known is not None  # nobody else knows a secret that is made here
        secret = mint_secret() if known is None else os.fsdecode(known.value)
        per_worker = self.gpus_per_worker if self.hosts is None else None  # hosts have their own
        self.gpus = processes.GpuShares(per_worker, self.environ)
        self._check_room(self.num_workers)
        jobs = {"chief": 1, "ps": self.num_ps, "worker": self.num_workers}
        if self.evaluator:
            jobs["evaluator"] = 1
        try:
            return asyncio.run(self._run(jobs, secret, "" if is_module else self.program))
        except (OSError, BaseExceptionGroup) as error:
            if not _too_many_files(error):
                raise
            say(f"error: {os.strerror(errno.EMFILE)}{RAISE_LIMIT}: the run ends")
            return FAILED

    def _check_room(self, num_workers: int) -> None:
        self.gpus.check(num_workers)
        if self.hosts is not None:
            self.hosts.check(num_workers)

    async def _run(self, jobs: Mapping[str, int], secret: str, script: str) -> int:
        self.num_chiefs = 0  # so far
        self.news: FileIO | None = None  # where the chief hears of workers that come and leave
        self._working = set(range(self.num_workers))  # workers that are kept running
        self._leaving: set[int] = set()  # of these, those that were asked to leave
        self._left = asyncio.Event()  # one of these has
        self._explained = False
        self._outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._scaling = asyncio.Lock()
        watch = {
            "chief": self._watch_chief, "ps": self._watch_ps, "worker": self._watch_worker,
            "evaluator": self._watch_evaluator,
        }  # fmt: skip
        if self.hosts is None:
            minted = None if self.joinable else secret
            group: AbstractAsyncContextManager[processes.ProcessGroup] = processes.ProcessGroup(
                jobs, secret=minted, environ=self.environ
            )
        else:
            group = self.hosts.group(jobs, secret, self.environ, script)
        async with group as self._group:
            if self.joinable:
                say(f"workers may join: psync join {self._group.cluster['chief'][0]}")
            # The evaluator hears that the run ends by the end of a pipe to which nobody writes.
            with self._signals(), new_pipe() as (self._heard, ending):
                async with asyncio.TaskGroup() as self._tasks:
                    watchers = {
                        (job, index): self._tasks.create_task(watch[job](index))
                        for job, count in jobs.items()
                        for index in range(count)
                    }
                    program = os.path.basename(self.program)
                    async with scaled_on_request(self.scale, program, self.environ):
                        code = await self._outcome
                    if code == 0 and self.evaluator:
                        ending.close()
                        await self._let_evaluator_end(watchers["evaluator", 0])
                    await self._group.stop()
        return code

    async def scale(self, number: int) -> str:
        """Start workers or let some leave, so that there are ``number``; return what to say.

        Raises:
            ConfigurationError: It is no such number, or there are too few GPUs.
            OSError: The machine has no free port or descriptor.
        """
        async with self._scaling:
            while True:
                come, leave = changes(self._working - self._leaving, self._leaving, number)
                try:
                    if come:
                        self._check_room(max(come) + 1)
                    break
                except ConfigurationError:
                    if not self._leaving:
                        raise
                    self._left.clear()
                    await self._left.wait()  # its place becomes free
            added: dict[int, str] = {}
            try:
                for index in come:
                    added[index] = await self._group.add_task("worker", index)
                    self._working.add(index)
                    self._tasks.create_task(self._watch_worker(index))
            finally:
                self._leaving.update(leave)
                self._tell_chief(added, leave)
                for index in leave:
                    if (worker := self._group.processes.get(f"worker-{index}")) is not None:
                        worker.send_signal(signal.SIGTERM)
        if leave:
            return f"{number} workers; {len(leave)} leave when what they run has ended"
        return f"{number} workers; {len(come)} more are started" if come else f"{number} workers"

    def _tell_chief(self, added: Mapping[int, str], leave: Sequence[int]) -> None:
        there = dict(enumerate(self._group.cluster["worker"]))
        workers = {index: there[index] for index in sorted(self._working - self._leaving)}
        line = json.dumps({"added": added, "removed": leave, "workers": workers})
        if self.news is not None:
            with contextlib.suppress(OSError, ValueError):  # it does not listen, or has gone
                self.news.write(f"{line}\n".encode())

    # Watchers: one for each task. When the outcome is known they end with their process.

    async def _watch_chief(self, index: int) -> None:
        limit = self.chief_restarts
        while True:
            restarts = self.num_chiefs
            # That it takes part in its cluster a chief says by a byte in a pipe.
            with new_pipe() as (membership, write_end), new_pipe() as (heard, self.news):
                os.set_blocking(membership.fileno(), False)
                os.set_blocking(self.news.fileno(), False)
                environ = {
                    "PSYNC_RESTART_COUNT": str(restarts),
                    "PSYNC_MEMBER_FD": named_file(write_end),
                    "PSYNC_WORKERS_FD": named_file(heard),
                }
                fds = write_end.fileno(), heard.fileno()
                chief = self._start("chief", index, environ, *fds)
                if chief is None:
                    return
                self.num_chiefs += 1
                code = await chief.wait()
                if self._outcome.done():
                    return
                if code == 0 and not membership.read(1):
                    say(
                        f"{self.program} ended without psync.run(main), so it has "
                        "used no ps and no worker; end it in: psync.run(main)"
                    )
            self._explain(code)
            death = f"the chief {processes.describe_exit(code)}"
            if code in (0, SETUP_ERROR) or restarts == limit:
                break
            say(f"{death} and is started again ({restarts + 1} of at most {limit} times)")
        if code and restarts:
            say(f"{death}, after {restarts} restart{'s' if restarts > 1 else ''}")
        elif code < 0:
            say(death)
        self._finish(code if code >= 0 else 128 - code)

    async def _lives(
        self, job: str, index: int, env: Mapping[str, str] | None = None, *pass_fds: int
    ) -> AsyncIterator[tuple[int, str]]:
        """Start a task again and again; yield how each life of it ends, until the run is over."""
        while (process := self._start(job, index, env, *pass_fds)) is not None:
            code = await process.wait()
            if self._outcome.done():
                return
            yield code, f"{process.name} {processes.describe_exit(code)}"

    async def _watch_ps(self, index: int) -> None:
        policy = processes.RestartPolicy(self.max_restarts)
        async for code, death in self._lives("ps", index):
            if code == SETUP_ERROR or not policy.allow():
                why = "" if code == SETUP_ERROR else f", {policy.exceeded}"
                say(f"{death}{why}: it is not started again")
                self._group.abandon("ps", index)  # so that the chief does not wait for it
                return
            say(f"{death} and is started again ({policy.at_most})")

    async def _watch_worker(self, index: int) -> None:
        try:
            await self._keep_worker(index)
        finally:
            self._working.discard(index)
            self._leaving.discard(index)
            self._left.set()

    async def _keep_worker(self, index: int) -> None:
        policy, chiefs = processes.RestartPolicy(self.max_restarts), self.num_chiefs
        async for code, death in self._lives("worker", index):
            if code == MISPLACED:
                say(
                    f"error: worker-{index} runs main instead of serving: the run ends; end "
                    f"{self.program} in psync.run(main), not in asyncio.run(main())"
                )
                self._finish(SETUP_ERROR)
                return
            if index in self._leaving:
                self._group.remove_task("worker", index)
                say(f"worker-{index} has left")
                return
            self._explain(code)
            if code == 0:
                # As a rule a worker that runs the program itself ends just before the chief.
                await asyncio.wait([self._outcome], timeout=ALONE_S)
                if self._outcome.done():
                    return
                self._group.abandon("worker", index)  # the chief goes on looking for it there
                say(f"{death}: it has ended by itself and is not started again")
                return
            if code > 0 and chiefs < self.num_chiefs:  # it ran the program, and lost its chief
                say(f"{death} and is started again, as the chief was")
            elif policy.allow():
                say(f"{death} and is started again ({policy.at_most})")
            else:
                self._give_up(f"{death}, {policy.exceeded}")
                return
            chiefs = self.num_chiefs

    async def _watch_evaluator(self, index: int) -> None:
        policy = processes.RestartPolicy(self.max_restarts)
        heard = self._heard.fileno()
        async for code, death in self._lives(
            "evaluator", index, {"PSYNC_RUN_FD": str(heard)}, heard
        ):
            if code == 0:
                return
            if code > 0 or not policy.allow():
                say(f"{death} and is not started again; training goes on")
                return
            say(f"{death} and is started again")

    async def _let_evaluator_end(self, evaluating: asyncio.Task[None]) -> None:
        """Wait for the end of an evaluator that knows that there will be no other checkpoint."""
        _, pending = await asyncio.wait([evaluating], timeout=ALONE_S)
        if pending:
            say("waiting for evaluator-0, which evaluates the last checkpoint; Ctrl-C ends it")
            await asyncio.wait(pending)

    def _explain(self, code: int) -> None:
        """Say, once, what a chief or worker has probably done that crashed."""
        if not self._explained and (hint := processes.hint_of_crash(code, self.environ)):
            self._explained = True
            say(hint)

    def _start(
        self, job: str, index: int, env: Mapping[str, str] | None = None, *pass_fds: int
    ) -> processes.Process | None:
        """Start a task; None if the run is being stopped, or has to be because it cannot start."""
        if self._outcome.done():
            return None
        output: processes.Output = (
            "inherited" if job == "chief" else "discarded" if self.quiet else "prefixed"
        )
        env = {**self.gpus.environ_of(job, index), **(env or {})}
        command = self.ps_command if job == "ps" else self.command
        try:
            return self._group.start_task(
                job, index, command, env=env, output=output, pass_fds=pass_fds
            )
        except OSError as error:
            hint = RAISE_LIMIT if _too_many_files(error) else ""
            failed = f"{job}-{index} could not be started: {error}{hint}"
            if job == "evaluator":
                say(f"{failed}; training goes on")
            else:
                self._give_up(failed)
            return None

    # What decides the outcome: the first call wins.

    def _finish(self, code: int) -> None:
        if not self._outcome.done():
            self._outcome.set_result(code)

    def _give_up(self, reason: str) -> None:
        if not self._outcome.done():
            hint = "; run without --quiet to see what it prints" if self.quiet else ""
            say(f"error: {reason}: the run ends{hint}")
            self._outcome.set_result(FAILED)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals stop the run. One that is ignored (SIGHUP, under nohup) stays ignored."""
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for signum in signals:
            loop.add_signal_handler(signum, self._on_signal, signum)
            signal.signal(signum, release_blocked_output)
        loop.add_signal_handler(signal.SIGUSR1, self._group.signal_all, signal.SIGUSR1)
        try:
            yield
        finally:
            for signum in (*signals, signal.SIGUSR1):
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._outcome.done():
            self._group.kill()
        else:
            say(f"{signum.name}: stopping all tasks; once more to kill them")
            self._finish(128 + signum)


def _too_many_files(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_too_many_files, error.exceptions))
    return isinstance(error, OSError) and error.errno == errno.EMFILE


# The script.

SCRIPT_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")  # what the interpreter takes by name


def script_command(script: str, args: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """Return the command that runs a script the way ``python SCRIPT ARGS`` does.

    Args:
        script: A Python file, or a directory with a ``__main__.py``; or the name of a module.
        args: What the script finds in ``sys.argv``.
        module: Whether it is a module, which runs the way ``python -m MODULE ARGS`` does.

    Raises:
        ConfigurationError: There is no such file, directory or module.
    """
    if module:
        _check_module(script)
        return [sys.executable, "-m", script, *args]
    path = Path(script)
    if not path.exists():
        is_module = path.suffix not in SCRIPT_SUFFIXES and os.sep not in script
        raise ConfigurationError(
            f"script {script!r} does not exist",
            hint="a module runs with -m, as with python" if is_module else None,
        )
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise ConfigurationError(f"script {script!r} is a directory without a __main__.py")
    elif path.suffix not in SCRIPT_SUFFIXES:
        raise ConfigurationError(
            f"script {script!r} is not a Python file: expected a name ending in .py"
        )
    return [sys.executable, script, *args]


def _check_module(name: str) -> None:
    """Look for a module as ``python -m`` does, but import nothing, not even its package.

    Raises:
        ConfigurationError: It is not there, or a package without a ``__main__.py``.
    """
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = ""
    for part in (*name.split("."), "__main__"):
        found = f"{found}.{part}".removeprefix(".")
        spec = PathFinder.find_spec(found, places)
        if spec is None and part == "__main__":
            raise ConfigurationError(
                f"{name!r} is a package without a __main__.py, so it cannot be run"
            )
        if spec is None:
            raise ConfigurationError(
                f"module {name!r} was not found: there is no {found!r} in this directory "
                f"({os.getcwd()}) or where Python looks for modules",
                hint="-m takes a name such as package.module, without .py; to run a file, leave "
                "out -m",
            )
        if spec.submodule_search_locations is None:
            if found == name or part == "__main__":
                return
            raise ConfigurationError(f"module {name!r} was not found: {found!r} is not a package")
        places = list(spec.submodule_search_locations)


def plugged(
    environ: Mapping[str, str], plugins: Sequence[str], script: str, *, module: bool
) -> dict[str, str]:
    """Return an environment in which all tasks load plugins.

    They are looked for beside the script, too, and where this process is.

    Raises:
        ConfigurationError: One is not found: here it is one error, and not one on each task.
    """
    if not plugins:
        return {**environ}
    variables = plugins_environ(plugins, environ)
    directory = script if os.path.isdir(script) else os.path.dirname(script)
    places = [os.getcwd() if module else os.path.abspath(directory), os.getcwd()]
    check_found(plugins, [*places, *sys.path])
    path = os.pathsep.join([*places, *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, **variables, "PYTHONPATH": path}


# ``psync scale``.

LAUNCHERS = "launchers"
"""The directory of their files, in that of run files, which are of coordinators."""


@contextlib.asynccontextmanager
async def scaled_on_request(
    scale: Callable[[int], Awaitable[str]], program: str, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Return a context in which processes of this user may ask a launcher to scale.

    They cannot if no directory can be made for it, or with ``PSYNC_STATUS=0``.

    Args:
        scale: Called with a number of workers; returns a report, or raises a PsyncError.
        program: Name of the script.
        environ: See ``directory_of_runs``.
    """

    async def answer(question: Mapping[str, Any]) -> bytes:
        return (await scale(question.get("workers", 0))).encode()

    async with contextlib.AsyncExitStack() as stack:
        if flag(environ, "PSYNC_STATUS") is not False:
            with contextlib.suppress(OSError):
                directory = _directory(environ)
                run_files.make_directory(directory.parent)
                answering = run_files.answering(directory, program, answer)
                await stack.enter_async_context(answering)
        yield


def _directory(environ: Mapping[str, str] = os.environ) -> Path:
    return run_files.directory_of_runs(environ) / LAUNCHERS


def ask_to_scale(named: str | None, workers: int) -> str:
    """Ask the launcher of a run for other workers; return what to say.

    Args:
        named: Which run; see ``chosen_run``.
        workers: How many.

    Raises:
        ConfigurationError: There is no such run, it is unreachable, or it refuses.
    """
    asked = _launched(named)
    return f"{asked}: {asyncio.run(run_files.ask(asked, workers=workers)).decode()}"


def _launched(named: str | None) -> run_files.Run:
    try:
        return run_files.chosen_run(named, _directory())
    except ConfigurationError as none:
        if not all(run_files.has_ended(each) for _, each in run_files.runs_in(_directory())):
            raise
        try:
            other = run_files.chosen_run(named)
        except ConfigurationError:
            raise none from None
        raise ConfigurationError(
            f"no program started by psync run is running: {other} was started without it",
            hint="psync scale asks psync run for workers; a program that opens a cluster itself "
            "calls its scale(workers=8)",
        ) from none
