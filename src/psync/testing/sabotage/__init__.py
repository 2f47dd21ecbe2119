"""Tasks that die, fail, forget or lose something on purpose, so that a test sees what follows.

``PSYNC_FAILPOINTS`` and the variables ``PSYNC_TESTING_...`` ask for it
(docs/explanation/testing.md); without them nothing of this package is loaded. Tasks know nothing
of it either: they build their parts through ``Platform.parts``, and ``SabotagedParts`` returns
subclasses that do something else.

Begin with ``parts``: which subclass takes whose place. ``places`` is the table of all failpoints.
"""

from psync.testing.sabotage.failpoints import FailpointError, Failpoints
from psync.testing.sabotage.message_loss import MessageLosses
from psync.testing.sabotage.notes import Notes, notes_in
from psync.testing.sabotage.parts import SabotagedParts, failpoints_of

__all__ = [
    "FailpointError",
    "Failpoints",
    "MessageLosses",
    "Notes",
    "SabotagedParts",
    "failpoints_of",
    "notes_in",
]
