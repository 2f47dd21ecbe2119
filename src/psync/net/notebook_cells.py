"""Notebook cells: what runs in the background writes to the cell that runs, not to its first one.

ipykernel keeps the cell whose output something is in a context variable, which tasks and callbacks
inherit from where they were made. Where the variable is not set, the cell that runs gets it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = "parent_header"
"""Name of ipykernel's variables, one for stdout, stderr and displays each."""


async def of_no_cell(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` so that what it starts belongs to no cell; outside of a notebook, just do it.

    Cancellation: As that of ``work``.
    """
    if "ipykernel" not in sys.modules:
        return await work
    context = contextvars.Context()
    for variable, value in contextvars.copy_context().items():
        if variable.name != VARIABLE:
            context.run(variable.set, value)
    return await asyncio.get_running_loop().create_task(work, context=context)
