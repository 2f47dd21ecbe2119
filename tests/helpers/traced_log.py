"""The services of a ps that write down what becomes of each entry of their log."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from psync.errors import BusyError, PsyncError
from psync.ps.computes import Compute, Place
from psync.ps.executor import Entry
from psync.ps.life import Life
from psync.store.commit_log import CommitLog
from psync.sync.ps_services import PsServices
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import CheckState
from stage_words import entry_words, error_words

if TYPE_CHECKING:
    from stage import Stage


class TracedLog(CommitLog[Entry]):
    """Says which numbers entries get."""

    appended: Callable[[int, Entry], None] = staticmethod(lambda *_: None)

    def append(self, entry: Entry, nbytes: int) -> int:
        number = super().append(entry, nbytes)
        self.appended(number, entry)
        return number


@dataclass(eq=False)
class Shown:
    """An entry, as the trace has it."""

    words: str
    kind: type[Message]
    number: int = 0


class TracedServices(PsServices):
    """Writes down what becomes of each entry."""

    stage: Stage

    def __init__(self, process: Any, life: Life, *rest: Any) -> None:
        self.index, self.is_hosted = process.index, life is Life.HOSTED
        super().__init__(process, life, *rest)
        executor = self.executor
        self._submit_plain, executor.submit = executor.submit, self._submit  # type: ignore[method-assign]
        self._appending: Shown | None = None
        cast(TracedLog, executor.log).appended = self._appended  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        if self.is_hosted:
            return f"backup of ps {self.index}"
        serving = self.stage.serving.get(self.index)
        if serving is not None and serving.services is not self and serving.life is Life.SERVING:
            return f"former ps {self.index}"
        return f"ps {self.index}"

    def say(self, words: str) -> None:
        self.stage.say(f"{self.name}: {words}", by=self)

    def _submit(
        self, request: Any, message: Any, body: Any, act: Any, claim: Any = None, client: Any = None
    ) -> Any:
        if not self.stage.traced:
            return self._submit_plain(request, message, body, act, claim, client)
        who = client or request.peer.client
        entry = Shown(entry_words(who, message), type(message))
        if self.executor.is_alone and self.executor._over is None:
            self._appended(self.executor.log.last + 1, Entry.of(who, encode(message), ()), entry)
        outer, self._appending = self._appending, entry
        try:
            traced = functools.partial(self._act, entry, act)
            return self._submit_plain(request, message, body, traced, claim, client)
        finally:
            self._appending = outer

    def _appended(self, number: int, entry: Entry, shown: Shown | None = None) -> None:
        if self.is_hosted or not self.stage.traced:
            return  # of a backup: its own log begins when it is promoted
        shown = shown or self._appending
        message = decode(entry.header) if entry.header else None
        if isinstance(message, CheckState) and (shown is None or shown.kind is not type(message)):
            self.say(f"entry {number}: {entry_words(entry.client, message)}, on its own account")
        elif shown is not None:
            shown.number = number
            self.say(f"entry {number}: {shown.words}")

    def _act(self, entry: Shown, act: Callable[[], Any]) -> Any:
        if not self.is_hosted:
            self.stage.judged(self, f"entry {entry.number}", entry.words)
        try:
            outcome = act()
        except PsyncError as exc:
            if not self.is_hosted:
                self.say(f"entry {entry.number}: refused, {error_words(exc)}")
            raise
        if self.is_hosted:
            return outcome
        if isinstance(outcome, Compute):
            outcome.at_once = functools.partial(self._at_once, outcome.keys, outcome.at_once)
            if outcome.in_pieces is not None:
                outcome.in_pieces = functools.partial(
                    self._compute, entry, outcome.keys, outcome.in_pieces
                )
        return outcome

    def _at_once(self, keys: Sequence[Place], work: Callable[[], None]) -> None:
        if self.stage.busy.intersection(keys):
            raise BusyError("the script says so")
        work()

    async def _compute(
        self, entry: Shown, keys: Sequence[Place], work: Callable[[], Awaitable[None]]
    ) -> None:
        self.say(f"entry {entry.number}: its compute has begun")
        while not self.is_hosted and self.stage.busy.intersection(keys):
            await self.stage.freed()
        await work()
        self.say(f"entry {entry.number}: computed")
