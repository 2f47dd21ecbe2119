"""All modules of messages, so that every task can decode whatever a peer may say.

A class is known to ``codec`` once its module is imported. So what a task says of a message that it
does not serve names the message, and does not depend on what else the process has imported.
"""

from __future__ import annotations

from psync.wire import (
    accumulator_messages,
    lock_messages,
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
)

CLASSES: tuple[type[Message], ...] = tuple(
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
)
"""Every class of messages."""
