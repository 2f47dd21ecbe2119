"""Workers that come and leave: coordinators that run hear of it, and those that start later."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from psync.closures.membership import Load
from psync.cluster import ClusterSpec
from psync.net.workforce import Workforce


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
