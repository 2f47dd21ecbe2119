"""The catalogue of message modules: a task that imports it can decode every message.

``codec`` knows a class once its module is imported. So the error about a message that a task does
not serve names the message, whatever else the process has imported.
"""

from __future__ import annotations

from psync.wire import (  # noqa: F401
    accumulator_messages,
    join_messages,
    lock_messages,
    log_messages,
    messages,
    ps_messages,
    recovery_messages,
    session_messages,
    sync_messages,
    worker_messages,
)
