"""Who owns a directory: one process, which dies and is followed, or is named."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from psync.checkpoints.ownership import Owner, own
from psync.errors import ConfigurationError

pytestmark = pytest.mark.promise("checkpoints.one-program-per-directory")

OWNS = """
import os, sys
from pathlib import Path
from psync.checkpoints.ownership import own
if sys.argv[2] == "no locks":
    import fcntl
    def flock(*_): raise OSError(95, "no locks")
    fcntl.flock = flock
owner = own(Path(sys.argv[1]), "saves here", "another place")
print("owns", flush=True)
if sys.argv[3] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "OWNER"


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none."""

    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


def owned(path: Path) -> Owner:
    return own(path, "saves into run", "another place")


@contextmanager
def other_program(
    path: Path, locks: str = "locks", fork: str = ""
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNS, str(path), locks, fork],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "owns\n"
            yield process
        finally:
            process.kill()


def refused(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        owned(path)
    assert caught.value.hint is not None
    return f"{caught.value.message}; {caught.value.hint}"


def says(path: Path, **fields: Any) -> None:
    known = {"host": socket.gethostname(), "pid": os.getpid(), "started": "1", "since": 1.5e9}
    path.write_text(json.dumps({"program": "train.py", **known, **fields}))


def test_all_of_a_process_are_one_owner_until_the_last_has_gone(path: Path) -> None:
    first, second = owned(path), owned(path)
    assert first is second
    assert path.exists()
    del first, second
    assert not path.exists()


def test_another_program_is_named_and_followed_once_it_is_killed(path: Path) -> None:
    with other_program(path) as process:
        message = refused(path)
        assert f"-c (process {process.pid} on {socket.gethostname()}, since 20" in message
        assert message.endswith(") saves into run; another place")
        process.kill()
        process.wait()
        assert path.exists()
        owned(path)
    assert not path.exists()


def test_a_program_that_ends_leaves_nothing(path: Path) -> None:
    with other_program(path) as process:
        process.communicate("")
        assert process.returncode == 0
        assert not path.exists()


def test_a_forked_child_neither_keeps_nor_ends_it(path: Path) -> None:
    with other_program(path, fork="fork") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            refused(path)
            process.kill()
            process.wait()
            owner = owned(path)  # although the child lives
        finally:
            os.kill(child, signal.SIGKILL)
        assert path.exists()
        del owner


def test_in_a_forked_child_the_parent_is_the_owner(path: Path) -> None:
    owner = owned(path)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send(refused(path))

    process = context.Process(target=child)
    process.start()
    assert f"process {os.getpid()} on " in ours.recv()
    process.join()
    process.close()
    ours.close()
    theirs.close()
    assert path.exists()
    del owner


def test_a_file_that_was_removed_is_made_again(path: Path) -> None:
    first = owned(path)
    path.unlink()
    second = owned(path)
    del first
    assert path.exists()
    del second
    assert not path.exists()


def test_who_has_lost_it_to_another_host_gets_an_error(path: Path) -> None:
    """Locks may hold on one host alone."""
    owner = owned(path)
    says(path, host="elsewhere", pid=7, what="a later version adds")
    assert "train.py (process 7 on elsewhere, since 2017-07-14 " in refused(path)
    del owner
    assert path.exists()


def test_what_was_left_under_a_lock_that_has_ended_is_taken_over(path: Path) -> None:
    for left in ("", "{", "[]", "null", '{"pid": "x"}', "[" * 9000):
        path.write_text(left)
        owned(path)
    says(path, host="elsewhere")
    owned(path)
    assert not path.exists()


@pytest.mark.usefixtures("without_locks")
class TestWithoutLocks:
    def test_of_this_host_one_that_lives_is_named(self, path: Path) -> None:
        with other_program(path, "no locks") as process:
            assert f"(process {process.pid} on" in refused(path)
            process.kill()
            process.wait()
            owned(path)

    def test_a_process_that_has_the_number_of_a_dead_one_is_not_it(self, path: Path) -> None:
        says(path, pid=1, started="0")
        owned(path)
        for pid in (1 << 40, 1 << 70, 2**22 + 1):
            says(path, pid=pid)
            owned(path)

    def test_one_of_another_host_may_live_and_the_error_says_what_to_do(self, path: Path) -> None:
        says(path, host="elsewhere", pid=7, what="a later version adds")
        message = refused(path)
        assert message.endswith(f"; if that process has ended, remove {path}")
        path.unlink()
        owned(path)

    def test_what_says_nothing_is_taken_over(self, path: Path) -> None:
        path.write_text("{")
        owned(path)


def test_something_else_in_its_place_is_an_error_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="expected a regular file"):
        owned(path)
