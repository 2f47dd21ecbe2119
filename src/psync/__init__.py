"""psync: an asyncio-native parameter server.

A coordinator schedules step functions onto workers; workers pull sharded variables from ps
tasks and push gradients back; ps tasks apply them. See the README for a first program.

Names are loaded when they are first used, so that ``import psync`` costs next to nothing: the
launcher needs none of them, and a ps only a few. Where each one lives is said once, in the stub
``__init__.pyi``, which type checkers read, too.
"""

from __future__ import annotations

import importlib
import os

TYPE_CHECKING = False  # typing is a third of what this module would cost, ast another
if TYPE_CHECKING:
    from typing import Any


def _homes() -> dict[str, str]:
    """Return the module of each public name, which the stub imports as itself."""
    homes, home = {}, ""
    with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:
        for line in stub:
            if line.startswith("from "):
                home = line.split()[1]
            before, imported, _ = line.partition(" as ")
            if imported:
                homes[before.split()[-1]] = home
    return homes


_HOME_OF = _homes()

__all__ = sorted(_HOME_OF)


_EARLIER = {
    "CaptureError": "SerializationError",
    "GradientError": "ValueMismatchError",
    "serve": "run_task",
}
"""Names until 0.2, and their successors."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("psync.wire.handshake").RELEASE
    name = _EARLIER.get(name, name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'psync' has no attribute {name!r}")
    if home == "psync":
        return importlib.import_module(f"psync.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = ("__all__", "__doc__", "__file__", "__name__", "__path__", "__version__")
    return sorted((*__all__, *own))
