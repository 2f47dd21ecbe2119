"""Session requests on ps 0: connections, clock and delayed answers for the rule of members.

``SessionMembers`` decides; this feeds it requests, keeps the answers that have to wait, and
carries out the rest on the services of its ps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from psync.compat.session_members import (
    Action,
    Answer,
    CloseTokens,
    FenceTask,
    SessionMembers,
    SetMembers,
)
from psync.errors import ConfigurationError, UnknownVariableError, UsageError
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
        self._members = SessionMembers()
        self._open: dict[tuple[str, int], int] = {}  # connections by task and incarnation
        self._timer: asyncio.TimerHandle | None = None
        self.attached(services().coordinator)
        for peer in endpoint.peers:
            self._note_peer(peer)
        endpoint.on_peer.append(self._note_peer)

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            messages.EnterSession: Handler(self._enter),
            messages.LeaveSession: Handler(self._leave),
            messages.ReplicaFailed: Handler(self._fail),
            messages.Declared: Handler(self._declared),
            messages.EndTraining: Handler(self._end),
            messages.AwaitEnd: Handler(self._await_end),
            messages.CheckShards: Handler(self._check_shards),
        }

    def statistics(self) -> dict[str, Any]:
        """Return who takes part."""
        return self._members.statistics()

    def attached(self, coordinator: int) -> None:
        """A chief has attached this ps."""
        self._perform(self._members.attached(coordinator))

    def _note_peer(self, peer: Connection) -> None:
        replica = (peer.task, peer.incarnation)
        self._open[replica] = self._open.get(replica, 0) + 1
        self._members.connected(*replica)
        peer.on_closed.append(self._note_closed)
        self._set_timer()

    def _note_closed(self, peer: Connection) -> None:
        replica = (peer.task, peer.incarnation)
        self._open[replica] -= 1
        if not self._open[replica]:
            del self._open[replica]
            self._members.disconnected(*replica, _now())
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
        self._wait(request, self._members.ask(request, peer.task, message.incarnation, _now()))

    def _declared(self, request: Request[messages.Declared]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        now, trains = _now(), message.trains
        actions = self._members.declared(request, peer.task, trains, message.num_workers, now)
        if (peer.task, peer.incarnation) not in self._open:  # gone before this was read
            self._members.disconnected(peer.task, peer.incarnation, now)
        self._wait(request, actions)

    def _leave(self, request: Request[messages.LeaveSession]) -> None:
        peer = request.peer
        if peer.task.startswith("/job:chief/"):
            self._check_coordinator(peer)
            self._wait(request, self._members.leave_as_chief(request, _now()))
        else:
            self._perform(self._members.leave(peer.task, peer.incarnation, _now()))
            request.answer(messages.Done())

    def _fail(self, request: Request[messages.ReplicaFailed]) -> None:
        peer, message = request.peer, request.message
        error = message.type_name, message.message, message.traceback
        self._perform(self._members.fail(peer.task, peer.incarnation, error, _now()))
        request.answer(messages.Done())

    def _end(self, request: Request[messages.EndTraining]) -> None:
        peer, message = request.peer, request.message
        if peer.task.startswith("/job:chief/"):
            self._check_coordinator(peer)
        self._perform(self._members.end(message.reason, message.failed))
        request.answer(messages.Done())

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

    def _await_end(self, request: Request[messages.AwaitEnd]) -> None:
        self._wait(request, self._members.await_end(request))

    def _wait(self, request: Request[Any], actions: Sequence[Action]) -> None:
        """Let the rule, which has taken a request in, answer it at some time."""
        request.on_given_up = self._forget
        self._perform(actions)

    def _forget(self, waiter: object) -> None:
        self._members.forget(waiter)
        self._set_timer()

    # What the rule has decided.

    def _perform(self, actions: Sequence[Action]) -> None:
        services = self._services()
        closer = services.closer
        for action in actions:
            match action:
                case Answer(waiter, answer):
                    request = cast("Request[Any]", waiter)
                    if isinstance(answer, Exception):
                        request.fail(answer)
                    else:
                        request.answer(answer)
                    self._members.forget(waiter)
                case SetMembers(alive, missing):  # no coordinator reports who lives
                    services.clocks.report(alive, None)
                    if closer is not None:
                        closer.set_members(alive, missing)
                case FenceTask(task, below):
                    refuse = functools.partial(services.refuse_below, task, below)
                    services.executor.in_turn(refuse)
                    if closer is not None:
                        closer.outgoing.fence(task, below)
                case CloseTokens(reason):
                    services.clocks.end()
                    if closer is not None:
                        closer.end(reason)
        self._set_timer()

    # Time.

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._members.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._perform(self._members.tick(_now()))


def _now() -> float:
    return asyncio.get_running_loop().time()
