"""All interleavings of two workers and two ps tasks, with faults: see ``helpers/interleavings.py``.

A rule that is broken on purpose is found with one of the shortest histories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asked import Asked, peer_of
from interleavings import Cluster, World, explore, played
from psync.errors import ConfigurationError, RemoteProtocolError
from psync.sync import step_closer
from psync.sync.step_closer import StepCloser
from psync.sync.steps import Group
from psync.testing.simulation.mutants import MUTANTS
from psync.testing.simulation.tight import replaced
from psync.wire.messages import Held
from sync_tools import GROUP, config

SMALL: list[dict[str, Any]] = [
    {"needed": 2, "closures": 2, "late": True},
    {"needed": 2, "closures": 2, "failovers": 1},
    {"needed": 1, "closures": 2, "losses": 1},
    {"needed": 2, "closures": 2, "cancels": 1},
    {"needed": 2, "closures": 1, "deaths": 1},
    {"needed": 1, "closures": 3, "narrow": 1},
    {"needed": 1, "closures": 2, "narrow": 1, "failovers": 1},
]
LARGER: list[dict[str, Any]] = [
    {"needed": needed, "closures": closures, **faults}
    for needed in (1, 2)
    for closures, faults in (
        (3, {"failovers": 1}),
        (3, {"losses": 1}),
        (2, {"deaths": 1}),
        (2, {"cancels": 1, "losses": 1}),
        (2, {"cancels": 1, "failovers": 1}),
        (2, {"failovers": 1, "losses": 1}),
        (1, {"deaths": 1, "failovers": 1}),
        (3, {"narrow": 1, "losses": 1}),
        (3, {"narrow": 1, "cancels": 1, "late": True}),
        (2, {"narrow": 1, "deaths": 1}),
    )
]


def whole(cluster: dict[str, Any]) -> None:
    found = explore(Cluster(**cluster))
    assert not found.violation, "\n    ".join([found.violation, *found.history])
    assert found.ends > 1


@pytest.mark.parametrize("cluster", SMALL, ids=str)
def test_the_rules_hold_in_whatever_order_it_happens(cluster: dict[str, Any]) -> None:
    whole(cluster)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cluster", LARGER, ids=str)
def test_they_hold_for_longer_and_with_more_faults(cluster: dict[str, Any]) -> None:
    whole(cluster)


def test_a_group_has_the_configuration_that_it_had_at_first() -> None:
    cluster = Cluster(1, 1)
    with played():
        known = World(cluster, cluster.start).ps(0).known
        with pytest.raises(ConfigurationError, match="a different configuration than at first"):
            known(GROUP, config(2).to_config())


def test_a_ps_says_what_it_holds_itself() -> None:
    cluster, peer = Cluster(1, 1), peer_of(("/job:ps/task:1", 1))
    with played():
        heard = World(cluster, cluster.start).ps(0).heard
        held = Asked(peer, Held(2, [(GROUP, "/job:worker/task:0", 1, 1, 0)]))
        with pytest.raises(RemoteProtocolError, match="ps/task:1 says what ps 2 holds"):
            heard(held)


# Broken rules: what takes the place of one, see ``psync.testing.simulation.wrong``.


def waits_for_no_part(original: Callable[..., Any]) -> Any:
    def took(self: StepCloser, request: Any, part: Any) -> None:
        original(self, request, part)
        self._go_on({part.key} & self._here.keys())

    return took


def finds_all_new(original: Callable[..., Any]) -> Any:
    def judge(self: Group, push: Any, *more: object) -> Any:
        return original(self, msgspec.structs.replace(push, local_step=self.step), *more)

    return judge


def puts_tokens_at_once(original: Callable[..., Any]) -> Any:
    def close(self: Group, **how: Any) -> Any:
        made = original(self, **how)
        self.tokens.put(self.step, self.config.tokens_per_step)
        return made

    return close


def forgets_who_waits(_: Callable[..., Any]) -> Any:
    def go_on(self: StepCloser, keys: list[Any]) -> None:
        for key in keys:
            del self._here[key]

    return go_on


ONE, TWO = {"needed": 1, "closures": 1}, {"needed": 1, "closures": 2}

BROKEN: dict[str, tuple[Any, dict[str, int], str]] = {
    "a push counts when all its parts are there": (
        [(StepCloser, "took", waits_for_no_part)],
        ONE, "which has not come in yet",
    ),
    "there are tokens when all ps tasks have applied a step": (
        [(Group, "close", puts_tokens_at_once)], TWO, "too early",
    ),
    "a push that waits for parts is judged when its step is closed": (
        [(StepCloser, "_go_on", forgets_who_waits)], TWO, "closures [1] never end",
    ),
    "a push whose values are old is stale": (
        [(Group, "judge", finds_all_new)], TWO, "which has not come in yet",
    ),
    "a promoted ps 0 carries the step that is outgoing": (
        [(StepCloser, "serve", lambda _: lambda _: None)],
        ONE | {"failovers": 1}, "closures [0] never end",
    ),
    "other ps tasks are told of steps once something of the group is there": (
        [(step_closer, "NOWHERE", lambda _: -1)], ONE, "closures [0] never end",
    ),
    **{
        MUTANTS[name].breaks: (MUTANTS[name].where, cluster, said)
        for name, cluster, said in (
            ("fence_drops_parts", ONE | {"deaths": 1}, "which has not come in yet"),
            ("held_is_told_once", TWO | {"losses": 1}, "closures [0, 1] never end"),
            ("parts_stay", TWO, "keeps parts"),
            ("step_raised_again", ONE | {"losses": 1}, "which has not come in yet"),
            ("sync_second_run_counts", ONE | {"deaths": 1}, "a closure counts twice"),
            ("reserved_for_all", TWO | {"closures": 3, "narrow": 2}, "too early"),
            ("unnamed_is_summed", TWO, "other pushes are in the values"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str) -> None:
    changes, cluster, said = BROKEN[rule]
    with replaced(changes):
        found = explore(Cluster(**cluster))
    assert said in found.violation, "\n    ".join([found.violation, *found.history])
