"""Bundles: small shards that are pushed together; that they are shows in the number of views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psync.store.bundles import PATIENCE, SMALL_SHARD_BYTES, runs_of

from psync.errors import BusyError
from psync.numerics.memory import BLOCK_BYTES
from psync.numerics.rules import SGD, Adam, Lamb, RuleOptions, UpdateRule
from psync.specs import ShardSpec, dtype_of
from psync.store.ledger import Ledger
from psync.store.previous_store import FormerStore
from psync.store.reattach import Orders
from psync.store.shards import Key
from psync.store.snapshot import freeze, load_snapshot
from psync.store.store import Adjacent, ShardStore, Work
from rule_table import RULES

PS = "/job:ps/task:0"
BUNDLED = {name: rule for name, rule in RULES.items() if not isinstance(rule, Lamb)}
SIZES = (7, 1, 64, 33, 5)  # neither is a multiple of what a CPU does at once


def key(number: int) -> Key:
    return number, 0


def keys_of(numbers: Sequence[int]) -> tuple[Key, ...]:
    return tuple(map(key, numbers))


def store_with(
    *rules: UpdateRule, sizes: Sequence[int] = SIZES, dtype: str = "float32"
) -> ShardStore:
    store = ShardStore(PS)
    for number, size in enumerate(sizes):
        value = np.linspace(-2, 2, size).astype(dtype_of(dtype))
        store.create(ShardSpec(f"v{number}", number, 0, 0, (size,), dtype, 0), value)
    for number, rule in enumerate(rules):
        store.define_optimizer(number, rule.to_config())
    return store


def gradients(store: ShardStore, numbers: Sequence[int], seed: int) -> Adjacent:
    """What a push has for these variables, side by side as it comes in."""
    sizes = [store.spec(key(number)).size for number in numbers]
    dtype = dtype_of(store.spec(key(numbers[0])).dtype)
    whole = np.random.default_rng(seed).standard_normal(sum(sizes)).astype(dtype)
    ends = np.cumsum(sizes).tolist()
    return Adjacent(whole, [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)])


def push(store: ShardStore, numbers: Sequence[int], step: int = 0, optimizer: int = 0) -> None:
    store.apply_at_once(optimizer, keys_of(numbers), gradients(store, numbers, step), step)


def one_by_one(
    store: ShardStore, numbers: Sequence[int], step: int = 0, optimizer: int = 0
) -> None:
    for number, gradient in zip(numbers, gradients(store, numbers, step), strict=True):
        run(store.apply_checked(optimizer, key(number), gradient, step))


def run(work: Work) -> None:
    for _ in work:
        pass


def views(store: ShardStore, numbers: Sequence[int]) -> int:
    return len(store.read_together(keys_of(numbers)))


def contents(store: ShardStore) -> dict[tuple[Key, int, str], bytes]:
    """All that a store has of its shards, as it is read shard by shard."""
    found = {}
    for each in store.keys():
        found[each, -1, ""] = b"".join(store.read(each))
        for number, optimizer in store.optimizers().items():
            for name in optimizer.rule.slot_names():
                found[each, number, name] = b"".join(store.read_slot(each, number, name))
    return found


ALL = range(len(SIZES))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", BUNDLED)
def test_all_bits_are_those_of_one_shard_after_the_other(name: str, dtype: str) -> None:
    together = store_with(BUNDLED[name], dtype=dtype)
    apart = store_with(BUNDLED[name], dtype=dtype)
    for step in range(12):
        push(together, ALL, step)
        one_by_one(apart, ALL, step)
        assert contents(together) == contents(apart)
    assert views(together, ALL) == 1
    assert together.version(key(0)) == 12
    assert together.statistics()["applies"] == apart.statistics()["applies"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_mean_of_several_pushes_has_the_same_bits_too(reduction: str) -> None:
    stores = together, apart = store_with(Adam(0.1)), store_with(Adam(0.1))
    for step in range(5):
        pushes = [gradients(together, ALL, 3 * step + n) for n in range(3)]
        for store, each in zip(stores, (pushes, [list(push) for push in pushes]), strict=True):
            store.apply_mean_at_once(0, keys_of(ALL), each, (1, 2, 0.5), step, reduction)  # type: ignore[arg-type]
        assert contents(together) == contents(apart)
    assert (views(together, ALL), views(apart, ALL)) == (1, len(SIZES))


def test_what_was_read_of_a_shard_stays_as_it_is_while_others_are_updated() -> None:
    store = store_with(SGD(0.1, momentum=0.9))
    push(store, ALL)
    before = contents(store)
    held = store.read(key(2))
    slot = store.read_slot(key(4), 0, "momentum")
    push(store, ALL, 1)
    run(store.assign(key(2), "add", np.ones(SIZES[2], np.float32)))
    one_by_one(store, [4], 2)
    push(store, ALL, 3)
    assert b"".join(held) == before[key(2), -1, ""]
    assert b"".join(slot) == before[key(4), 0, "momentum"]
    assert contents(store) != before


def test_a_bundle_that_nobody_sees_is_updated_in_place() -> None:
    store = store_with(Adam(0.1))
    push(store, ALL)
    copies = store.statistics()["copies"]
    for step in range(1, 4):
        push(store, ALL, step)
        one_by_one(store, ALL, step)
    assert store.statistics()["copies"] == copies
    held = store.read_together(keys_of(ALL))
    push(store, ALL, 4)
    assert store.statistics()["copies"] == copies + 1  # the values; nobody has the slots
    del held
    push(store, ALL, 5)
    assert store.statistics()["copies"] == copies + 1
    assert views(store, ALL) == 1


def test_shards_that_are_pushed_one_by_one_stay_in_their_bundle() -> None:
    store = store_with(SGD(0.1))
    push(store, ALL)
    lists = list(gradients(store, ALL, 1))
    store.apply_at_once(0, keys_of(ALL), lists, 1)
    assert views(store, ALL) == 1


def test_some_of_a_bundle_side_by_side_are_one_view() -> None:
    store = store_with(SGD(0.1))
    push(store, ALL)
    for some, count in (([0, 1, 2], 1), ([1, 2, 3], 1), ([0, 1, 3, 4], 2), ([4, 3], 2)):
        assert views(store, some) == count
        expected = b"".join(b"".join(store.read(key(number))) for number in some)
        assert b"".join(store.read_together(keys_of(some))) == expected


def test_a_shard_that_is_written_while_somebody_reads_leaves_and_comes_back() -> None:
    store = store_with(SGD(0.1))
    push(store, ALL)
    held = store.read(key(0))
    run(store.assign(key(1), "assign", np.full(SIZES[1], 5, np.float32)))
    assert views(store, ALL) == len(SIZES)
    del held
    push(store, ALL)
    assert views(store, ALL) == 1


def test_a_bundle_has_patience_with_pushes_of_some_of_its_shards() -> None:
    store = store_with(SGD(0.1))
    push(store, ALL)
    for _ in range(2):
        for _ in range(PATIENCE - 1):
            push(store, [1, 2])
        push(store, ALL)
        assert views(store, ALL) == 1
    for _ in range(PATIENCE):
        push(store, [1, 2])
    assert views(store, [1, 2]) == 1
    assert views(store, ALL) == 4  # the others have blocks of their own again


def test_sets_that_overlap_and_take_turns_do_not_take_each_others_shards() -> None:
    store = store_with(SGD(0.1))
    for _ in range(3 * PATIENCE):
        push(store, [0, 1, 2])
        push(store, [2, 3])
    assert views(store, [0, 1, 2]) == 1


def test_large_shards_and_other_dtypes_are_beside_bundles() -> None:
    large = SMALL_SHARD_BYTES // 4 + 1
    store = store_with(SGD(0.1), sizes=(5, 6, large, 7, 8))
    apart = store_with(SGD(0.1), sizes=(5, 6, large, 7, 8))
    push(store, range(5))
    one_by_one(apart, range(5))
    assert contents(store) == contents(apart)
    assert views(store, range(5)) == 3


def test_a_bundle_is_no_larger_than_a_block() -> None:
    most = SMALL_SHARD_BYTES // 4
    store = store_with(SGD(0.1), sizes=[most] * 20)
    push(store, range(20))
    found = store.read_together(keys_of(range(20)))
    assert [len(view) for view in found] == [BLOCK_BYTES, 4 * SMALL_SHARD_BYTES]


def test_an_empty_shard_is_in_no_bundle() -> None:
    store = store_with(SGD(0.1), sizes=(3, 0, 4, 5))
    push(store, range(4))
    assert views(store, range(4)) == 2  # an empty one has no view


@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1).with_options(RuleOptions(gradient_accumulation_steps=2)),
        SGD(0.1).with_options(RuleOptions(weight_decay=0.1, excluded_words=("v1",))),
        RULES["lamb"],
    ],
    ids=["accumulation", "exclusion", "layerwise"],
)
def test_what_differs_from_variable_to_variable_is_not_bundled(rule: UpdateRule) -> None:
    store, apart = store_with(rule), store_with(rule)
    for step in range(4):
        push(store, ALL, step)
        one_by_one(apart, ALL, step)
    assert contents(store) == contents(apart)
    assert views(store, ALL) == len(SIZES)


def test_what_differs_from_variable_to_variable_is_applied_to_bundles_of_another_optimizer() -> (
    None
):
    rules = Adam(0.1), RULES["lamb"]
    store, apart = store_with(*rules), store_with(*rules)
    for step in range(4):
        for optimizer in range(2):
            push(store, ALL, step, optimizer)
            one_by_one(apart, ALL, step, optimizer)
    assert contents(store) == contents(apart)
    assert views(store, ALL) == 1


def test_an_update_under_way_in_one_shard_keeps_all_of_the_bundle() -> None:
    store = store_with(SGD(0.1))
    push(store, ALL)
    before = contents(store)
    work = store.assign(key(3), "assign", np.ones(SIZES[3], np.float32))
    with pytest.raises(BusyError, match="v3"):
        push(store, ALL, 1)
    with pytest.raises(BusyError, match="v3"):
        store.read_together(keys_of(ALL))
    assert views(store, [0, 1, 2]) == 1
    run(work)
    assert [each for each in before if before[each] != contents(store)[each]] == [(key(3), -1, "")]
    push(store, ALL, 1)


def test_rows_of_a_table_in_a_bundle_are_pushed_and_read_as_ever() -> None:
    rows, values = np.array([1]), np.full((1, 3), 2, np.float32)
    stores = [ShardStore(PS), ShardStore(PS)]
    for store, do in zip(stores, (push, one_by_one), strict=True):
        for number in range(4):
            store.create(ShardSpec(f"t{number}", number, 0, 0, (4, 3), "float32", 0), fill=1)
        store.define_optimizer(0, Adam(0.1).to_config())
        do(store, range(4))
        run(store.apply_rows(0, key(2), rows, values, 1))
        do(store, range(4), 2)
        out = np.empty((1, 3), np.float32)
        run(store.read_rows(key(2), rows, out.reshape(-1).view(np.uint8)))
        assert out.tobytes() == b"".join(store.read(key(2)))[12:24]
    assert contents(stores[0]) == contents(stores[1])
    assert (views(stores[0], range(4)), views(stores[1], range(4))) == (3, 4)


def test_memory_of_a_bundle_that_is_no_more_is_used_again() -> None:
    sizes = [4096 // 4] * 4
    store = store_with(Adam(0.1), sizes=sizes)
    for step in range(3 * PATIENCE):
        push(store, range(step % 2, 3 + step % 2), step)
    before = store.statistics()["pool"]["misses"]
    for step in range(20 * PATIENCE):
        push(store, range(4) if step // (2 * PATIENCE) % 2 else range(1, 3), step)
    assert store.statistics()["pool"]["misses"] - before < 2 * PATIENCE


def test_what_is_frozen_stays_and_is_restored_shard_by_shard() -> None:
    store = store_with(Adam(0.1))
    push(store, ALL)
    frozen = freeze(store, Ledger(), lambda answer: b"")
    before = contents(store)
    push(store, ALL, 1)
    restored = ShardStore(PS)
    loaded = load_snapshot(frozen.state, restored, Ledger(), lambda _: None)
    for place in loaded.wanted():
        for _ in loaded.write(place, 0, memoryview(b"".join(frozen.views(place)))):
            pass
    assert contents(restored) == before
    push(restored, ALL, 1)
    assert contents(restored) == contents(store)
    assert views(restored, ALL) == 1


def test_shards_of_a_bundle_are_adopted_with_their_slots() -> None:
    store = store_with(Adam(0.1))
    push(store, ALL)
    before = contents(store)
    shards, optimizers = store.release()
    assert store.keys() == []
    next_store = ShardStore(PS)
    for shard in shards[1:]:
        next_store.take_up(shard)
    next_store.take_up_optimizer(0, optimizers[0])
    kept = {each: data for each, data in before.items() if each[0] != key(0)}
    assert contents(next_store) == kept
    push(next_store, ALL[1:], 1)
    one_by_one(store_with(Adam(0.1)), ALL, 1)
    assert views(next_store, ALL[1:]) == 1


OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(["push", "push", "mean"]),
        st.lists(st.sampled_from(ALL), unique=True, min_size=1),
        st.integers(0, 1),
    ),
    st.tuples(st.sampled_from(["all"]), st.just(list(ALL)), st.integers(0, 1)),
    st.tuples(
        st.sampled_from(["assign", "average", "slot", "hold", "release"]),
        st.lists(st.sampled_from(ALL), unique=True, min_size=2, max_size=2),
        st.integers(0, 1),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_whatever_is_done_a_store_with_bundles_has_what_one_without_has(
    operations: list[tuple[str, list[int], int]],
) -> None:
    sizes = (4, 9, 4, 4, 5)
    rules = SGD(0.1, momentum=0.5), Adam(0.01)
    stores = bundled, plain = [store_with(*rules, sizes=sizes) for _ in range(2)]
    held: list[tuple[list[memoryview], bytes]] = []
    for step, (what, numbers, optimizer) in enumerate(operations):
        first = key(numbers[0])
        if what in ("push", "all"):
            push(bundled, numbers, step, optimizer)
            one_by_one(plain, numbers, step, optimizer)
        elif what == "mean":
            pushes = [gradients(bundled, numbers, step + n) for n in range(2)]
            for store, each in zip(stores, (pushes, list(map(list, pushes))), strict=True):
                store.apply_mean_at_once(optimizer, keys_of(numbers), each, (1, 3), step)
        elif what == "hold":
            views_now = bundled.read_together(keys_of(numbers))
            held.append((views_now, b"".join(views_now)))
        elif what == "release":
            held = held[1:]
        else:
            for store in stores:
                run(_changed(store, what, first, optimizer))
        assert contents(bundled) == contents(plain)
        assert all(b"".join(seen) == then for seen, then in held)
    assert all(bundled.version(each) == plain.version(each) for each in bundled.keys())


def _changed(store: ShardStore, what: str, first: Key, optimizer: int) -> Work:
    size = store.spec(first).size
    if what == "assign":
        return store.assign(first, "add", np.arange(size, dtype=np.float32))
    if what == "average":
        return store.average(key(0), key(2), 0.5)
    name = store.rule(optimizer).slot_names()[0]
    return store.load_slot(first, optimizer, name, np.arange(size, dtype=np.float32))


def test_shards_of_which_one_is_busy_are_not_idle() -> None:
    store = ShardStore(PS)
    for number in range(2):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (3,), "float32", 0))
    store.check_idle(keys_of((0, 1)))
    work = store.assign(key(1), "add", np.ones(3, np.float32))
    with pytest.raises(BusyError):
        store.check_idle(keys_of((0, 1)))
    for _ in work:
        pass


def test_slots_that_shards_get_from_an_earlier_store_take_the_place_of_bundled_ones() -> None:
    def slot_after(*, together: bool) -> bytes:
        rule = SGD(1.0, momentum=0.5)

        def push(store: ShardStore, number: int) -> None:
            both = Adjacent(np.ones(8, np.float32), [slice(0, 4), slice(4, 8)])
            parts = both if together else [both[0], both[1]]
            store.apply_at_once(number, keys_of((0, 1)), parts, store.begin_push(number, 0))

        earlier, now, former = store_with(sizes=(4, 4)), ShardStore(PS), FormerStore(PS)
        earlier.define_optimizer(5, rule.to_config())
        for _ in range(3):
            push(earlier, 5)
        former.take(earlier, Ledger(), 1)
        former.adopt(Orders((("v0", 0, 0), ("v1", 0, 1)), (), ()), now)
        now.define_optimizer(9, rule.to_config())
        push(now, 9)  # before it is known which optimizer that was
        former.adopt(Orders((), (), ((1, 5, 9),)), now)
        for _ in range(2):
            push(now, 9)
        return b"".join((*now.read_slot(key(0), 9, "momentum"), *now.read(key(0))))

    assert slot_after(together=True) == slot_after(together=False)


def test_a_shard_that_is_pushed_to_twice_at_once_is_updated_twice() -> None:
    store = store_with(SGD(1.0), sizes=(4, 4))
    whole = np.arange(12, dtype=np.float32)
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    before = np.frombuffer(store.read(key(0))[0], np.float32)
    store.apply_at_once(0, keys_of((0, 1, 0)), Adjacent(whole, parts), store.begin_push(0, 0))
    after = np.frombuffer(store.read(key(0))[0], np.float32)
    assert np.allclose(after, before - whole[:4] - whole[8:])


@given(st.lists(st.sampled_from([0, 1, 4, SMALL_SHARD_BYTES, SMALL_SHARD_BYTES + 1, 1 << 20])))
def test_runs_are_of_small_shards_that_fit_into_a_block(sizes: list[int]) -> None:
    runs = runs_of(sizes)
    assert [place for run in runs for place in range(run.start, run.stop)] == list(
        range(len(sizes))
    )
    for run in runs:
        together = sizes[run]
        assert len(together) == 1 or sum(together) <= BLOCK_BYTES
        assert len(together) == 1 or all(0 < size <= SMALL_SHARD_BYTES for size in together)
