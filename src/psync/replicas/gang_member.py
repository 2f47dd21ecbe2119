"""One replica of a gang on its worker: its collectives, sent to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psync.client.context import ClosureContext
from psync.cluster import CHIEF
from psync.errors import RemoteProtocolError
from psync.net.shielding import shielded
from psync.replicas.collectives import Collective
from psync.serialization.failures import rebuild_exception
from psync.serialization.payloads import Payload, Segment, check_size, pack, unpack
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.limits import Limits
from psync.wire.messages import Merged, ReachCollective


@dataclass(slots=True, eq=False)
class GangMember:
    """One replica of a gang, as the step on its worker sees it."""

    replica_id: int  # which one it is
    num_replicas: int  # how many there are
    closure: ClosureContext  # that runs it
    call: Callable[[Message, Sequence[Segment]], Awaitable[Frame]]
    """Sends a request with its segments to the coordinator and waits for the reply."""
    limits: Limits  # for what it sends
    main_by_name: bool  # whether classes of ``__main__`` travel by name

    async def collective(self, what: str, function: Collective, value: Any) -> Any:
        """Wait until all replicas are here; return what ``function`` makes of all the values.

        Args:
            what: Names it in errors. All replicas must come to the same: the first one's function
                is called.
            function: See `Collective`.
            value: This replica's.

        Raises:
            UsageError: The replicas came to different ones, or not all of them come.
            SerializationError: The value cannot be sent to the coordinator.
            ConnectionLost: The coordinator is gone; so is the gang.
            WorkerLost: The worker of another replica was lost.
            ClosureCancelled: Another replica failed, or the gang was cancelled.
            Exception: What the function raised; all replicas get it.

        Cancellation: The gang is over: no replica may be left out.
        """
        self.closure.check_open(what)
        subject = f"what replica {self.replica_id} brings to {what}"
        payload = pack(
            (function, value),
            subject=subject,
            receiver="the coordinator",
            main_by_name=self.main_by_name,
        )
        check_size(payload, subject, self.limits)
        received = await self._ask(ReachCollective(self.closure.closure_id, what), payload.segments)
        answer, result = received.message, Payload.from_segments(received.segments)
        if not isinstance(answer, Merged):
            raise RemoteProtocolError(f"{what}: expected Merged, got {type(answer).__name__}")
        if answer.error is not None:
            raise rebuild_exception(
                CHIEF, *answer.error, payload=result if received.segments else None
            )
        return unpack(result.data, result.buffers)

    async def _ask(self, message: Message, segments: Sequence[Segment]) -> Frame:
        """Call the coordinator, and tell it if the step gives up.

        A step that is stopped has not given up: the coordinator knows of it, or of the end of this
        worker, which is what the others should hear.
        """
        call = asyncio.ensure_future(self.call(message, segments))
        try:
            return await shielded(call)
        except asyncio.CancelledError:
            if not self.closure.cancelled:
                call.cancel()
            raise
