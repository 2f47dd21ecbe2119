"""Views of memory: where they begin, and what all that see it refer to."""

from __future__ import annotations

import numpy as np


def root_of(memory: memoryview) -> np.ndarray:
    """Return an array of bytes to which all references to this memory will lead.

    numpy lets views of views refer to the first array in their chain: that is this one, as what is
    below it is none.
    """
    return np.frombuffer(memory, np.uint8)


def address_of(view: memoryview) -> int:
    """Return where in this process a view begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
