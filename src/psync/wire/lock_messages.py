"""Messages of shard locks, for consistent reads and atomic assigns over several ps tasks."""

from __future__ import annotations

from psync.wire.codec import Message, message
from psync.wire.ps_messages import Assign, Pull


@message(115)
class LockShards(Message):
    """Lock shards, all of them or none; who changes them waits. Answered by Done, once it is so.

    The lock ends when it is given up, with the connection over which it was asked for, and when it
    was not renewed for the time of its lease. The same number again asks anew.
    """

    lock: int  # number of the lock, unique in its client
    members: list[tuple[int, int]]
    lease_s: float


@message(116)
class UnlockShards(Message):
    """Give a lock up, held or not; idempotent. Answered by Done."""

    lock: int


@message(117)
class RenewLock(Message):
    """Let the lease of a lock begin anew. Answered by Done, or LockLost."""

    lock: int


@message(118)
class PullLocked(Pull):
    """A pull of shards that are locked by the one who asks. Answered by Pulled, or LockLost."""

    lock: int


@message(119)
class AssignLocked(Assign):
    """An assign to shards that are locked by the one who asks. Answered by Pushed, or LockLost."""

    lock: int = 0  # ``rows`` before it has a default, too
