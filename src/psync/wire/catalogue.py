"""The catalogue of message modules: a task that imports it can decode every message.

``codec`` knows a class once its module is imported. So the error about a message that a task does
not serve names the message, whatever else the process has imported.
"""

from __future__ import annotations

from psync.wire import (
    accumulator_messages,
    lock_messages,
    log_messages,
    messages,
    ps_messages,
    recovery_messages,
    session_messages,
    sync_messages,
    worker_messages,
)
from psync.wire.codec import Message

MODULES = (
    messages,
    worker_messages,
    ps_messages,
    lock_messages,
    sync_messages,
    session_messages,
    accumulator_messages,
    recovery_messages,
    log_messages,
)

CLASSES: tuple[type[Message], ...] = tuple(
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
)
"""Every class of messages."""
