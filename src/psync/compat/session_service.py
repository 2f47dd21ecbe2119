"""Session requests on ps 0: connections, clock and delayed answers for the rule of members.

``SessionMembers`` decides; this feeds it requests, which it keeps until they are answered, and
carries out the rest on the services of its ps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from psync.compat.session_members import SessionMembers
from psync.errors import ConfigurationError, PsyncError, UnknownVariableError, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.sync.ps_services import PsServices
from psync.wire import messages
from psync.wire.codec import Message

SAME_ORDER = "every task must declare the same variables in the same order, before its session"


class SessionService:
    """The sessions of one ps task: who takes part is known to ps 0, what is declared to each.

    The ps task makes it when the first message comes that a session alone sends.

    Args:
        endpoint: Of the ps task; some peers may be connected already.
        services: Returns what serves the chief that has attached this ps, as of now.
        check_coordinator: Raises unless a peer is that chief.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        services: Callable[[], PsServices],
        check_coordinator: Callable[[Connection], None],
    ) -> None:
        self._services = services
        self._check_coordinator = check_coordinator
        self._members = SessionMembers(self)
        self._open: dict[tuple[str, int], int] = {}  # connections by task and incarnation
        self._timer: asyncio.TimerHandle | None = None
        self.attached(services().coordinator)
        for peer in endpoint.peers:
            self._note_peer(peer)
        endpoint.on_peer.append(self._note_peer)

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        told: dict[type[Message], Callable[[Request[Any]], None]] = {
            messages.EnterSession: self._enter,
            messages.LeaveSession: self._leave,
            messages.Declared: self._declared,
            messages.EndTraining: self._end,
            messages.AwaitEnd: self._await_end,
        }
        handlers = {kind: Handler(functools.partial(self._tell, to)) for kind, to in told.items()}
        return {**handlers, messages.CheckShards: Handler(self._check_shards)}

    def _tell(self, to: Callable[[Request[Any]], None], request: Request[Any]) -> None:
        """Tell the rule of a request, which it may keep; it says itself when it looks again."""
        request.on_given_up = self._forget
        to(request)
        self._set_timer()

    def _forget(self, request: Request[Any]) -> None:
        self._members.forget(request)
        self._set_timer()

    def statistics(self) -> dict[str, Any]:
        """Return who takes part."""
        return self._members.statistics()

    def attached(self, coordinator: int) -> None:
        """A chief has attached this ps."""
        self._members.attached(coordinator)
        self._set_timer()

    def _note_peer(self, peer: Connection) -> None:
        self._open[peer.client] = self._open.get(peer.client, 0) + 1
        self._members.connected(*peer.client)
        peer.on_closed.append(self._note_closed)
        self._set_timer()

    def _note_closed(self, peer: Connection) -> None:
        self._open[peer.client] -= 1
        if not self._open[peer.client]:
            del self._open[peer.client]
            self._members.disconnected(*peer.client, _now())
            self._set_timer()

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    # Requests.

    def _enter(self, request: Request[messages.EnterSession]) -> None:
        peer, message = request.peer, request.message
        if not peer.task.startswith("/job:worker/"):
            raise UsageError(f"{peer.task} is not a worker")
        self._members.ask(request, peer.task, message.incarnation, _now())

    def _declared(self, request: Request[messages.Declared]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        now = _now()
        self._members.declared(request, peer.task, message.trains, message.num_workers, now)
        if peer.client not in self._open:  # gone before this was read
            self._members.disconnected(*peer.client, now)

    def _leave(self, request: Request[messages.LeaveSession]) -> None:
        peer, error = request.peer, request.message.error
        if peer.task.startswith("/job:chief/"):
            self._check_coordinator(peer)
            self._members.leave_as_chief(request, _now())
            return
        if error is None:
            self._members.leave(*peer.client, _now())
        else:
            self._members.fail(*peer.client, error, _now())
        request.answer(messages.Done())

    def _end(self, request: Request[messages.EndTraining]) -> None:
        if request.peer.task.startswith("/job:chief/"):
            self._check_coordinator(request.peer)
        self._members.end(request.message.reason, request.message.failed)
        request.answer(messages.Done())

    def _await_end(self, request: Request[messages.AwaitEnd]) -> None:
        self._members.await_end(request)

    def _check_shards(self, request: Request[messages.CheckShards]) -> None:
        """Check whether a ps holds what the sender has declared.

        Raises:
            ConfigurationError: A shard is not here, or of another variable, shape or dtype.
        """
        store = self._services().store
        for name, variable_id, index, offset, shape, dtype in request.message.shards:
            declared = f'variable "{name}" ({dtype}, shard {index} of shape {tuple(shape)})'
            try:
                spec = store.spec((variable_id, index))
            except UnknownVariableError as exc:
                raise ConfigurationError(
                    f"the chief did not declare {declared} before training began", hint=SAME_ORDER
                ) from exc
            held = (spec.variable, spec.offset, list(spec.shape), spec.dtype)
            if held != (name, offset, shape, dtype):
                raise ConfigurationError(
                    f'the chief has declared variable "{spec.variable}" ({spec.dtype}, shard '
                    f"{index} of shape {spec.shape}), but this task declared {declared}",
                    hint=SAME_ORDER,
                )
        request.answer(messages.Done())

    # What the rule has decided.

    def answer(self, waiter: Request[Any], answer: Message | PsyncError) -> None:
        """See ``Effects``, as for the next three."""
        if isinstance(answer, PsyncError):
            waiter.fail(answer)
        else:
            waiter.answer(answer)

    def set_members(self, alive: dict[str, int], missing: tuple[str, ...]) -> None:
        services = self._services()
        services.clocks.report(alive, None)  # no coordinator reports who lives
        if services.closer is not None:
            services.closer.set_members(alive, missing)

    def fence(self, task: str, below: int) -> None:
        services = self._services()
        services.executor.in_turn(functools.partial(services.refuse_below, task, below))
        if services.closer is not None:
            services.closer.outgoing.fence(task, below)

    def close_tokens(self, reason: str) -> None:
        services = self._services()
        services.clocks.end()
        if services.closer is not None:
            services.closer.end(reason)

    # Time.

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._members.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._members.tick(_now())
        self._set_timer()


def _now() -> float:
    return asyncio.get_running_loop().time()
