"""The closure queue among losses, errors and cancellations, in every order hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import settings

from queue_machine import ClosureQueueMachine

ClosureQueueMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None
)
TestClosureQueue = pytest.mark.promise("schedule.join-waits-for-all")(ClosureQueueMachine.TestCase)
