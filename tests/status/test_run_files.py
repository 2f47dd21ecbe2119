"""Run files: where they lie, who can read them, and which run is found."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from psync.errors import ConfigurationError
from psync.status.run_files import (
    Run,
    chosen_run,
    directory_of_runs,
    has_ended,
    make_directory,
    read_run,
    run_file,
    socket_of,
    take_away_ended,
)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: that of a Unix socket may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def run_of(directory: Path, name: str, started: float = 1.0) -> Run:
    return Run(7, started, name, f"unix:{directory / name}.sock", "ab" * 32)


def listening(run: Run) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(run.address.removeprefix("unix:"))
    sock.listen()
    return sock


# The directory.


def test_it_is_in_the_runtime_directory_of_this_user_or_in_that_for_temporary_files(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(runtime: object) -> Path:
        return directory_of_runs({"XDG_RUNTIME_DIR": str(runtime)})

    assert found(directory) == directory / "psync"
    elsewhere = Path(tempfile.gettempdir(), f"psync-{os.getuid()}")
    assert [found(each) for each in ("", "/nonexistent", "relative")] == [elsewhere] * 3
    assert directory_of_runs({}) == elsewhere
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert found(directory) == Path(tempfile.gettempdir(), f"psync-{other}")


def test_nobody_else_can_enter_it(directory: Path) -> None:
    make_directory(directory / "psync")
    make_directory(directory / "psync")  # it may be there
    assert stat.S_IMODE((directory / "psync").stat().st_mode) == 0o700
    (directory / "link").symlink_to("psync")
    (directory / "open").mkdir()
    (directory / "open").chmod(0o755)
    for name in ("link", "open"):
        with pytest.raises(PermissionError, match="owned by this user, with mode 0700"):
            make_directory(directory / name)


# Files.


def test_a_run_file_says_what_it_was_given_and_goes_with_its_context(directory: Path) -> None:
    path, run = directory / "7.json", Run(7, 1.0, "train.py", f"unix:{directory}/7.sock", "ab")
    with run_file(run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_run(path) == run
        assert str(run) == "train.py (process 7)"
    assert list(directory.iterdir()) == []
    with run_file(run):
        listening(run).close()  # its socket goes with it
    assert list(directory.iterdir()) == []
    with run_file(run):
        path.unlink()  # somebody has tidied up


def test_one_that_cannot_be_written_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"), run_file(run_of(directory, "a")):
        pass
    assert list(directory.iterdir()) == []


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_that_is_not_there_says_so(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"7\.json: there is no such file: has the run"):
        read_run(directory / "7.json")


def test_a_file_that_others_can_read_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="users other than its owner can read"):
        read_run(written(directory / "7.json", "{}", 0o644))


FOREIGN = json.dumps(
    {"schema": 1, "pid": "x", "started": "y", "program": 1, "address": 7, "token": None}
)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "pid": 3}', FOREIGN, " " * (1 << 17)]
)
def test_what_is_no_run_file_is_refused(directory: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"7\.json: expected a run file of psync"):
        read_run(written(directory / "7.json", text))


def test_a_run_file_of_another_version_says_so(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a run file of schema 1"):
        read_run(written(directory / "7.json", '{"schema": 9}'))


def test_what_a_later_version_adds_is_passed_over(directory: Path) -> None:
    path, run = directory / "a.json", run_of(directory, "a")
    with run_file(run):
        written(path, json.dumps({**json.loads(path.read_text()), "colour": "red"}))
        assert read_run(path) == run


# Which run.


def test_the_only_run_that_is_there_is_found(directory: Path) -> None:
    runs = [run_of(directory, name, at) for at, name in enumerate(("a", "b", "c"))]
    with run_file(runs[1]), run_file(runs[0]), run_file(runs[2]), listening(runs[1]):
        written(directory / "w.json", "nonsense")
        assert has_ended(runs[2])
        assert chosen_run(directory=directory) == runs[1]


def test_of_several_one_is_chosen_by_id_process_or_name(directory: Path) -> None:
    runs = [
        Run(pid, pid, name, f"unix:{directory}/{pid}-1f.sock", "ab")
        for pid, name in ((7, "train.py"), (8, "train.py"), (9, "other.py"))
    ]
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run_file(run))
            stack.enter_context(listening(run))
        for named, run in (("7-1f", runs[0]), ("8", runs[1]), ("other.py", runs[2])):
            assert chosen_run(named, directory) == run
        assert chosen_run("other", directory) == runs[2]
        assert chosen_run(str(directory / "7-1f.json"), directory) == runs[0]
        for named, message in (
            (None, "expected one program, and 3 programs of this user run"),
            ("train.py", "expected one program, and 2 running programs match 'train.py'"),
            ("nobody", "expected one program, and no running programs match 'nobody'"),
        ):
            with pytest.raises(ConfigurationError) as caught:
                chosen_run(named, directory)
            assert caught.value.message == message
            assert caught.value.hint is not None
            first, *lines = caught.value.hint.splitlines()
            assert "--run" in first
            assert [line.partition(", for ")[0] for line in lines] == [
                "  9-1f  other.py (process 9)",
                "  8-1f  train.py (process 8)",
                "  7-1f  train.py (process 7)",
            ]


def test_where_only_ended_ones_are_left_the_newest_is_named(directory: Path) -> None:
    with run_file(run_of(directory, "train.py")):
        with pytest.raises(ConfigurationError, match=r"the newest run, train.py .*, has ended"):
            chosen_run(directory=directory)


def test_where_there_is_none_the_place_is_named(directory: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"no program of this user is running .*{directory}"
    ):
        chosen_run(directory=directory)
    with pytest.raises(ConfigurationError, match="no program of this user is running"):
        chosen_run(directory=directory / "nowhere")


def test_a_directory_that_others_can_enter_is_not_looked_into(directory: Path) -> None:
    directory.chmod(0o755)
    with pytest.raises(
        ConfigurationError, match=f"{directory}: expected a directory owned by this user"
    ):
        chosen_run(directory=directory)


def test_what_killed_runs_have_left_is_taken_away(directory: Path) -> None:
    killed, alive = run_of(directory, "killed"), run_of(directory, "alive")
    listening(killed).close()
    with run_file(killed), run_file(alive), listening(alive):
        take_away_ended(directory)
        assert {path.name for path in directory.iterdir()} == {"alive.json", "alive.sock"}


def test_what_lies_elsewhere_is_left_alone(directory: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.sock"
    precious.write_text("not a socket, and nobody listens there")
    said = {"pid": 7, "started": 1.0, "program": "a", "address": f"unix:{precious}", "token": "ab"}
    written(directory / "x.json", json.dumps({"schema": 1, **said}))
    take_away_ended(directory)
    assert list(directory.iterdir()) == []
    assert precious.exists()


def test_files_of_others_do_not_hide_a_run(directory: Path) -> None:
    written(directory / "foreign.json", FOREIGN)
    os.mkfifo(directory / "pipe.json", 0o600)
    (directory / "link.json").symlink_to("/etc/passwd")
    run = run_of(directory, "a")
    with run_file(run), listening(run):
        assert chosen_run(directory=directory) == run


def test_sockets_without_a_file_are_taken_away_when_they_are_old(directory: Path) -> None:
    runs = {name: run_of(directory, name) for name in ("old", "new", "alive")}
    for name, run in runs.items():
        sock = listening(run)
        if name != "new":
            os.utime(socket_of(run), (1.0, 1.0))
        if name != "alive":
            sock.close()
        else:
            alive = sock
    take_away_ended(directory)
    assert {path.name for path in directory.iterdir()} == {"new.sock", "alive.sock"}
    alive.close()


def test_a_socket_of_which_nothing_is_known_is_not_ended(directory: Path) -> None:
    long = Run(7, 1.0, "a", f"unix:{directory}/{'x' * 200}", "ab")
    assert not has_ended(long)
