"""The faults of a plan as they happen: who waits for what, and what each kind does."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psync.errors import ConnectFailed, PsyncError
from psync.net.transport import KEEPALIVE_IDLE_S
from psync.testing.link import Direction, Link, reset_error
from psync.testing.sabotage import Failpoints, MessageLosses, SabotagedParts
from psync.testing.simulation.plan import Fault, Trigger
from psync.testing.simulation.processes import Process, reached
from psync.worker_task import WorkerTask

if TYPE_CHECKING:
    from psync.testing.simulation.world import World

KEEPALIVE_S = (25.0, 40.0)
"""Seconds between which a kernel gives up a peer that it cannot reach."""


@dataclass(eq=False)
class _Armed:
    """A fault that waits for its trigger."""

    fault: Fault
    left: int  # how often it has to be reached until then
    there: asyncio.Future[str]  # who has reached it
    process: Process | None = None  # whose turns are counted; None: those of all
    due: float = math.inf  # turns


class Injector:
    """Lets the faults of a plan happen.

    Args:
        world: To which they happen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, list[_Armed]] = {}  # by the kind of their triggers
        self._tasks: list[asyncio.Task[None]] = []
        self._began = 0.0
        self._recovered = asyncio.Event()  # the program has heard of it
        world.loop.on_due = self._due

    def begin(self) -> list[asyncio.Task[None]]:
        """Arm all faults, each of which is a task; times count from now on."""
        self._began = self._world.loop.time()
        for fault in self._world.plan.faults:
            armed = None
            if fault.when.kind and fault.when.at_s <= 0:
                armed = self._arm(fault)  # before anything runs
            self._tasks.append(self._world.loop.create_task(self._bring_about(fault, armed)))
        return self._tasks

    async def heal(self) -> None:
        """End all faults: what lasts is undone, and what has not happened never will."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._world.network.links():  # kernels still ask whether anybody is left
            if link.client.is_lost != link.server.is_lost:
                left = link.server if link.client.is_lost else link.client
                left.fail(reset_error("nobody is left"), tell_peer=False)

    # Triggers.

    def _arm(self, fault: Fault) -> _Armed:
        when, loop = fault.when, self._world.loop
        armed = _Armed(fault, when.count, loop.create_future())
        self._waiting.setdefault(when.kind, []).append(armed)
        if when.kind == "turn":
            armed.process = self._world.processes.get(when.at)
            armed.due = when.count + (armed.process.turns if armed.process else loop.turns)
            self._look_at_turns()
        return armed

    async def _bring_about(self, fault: Fault, armed: _Armed | None) -> None:
        when = fault.when
        await asyncio.sleep(self._began + when.at_s - self._world.loop.time())
        reached = fault.targets
        if when.kind:
            if armed is None:
                armed = self._arm(fault)
            name = await armed.there
            reached = reached or (name,)
        await asyncio.sleep(when.delay_s)
        await self._happen(fault, reached)

    def reach(self, kind: str, name: str, process: str) -> str | None:
        """A process serves a message or reaches a place; return how the message is lost."""
        form = None
        for armed in tuple(self._waiting.get(kind, ())):
            when = armed.fault.when
            if when.name not in ("", name) or when.at not in ("", process):
                continue
            armed.left -= 1
            if armed.left <= 0:
                form = self._trigger(armed, process) or form
        if kind == "moment" and name in ("RollbackEvent", "FailoverEvent"):
            self._recovered.set()
        if kind == "moment" and name == "start":
            self._begin_life(process)
        return form

    def _trigger(self, armed: _Armed, process: str) -> str | None:
        fault = armed.fault
        self._world.journal.is_calm = False
        self._waiting[fault.when.kind].remove(armed)
        if not armed.there.done():
            armed.there.set_result(process)
        if fault.kind.startswith("lose_") or fault.kind == "slow":
            self._note(fault, process)
            return fault.kind.removeprefix("lose_")
        if not fault.when.delay_s:
            self._strike(fault, fault.targets or (process,))  # nothing comes in between
        return None

    def _begin_life(self, name: str) -> None:
        """Count the turns of a process that has just started."""
        process = self._world.processes[name]
        for armed in self._waiting.get("life", ()):
            if armed.fault.when.at in ("", name) and armed.process is None:
                armed.process, armed.due = process, armed.left
        for armed in self._waiting.get("turn", ()):
            if armed.process is not None and armed.fault.when.at == name:
                armed.due -= armed.process.turns  # the life before has not come so far
                armed.process = process
        self._look_at_turns()

    def _look_at_turns(self) -> None:
        loop = self._world.loop
        loop.due = math.inf
        for process in self._world.processes.values():
            process.due = math.inf
        for armed in (*self._waiting.get("turn", ()), *self._waiting.get("life", ())):
            if armed.process is not None:
                armed.process.due = min(armed.process.due, armed.due)
            elif armed.fault.when.kind == "turn":
                loop.due = min(loop.due, armed.due)

    def _due(self, process: Process) -> None:
        """As many turns are over as a fault waits for."""
        loop = self._world.loop
        for armed in (*self._waiting.get("turn", ()), *self._waiting.get("life", ())):
            if armed.process in (None, process) and armed.due <= (
                loop.turns if armed.process is None else process.turns
            ):
                self._trigger(armed, process.name)
        self._look_at_turns()

    # What happens.

    def _note(self, fault: Fault, what: str) -> None:
        self._world.journal.is_calm = False
        self._world.note("fault", what, f"{fault.kind} {fault.when.name}".rstrip())
        self._world.injected[fault.kind] += 1

    def _strike(self, fault: Fault, targets: tuple[str, ...]) -> None:
        """Do at once what cannot wait."""
        world = self._world
        match fault.kind:
            case "kill" | "kill_many" | "host_dies" | "power":
                names = world.names if fault.kind == "power" else targets
                for name in names:
                    world.kill(name, silently=fault.kind in ("host_dies", "power"))
                    world.keep_away(name, fault.seconds)
                if fault.kind in ("host_dies", "power"):
                    world.lose_unsynced(names)
            case "vanish":
                world.vanish(targets[0])
            case "stop":
                for name in targets:
                    world.stop(name)
            case "disk":
                for name in targets:
                    world.disk.failing[name] = int(fault.amount)
            case "damage":
                world.damage_newest()

    async def _happen(self, fault: Fault, targets: tuple[str, ...]) -> None:
        """Let a fault happen, if it has not yet, and end."""
        if fault.kind.startswith("lose_") or fault.kind == "slow":
            return
        self._note(fault, ",".join(targets))
        self._strike(fault, targets)
        world, network, rng = self._world, self._world.network, self._world.stream(f"{fault}")
        links = network.links(targets[0]) if targets else []
        some = [link for link in links if rng.random() < 0.5]
        match fault.kind:
            case "kill" | "kill_many" | "host_dies" | "power":
                names = world.names if fault.kind == "power" else targets
                await asyncio.sleep(fault.seconds)
                for name in names:
                    world.start_again(name)
            case "stop":
                await asyncio.sleep(fault.seconds)
                for name in targets:
                    world.go_on(name)
            case "disk":
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    for name in targets:
                        world.disk.failing.pop(name, None)
            case "damage":
                try:
                    self._recovered.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(fault.seconds):
                            await self._recovered.wait()
                finally:
                    world.mend()
            case "drag":
                await self._drag(targets[0], fault)
            case "cut":
                for link in some:
                    link.cut()
            case "cut_bytes":
                for link in some:
                    rng.choice((link.to_server, link.to_client)).cut_after(int(fault.amount))
            case "stall":
                stalled = [rng.choice((link.to_server, link.to_client)) for link in some]
                await self._stall(stalled, fault.seconds)
            case "last_words":
                await self._speak_late(targets[0], targets[-1], some, fault)
            case "clog":
                async with asyncio.TaskGroup() as tasks:
                    for link in some:  # one by one, and freed in another order
                        begins, lasts = rng.random() * fault.seconds, rng.random() * fault.seconds
                        both = [link.to_server, link.to_client]
                        tasks.create_task(self._stall(both, lasts, begins))
            case "partition" | "one_way":
                pair = targets if len(targets) == 2 else (targets[0], "chief-0")
                await self._part(pair[0], pair[1], fault)
            case "close":
                world.closing.set()
            case "leave":
                self._leave(targets[0], fault.seconds)
            case "add_worker":
                self._add_worker(int(fault.amount))
            case "remove_worker":
                self._remove_worker(targets[0], fault.seconds)

    async def _drag(self, name: str, fault: Fault) -> None:
        process = self._world.processes[name]
        process.drag_s = fault.amount
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            process.drag_s = 0.0

    async def _stall(self, directions: list[Direction], lasts: float, begins: float = 0.0) -> None:
        await asyncio.sleep(begins)
        for direction in directions:
            direction.stall()
        try:
            await asyncio.sleep(lasts)
        finally:
            for direction in directions:
                direction.flow()

    async def _speak_late(self, says: str, dies: str, links: list[Link], fault: Fault) -> None:
        """What a process has said arrives when it has said it again, and others have died since."""
        world = self._world
        if says.startswith("worker") and says != dies:  # all of its push is done then, but one word
            await self._wait_for_push(says, "begun")
        if says != "chief-0":
            links = [
                link for link in world.network.links(says)
                if link.ends.server_host.startswith("ps") and link.ends.server_host != dies
            ]  # fmt: skip
            links = world.stream(f"{fault}:late").sample(links, min(1, len(links)))
        said = [
            (link.to_server if link.ends.client_host == says else link.to_client) for link in links
        ]
        waits = world.loop.create_task(self._stall_until_back(said, fault.seconds))
        await asyncio.sleep(fault.amount)
        if says != dies:
            late = TimeoutError("the peer's machine does not answer")
            for direction in said:  # it gives up waiting, and does not hear that it need not have
                direction.sender.fail(late, tell_peer=False)
            if says.startswith("worker"):
                await self._wait_for_push(says, "answered")
            await asyncio.sleep(fault.amount)
        self._note(fault, f"{dies} dies")
        world.kill(dies)
        world.loop.call_later(0.01, world.start_again, dies, context=contextvars.Context())
        await waits
        if says != dies:  # the kernel over there asks whether anybody is left
            await asyncio.sleep(KEEPALIVE_IDLE_S)
            for direction in said:
                direction.receiver.fail(reset_error("nobody is left"), tell_peer=False)

    async def _wait_for_push(self, worker: str, how_far: str) -> None:
        """Wait until a worker has come so far with a push, if it soon does."""
        place = Trigger(0.0, "place", f"worker.push.{how_far}", at=worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await self._arm(Fault("", place)).there

    async def _stall_until_back(self, directions: list[Direction], at_most: float) -> None:
        for direction in directions:
            direction.stall()
        try:
            self._recovered.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_most + 1.0):
                    await self._recovered.wait()
            await asyncio.sleep(at_most * 0.001)
        finally:
            for direction in directions:
                direction.flow()

    async def _part(self, a: str, b: str, fault: Fault) -> None:
        network, rng = self._world.network, self._world.stream(f"{fault}:kernels")
        one_way = fault.kind == "one_way"
        self._world.cut_off(a, b)
        (network.deafen if one_way else network.partition)(a, b)
        between = [link for link in network.links(a) if link.ends.are(a, b)]
        try:
            left = fault.seconds
            gives_up = sorted(
                ((rng.uniform(*KEEPALIVE_S), number, side)
                 for number, link in enumerate(between) for side in (link.client, link.server)),
                key=lambda each: each[:2],
            )  # fmt: skip
            for after, _, side in gives_up:
                if after > fault.seconds:
                    break
                await asyncio.sleep(after - (fault.seconds - left))
                left = fault.seconds - after
                side.fail(TimeoutError("the peer's machine does not answer"), tell_peer=False)
            await asyncio.sleep(left)
        finally:
            (network.undeafen if one_way else network.heal)(a, b)

    # Members that come and go.

    def _leave(self, name: str, away_s: float) -> None:
        task, process = self._world.tasks.get(name), self._world.processes[name]
        if isinstance(task, WorkerTask) and not process.is_dead:
            self._world.keep_away(name, away_s)
            process.start(functools.partial(task.leave, "SIGTERM"))

    def _in_chief(self, what: str, does: Callable[[Any], Coroutine[Any, Any, object]]) -> None:
        """Let the program's process do something with its coordinator."""
        world = self._world
        process, coordinator = world.processes["chief-0"], world.coordinator
        if process.is_dead or coordinator is None:
            return

        async def act() -> None:
            try:
                await does(coordinator)
            except PsyncError as exc:
                world.note(what, "chief-0", f"{type(exc).__name__}: {exc}")

        process.start(act)

    def _add_worker(self, number: int) -> None:
        name = f"worker-{number}"
        self._world.add_host(name)
        self._in_chief(
            "add worker",
            lambda coordinator: coordinator.add_worker(f"{name}:1", index=number, timeout=30.0),
        )

    def _remove_worker(self, name: str, away_s: float) -> None:
        """Let the program remove a worker, and take it in again later: it may be the only one."""
        self._world.keep_away(name, away_s)
        index = int(name.removeprefix("worker-"))

        async def remove(coordinator: Any) -> None:
            await coordinator.remove_worker(f"/job:worker/task:{index}")
            while True:
                await asyncio.sleep(away_s)
                with contextlib.suppress(ConnectFailed):
                    await coordinator.add_worker(f"{name}:1", index=index, timeout=30.0)
                    return

        self._in_chief("remove worker", remove)


class Places(Failpoints):
    """Failpoints of all processes, which tell the world of each place that is reached."""

    def of_backup(self) -> Failpoints:
        """Return these: what a backup reaches that serves, or follows, is reached, too."""
        return self

    def hit(self, name: str) -> None:
        """The place ``name`` is reached."""
        reached("place", name)


class Losses(MessageLosses):
    """Asks the world about each request that a process is about to serve."""

    def draw(self, kind: str) -> str | None:
        """Return how a request of this kind is lost, or None: it is not."""
        return reached("message", kind)

    def slowness(self) -> float:
        """Return by how many seconds a slow request is served later."""
        return 0.3


@functools.cache
def parts_without(safeguards: frozenset[str]) -> SabotagedParts:
    """Return the parts of all processes, in all runs: new classes take Python long to get used to.

    Args:
        safeguards: That are switched off.
    """
    return SabotagedParts(Places(), without=safeguards, losses=Losses({}))
