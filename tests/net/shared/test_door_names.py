"""The names of doors, and the sockets that bear them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.net.shared import door_names
from psync.net.shared.door_names import door_beside, may_share, name_of_door, shut


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.mark.parametrize(("text", "may"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_tasks_may_share_memory_unless_told_not_to(text: str | None, may: bool) -> None:
    assert may_share({} if text is None else {"PSYNC_SHARED_MEMORY": text}) is may


def test_another_value_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="PSYNC_SHARED_MEMORY: expected 0 or 1, got 'no'"):
        may_share({"PSYNC_SHARED_MEMORY": "no"})


def test_its_name_says_who_and_where() -> None:
    uid = os.geteuid()
    assert name_of_door("127.0.0.1", 5) == f"\0psync/{uid}/127.0.0.1:5"
    assert name_of_door("::1", 5) == f"\0psync/{uid}/::1:5"


def test_that_of_a_unix_socket_is_its_files(tmp_path: Path) -> None:
    """Two containers may have other files of the same path, and one file may have two paths."""
    path = tmp_path / "x"
    path.touch()
    name = name_of_door(str(path), None)
    (tmp_path / "link").symlink_to(path)
    assert name_of_door(str(tmp_path / "link"), None) == name
    other = tmp_path / "y"
    other.touch()
    other.replace(path)
    assert name_of_door(str(path), None) != name
    with pytest.raises(FileNotFoundError):
        name_of_door(str(other), None)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_there_is_one_beside_an_address(host: str) -> None:
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]
        door = door_beside(listening)
        assert door is not None
        known_as = "*" if host == "0.0.0.0" else host
        assert door.getsockname().decode() == name_of_door(known_as, port)
        assert door_beside(listening) is None  # it is there already
        shut(door)
        again = door_beside(listening)
        assert again is not None
        again.close()


def test_without_descriptors_there_is_none(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(door_names.socket, "socket", fails)
    assert door_beside(listening) is None
