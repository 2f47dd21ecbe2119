"""Requests and replies that are lost now and then, because a test wants it.

TCP loses no single message: what is lost is the connection, at a moment. So who is to lose a
message cuts the connection at that moment, on the side of who serves it:

    form        the connection is cut                          the caller knows   it was served
    request     when the request is there whole                nothing            no
    reply       when the answer is known, instead of sending   nothing            yes
    in_flight   when the handler begins, which works on        nothing            not yet, but soon
    late        when the request is there whole                nothing            not yet, but once
    slow        not at all                                     the answer         later than it came

``PSYNC_TESTING_LOSS`` is JSON: for each kind of request (the name of its message, or "*" for all
that are not named) how often which form is drawn, and how often each form happens at least
(``min_each``), to the first requests of the kind; and the seed.

    {"Update": {"request": 0.1, "reply": 0.1, "in_flight": 0.05, "min_each": 2}, "seed": 7}

A *late* request is served when the file is there that "until" names, in the order in which they
came: as if it had been on its way until then, or in the buffer of a kernel whose process was
stopped. Its caller has long given it up, and sent it again. Of a *slow* one nothing is lost, it is
served up to SLOW_S later; a message that nobody answers never is, for the next may follow from it.
Nothing is late or slow unless a share says so.

    {"Update": {"late": 0.3}, "until": "/some/file", "seed": 7}

With "while" nothing is lost unless the file is there that it names.

What was lost is written to the notes of the task, from which its next life goes on: so the minimum
holds for all lives together, and a life does not lose what the one before it has lost. Without the
variable no connection knows of any of this.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psync.errors import ConfigurationError, ConnectionLost, PsyncError
from psync.net.connection import Connection, Request
from psync.testing.sabotage.notes import Notes
from psync.wire import messages
from psync.wire.frames import Buffer, Kind

VARIABLE = "PSYNC_TESTING_LOSS"

FORMS = ("request", "reply", "in_flight")
LATE, SLOW = "late", "slow"
SHARED = (*FORMS, LATE, SLOW)
"""What can be given shares; the minimum is for those forms in which something is lost."""

SLOW_S = 0.1

ANY = "*"

LOOK_EVERY_S = 0.02
"""For the file that late requests wait for."""


class MessageLosses:
    """Which messages one task loses.

    Args:
        plan: What ``PSYNC_TESTING_LOSS`` says.
        notes: Of the task.

    Attributes:
        seen: How many requests of each kind came.
        lost: How many of each (kind, form) were lost, by earlier lives of the task, too.

    Raises:
        ConfigurationError: The plan makes no sense.
    """

    def __init__(self, plan: Mapping[str, Any], notes: Notes | None = None) -> None:
        self.seen: Counter[str] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()
        self._notes = Notes() if notes is None else notes
        self._rates = {
            name: _checked(name, of)
            for name, of in plan.items()
            if name not in ("seed", "until", "while")
        }
        self._until = Path(str(plan.get("until", "")))
        self._while = Path(str(plan["while"])) if "while" in plan else None
        self._late: deque[tuple[str, Callable[[], None]]] = deque()
        for line, count in self._notes.earlier().items():
            match line.split():
                case ["lost", kind, form]:
                    self.lost[kind, form] += count
                case ["met", kind]:
                    self.seen[kind] = 0  # it is known to occur
        life = self.lost.total()
        self._random = random.Random(f"{plan.get('seed', 0)}/{self._notes.task}/{life}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> MessageLosses | None:
        """Return what ``PSYNC_TESTING_LOSS`` says, or None."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        try:
            plan = json.loads(text)
        except ValueError as exc:
            raise ConfigurationError(f"{VARIABLE}: no JSON: {exc}") from exc
        if not isinstance(plan, dict):
            raise ConfigurationError(f"{VARIABLE}: expected an object, got {text!r}")
        return cls(plan, Notes.from_environment(environ))

    def draw(self, kind: str) -> str | None:
        """Return the form in which a request of this kind is lost, or None: it is not."""
        rates = self._rates.get(kind) or self._rates.get(ANY)
        if rates is None or (self._while is not None and not self._while.is_file()):
            return None
        if kind not in self.seen:
            self._notes.add("met", kind)
        self.seen[kind] += 1
        form = self._draw(kind, rates)
        if form is not None:
            self.lost[kind, form] += 1
            self._notes.add("lost", kind, form)
        return form

    def slowness(self) -> float:
        """Return by how many seconds a slow request is served later."""
        return self._random.random() * SLOW_S

    def when_it_is_time(self, kind: str, serve: Callable[[], None]) -> None:
        """Serve a late request once the file is there, after those that came before it."""
        self._late.append((kind, serve))
        if len(self._late) == 1:
            self._look()

    def _look(self) -> None:
        if not self._until.is_file():
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
            return
        while self._late:
            kind, serve = self._late[0]
            self._notes.add("served", kind, LATE)
            serve()
            self._late.popleft()

    def _draw(self, kind: str, rates: Mapping[str, float]) -> str | None:
        drawn = self._random.random()  # in any case: one draw for each request
        for form in FORMS:
            if self.lost[kind, form] < rates.get("min_each", 0):
                return form
        for form in SHARED:
            drawn -= rates.get(form, 0.0)
            if drawn < 0:
                return form
        return None


class LossyConnection(Connection):
    """Serves the requests of a peer, and is cut where ``losses`` say so."""

    losses: MessageLosses  # of the task

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._silent: set[int] = set()  # requests whose answer is lost

    def _serve(self, request: Request[Any]) -> None:
        """Serve a request, or lose it or its answer."""
        kind = type(request.message).__name__
        form = self.losses.draw(kind) if not isinstance(request.token, Exception) else None
        if form == "request":
            self._cut(f"the request {kind} was lost")
            return
        if form == LATE:
            self._cut(f"the request {kind} is late")
            self.losses.when_it_is_time(kind, functools.partial(self._serve_late, request))
            return
        if form == SLOW and request.kind == Kind.REQUEST:  # what nobody answers keeps its order
            after_s = self.losses.slowness()
            asyncio.get_running_loop().call_later(after_s, self._serve_late, request)
            return
        if form == "in_flight":
            self._cut(f"the reply to {kind} was lost while it was worked on")
        elif form == "reply" and request.kind == Kind.REQUEST:
            self._silent.add(request.request_id)
        super()._serve(request)
        if form == "reply" and request.kind != Kind.REQUEST:  # nobody answers a notification
            self._cut(f"the connection was lost after {kind}")

    def _serve_late(self, request: Request[Any]) -> None:
        try:
            super()._serve(request)
        except PsyncError as exc:
            self.abort(exc)  # if it is there still

    def send(self, kind: int, request_id: int, *message: Any, **how: Any) -> list[Buffer]:
        """Send a message, unless it is an answer that is lost."""
        if kind in (Kind.REPLY, Kind.ERROR) and request_id in self._silent:
            self._cut(
                "the reply was lost" if kind == Kind.REPLY else "the reply, an error, was lost"
            )
            return []
        return super().send(kind, request_id, *message, **how)

    def _cut(self, reason: str) -> None:
        self.abort(ConnectionLost(f"{reason} ({VARIABLE})"))


def _checked(name: str, rates: Any) -> Mapping[str, float]:
    """Return what the plan says of one kind of requests."""
    if name != ANY and not hasattr(getattr(messages, name, None), "code"):
        raise ConfigurationError(
            f"{VARIABLE}: there is no message {name!r}", hint="such as Update, Read, CloseStep"
        )
    fits = isinstance(rates, dict) and all(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (value >= 0 and value == int(value) if key == "min_each" else 0 <= value <= 1)
        and key in (*SHARED, "min_each")
        for key, value in rates.items()
    )
    if not fits or sum(rates.get(form, 0) for form in SHARED) > 1:
        raise ConfigurationError(
            f"{VARIABLE}: {name}: expected shares of {', '.join(SHARED)} that make at most "
            f"1, and a whole number min_each, got {rates!r}"
        )
    checked: Mapping[str, float] = rates
    return checked
