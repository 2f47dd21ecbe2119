"""Test tools for psync and for programs that use it: virtual time and a network in memory.

- ``VirtualClockLoop``: an event loop whose clock jumps to the next timer, so that tests do not
  wait. It raises ``Deadlock`` instead of hanging. ``run_virtual`` runs a coroutine on it.
- ``MemoryNetwork``: a network in memory, with seeded delivery and the faults of a real one.
- ``settle``: runs everything that is ready.
"""

from psync.testing.clock import Deadlock, RealWorldError, VirtualClockLoop, run_virtual, settle
from psync.testing.link import BufferChanged, Direction, Link
from psync.testing.network import MemoryHost, MemoryListener, MemoryNetwork

__all__ = [
    "BufferChanged",
    "Deadlock",
    "Direction",
    "Link",
    "MemoryHost",
    "MemoryListener",
    "MemoryNetwork",
    "RealWorldError",
    "VirtualClockLoop",
    "run_virtual",
    "settle",
]
