"""What a task is given, and what it gets if nothing is said."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest

import psync
from psync import optimizers
from psync.api.scopes import running_scopes
from psync.closures.scaling import Load
from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError
from psync.net.platform import GivenUp, PerProcess, Platform, Workforce, flag
from psync.net.secret import Secret
from psync.net.task_reports import add_description, report_text
from psync.net.transport import SocketNetwork
from psync.testing.seams import fresh_process
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


def test_a_flag_is_said_with_0_and_1_and_nobody_has_to_guess() -> None:
    assert [flag({"PSYNC_INSECURE": text}, "PSYNC_INSECURE") for text in ("", "0", "1")] == [
        None, False, True,
    ]  # fmt: skip
    assert flag({}, "PSYNC_INSECURE") is None
    for text in ("yes", "false", " 1"):
        with pytest.raises(ConfigurationError, match="PSYNC_INSECURE: expected 0 or 1, got"):
            flag({"PSYNC_INSECURE": text}, "PSYNC_INSECURE")


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

    remove = add_description(lambda: ["me"])
    check_twice(lambda: (told(), running_scopes()))
    assert told() == ["me"]
    remove()


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
