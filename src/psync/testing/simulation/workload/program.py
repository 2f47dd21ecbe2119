"""The program of a simulated chief: it trains by a plan, and knows what it was told.

What it is told goes into the journal, which is kept across the lives of the chief.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import psync
from psync.api import scopes
from psync.api.optimizers import optimizers_here
from psync.errors import (
    AttachError,
    CheckpointError,
    ClosureCancelled,
    ClosureInputError,
    EndOfData,
    NotEnoughReplicas,
    ParameterServerLost,
    PsyncError,
)
from psync.testing.simulation import oracle
from psync.testing.simulation.journal import LOOKED_AFTER_S, Closure, Journal
from psync.testing.simulation.plan import Batch, Call, ClosurePlan
from psync.testing.simulation.ps_oracle import (
    faults_of_arrivals,
    faults_of_counts,
    faults_of_pairs,
    faults_of_rest,
)
from psync.testing.simulation.workload.own_updates import OwnUpdates
from psync.testing.simulation.workload.tables import SPARE, Handles, Slots, StepFailed, Values

if TYPE_CHECKING:
    from psync.testing.simulation.world import World

CLOSED_WITHIN_S = 150.0
"""Closing a coordinator takes no longer, whatever has happened to others."""


async def step(
    handles: Mapping[str, Handles], closure: int, plan: ClosurePlan, _: Any
) -> list[str]:
    """One closure: make the calls, and return what became of each."""
    journal = Journal.current()
    run, outcomes = journal.begin_run(closure), []
    with journal.rounds.working(run.worker), run.noting_errors():
        for ordinal, call in enumerate(plan.calls):
            if call.pulls:
                values = await psync.pull({kind: each.variables for kind, each in handles.items()})
                for kind, of_table in values.items():
                    journal.tables[kind].note_pull(of_table, run)
                journal.holdings.hold(
                    [array for each in values.values() for array in each.values()]
                )
            await asyncio.sleep(call.pause_s)
            run.ordinal = ordinal
            note = await journal.tables[call.kind].change(handles[call.kind], call, run)
            outcomes.append(str(note.outcome))
            if note.outcome == "accepted":
                run.changed.append((call.kind, call.column))
                if journal.holdings.any_leased():
                    journal.say("mark", "a worker holds a ps's memory across an update")
            journal.find(journal.holdings.faults())
        await asyncio.sleep(plan.calls[-1].pause_s)
        journal.find(journal.holdings.faults())
    if plan.stops:
        run.has_raised = True
        psync.request_stop(f"closure {closure}")
    if plan.fails:
        run.has_raised = True
        raise StepFailed(closure)
    return outcomes


class Life:
    """One life of the chief.

    Args:
        world: In which it lives.
        attach: Whether it attaches.
    """

    def __init__(self, world: World, *, attach: bool) -> None:
        self._world = world
        self._plan = world.plan
        self._journal = world.journal
        self._attach = attach

    async def run(self) -> bool:
        """Go on where the life before this has ended; return whether the program came to its end.

        If not it has closed its coordinator while things were going on.
        """
        optimizers_here().begin_process()
        scopes.begin_process()
        world = self._world
        world.begin_life()
        if not self._attach:
            world.begin_anew()
            self._journal.begin_anew()
        strategy = world.strategy()
        async with psync.ClusterCoordinator(
            strategy,
            attach=self._attach,
            max_losses=10_000,
            max_flaps=None,
            min_workers=self._plan.num_workers if self._plan.all_workers and not world.gone else 1,
        ) as coordinator:
            self._coordinator = world.coordinator = coordinator
            if not coordinator.attached:
                self._journal.begin_anew()
            self._journal.note_partial(coordinator.partial_updates)
            with strategy.scope():
                self._declare()
            for name, table in self._journal.tables.items():
                table.prepare(self._handles[name], coordinator)
            self._manager = self._make_manager()
            await self._begin()
            listening = asyncio.create_task(self._listen())
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(self._train())
                closing = tasks.create_task(world.closing.wait())
                others = [
                    closing,
                    tasks.create_task(self._own.act(world.stream("acts"), self._compare)),
                ]
                for name, table in self._journal.tables.items():
                    acts = table.act(self._handles[name], coordinator, world.stream(name))
                    others.append(tasks.create_task(acts))
                await asyncio.wait((training, closing), return_when=asyncio.FIRST_COMPLETED)
                ended, began = training.done(), world.loop.time()
                for each in (training, *others):
                    each.cancel()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        if not ended:
            self._journal.say("mark", "a program closes its coordinator while it trains")
            lasted = world.loop.time() - began
            self._journal.look(lasted < CLOSED_WITHIN_S, f"close took {lasted:g} s", "close")
        return ended

    def _declare(self) -> None:
        plan = self._plan
        for number in range(plan.fillers):  # they shift the global step to another ps
            psync.Variable(np.zeros((), np.float32), name=f"filler{number}")
        self._steps: dict[str, Any] = {}
        if plan.groups:
            self._steps["0"] = psync.get_or_create_global_step()
        for number in range(1, len(plan.groups)):
            if plan.step_of(number):
                self._steps[str(number)] = psync.Variable(
                    np.zeros((), np.int64), name=f"step{number}"
                )
        steps = [self._steps.get(str(number)) for number in range(len(plan.groups))]
        self._handles = {name: table.declare(steps) for name, table in self._journal.tables.items()}
        self._own = OwnUpdates(plan.num_shards)
        self._all = {name: each.pulled() for name, each in self._handles.items()}
        self._all |= {"steps": self._steps, "own": self._own.variables}

    def _make_manager(self) -> psync.CheckpointManager | None:
        if self._plan.recovery == "none":
            return None
        saved: dict[str, Any] = dict(self._all["own"])
        saved |= {f"s.{name}": step for name, step in self._steps.items()}
        for name, handles in self._handles.items():
            saved |= handles.saved(name)
        return psync.CheckpointManager(
            psync.Checkpoint(**saved), self._world.directory, 2 + self._plan.seed % 2
        )

    async def _begin(self) -> None:
        """Go on from what is there, and note it: nothing of an earlier life may change it."""
        attached, restored = self._coordinator.attached, None
        if not attached and self._manager is not None:
            found = await self._manager.restore_or_initialize()
            restored = None if found is None else found.name
        values = await self._pull()
        if restored is not None:
            self._note_layout(restored)
            there = {**values, **await self._slots()}
            self._journal.find(oracle.faults_of_restoring(self._journal, restored, there))
        self._journal.begin_life(attached, restored, values, self._own)
        saves = [save.noted for save in self._journal.saves if save.name == restored is not None]
        for name, table in self._journal.tables.items():
            noted = saves[-1][name] if saves else None
            self._journal.find(table.begin(self._handles[name], values[name], noted))
        if self._plan.first_step and not values["steps"]["0"]:
            await self._steps["0"].assign(self._plan.first_step)

    def _note_layout(self, restored: str) -> None:
        world, journal = self._world, self._journal
        for save in journal.saves:
            if save.name == restored and save.layout[0] != world.num_ps:
                journal.say("mark", "a life restores into another number of ps tasks")
            if save.name == restored and save.layout[1] != world.num_shards:
                journal.say("mark", "a life restores into another number of shards")

    async def _pull(self) -> Values:
        values: Values = await psync.pull(self._all)
        return values

    async def _listen(self) -> None:
        async for event in self._coordinator.events():
            self._journal.note_event(event)
            self._world.reach("moment", type(event).__name__, "chief-0")

    async def _train(self) -> None:
        world, journal = self._world, self._journal
        while (number := journal.next_batch) < len(self._plan.batches):
            journal.next_batch += 1
            batch = self._plan.batches[number]
            await asyncio.sleep(batch.pause_s)
            await self._batch(number, batch)
        self._world.reach("moment", "trained", "chief-0")
        world.trained.set()
        await world.quiet.wait()
        for _ in range(2):
            if journal.next_spare < SPARE:
                journal.next_spare += 1
                await self._batch(-1, self._last_batch(journal.next_spare - 1), quiet=True)
        await self._end()

    def _last_batch(self, spare: int) -> Batch:
        """Return a batch with a call of each kind, when all faults are over."""
        calls = [
            Call(name, table.columns - SPARE + spare)
            for name, table in self._journal.tables.items()
            if name not in self._plan.works
        ]
        return Batch(tuple(ClosurePlan((call,)) for call in calls))

    async def _batch(self, number: int, batch: Batch, *, quiet: bool = False) -> None:
        closures = self._schedule(batch)
        async with asyncio.TaskGroup() as tasks:
            if batch.save == "hot":
                tasks.create_task(self._save_later(number))
            await self._join(closures)
        if batch.save == "quiet":
            await self._save()

    def _schedule(self, batch: Batch) -> list[tuple[Closure, psync.RemoteValue[Any]]]:
        made: list[tuple[Closure, psync.RemoteValue[Any]]] = []
        for each in batch.closures:
            closure = self._journal.schedule(each)
            needed = made[each.needs][1] if each.needs >= 0 else None
            handles = {call.kind: self._handles[call.kind] for call in each.calls}
            args = (handles, closure.number, each, needed)
            value = self._coordinator.schedule(step, args)
            closure.id = value.closure_id
            made.append((closure, value))
            if each.cancel_s is not None:
                asyncio.get_running_loop().call_later(each.cancel_s, value.cancel)
        return made

    async def _join(self, closures: Sequence[tuple[Closure, psync.RemoteValue[Any]]]) -> None:
        journal, failed = self._journal, False
        worked = journal.worked
        self._world.reach("moment", "join", "chief-0")
        try:
            await self._coordinator.join()
        except (StepFailed, ClosureInputError, NotEnoughReplicas, EndOfData):
            failed = True  # steps that were open stay so until the next join
        # What is scheduled meanwhile is not waited for, and leaves steps open.
        settled = not failed and not journal.gangs and journal.worked == worked
        stopped = self._coordinator.stop_reason is not None
        known = journal.known()
        for closure, value in closures:
            try:
                outcomes = await value
            except (StepFailed, NotEnoughReplicas):
                closure.ended("failed")
            except (ClosureCancelled, ClosureInputError):
                closure.ended("cancelled")
            else:
                closure.ended("done", outcomes)
                told = stopped or failed or not closure.plan.stops
                journal.look(told, f"join knows nothing of the stop by {closure.number}", "stop")
        if stopped and not failed:
            journal.say("mark", "a step asks for the end of training")
            journal.find(oracle.faults_of_stopping(journal, [closure for closure, _ in closures]))
        if settled:
            journal.settle()
        journal.check(await self._pull(), "when join returned", known, settled=settled)

    async def _save_later(self, number: int) -> None:
        rng = self._world.stream(f"save {number}")
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.02, 0.2, 1.0)) * rng.random())
        await self._save()

    async def _save(self, *, quiet: bool = False) -> None:
        assert self._manager is not None
        self._world.reach("moment", "save", "chief-0")
        save = self._journal.begin_save((self._world.num_ps, self._world.num_shards))
        try:
            path = await self._manager.save()
        except PsyncError as exc:
            save.failed(exc)
            self._journal.look(
                not quiet and isinstance(exc, CheckpointError | ParameterServerLost),
                f"a save failed: {exc!r}",
                "save",
            )
        else:
            save.ended(path.name)
            self._journal.look_into(save, path)
            self._world.reach("moment", "saved", "chief-0")

    def _compare(self) -> None:
        """Look at ps tasks, whose backups are equal wherever they are at one place of the log."""
        compared, faults = faults_of_pairs(self._world.tasks, self._journal.digests)
        self._journal.find(faults)
        self._journal.find(faults_of_counts(self._world.tasks, self._world.num_ps))
        self._journal.find(faults_of_arrivals(self._world.tasks))
        if compared:
            self._journal.say("mark", "a ps and its backup are compared")

    async def _end(self) -> None:
        """What must hold when all is quiet."""
        for name, table in self._journal.tables.items():
            await table.finish(self._handles[name])
        await self._coordinator.join()  # steps may be open: where one failed, or gangs scheduled
        if self._manager is not None:
            await self._save(quiet=True)
            directory = self._world.directory
            self._journal.find(
                oracle.faults_of_directory(self._journal, directory, "at the end", tidy=True)
            )
        known = self._journal.known()
        values, slots = await self._pull(), await self._slots()
        self._compare()
        self._journal.check(values, "at the end", known, is_last=True, **slots)
        world = self._world
        for _ in range(10):  # slow backups delay what ps tasks tell each other
            await asyncio.sleep(2 * LOOKED_AFTER_S)  # the last look is made
            if not (faults := [*faults_of_rest(world.tasks, self._journal.moved, world.num_ps)]):
                break
        self._journal.find(faults)
        in_flight = self._coordinator.statistics()["closures"].in_flight
        self._journal.look(not in_flight, f"{in_flight} closures in flight", "left over")
        for job in ("ps", "worker"):
            if any(name.startswith(job) for name in self._world.gone):
                self._journal.say("mark", f"a program ends although a {job} is gone for good")
        self._journal.end_life({**values, **slots})

    async def _slots(self) -> dict[str, Any]:
        """Return slots and iterations of all optimizers."""
        slots: Slots = {}
        iterations: dict[str, int] = {}
        for name, handles in self._handles.items():
            if handles.optimizer is None:
                continue
            iterations[name] = await handles.optimizer.iterations.read()
            found = slots[name] = {}
            variable = next(iter(handles.variables.values()))
            for slot_name in handles.optimizer.get_slot_names():
                slot = handles.optimizer.get_slot(variable, slot_name)
                if slot is not None:
                    found[slot_name] = await slot.read()
        return {"slots": slots, "iterations": iterations}


async def live(world: World) -> None:
    """Be the chief until the program is at its end, or the process is killed."""
    journal, plan = world.journal, world.plan
    ended = await _attached(world)
    if ended is None:
        ended = await Life(world, attach=False).run()
    if ended and plan.layouts and plan.recovery != "none" and journal.ends == 1 and not world.gone:
        ended = await Life(world, attach=False).run()
    journal.ended = ended


async def _attached(world: World) -> bool | None:
    """Live as one that attaches, and return what ``Life.run`` does; None: it cannot."""
    if not world.plan.attach or not world.journal.lives:
        return None
    ended = None
    try:
        ended = await Life(world, attach=True).run()
    except* AttachError as group:
        world.journal.say("unattached", group.exceptions)
    return ended
