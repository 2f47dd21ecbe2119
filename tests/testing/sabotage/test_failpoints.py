from __future__ import annotations

import subprocess
import sys

import pytest

from psync.errors import ConfigurationError, PsyncError
from psync.testing.sabotage.failpoints import FailpointError, Failpoints
from psync.testing.sabotage.places import NAMES


def test_an_error_is_raised_at_the_first_or_at_the_counted_time() -> None:
    failpoints = Failpoints(" ps.push.applied=error@3 , worker.push.begun=error,")
    with pytest.raises(FailpointError, match=r"failpoint worker\.push\.begun"):
        failpoints.hit("worker.push.begun")
    failpoints.hit("worker.push.begun")
    for _ in range(2):
        failpoints.hit("ps.push.applied")
    with pytest.raises(FailpointError, match=r"failpoint ps\.push\.applied"):
        failpoints.hit("ps.push.applied")
    failpoints.hit("ps.push.applied")
    assert failpoints.hits == {"ps.push.applied": 4, "worker.push.begun": 2}
    assert issubclass(FailpointError, PsyncError)


def test_the_environment_arms_them() -> None:
    armed = Failpoints.from_environment({"PSYNC_FAILPOINTS": "ps.create.done=error"})
    assert armed.armed("ps.create.done")
    assert Failpoints.from_environment({}).hits == {}


@pytest.mark.parametrize(
    "text",
    ["ps.create.done", "ps.create.done=", "ps.create.done=stop", "ps.create.done=kill@0",
     "ps.create.done=error@", "ps.create.done=error@two", "ps.create.done=error@-1"],
)  # fmt: skip
def test_a_text_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Failpoints(text)
    assert caught.value.message == (
        f"PSYNC_FAILPOINTS: {text!r}: expected NAME=kill or NAME=error, optionally with "
        "@COUNT from 1"
    )


def test_an_unknown_place_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown failpoint 'ps\.pull'") as caught:
        Failpoints("ps.pull=kill")
    assert caught.value.hint == f"known: {', '.join(sorted(NAMES))}"


def test_kill_ends_the_process_at_once() -> None:
    program = """
import atexit
from psync.testing.sabotage import Failpoints
atexit.register(print, "not reached")
Failpoints("ps.push.applied=kill").hit("ps.push.applied")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-9, b"")
