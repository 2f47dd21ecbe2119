"""Views of memory: where they begin, and what they refer to."""

from __future__ import annotations

import numpy as np

from psync.net.shared.views import address_of, root_of


def test_all_that_is_made_of_a_root_refers_to_it() -> None:
    memory = memoryview(bytearray(16))
    root = root_of(memory[4:])
    part = root.view(np.float32).reshape(3, 1)[1:]
    assert part.base is root
    part[0] = 1
    assert memory[8:12] == np.float32(1).tobytes()
    assert not root_of(memory.toreadonly()).flags.writeable


def test_addresses_are_those_of_first_bytes() -> None:
    memory = memoryview(bytearray(16))
    assert address_of(memory[5:]) - address_of(memory) == 5
