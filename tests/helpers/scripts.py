"""Interaction scripts: stories of ps tasks as text, commands in, the whole trace out.

A script is a text file of paragraphs, separated by empty lines:

    # What happens here, and why.
    push worker0 w=+1
    ----
    ps 0: entry 1: Push 1 to w, from worker 0; judged
    ps 0 → worker 0, Push 1: accepted, step 1

What is below the line is compared, and written anew with PSYNC_REWRITE=1. The commands are the
methods of ``Player`` whose names begin with ``do_``; docs/explanation/testing.md says
how to add a script.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from held_backups import MANY
from psync.errors import ParameterServerLost
from psync.numerics.rules import SGD
from psync.ps.computes import Place
from psync.store import commit_log
from psync.store.store import Key
from psync.sync.step_closer import StepCloser
from psync.testing import settle
from psync.wire.limits import Limits
from psync.wire.messages import (
    CreateShards,
    Fence,
    FinalBelow,
    Freeze,
    Gate,
    LockShards,
    OpenGate,
    UnlockShards,
)
from script_clients import (
    Clients,
    Sent,
    group_config,
    listed,
    parts_of,
    plans_of,
)
from stage import CHIEF, Stage
from stage_words import (
    PLACES,
    same_state,
    state_words,
)

MAX_ROUNDS = 200
"""Of ``stabilize``: more, and something goes round and round."""

LINE = "----"


def play_file(path: Path) -> None:
    """Play a script, and compare what happens with what it says."""
    text = path.read_text(encoding="utf-8")
    with asyncio.Runner(loop_factory=_loop) as runner:
        played = runner.run(_play(text))
    if os.environ.get("PSYNC_REWRITE"):
        path.write_text(played, encoding="utf-8")
        return
    assert played.splitlines() == text.splitlines(), f"read the diff; then PSYNC_REWRITE=1: {path}"


def _loop() -> asyncio.AbstractEventLoop:
    from psync.testing import VirtualClockLoop

    return VirtualClockLoop()


async def _play(text: str) -> str:
    player, paragraphs = Player(), []
    try:
        for paragraph in text.strip().split("\n\n"):
            above = paragraph.split(f"\n{LINE}")[0].splitlines()
            commands = [line for line in above if not line.startswith("#")]
            for command in commands:
                await player.do(command)
            below = [LINE, *(player.lines() or ["(nothing)"])] if commands else []
            paragraphs.append("\n".join([*above, *below]))
    finally:
        await player.close()
    return "\n\n".join(paragraphs) + "\n"


class Player(Clients):
    """Carries out the commands of one script: clients, coordinator, backups, and the cast."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()

    async def do(self, line: str) -> None:
        """Carry out one command, or several at once, and let everything run that can run then."""
        for command in line.split("; "):
            name, *words = command.split()
            options = dict(word.split("=", 1) for word in words if "=" in word)
            args = [word for word in words if "=" not in word]
            done = getattr(self, f"do_{name}")(args, options)
            if isinstance(done, Awaitable):
                await done
        await settle()
        self._compare()

    def lines(self) -> list[str]:
        """Return what has happened since the last call."""
        lines, self.stage.lines[:] = list(self.stage.lines), []
        return lines

    async def close(self) -> None:
        """End all tasks."""
        await self.stage.close()
        self._patch.undo()

    def _compare(self) -> None:
        """Wherever a ps and its backup are at one position, they must be equal."""
        for index, task in self.stage.serving.items():
            backup = self.stage.backup(index)
            if backup is None or not self.stage.is_even(index):
                continue
            pair = [[each.control() for each in one.services.sections] for one in (task, backup)]
            if not same_state(*pair):
                self.say(f"ps {index} and its backup have come to differ")

    # The cast.

    async def do_ps(self, args: list[str], options: dict[str, str]) -> None:
        """ps 2 [backup] [check=1] [needed=2 total=2 min=1 patience=30 clip=1 budget=30]: the cast.

        So many ps tasks, all with backups, or with ``backup=ps1`` only that, which are compared
        after so many entries. With ``needed`` a synchronous group; the budget is that of parts.
        """
        count = int(args[0])
        all_of_them = range(count) if "backup" in args else ()
        backed = [int(options["backup"][2:])] if "backup" in options else all_of_them
        if "check" in options:
            self._patch.setattr(commit_log, "CHECK_EVERY", int(options["check"]))
        limits = Limits(staging_bytes=int(options.get("budget", 1 << 20)))
        self.stage = stage = Stage(count, limits)
        self._config = group_config(options) if "needed" in options else {}
        stage.traced = False
        await stage.begin()
        stage.create(0, (9, 0), "step", np.array(0))
        for name, (ps, key) in PLACES.items():
            if ps < count and name != "z":
                stage.create(ps, key, name, np.zeros(2, np.float32))
        for index, task in stage.serving.items():
            task.services.store.define_optimizer(1, SGD(1.0).to_config())
            self._define_plans(index)
            task.services.executor.log.last = 0
            if index in backed:
                await stage.back_up(index)
        await self._take_all()
        stage.traced = True
        cast = []
        for index in stage.serving:
            names = [name for name, (ps, _) in PLACES.items() if ps == index and name != "z"]
            names += ["step"] if index == 0 else []
            backup = ", and a backup" if index in backed else ""
            cast.append(f"ps {index} has {', '.join(names[:-1])} and {names[-1]}{backup}")
        self.say("; ".join(cast))

    def _define_plans(self, index: int) -> None:
        """All clients but later incarnations name what they use most."""
        task, keys = self.stage.serving[index], [key for ps, key in PLACES.values() if ps == index]
        for client in (CHIEF, *(self._client(f"worker{number}") for number in range(3))):
            for named in ([keys[0]], [keys[1]], keys[:2]):
                for plan in plans_of(named):
                    self.stage.define(task, client, plan)
            for names in ("w", "x", "wx") if self._config else ():
                places = {PLACES[name][0]: [PLACES[name][1]] for name in names}
                parts = parts_of(self._config, places)
                if index in parts:
                    self.stage.define(task, client, parts[index])

    # The coordinator, and time.

    def do_fence(self, args: list[str], _: dict[str, str]) -> None:
        """fence worker0 <1001: earlier incarnations are refused, on every ps."""
        task, below = self._client(args[0])[0], int(args[1].removeprefix("<"))
        for index in self.stage.serving:
            self._send(Sent(CHIEF, index, Fence(task, below)))

    def do_final(self, args: list[str], _: dict[str, str]) -> None:
        """final <3: closures below will not run again."""
        for index in self.stage.serving:
            message = FinalBelow(int(args[0].removeprefix("<")))
            self.stage.ask(CHIEF, index, message, (), lambda _: None)

    def do_create(self, args: list[str], _: dict[str, str]) -> None:
        """create z: another variable on ps 0, of zeros. Such an entry holds up those after it."""
        ps, (variable, part) = PLACES[args[0]]
        shards = [(args[0], variable, part, 0, [2], "float32")]
        self._send(Sent(CHIEF, ps, CreateShards(shards, [bytes(4)])))

    def do_cut(self, args: list[str], _: dict[str, str]) -> None:
        """cut 1: the gates are shut for a consistent cut."""
        for index in self.stage.serving:
            self._send(Sent(CHIEF, index, Gate(int(args[0]))))

    def do_admit(self, args: list[str], _: dict[str, str]) -> None:
        """admit 1: what has begun elsewhere may pass the gates; then each ps freezes."""
        for index in self.stage.serving:
            parts = [(*each[1:],) for each in self._others if each[0] == index]
            self._send(Sent(CHIEF, index, Freeze(int(args[0]), parts)))

    def do_open(self, args: list[str], _: dict[str, str]) -> None:
        """open 1: the cut has been taken."""
        for index in self.stage.serving:
            self._send(Sent(CHIEF, index, OpenGate(int(args[0]))))

    def do_lock(self, args: list[str], _: dict[str, str]) -> None:
        """lock worker0 w: a shard lock."""
        ps, key = PLACES[args[1]]
        self._send(Sent(self._client(args[0]), ps, LockShards(1, [key], 30.0)))

    def do_unlock(self, args: list[str], _: dict[str, str]) -> None:
        """unlock worker0 w."""
        self._send(Sent(self._client(args[0]), PLACES[args[1]][0], UnlockShards(1)))

    async def do_tick(self, args: list[str], _: dict[str, str]) -> None:
        """tick 5s: time passes."""
        await asyncio.sleep(float(args[0].removesuffix("s")))

    def do_busy(self, args: list[str], _: dict[str, str]) -> None:
        """busy w: computes of a shard, or of an accumulator, take long from now on."""
        self.stage.busy.add(_place(args[0]))

    def do_free(self, args: list[str], _: dict[str, str]) -> None:
        """free w: they are done."""
        self.stage.busy.discard(_place(args[0]))
        self.stage.wake()

    # Between ps tasks, and backups.

    async def do_deliver(self, args: list[str], _: dict[str, str]) -> None:
        """deliver [2]: the next requests or answers between ps tasks arrive."""
        for _ in range(int(args[0]) if args else 1):
            letter = self.stage.letters.deliverable()
            assert letter is not None, "there is nothing to deliver"
            self.say(f"delivered: {letter}")
            self.stage.letters.deliver()
            await settle()

    def do_drop(self, args: list[str], _: dict[str, str]) -> None:
        """drop: the next request or answer is lost with its connection, and sent again.

        drop last: all that is asked over it was lost so often before that it fails.
        """
        letter = self.stage.letters.deliverable()
        assert letter is not None, "there is nothing to lose"
        self.say(f"lost: {letter}")
        self.stage.letters.drop(last="last" in args)

    def do_hasty(self, *_: Any) -> None:
        """hasty: ps 0 takes a push for complete when its own part is there."""
        self._patch.setattr(StepCloser, "_is_complete", lambda *_: True)

    def do_unreachable(self, args: list[str], _: dict[str, str]) -> None:
        """unreachable ps1: ps 0 has not reached it for too long, and gives it up."""
        letter = self.stage.letters.all[0]
        letter.link.lost = ParameterServerLost(letter.link.task, "cannot be reached")
        letter.link.fail(letter.link.lost)

    async def do_take(self, args: list[str], _: dict[str, str]) -> None:
        """take 2 [ps0] [unheard] [former]: the backup is sent entries.

        What it has taken its primary hears, or with ``unheard`` does not.
        """
        index = int(next((word[2:] for word in args if word.startswith("ps")), "0"))
        sender = self.stage.sender(index, former="former" in args)
        assert sender is not None, f"ps {index} has no backup"
        count = MANY if args[0] == "all" else int(args[0])
        await sender.take(count, heard="unheard" not in args)

    async def _take_all(self) -> bool:
        taken = 0
        for index in self.stage.serving:
            sender = self.stage.sender(index)
            if sender is not None:
                taken += await sender.take(MANY)
                await settle()
        return taken > 0

    async def do_stabilize(self, *_: Any) -> None:
        """stabilize: backups take, and messages arrive, until nothing is left."""
        for _ in range(MAX_ROUNDS):
            await settle()
            if not await self._take_all() and not self.stage.letters.deliver():
                return
        raise AssertionError(f"nothing is settled after {MAX_ROUNDS} rounds")

    async def do_backup(self, args: list[str], _: dict[str, str]) -> None:
        """backup ps0 [slowly]: make a backup; slowly: its copy is complete with ``copied``."""
        await self.stage.back_up(int(args[0][2:]), wait="slowly" in args)

    def do_copied(self, *_: Any) -> None:
        """copied: the copy of a slow backup is there."""
        self.stage.copies_wait = False
        self.stage.wake()

    async def do_alone(self, args: list[str], _: dict[str, str]) -> None:
        """alone ps0: go on without a backup, says the coordinator."""
        await self.stage.go_on_alone(int(args[0][2:]))

    def do_spoil(self, args: list[str], _: dict[str, str]) -> None:
        """spoil ps0: a fault makes the state of its backup another one."""
        backup = self.stage.backup(int(args[0][2:]))
        assert backup is not None, f"{args[0]} has no backup"
        backup.services.ledger.final_below(99)

    def do_crash(self, args: list[str], _: dict[str, str]) -> None:
        """crash ps0: its process dies."""
        self.say(f"ps {args[0][2:]} is gone")
        self.stage.crash(int(args[0][2:]))
        for sent in self._sent:
            sent.answers += sent.ps == int(args[0][2:]) and not sent.is_answered

    async def do_promote(self, args: list[str], options: dict[str, str]) -> None:
        """promote ps0 [fence=worker0/1001]: its backup serves, and all are told."""
        fences = [self._client(word) for word in listed(options.get("fence", ""))]
        await self.stage.promote(int(args[0][2:]), fences)

    def do_snapshot(self, *_: Any) -> None:
        """snapshot: keep what all ps tasks hold."""
        self._snapshots = {index: self.stage.snapshot(index) for index in self.stage.serving}

    async def do_rollback(self, args: list[str], _: dict[str, str]) -> None:
        """rollback worker0/1001: all go back to the snapshot, and serve these from then on."""
        await self.stage.roll_back(self._snapshots, [self._client(word) for word in args])

    # What there is.

    def do_state(self, args: list[str], _: dict[str, str]) -> None:
        """state ps0, or backup0: what judging has made."""
        index = int(args[0][-1])
        task = self.stage.backup(index) if "backup" in args[0] else self.stage.serving[index]
        assert task is not None, "there is no such backup"
        self.say(f"state of {'the backup of ' if 'backup' in args[0] else ''}ps {index}:")
        for words in state_words([each.control() for each in task.services.sections]):
            self.say(f"  {words}")

    def do_values(self, *_: Any) -> None:
        """values: what variables hold, here and on backups, if that differs."""
        listed = []
        for name, (index, key) in {**PLACES, "step": (0, (9, 0))}.items():
            if index not in self.stage.serving or not self._has(index, key):
                continue
            here = self._value(self.stage.serving[index], key)
            backup = self.stage.backup(index)
            there = here if backup is None else self._value(backup, key)
            differs = "" if here == there else f" (on its backup {there})"
            if name in "wx" or here.strip("0 ") or differs:
                listed.append(f"{name} = {here}{differs}")
        self.say(", ".join(listed))

    def _has(self, index: int, key: Key) -> bool:
        return key in self.stage.serving[index].services.store.keys()

    def _value(self, task: Any, key: Key) -> str:
        if key not in task.services.store.keys():
            return "nothing"
        value = self.stage.value(task, key)
        return " ".join(f"{each:g}" for each in value.ravel())


def _place(name: str) -> Place:
    return PLACES[name][1] if name in PLACES else name
