"""The simulated world: hosts, a network, a launcher, and what goes wrong there.

The tasks are the real ones. What they reach for is given to them: a network in memory, a clock
that jumps, drawn random bytes, and failpoints and losses that ask the plan.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import traceback
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import msgpack

import psync
from psync.checkpoints.files import current_disk, is_complete
from psync.errors import ConnectFailed, ParameterServerLost
from psync.launch.tasks import make_task
from psync.net.platform import Platform, entropy
from psync.net.secret import Secret
from psync.ps_task import PsTask
from psync.testing import Link, MemoryNetwork
from psync.testing.simulation import oracle
from psync.testing.simulation.disk import SimulatedDisk
from psync.testing.simulation.injection import Injector, parts_without
from psync.testing.simulation.journal import Journal
from psync.testing.simulation.plan import Plan
from psync.testing.simulation.processes import Process, ProcessLoop, current_process
from psync.testing.simulation.ps_oracle import full_budgets
from psync.testing.simulation.workload import program
from psync.testing.simulation.workload.table_kinds import tables_of
from psync.wire.limits import Limits
from psync.worker_task import WorkerTask

SECRET = Secret(b"0123456789abcdef0123456789abcdef")
LATEST_S = 60.0
"""No fault happens later than so long after the time that the plan names."""
RESTART_S = 0.2
"""After which the launcher starts again what has ended by itself."""
LOSSES = (ParameterServerLost, ConnectFailed)
"""What ends a program for good: it is started again."""
MAX_LIVES = 12
"""Of the chief: one that fails each time is a violation, and not started again for ever."""


class World:
    """One run.

    Args:
        plan: What happens.
        directory: For checkpoints.
        without: Safeguards that are switched off.
    """

    def __init__(self, plan: Plan, directory: Path, without: frozenset[str] = frozenset()) -> None:
        self.plan = plan
        self.directory = directory
        self.without = without
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.loop = loop
        self.network = MemoryNetwork(
            plan.seed, latency=plan.latency, chunk=plan.chunk, spread=plan.spread,
            shares_memory=plan.shares,
        )  # fmt: skip
        self.journal = Journal(plan, tables_of(plan))
        self.processes: dict[str, Process] = {}
        self.tasks: dict[str, PsTask | WorkerTask] = {}  # of the living, by name
        self.trained = asyncio.Event()  # the program is through its batches
        self.quiet = asyncio.Event()  # no fault happens any more
        self.over = asyncio.Event()  # the program is at its end
        self.closing = asyncio.Event()  # the program is to close its coordinator
        self.gone: set[str] = set()  # who is never started again
        self._lost: set[str] = set()  # ps tasks that were, at some time, away for the chief
        self.injected: Counter[str] = Counter()  # faults that happened, by kind
        self.trace: list[tuple[float, int, str, str, str]] = []
        self._graves: list[Process] = []
        self._away: dict[str, float] = {}  # who is not to be started before when
        self._platforms: list[Platform] = []
        self._newest_incarnation = 0
        self.coordinator: psync.ClusterCoordinator | None = None  # of the living chief
        self._damaged: list[tuple[Path, bytes]] = []  # files, and what they were
        self._added: list[str] = []  # hosts of workers that came later
        self._chief_lives = 0
        self._nobody = contextvars.Context()  # in which no process is at work
        self._layouts = itertools.cycle(plan.layouts)
        self.num_ps, self.num_shards = plan.num_ps, plan.num_shards  # of this life
        self._injector = Injector(self)
        self.disk = SimulatedDisk(functools.partial(self.reach, "file"), self.stream("disk"))
        self.network.trace_deliveries(self._note_delivery)
        loop.set_exception_handler(self._note_unhandled)
        loop.on_reach = self.reach
        self.journal.listener = self._note_saying
        loop.on_threads = lambda: self.journal.say("mark", "several threads compute at once")

    def stream(self, name: str) -> random.Random:
        """Return a generator of its own."""
        return random.Random(f"{self.plan.seed}:{name}")

    @property
    def names(self) -> list[str]:
        """All processes of the cluster."""
        plan = self.plan
        return [
            *(f"ps-{index}" for index in range(plan.num_ps)),
            *(f"worker-{index}" for index in range(plan.num_workers)),
            *self._added,
            "chief-0",
        ]

    # The run.

    async def run(self) -> None:
        """Start everything, let the faults happen, heal, and wait for the end."""
        if self.plan.sizes:
            self.journal.say("mark", "sizes are smaller than usual")
        entropy.set(self.stream("bytes").randbytes)
        current_disk.set(self.disk)
        self._nobody = contextvars.copy_context()
        faults = self._injector.begin()
        for name in self.names:
            self.start(name)
        async with asyncio.timeout(self.plan.train_s + LATEST_S + 900):
            await self._faults_over(faults)
            await self._heal()
            await self.over.wait()
        for mark in self.network.lent:
            self.journal.say("mark", mark)
        for process in self.processes.values():
            process.forget_done()

    async def _faults_over(self, faults: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all faults have happened, or the program has been idle for a while."""
        waits = [self.loop.create_task(self._idle()), self.loop.create_task(_all(faults))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED,
                               timeout=self.plan.train_s + LATEST_S)  # fmt: skip
        finally:
            for wait in waits:
                wait.cancel()

    async def _idle(self) -> None:
        await self.trained.wait()
        await asyncio.sleep(self.stream("idle").choice((0.0, 0.1, 3.0)))

    async def _heal(self) -> None:
        await self._injector.heal()
        self.mend()
        self.disk.failing.clear()
        self._away.clear()
        for name in self.names:
            process = self.processes[name]
            if process.is_stopped:
                self.go_on(name)
            is_over = self.journal.ended or self._chief_lives >= MAX_LIVES
            if process.is_dead and not (name == "chief-0" and is_over):
                self.start(name)
        self.quiet.set()

    def bury(self) -> None:
        """Close all that is left, when the loop has ended."""
        for process in (*self._graves, *self.processes.values()):
            process.is_dead = True
            process.bury()
        for platform in self._platforms:  # what a program still reads keeps none of them
            platform.memory.end()
        self.processes.clear()
        self.tasks.clear()
        self._graves.clear()
        self.coordinator = None

    # Processes.

    def start(self, name: str) -> None:
        """Start a process, unless it runs."""
        known = self.processes.get(name)
        if known is not None:
            if not known.is_dead or name in self.gone:
                return
            self._graves.append(known)
        if name == "chief-0":
            self._chief_lives += 1
            self.begin_life()
        self.note("start", name)
        process = self.processes[name] = Process(name, self.loop)
        self.network.revive(name)
        self.reach("moment", "start", name)
        process.start(functools.partial(self._main, name, process))

    async def _main(self, name: str, process: Process) -> None:
        """The program of a process; when it ends, the launcher starts it again."""
        failed = False
        try:
            if name == "chief-0":
                await program.live(self)
            else:
                await self._serve(name)
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            failed = True
            if not process.is_dead:
                self._judge(name, exc)
            self.journal.say("failed", repr(exc))
        finally:
            if not process.is_dead:
                self.loop.call_soon(self._ended, name, process, failed, context=self._nobody)

    def _judge(self, name: str, exc: BaseException) -> None:
        """A process may fail for a reason that is promised, and for no other one."""
        if isinstance(exc, BaseExceptionGroup):
            for each in exc.exceptions:
                self._judge(name, each)
        else:
            may = LOSSES if name == "chief-0" else ()
            if self.gone & self._lost and isinstance(exc, may):
                # Nobody can go on: that is said, and names one that was lost.
                lost = sorted(self._lost)
                said = any(f"/job:ps/task:{each[3:]}" in str(exc) for each in lost)
                self.journal.look(said, f"{lost} were lost, and the error is {exc}", "gone")
                self.journal.say("mark", "a program ends because a ps is gone for good")
                self.over.set()
            text = "".join(traceback.format_exception(exc))
            self.journal.look(isinstance(exc, may), f"{name} failed: {text}", "failure")

    async def _serve(self, name: str) -> None:
        job, _, index = name.partition("-")
        task = make_task(self.platform(name), job, int(index), f"{name}:1")
        self.tasks[name] = task
        await task.start()
        await task.stopped.wait()
        await task.close()

    def _ended(self, name: str, process: Process, failed: bool) -> None:
        if process.is_dead:
            return
        process.forget_done()
        left = process.pending()
        process.kill()
        self.network.crash(name)
        if name == "chief-0" and not failed:
            self.journal.look(
                not left, f"the program has ended, and these have not: {left}", "left"
            )
        if name == "chief-0" and self.journal.ended:
            self.over.set()
        elif self.over.is_set():
            pass
        elif name == "chief-0" and self._chief_lives >= MAX_LIVES:
            self.journal.look(False, f"the chief failed {MAX_LIVES} times", "chief")
            self.over.set()
        else:
            self.loop.call_later(RESTART_S, self.start_again, name, context=self._nobody)

    def add_host(self, name: str) -> None:
        """Start a worker that was not there at the start."""
        if name not in self._added:
            self._added.append(name)
        self._away.pop(name, None)
        self.start(name)

    def keep_away(self, name: str, seconds: float) -> None:
        """Do not let the launcher start a process again for so long."""
        self._away[name] = max(self._away.get(name, 0.0), self.loop.time() + seconds)

    def start_again(self, name: str) -> None:
        """Start a process, unless it runs, or is not to be there yet."""
        if self._away.get(name, 0.0) <= self.loop.time():
            self.start(name)

    def kill(self, name: str, *, silently: bool = False) -> None:
        """As kill -9; ``silently``: its machine dies."""
        process = self.processes[name]
        if process.is_dead:
            return
        self.note("kill", name)
        if name.startswith("ps"):
            self._lost.add(name)
        process.kill()
        self.tasks.pop(name, None)
        self.network.crash(name, silently=silently)
        self.reach("moment", "kill", name)

    def vanish(self, name: str) -> None:
        """A process dies, and nobody starts it again, unless it is a worker that is needed."""
        others = {f"worker-{index}" for index in range(self.plan.num_workers)} - self.gone - {name}
        needed = [group.options.get("min_replicas", 1) for group in self.plan.groups]
        if name.startswith("ps") or len(others) >= max(needed, default=1):
            self.gone.add(name)
            self.kill(name)

    def stop(self, name: str) -> None:
        """As SIGSTOP."""
        process = self.processes[name]
        if not process.is_dead and not process.is_stopped:
            self.note("stop", name)
            if name.startswith("ps"):
                self._lost.add(name)  # if it is for long
            process.stop()
            self.network.stop(name)

    def cut_off(self, a: str, b: str) -> None:
        """Two processes do not reach each other."""
        if "chief-0" in (a, b):
            self._lost.update(name for name in (a, b) if name.startswith("ps"))  # if it is for long

    def go_on(self, name: str) -> None:
        """As SIGCONT."""
        process = self.processes[name]
        if process.is_stopped:
            self.note("go on", name)
            process.go_on()
            self.network.go_on(name)

    # What processes are given.

    def platform(self, name: str) -> Platform:
        """Return the surroundings of a new process."""
        draw = self.stream(f"{name}:{len(self._platforms)}")
        platform = Platform(
            self.network.host(name),
            SECRET,
            limits=Limits(**self.plan.limits),
            parts=parts_without(self.without),
            random_bytes=draw.randbytes,
            uniform=draw.random,
            new_incarnation=self._new_incarnation,
            now=self.loop.time,
            threads=False,
        )
        self._platforms.append(platform)
        return platform

    def _new_incarnation(self) -> int:
        """Return nanoseconds, as ``time.time_ns`` does."""
        now = 1_000_000_000 * 10**9 + int(self.loop.time() * 1e9)
        self._newest_incarnation = max(now, self._newest_incarnation + 1)
        return self._newest_incarnation

    def begin_life(self) -> None:
        """The next life of the program begins: somebody has mended what was damaged."""
        self.coordinator = None
        self.closing.clear()
        self.mend()

    def begin_anew(self) -> None:
        """Let the next life of the program have another layout, if the plan says so."""
        if self.journal.lives and self.plan.layouts:
            self.num_ps, self.num_shards = next(self._layouts)

    def strategy(self) -> psync.ParameterServerStrategy:
        """Return a new strategy of the chief."""
        plan = self.plan
        addresses = {"chief": ["chief-0:1"]} | {
            job: [f"{job}-{index}:1" for index in range(count)]
            for job, count in (("ps", self.num_ps), ("worker", plan.num_workers))
        }
        resolver = psync.SimpleClusterResolver(
            psync.ClusterSpec(addresses), task_type="chief", task_id=0
        )
        resolver.platform = self.platform("chief-0")  # type: ignore[attr-defined]
        return psync.ParameterServerStrategy(
            resolver,
            psync.FixedShardsPartitioner(self.num_shards),
            placement="packed" if plan.packed else "round_robin",
            ps_recovery="backup" if plan.recovery == "replica" else "checkpoint",
        )

    # Faults.

    def reach(self, kind: str, name: str, process: str) -> str | None:
        """A process serves a message or reaches a place; return how the message is lost."""
        self.note(kind, process, name)
        run = None if self.coordinator is None else self.coordinator._coordinator
        if name == "RestoreSnapshot" and run is not None and run.recovery.checkpoints.in_use:
            self.journal.targets[run.links.ps.timeline] = run.recovery.checkpoints.in_use.name
        if name == "LogEntries":
            for mark in full_budgets(self.tasks):
                self.journal.say("mark", mark)
        return self._injector.reach(kind, name, process)

    def damage_newest(self) -> None:
        """Flip a byte of the newest checkpoints, or remove a file, if there is one before them."""
        if self.coordinator is None or self._damaged:
            return
        run = self.coordinator._coordinator
        paths = [] if run is None else [*filter(None, run.recovery.checkpoints.paths)]
        known = {save.name for save in self.journal.saves}
        rng = self.stream("damage")
        newest = paths[1:][-rng.choice((1, 2, 2)) :]
        if not known.issuperset(path.name for path in newest) or not all(map(is_complete, paths)):
            return
        for path in newest:
            file = rng.choice(sorted(path.iterdir()))
            whole = file.read_bytes()
            self._damaged.append((file, whole))
            if rng.random() < 0.3:
                file.unlink()
            else:  # near the end more often, where arrays are
                at = int(len(whole) * rng.random() ** 0.3)
                file.write_bytes(
                    whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
                )
            self.note("damage", "", f"{path.name} {file.name}")

    def mend(self) -> None:
        """Let the files that were damaged be as before, if they were not removed since."""
        while self._damaged:
            file, whole = self._damaged.pop()
            for directory in (file.parent, file.parent.with_name(f"{file.parent.name}.tmp")):
                if directory.exists():
                    (directory / file.name).write_bytes(whole)
            self.note("mend", "", file.name)

    def lose_unsynced(self, names: Sequence[str]) -> None:
        """The machines of these processes have died: their disks forget."""
        self.mend()
        self.disk.lose(names)
        when = f"after the machines of {', '.join(names)} had died"
        self.journal.find(oracle.faults_of_directory(self.journal, self.directory, when))

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The living have an error that nobody awaits, or have lost sight of a task."""
        task = context.get("task", context.get("future"))
        where = (
            getattr(task.get_coro(), "__qualname__", "") if isinstance(task, asyncio.Task) else ""
        )
        message = f"{context['message']}: {where} {context.get('exception')!r}"
        self.journal.look(False, message, "unhandled")

    # The trace.

    def note(self, kind: str, process: str = "", what: str = "") -> None:
        """Put something on the trace: time, turns of the loop so far, kind, process, text."""
        loop = self.loop
        if not loop.is_over:
            self.trace.append((loop.time(), loop.turns, kind, process, what))

    def _note_saying(self, kind: str, what: object) -> None:
        process = current_process.get()
        text = str(what).replace(str(self.directory), "DIR")
        self.note(kind, "" if process is None else process.name, text)

    def _note_delivery(self, link: Link, direction: str, num_bytes: int) -> None:
        self.note("bytes", "", f"{link.number} {direction} {num_bytes}")

    def trace_hash(self) -> str:
        """Return a checksum of everything that happened, in order, and of a last draw.

        Two runs with other draws in between differ in the turns of the loop, or in the last draw.
        """
        return f"{zlib.crc32(msgpack.encode((self.trace, self.loop.last_draw()))):08x}"


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
