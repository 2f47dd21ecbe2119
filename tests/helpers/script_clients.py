"""What clients say in scripts: workers, and the coordinator where it sends updates itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asked import Asked, Lent, Reply
from psync.numerics.rules import SGD
from psync.store.store import Key
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message
from psync.wire.messages import (
    ApplyGradient,
    DefineAccumulator,
    DefinePlan,
    FinishSteps,
    Freeze,
    Gated,
    KeepPart,
    ReportSchedule,
    TakeGradient,
    Update,
)
from stage import CHIEF, Stage
from stage_words import NAMES, PLACES, error_words, message_words, planned, task_words

GROUP = 5


@dataclass(eq=False)
class Sent:
    """A request of a client."""

    client: tuple[str, int]
    ps: int
    message: Message
    segments: Sequence[bytes] = ()
    answers: int = 0  # that were awaited so far: only the last is looked at; 0: it was not sent
    is_answered: bool = False
    later: Asked | None = None


@dataclass
class Numbers:
    """What a client has numbered so far."""

    updates: dict[int, int] = field(default_factory=dict)  # by ps
    pushes: int = 0  # to the group
    takes: int = 0


def plans_of(keys: Sequence[Key], optimizer: int = 1) -> list[DefinePlan]:
    """What is done with shards of one ps: a push, an addition, an assign."""
    config, members = SGD(1.0).to_config(), list(keys)
    return [
        planned(DefinePlan(0, members, optimizer, config)),
        planned(DefinePlan(0, members, op="add")),
        planned(DefinePlan(0, members, op="assign")),
    ]


def parts_of(config: dict[str, Any], places: dict[int, list[Key]]) -> dict[int, DefinePlan]:
    """What each ps gets of a push to the group; it answers with the values that the step makes."""
    parts = {0: list[Key](), **places}
    others, names = [ps for ps in parts if ps], str(parts).encode()
    return {
        ps: planned(
            DefinePlan(
                0, keys, GROUP, config, pull=keys or None, variable_set=names,
                others=None if ps else others,
            )
        )
        for ps, keys in parts.items()
    }  # fmt: skip


class Clients:
    """Carries out the commands of clients.

    Attributes:
        stage: Whom they talk to.
    """

    def __init__(self) -> None:
        self.stage = Stage(0)
        self._sent: list[Sent] = []
        self._numbers: dict[tuple[str, int], Numbers] = {}
        self._config: dict[str, Any] = {}
        self._version = 0
        self._others: list[tuple[int, str, int, int]] = []  # parts of what has begun, at a cut

    def say(self, words: str) -> None:
        self.stage.say(words)

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
        asked = (self.stage.former if former else self.stage.serving)[sent.ps]

        def then(outcome: Any) -> None:
            if awaited != sent.answers:
                return  # over a connection that has gone since
            sent.is_answered = True
            if isinstance(outcome, Reply):
                words = message_words(outcome.message)
                if not isinstance(sent.message, Freeze):  # its segment is a state
                    words += _arrays(outcome.segments)
                if isinstance(outcome.message, Gated):
                    self._others += outcome.message.others
            else:
                words = error_words(outcome)
            what = re.split(r" to |,| \(| at ", message_words(sent.message))[0]
            where = "ps" if self.stage.serving[sent.ps] is asked else "former ps"
            self.say(f"{where} {sent.ps} → {who}, {what}: {words}")

        sent.later = self.stage.ask(
            sent.client, sent.ps, sent.message, sent.segments, then, to_former=former
        )

    def do_push(self, args: list[str], options: dict[str, str]) -> None:
        """push worker0 w=+1 [x=+1] [closure=3] [optimizer=2] [only=ps0] [to=former]: asynchronous.

        ``w=+1`` is a gradient that adds 1 to each element of w. A push to several ps tasks is a
        message to each; with ``only`` the others are sent by ``rest``.
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
            push, add, assign = plans_of(keys, optimizer)
            plan = push if is_push else add if words[0][0] in "+-" else assign
            message = Update(*whose, plan.plan, spread=rest)
            factor = -1 if is_push else 1
            sent = Sent(client, ps, message, [_filled(factor * float(word)) for word in words])
            self._send_or_leave(sent, options)

    def _send_or_leave(self, sent: Sent, options: dict[str, str]) -> None:
        if options.get("only", f"ps{sent.ps}") == f"ps{sent.ps}":
            self._send(sent, former=options.get("to") == "former")
        else:
            self._sent.append(sent)

    def do_rest(self, args: list[str], _: dict[str, str]) -> None:
        """rest worker0: what ``only`` has left."""
        for each in self._sent:
            if each.client == self._client(args[0]) and not each.answers:
                self._send(each, again=True)

    def do_repeat(self, args: list[str], _: dict[str, str]) -> None:
        """repeat worker0 [ps1] [unanswered]: the last message again, or all without an answer."""
        client = self._client(args[0])
        to = {int(word[2:]) for word in args if word.startswith("ps")} or self.stage.serving
        sent = [each for each in self._sent if each.client == client and each.ps in to]
        wanted = [each for each in sent if not each.is_answered]
        for each in wanted if "unanswered" in args else sent[-1:]:
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

    def do_contribute(self, args: list[str], options: dict[str, str]) -> None:
        """contribute worker0 [w=+1] [x=+1] [at=0] [closure=3] [only=ps0] [lent]: to the group.

        Each ps gets its part, and ps 0 in any case. What is lent lies in memory of the worker's.
        """
        client, places = self._client(args[0]), _by_ps(options)
        numbers = self._of(client)
        numbers.pushes += 1
        for ps, plan in parts_of(self._config, places).items():
            message = Update(
                numbers.pushes, 0, int(options.get("closure", -1)), 0, plan.plan,
                local_step=int(options.get("at", 0)),
            )  # fmt: skip
            body = [_filled(-float(options[NAMES[key]])) for key in places.get(ps, ())]
            lent = Lent(map(bytearray, body)) if "lent" in args else body
            self._send_or_leave(Sent(client, ps, message, lent), options)

    def do_keep(self, args: list[str], _: dict[str, str]) -> None:
        """keep worker0 ps1: a ps is to copy its part of the last push, if that is lent."""
        client = self._client(args[0])
        message = KeepPart(GROUP, self._of(client).pushes)
        self._send(Sent(client, int(args[1][2:]), message))

    def do_scribble(self, args: list[str], _: dict[str, str]) -> None:
        """scribble worker0: it writes to all that it has lent."""
        for each in self._sent:
            if each.client == self._client(args[0]) and isinstance(each.segments, Lent):
                for memory in each.segments:
                    memory[:] = _filled(np.nan)

    def do_members(self, args: list[str], options: dict[str, str]) -> None:
        """members worker0 worker1 [missing=worker2] [last=3,4]: who lives, says the coordinator.

        With ``last`` these closures are in flight, and no others will be started.
        """
        self._version += 1
        alive = [self._client(word) for word in args]
        missing = [self._client(word)[0] for word in listed(options.get("missing", ""))]
        last = [(int(word), "/job:worker/task:0") for word in listed(options.get("last", ""))]
        report = ReportSchedule(self._version, alive, missing, not last, last)
        self.stage.ask(CHIEF, 0, report, (), lambda _: None)

    def do_finish(self, *_: Any) -> None:
        """finish: join finds that all closures have ended."""
        self._send(Sent(CHIEF, 0, FinishSteps()))

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


def group_config(options: dict[str, str]) -> dict[str, Any]:
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


def listed(words: str) -> list[str]:
    return [word for word in words.split(",") if word]


def _filled(value: float) -> bytes:
    return np.full(2, value, np.float32).tobytes()


def _arrays(segments: Sequence[Any]) -> str:
    values = [np.frombuffer(bytes(each), np.float32) for each in segments]
    return "".join(f"; {' '.join(f'{x:g}' for x in value)}" for value in values)
