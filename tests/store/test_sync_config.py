"""What a synchronous optimizer is: numbers that fit each other, and what came over the wire."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import ConfigurationError
from psync.store.sync_config import MAX_TOKENS, SyncConfig
from sync_tools import config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"needed": 0}, "at least 1, got 0 and 1"),
        ({"needed": 1, "total": -1}, "at least 1, got 1 and -1"),
        ({"needed": 1, "total": MAX_TOKENS + 1}, "at most 1048576, got 1 and 1048577"),
        ({"needed": 10**30}, "expected a whole number as replicas_to_aggregate"),
        ({"needed": 2, "min_replicas": 1.0}, "expected a whole number as min_replicas, got 1.0"),
        ({"needed": 2, "strict": 1}, "expected strict to be True or False, got 1"),
        ({"needed": 2, "min_replicas": 0}, "min_replicas from 1"),
        ({"needed": 2, "min_replicas": 3}, "min_replicas from 1"),
        ({"needed": 2, "patience_s": 0}, "patience_s above 0 s"),
        ({"needed": 2, "patience_s": float("nan")}, "patience_s: expected a finite number"),
        ({"needed": 2, "patience_s": float("inf")}, "patience_s: expected a finite number"),
        ({"needed": 2, "reduction": "MEAN"}, 'expected reduction "mean" or "sum"'),
        ({"needed": 2, "sparse_divisor": "all"}, 'expected sparse_divisor "per_index" or "total"'),
        ({"needed": 2, "decay": 1.0}, "decay in"),
        ({"needed": 2, "total": 3, "deterministic": True}, "every replica in every step"),
        ({"needed": 2, "strict": True, "tensorflow_compat": True}, "unbound tokens"),
        ({"needed": 2, "deterministic": True, "tensorflow_compat": True}, "unbound tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], text: str) -> None:
    needed, total = options.pop("needed"), options.pop("total", None)
    with pytest.raises(ConfigurationError, match=text):
        config(needed, total or max(needed, 1), **options)


@pytest.mark.parametrize(
    ("needed", "total", "per_step", "allowance", "fewest"),
    [(2, 2, 2, 1, 0), (2, 3, 3, 1, 0), (3, 1, 3, 3, 2), (5, 2, 5, 3, 3), (50, 52, 52, 1, 0)],
)
def test_tokens_follow_from_replicas(
    needed: int, total: int, per_step: int, allowance: int, fewest: int
) -> None:
    given = config(needed, total)
    assert given.tokens_per_step == per_step
    assert given.allowance == allowance
    assert given.fewest_initial_tokens == fewest
    assert given.initial_tokens(-1) == fewest
    assert config(needed, total, tensorflow_compat=True).initial_tokens(-1) == needed
    assert given.initial_tokens(fewest + 3) == fewest + 3
    for too_few in {fewest - 1, -2}:
        with pytest.raises(ConfigurationError, match="too few tokens"):
            given.initial_tokens(too_few) if too_few != -1 else given.initial_tokens(-2)


def test_there_is_memory_for_all_tokens() -> None:
    assert config(2).initial_tokens(MAX_TOKENS) == MAX_TOKENS
    with pytest.raises(ConfigurationError, match="at most 1048576 initial tokens, got 1048577"):
        config(2).initial_tokens(MAX_TOKENS + 1)


def test_tokens_are_bound_where_it_says_so() -> None:
    assert not config(2).strict
    assert config(2, strict=True).strict
    assert config(2, deterministic=True).strict


def test_the_decay_begins_low_where_it_follows_the_step() -> None:
    assert config(1, decay=0.9).decay_at(0) == 0.9
    following = config(1, decay=0.9, num_updates=True)
    assert following.decay_at(1) == 2 / 11
    assert following.decay_at(1000) == 0.9


def test_it_comes_back_from_the_wire() -> None:
    given = config(2, 3, averages=((1, 4), (2, 5)), decay=0.5, patience_s=3)
    wire = given.to_config()
    wire["averages"] = [list(pair) for pair in given.averages]
    wire["global_step"] = list(given.global_step)
    assert SyncConfig.from_config(wire) == given


NAMES = SyncConfig.__struct_fields__


def test_an_error_of_a_config_on_the_wire_is_the_one_of_the_program_or_names_the_field() -> None:
    wrong = {"replicas_to_aggregate": 2, "total_num_replicas": 3, "deterministic": True}
    with pytest.raises(ConfigurationError) as here:
        config(2, 3, deterministic=True)
    with pytest.raises(ConfigurationError) as caught:
        SyncConfig.from_config(config(2).to_config() | wrong)
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)
    assert here.value.hint
    for name, value, text in [
        ("decay", "x", "decay: expected float, got str"),
        ("averages", [[1, "x"]], "averages[0][1]: expected int, got str"),
        ("optimizer", {1: 2}, "key in optimizer: expected str, got int"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            SyncConfig.from_config({**config(2).to_config(), name: value})
        assert str(caught.value) == f"a synchronous optimizer's configuration: {text}"


def test_nonsense_from_the_wire_is_refused() -> None:
    taken = []
    for name, value in itertools.product(
        NAMES, [None, b"raw", [1], {"a": 1}, -1, [[1, "x"]], True]
    ):
        with contextlib.suppress(ConfigurationError):
            SyncConfig.from_config({**config(2).to_config(), name: value})
            taken.append((name, value))
    flags = ("strict", "deterministic", "tensorflow_compat", "num_updates")
    # The contents of an optimizer are for the update rules to judge.
    assert sorted(taken) == sorted([("optimizer", {"a": 1}), *((name, True) for name in flags)])


@given(st.none() | st.integers() | st.dictionaries(st.sampled_from([*NAMES, "more"]), st.text()))
def test_anything_else_is_refused(wire: object) -> None:
    with pytest.raises(ConfigurationError, match=r"lacks fields|got"):
        SyncConfig.from_config(wire)
