"""What a task is given, and what it gets if nothing is said."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import itertools
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

import psync
from psync import optimizers
from psync.api.scopes import running_scopes
from psync.closures.scaling import Load
from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError, SerializationError
from psync.net.platform import (
    HOW_TO_MAKE_ONE,
    GivenUp,
    PerProcess,
    Platform,
    Secret,
    Workforce,
    flag,
    fresh_process,
    load_secret,
    mint_secret,
    require_secret,
)
from psync.net.task_reports import described_by, report_text
from psync.net.transport import SocketNetwork
from psync.testing.simulation.drawing import drawn
from psync.testing.simulation.run import simulate
from psync.wire.limits import Limits


def test_the_defaults_are_the_machines() -> None:
    platform = Platform(SocketNetwork())
    assert platform.secret is None
    assert platform.limits == Limits()
    assert len(platform.random_bytes(32)) == 32
    assert platform.random_bytes(32) != platform.random_bytes(32)
    assert 0.0 <= platform.uniform() < 1.0
    assert platform.threads


def test_a_task_that_starts_later_has_a_higher_incarnation() -> None:
    first, second = Platform(SocketNetwork()), Platform(SocketNetwork())
    assert 0 < first.new_incarnation() <= second.new_incarnation() < 2**63


def test_a_platform_does_not_change_and_does_not_show_its_secret() -> None:
    platform = Platform(SocketNetwork(), Secret(b"very secret, and long enough"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.secret = None  # type: ignore[misc]
    assert "very secret" not in repr(platform)


def test_who_listens_hears_of_all_tasks_that_are_given_up_until_it_stops() -> None:
    given_up, heard = GivenUp(), []
    given_up.note("a:1", "exited")
    end = given_up.listen(lambda *each: heard.append(each))
    given_up.note("b:1", "was killed")
    end()
    given_up.note("c:1", "exited")
    assert heard == [("a:1", "exited"), ("b:1", "was killed")]
    assert [given_up.reason(address) for address in ("c:1", "d:1")] == ["exited", None]


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


def test_a_flag_is_said_with_0_and_1_and_nobody_has_to_guess() -> None:
    assert [flag({"PSYNC_INSECURE": text}, "PSYNC_INSECURE") for text in ("", "0", "1")] == [
        None, False, True,
    ]  # fmt: skip
    assert flag({}, "PSYNC_INSECURE") is None
    for text in ("yes", "false", " 1"):
        with pytest.raises(ConfigurationError, match="PSYNC_INSECURE: expected 0 or 1, got"):
            flag({"PSYNC_INSECURE": text}, "PSYNC_INSECURE")


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


def count() -> Iterator[int]:
    return itertools.count(1)


def test_each_process_begins_with_a_value_of_its_own() -> None:
    numbers, names = PerProcess(count), PerProcess[list[str]](list)
    assert next(numbers()) == 1
    names().append("one")
    with fresh_process():
        assert (next(numbers()), names()) == (1, [])
        with fresh_process():
            assert next(numbers()) == 1
        assert next(numbers()) == 2
        names().append("another")
    assert (next(numbers()), names()) == (2, ["one"])


def test_what_was_is_back_after_an_error() -> None:
    numbers = PerProcess(count)
    before = numbers()
    with pytest.raises(ZeroDivisionError), fresh_process():
        raise ZeroDivisionError
    assert numbers() is before


def test_what_is_first_needed_within_begins_again_afterwards() -> None:
    with fresh_process():
        numbers = PerProcess(count)
        assert next(numbers()) == 1
    assert next(numbers()) == 1


def check_twice(of: Callable[[], object]) -> None:
    """A simulation leaves the process it runs in as it was, and begins as if nothing had run."""
    before = of()
    first = simulate(drawn(4, "sync"))
    assert of() == before
    again = simulate(drawn(4, "sync"))
    assert (again.oracle, again.trace_hash) == (first.oracle, first.trace_hash)
    assert of() == before


@pytest.mark.slow
def test_a_simulation_leaves_the_optimizers_of_its_process() -> None:
    sgd = optimizers.SGD(0.5)
    synchronous = psync.SyncReplicasOptimizer(optimizers.SGD(0.5), 2)
    check_twice(lambda: [pickle.loads(pickle.dumps(each)) is each for each in (sgd, synchronous)])
    assert (optimizers.SGD(0.5).origin, optimizers.SGD(0.5).number) == (sgd.origin, sgd.number + 4)


@pytest.mark.slow
def test_a_simulation_leaves_strategies_and_what_tasks_tell_of_themselves() -> None:
    def told() -> list[str]:
        lines = report_text("because").splitlines()
        return [line for line in lines if line.startswith(("me", "/job:", "coordinator"))]

    with described_by(lambda: ["me"]):
        check_twice(lambda: (told(), running_scopes()))
        assert told() == ["me"]


@pytest.mark.slow
def test_a_simulation_leaves_nothing_of_itself_to_be_collected() -> None:
    for works in [(), ("visited",)]:
        simulate(dataclasses.replace(drawn(4, "sync"), works=works))
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, psync.ClusterCoordinator)]


class Follower:
    def __init__(self, queued: int = 0) -> None:
        self.heard: list[tuple[dict[int, str], list[int]]] = []
        self._queued = queued

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        self.heard.append((dict(added), sorted(removed)))
        return []

    def load(self) -> Load:
        return Load(self._queued)


def test_whoever_follows_hears_of_changes_until_it_ends() -> None:
    workforce, follower = Workforce(), Follower()
    unfollow = workforce.follow(follower)
    workforce.change({2: "a:1"}, [])
    workforce.change({}, [2, 1])
    unfollow()
    unfollow()
    workforce.change({3: "a:2"}, [])
    assert follower.heard == [({}, []), ({2: "a:1"}, []), ({}, [1, 2])]


def test_whoever_comes_later_hears_what_is_different_from_the_start() -> None:
    workforce = Workforce()
    workforce.change({2: "a:1", 3: "a:2"}, [])
    workforce.change({}, [1, 3])
    workforce.change({1: "a:3"}, [])
    follower = Follower()
    workforce.follow(follower)
    assert follower.heard == [({2: "a:1", 1: "a:3"}, [3])]


def test_the_newest_says_how_much_there_is_to_do() -> None:
    workforce = Workforce()
    assert workforce.load() == Load()
    workforce.follow(Follower(1))
    unfollow = workforce.follow(Follower(2))
    assert workforce.load() == Load(2)
    unfollow()
    assert workforce.load() == Load(1)


def test_a_cluster_that_was_described_earlier_has_the_workers_of_now() -> None:
    workforce = Workforce()
    cluster = ClusterSpec({"ps": ["p:1"], "worker": ["w:7", "w:8", "w:9"]})
    assert workforce.present(cluster) == cluster
    workforce.change({}, [1, 2])
    workforce.change({2: "w:6"}, [])
    assert workforce.present(cluster).as_dict() == {
        "ps": cluster.as_dict()["ps"], "worker": {0: "w:7", 2: "w:6"},
    }  # fmt: skip
    assert workforce.present(ClusterSpec({"ps": ["p:1"]})).as_dict()["worker"] == {2: "w:6"}
