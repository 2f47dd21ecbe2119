"""As seen.py, but the clocks of its workers are far from those of others."""

import dataclasses
import time
from typing import Any

from psync.launch import tasks

make_task = tasks.make_task


def with_another_clock(platform: Any, job: str, index: int, *args: Any, **options: Any) -> Any:
    ahead = 1000.0 * (index + 1)
    platform = dataclasses.replace(platform, now=lambda: time.monotonic() + ahead)
    return make_task(platform, job, index, *args, **options)


tasks.make_task = with_another_clock

import seen  # noqa: E402, F401
