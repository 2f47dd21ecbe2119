"""The secret of a cluster: where it comes from, and that it shows nowhere."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from psync.errors import ConfigurationError, SerializationError
from psync.net.secret import HOW_TO_MAKE_ONE, Secret, load_secret, mint_secret, require_secret

TEXT = "correct horse battery staple"


def private_file(directory: Path, content: bytes = TEXT.encode() + b"\n") -> Path:
    path = directory / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def refuse_to_warn(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def test_secret_shows_in_no_text() -> None:
    secret = Secret(TEXT.encode())
    texts = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", f"{[secret]}"]
    assert [text for text in texts if "horse" in text] == []
    assert repr(secret) == "Secret(…)"


def test_secret_refuses_to_be_pickled() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(
            SerializationError, match="the cluster's secret cannot be pickled or copied"
        ):
            pickle.dumps({"key": Secret(TEXT.encode())}, protocol)


def test_secret_refuses_to_be_copied() -> None:
    with pytest.raises(SerializationError, match="a step must not use it"):
        copy.deepcopy(Secret(TEXT.encode()))


def test_secrets_are_equal_by_value_and_not_hashable() -> None:
    assert Secret(TEXT.encode()) == Secret(TEXT.encode())
    assert Secret(TEXT.encode()) != Secret(TEXT.encode() + b".")
    assert Secret(TEXT.encode()) != TEXT.encode()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Secret(TEXT.encode()))


def test_secret_has_at_least_sixteen_bytes() -> None:
    assert Secret(b"x" * 16).value == b"x" * 16
    with pytest.raises(ConfigurationError) as caught:
        Secret(b"x" * 15)
    assert caught.value.message == "the secret: expected at least 16 bytes, got 15"
    assert caught.value.hint == HOW_TO_MAKE_ONE


def test_minted_secrets_are_long_and_differ() -> None:
    first, second = mint_secret(), mint_secret()
    assert first != second
    assert load_secret({"PSYNC_SECRET": first}) == Secret(first.encode())
    assert len(bytes.fromhex(first)) == 32


def test_no_variable_means_no_secret() -> None:
    assert load_secret({}) is None


def test_secret_comes_from_the_environment_first(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    loaded = load_secret({"PSYNC_SECRET": f" {TEXT}\n", "PSYNC_SECRET_FILE": missing})
    assert loaded == Secret(TEXT.encode())


def test_secret_comes_from_a_private_file(tmp_path: Path) -> None:
    path = private_file(tmp_path)
    assert load_secret({"PSYNC_SECRET_FILE": str(path)}) == Secret(TEXT.encode())


def test_empty_or_short_variable_is_an_error() -> None:
    for text in ["", "   ", "short"]:
        with pytest.raises(
            ConfigurationError, match="PSYNC_SECRET: expected at least 16 bytes, got"
        ):
            load_secret({"PSYNC_SECRET": text})


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n"])
def test_empty_or_short_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = private_file(tmp_path, content)
    with pytest.raises(ConfigurationError) as caught:
        load_secret({"PSYNC_SECRET_FILE": str(path)})
    size = len(content.strip())
    assert caught.value.message == (
        f"PSYNC_SECRET_FILE ({path}): expected at least 16 bytes, got {size}"
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = private_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError) as caught:
        load_secret({"PSYNC_SECRET_FILE": str(path)})
    assert caught.value.message == (
        f"PSYNC_SECRET_FILE ({path}): users other than its owner can read or change it "
        f"(mode {mode:04o})"
    )
    assert caught.value.hint == f"chmod 600 {path}"


def test_missing_file_is_an_error_and_nothing_else_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(ConfigurationError) as caught:
        load_secret({"PSYNC_SECRET_FILE": str(path)})
    assert caught.value.message == (
        f"PSYNC_SECRET_FILE ({path}): cannot be read: No such file or directory"
    )


def test_directory_and_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, text in [(tmp_path, "Is a directory"), (pipe, "expected a file")]:
        with pytest.raises(ConfigurationError, match=text):
            load_secret({"PSYNC_SECRET_FILE": str(path)})


def test_path_that_is_none_is_an_error() -> None:
    for path in ["", "a\0b"]:
        with pytest.raises(ConfigurationError, match="cannot be read"):
            load_secret({"PSYNC_SECRET_FILE": path})


def test_secret_is_used_where_there_is_one() -> None:
    for insecure in [False, True]:
        secret = Secret(TEXT.encode())
        assert require_secret(secret, insecure, "10.0.0.1:2222", refuse_to_warn) is secret


def test_task_without_secret_is_refused_with_three_ways_out() -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_secret(None, False, "10.0.0.1:2222", refuse_to_warn)
    assert caught.value.message == (
        "no secret is set, so everybody who can reach it could run code on this task "
        "(10.0.0.1:2222)"
    )
    hint = caught.value.hint or ""
    for way in ("PSYNC_SECRET,", "PSYNC_SECRET_FILE", "--insecure", "PSYNC_INSECURE=1"):
        assert way in hint


def test_running_without_secret_says_what_it_means() -> None:
    for address, who in [
        ("127.0.0.1:2222", "every user of this machine"),
        ("unix:/run/psync/ps", "every user of this machine"),
        ("ps-0.cluster:2222", "everybody who can reach it"),
    ]:
        warnings: list[str] = []
        assert require_secret(None, True, address, warnings.append) is None
        assert warnings == [
            f"running without a secret: {who} can run code on this task ({address})"
        ]
        with pytest.raises(ConfigurationError, match=who):
            require_secret(None, False, address, refuse_to_warn)
