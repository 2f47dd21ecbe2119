"""Messages between the chief and a worker that joins a running cluster, knowing its address only.

The connection over which they go stays open while the worker is there. ``LeaveCluster``, of
``recovery_messages``, says over it that the worker has left.
"""

from __future__ import annotations

from psync.wire.codec import Message, message


@message(150)
class JoinCluster(Message):
    """Worker → chief: take me into the cluster; answered by Joined, at once."""

    address: str  # where it listens
    index: int  # what it was called before the connection was lost; -1: it is new
    python: str  # version of its interpreter, as in "3.11": functions travel as its bytecode


@message(151)
class Joined(Message):
    """See JoinCluster."""

    index: int  # of its task
