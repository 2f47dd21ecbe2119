"""``merge_call``: one call of a function with the arguments of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psync.numerics.replicas import regroup


def merge(strategy: Any, calls: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Return what the first replica's merge function makes of the arguments of all, regrouped."""
    merge_fn = calls[0][0]
    args, kwargs = regroup([(args, kwargs) for _, args, kwargs in calls])
    return merge_fn(strategy, *args, **kwargs)
