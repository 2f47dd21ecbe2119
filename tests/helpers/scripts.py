"""Interaction scripts: stories of ps tasks as text, commands in, the whole trace out.

A script is a text file of paragraphs, separated by empty lines:

    # What happens here, and why.
    push worker0 w=+1
    ----
    ps 0: entry 1: Push 1 to w, from worker 0; judged
    ps 0 → worker 0, Push 1: accepted, step 1

What is below the line is compared, and written anew with PSYNC_REWRITE=1. The commands are the
methods of ``Player`` whose names begin with ``do_``; docs/testing.md says how to add a script.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psync.net.peer import Later, Reply
from psync.numerics.update_rule import SGD
from psync.ps import executor
from psync.store.store import Key
from psync.store.sync_config import SyncConfig
from psync.testing import settle
from psync.wire.accumulator_messages import ApplyGradient, DefineAccumulator, TakeGradient
from psync.wire.codec import Message
from psync.wire.lock_messages import LockShards, UnlockShards
from psync.wire.ps_messages import Assign, CreateShards, Fence, FinalBelow, Push
from psync.wire.recovery_messages import Admit, Gate, Gated, OpenGate
from psync.wire.sync_messages import Contribute, FinishSteps, ReportSchedule, StagePush
from stage import CHIEF, MANY, Stage
from stage_words import (
    NAMES,
    PLACES,
    error_words,
    message_words,
    same_state,
    state_words,
    task_words,
)

GROUP = 5
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


@dataclass(eq=False)
class Sent:
    """A request of a client."""

    client: tuple[str, int]
    ps: int
    message: Message
    segments: Sequence[bytes] = ()
    answers: int = 0  # that are awaited since it was sent last; those of before are not looked at
    is_answered: bool = False
    later: Later | None = None


@dataclass
class Numbers:
    """What a client has numbered so far."""

    updates: dict[int, int] = field(default_factory=dict)  # by ps
    pushes: int = 0  # to the group
    takes: int = 0


class Player:
    """Carries out the commands of one script."""

    def __init__(self) -> None:
        self.stage = Stage(0)
        self._sent: list[Sent] = []
        self._numbers: dict[tuple[str, int], Numbers] = {}
        self._config: dict[str, Any] = {}
        self._version = 0
        self._others: list[tuple[int, str, int, int]] = []
        self._patch = pytest.MonkeyPatch()

    async def do(self, command: str) -> None:
        """Carry out one command, and let everything run that can run then."""
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

    def say(self, words: str) -> None:
        self.stage.say(words)

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
        """ps 2 [backup] [check=1] [needed=2 total=2 min=1 patience=30 clip=1]: the cast.

        So many ps tasks, with backups, which are compared after so many entries; and with
        ``needed`` a synchronous group.
        """
        count = int(args[0])
        if "check" in options:
            self._patch.setattr(executor, "CHECK_EVERY", int(options["check"]))
        self.stage = stage = Stage(count)
        stage.traced = False
        await stage.begin()
        stage.create(0, (9, 0), "step", np.array(0))
        for name, (ps, key) in PLACES.items():
            if ps < count and name != "z":
                stage.create(ps, key, name, np.zeros(2, np.float32))
        for index, task in stage.serving.items():
            task.services.store.define_optimizer(1, SGD(1.0).to_config())
            if "needed" in options:
                self._config = _group(options)
                task.services.sync.define(GROUP, self._config)
            if "backup" in args:
                await stage.back_up(index)
        await self._take_all()
        stage.traced = True
        for index in stage.serving:
            names = [name for name, (ps, _) in PLACES.items() if ps == index and name != "z"]
            names += ["step"] if index == 0 else []
            backed = ", and a backup" if "backup" in args else ""
            self.say(f"ps {index} has {', '.join(names[:-1])} and {names[-1]}{backed}")

    # Clients.

    def _client(self, word: str) -> tuple[str, int]:
        if word == "chief":
            return CHIEF
        name, _, incarnation = word.partition("/")
        return f"/job:worker/task:{name.removeprefix('worker')}", int(incarnation or 1000)

    def _of(self, client: tuple[str, int]) -> Numbers:
        return self._numbers.setdefault(client, Numbers())

    def _send(self, sent: Sent, *, again: bool = False, former: bool = False) -> None:
        if not again:
            self._sent.append(sent)
        sent.answers += 1
        awaited, who = sent.answers, task_words(*sent.client)

        def then(outcome: Reply | Exception) -> None:
            if awaited != sent.answers:
                return  # over a connection that has gone since
            sent.is_answered = True
            if isinstance(outcome, Reply):
                words = message_words(outcome.message) + _arrays(outcome.segments)
                if isinstance(outcome.message, Gated):
                    self._others += outcome.message.others
            else:
                words = error_words(outcome)
            what = message_words(sent.message).split(" to ")[0].split(",")[0].split(" (")[0]
            where = "former ps" if former else "ps"
            self.say(f"{where} {sent.ps} → {who}, {what}: {words}")

        sent.later = self.stage.ask(
            sent.client, sent.ps, sent.message, sent.segments, then, to_former=former
        )

    def do_push(self, args: list[str], options: dict[str, str]) -> None:
        """push worker0 w=+1 [x=+1] [closure=3] [optimizer=2] [only=ps0] [to=former]: asynchronous.

        ``w=+1`` is a gradient that adds 1 to each element of w. A push to several ps tasks is a
        message to each; with ``only`` the others are sent by ``repeat``.
        """
        self._update(args, options, is_push=True)

    def do_assign(self, args: list[str], options: dict[str, str]) -> None:
        """assign worker0 w=5, or w=+5 to add. Options as for push."""
        self._update(args, options, is_push=False)

    def _update(self, args: list[str], options: dict[str, str], *, is_push: bool) -> None:
        client = self._client(args[0])
        numbers = self._of(client).updates
        places = _by_ps(options)
        drawn = {ps: numbers.get(ps, 0) + 1 for ps in places}
        numbers.update(drawn)
        for ps, keys in places.items():
            rest = [(other, number) for other, number in drawn.items() if other != ps] or None
            optimizer = int(options.get("optimizer", 1))
            whose = (drawn[ps], int(options.get("acked", 0)), int(options.get("closure", -1)), 0)
            words = [options[NAMES[key]] for key in keys]
            message: Message
            if is_push:
                config = SGD(1.0).to_config() if optimizer > 1 else None
                message = Push(*whose, 1, keys, optimizer, config, 0, spread=rest)
            else:
                op = "add" if words[0][0] in "+-" else "assign"
                message = Assign(*whose, 1, keys, op, spread=rest)
            factor = -1 if is_push else 1
            sent = Sent(client, ps, message, [_filled(factor * float(word)) for word in words])
            if options.get("only", f"ps{ps}") == f"ps{ps}":
                self._send(sent, former=options.get("to") == "former")
            else:
                self._sent.append(sent)

    def do_repeat(self, args: list[str], _: dict[str, str]) -> None:
        """repeat worker0 [unanswered]: the last message again, or all that have no answer."""
        client = self._client(args[0])
        sent = [each for each in self._sent if each.client == client]
        wanted = [each for each in sent if not each.is_answered] if args[1:] else sent[-1:]
        for each in wanted:
            self._send(each, again=True)

    def do_hangup(self, args: list[str], _: dict[str, str]) -> None:
        """hangup worker0 [ps0]: the connections of a client break."""
        client = self._client(args[0])
        for each in self._sent:
            if each.client == client and not each.is_answered:
                each.answers += 1
                if each.later is not None:
                    each.later.give_up()
        for index in self.stage.serving:
            self.stage.hang_up(index, client)

    # Synchronous steps.

    def do_stage(self, args: list[str], options: dict[str, str]) -> None:
        """stage worker0 x=+1 [at=0]: a part of the next push to the group, to its ps."""
        client = self._client(args[0])
        push, at = self._of(client).pushes + 1, int(options.get("at", 0))
        for ps, keys in _by_ps(options).items():
            message = StagePush(GROUP, self._config, push, at, 2, keys)
            body = [_filled(-float(options[NAMES[key]])) for key in keys]
            self._send(Sent(client, ps, message, body))

    def do_contribute(self, args: list[str], options: dict[str, str]) -> None:
        """contribute worker0 [w=+1] [x=+1] [at=0] [closure=3]: a push to the group, to ps 0.

        What is named comes along with it; the rest was staged before.
        """
        client = self._client(args[0])
        numbers = self._of(client)
        numbers.pushes += 1
        members = [(ps, *key) for ps, keys in _by_ps(options).items() for key in keys]
        message = Contribute(
            GROUP, self._config, numbers.pushes, 0, int(options.get("closure", -1)), 0, b"w, x",
            int(options.get("at", 0)), 1.0, 3 if members else -1, members or None, -1, None,
        )  # fmt: skip
        body = [_filled(-float(options[NAMES[variable, part]])) for _, variable, part in members]
        self._send(Sent(client, 0, message, body))

    def do_members(self, args: list[str], options: dict[str, str]) -> None:
        """members worker0 worker1 [missing=worker2] [last=3,4]: who lives, says the coordinator.

        With ``last`` these closures are in flight, and no others will be started.
        """
        self._version += 1
        alive = [self._client(word) for word in args]
        workers = [(int(task[-1]), born) for task, born in alive]
        missing = [self._client(word)[0] for word in _listed(options.get("missing", ""))]
        last = [(int(word), 0) for word in _listed(options.get("last", ""))]
        report = ReportSchedule(self._version, workers, missing, not last, last)
        self.stage.ask(CHIEF, 0, report, (), lambda _: None)

    def do_finish(self, *_: Any) -> None:
        """finish: join finds that all closures have ended."""
        self._send(Sent(CHIEF, 0, FinishSteps()))

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
        """admit 1: what has begun elsewhere may pass the gates."""
        for index in self.stage.serving:
            parts = [(*each[1:],) for each in self._others if each[0] == index]
            self._send(Sent(CHIEF, index, Admit(int(args[0]), parts)))

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
        """busy w: computes of a shard take long from now on."""
        self.stage.busy.add(PLACES[args[0]][1])

    def do_free(self, args: list[str], _: dict[str, str]) -> None:
        """free w: they are done."""
        self.stage.busy.discard(PLACES[args[0]][1])
        self.stage.wake()

    # Accumulators.

    def do_accumulator(self, args: list[str], _: dict[str, str]) -> None:
        """accumulator a: define one, of two elements, on ps 0."""
        message = DefineAccumulator(args[0], "dense", "float32", [2], "MEAN", "", False, 0)
        self._send(Sent(CHIEF, 0, message))

    def do_apply(self, args: list[str], options: dict[str, str]) -> None:
        """apply worker0 a=+1 [at=0] [closure=3]: add a gradient."""
        client = self._client(args[0])
        numbers = self._of(client).updates
        numbers[0] = numbers.get(0, 0) + 1
        (name,) = set(options) - {"at", "closure"}
        closure, at = int(options.get("closure", -1)), int(options.get("at", 0))
        message = ApplyGradient(numbers[0], 0, closure, 0, name, [2], None, at, 1.0)
        self._send(Sent(client, 0, message, [_filled(float(options[name]))]))

    def do_grad(self, args: list[str], _: dict[str, str]) -> None:
        """grad worker0 a 2: take the mean of 2 gradients; waits for them."""
        client = self._client(args[0])
        self._of(client).takes += 1
        self._send(Sent(client, 0, TakeGradient(args[1], self._of(client).takes, 0, int(args[2]))))

    # Between ps tasks, and backups.

    async def do_deliver(self, args: list[str], _: dict[str, str]) -> None:
        """deliver [2]: the next requests or answers between ps tasks arrive."""
        for _ in range(int(args[0]) if args else 1):
            letter = self.stage.deliverable()
            assert letter is not None, "there is nothing to deliver"
            self.say(f"delivered: {letter}")
            self.stage.deliver()
            await settle()

    def do_drop(self, *_: Any) -> None:
        """drop: the next request or answer is lost with its connection, and sent again."""
        letter = self.stage.deliverable()
        assert letter is not None, "there is nothing to lose"
        self.say(f"lost: {letter}")
        self.stage.drop()

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
            if not await self._take_all() and not self.stage.deliver():
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
        fences = [self._client(word) for word in _listed(options.get("fence", ""))]
        await self.stage.promote(int(args[0][2:]), fences)

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


def _group(options: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of the synchronous group."""
    clip = float(options["clip"]) if "clip" in options else None
    return SyncConfig(
        name="group", optimizer={**SGD(1.0).to_config(), "global_clipnorm": clip},
        replicas_to_aggregate=int(options["needed"]),
        total_num_replicas=int(options.get("total", options["needed"])),
        min_replicas=int(options.get("min", 1)), patience_s=float(options.get("patience", 30)),
        global_step=(0, 9, 0),
    ).to_config()  # fmt: skip


def _by_ps(options: dict[str, str]) -> dict[int, list[Key]]:
    """Return the shards that a command names, in their order, by their ps tasks."""
    places: dict[int, list[Key]] = {}
    for name in options:
        if name in PLACES:
            ps, key = PLACES[name]
            places.setdefault(ps, []).append(key)
    return places


def _listed(words: str) -> list[str]:
    return [word for word in words.split(",") if word]


def _filled(value: float) -> bytes:
    return np.full(2, value, np.float32).tobytes()


def _arrays(segments: Sequence[Any]) -> str:
    values = [np.frombuffer(bytes(each), np.float32) for each in segments]
    return "".join(f"; {' '.join(f'{x:g}' for x in value)}" for value in values)


Command = Callable[[list[str], dict[str, str]], Any]
