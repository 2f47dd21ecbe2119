"""The chief queue runner of SyncReplicasOptimizer, which only waits for the end here."""

from __future__ import annotations

import contextlib

from psync.api.reads import runtime_of
from psync.api.variables import Variable
from psync.compat.session_links import wait_over
from psync.errors import ClosedError


class ChiefQueueRunner:
    """A stand-in for TensorFlow's queue runner on the chief; ps 0 closes the steps instead.

    Args:
        global_step: The global step of the training.
    """

    def __init__(self, global_step: Variable) -> None:
        self._global_step = global_step

    async def run(self) -> None:
        """Return when training has ended, or when this task's connections are closed.

        Raises:
            ParameterServerLost: ps 0 is lost.

        Cancellation: Safe.
        """
        runtime = await runtime_of("the chief's queue runner", self._global_step)
        with contextlib.suppress(ClosedError):
            await wait_over(runtime.ps, "the chief's queue runner")
