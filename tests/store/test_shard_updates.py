"""One push and one shard, block by block. What comes of it is in test_store.py."""

from __future__ import annotations

import numpy as np

from block_arrays import array_of
from psync.numerics.memory import BLOCK_ELEMENTS, BlockArray, BlockPool, Scratch
from psync.numerics.rules import SGD, Lamb, UpdateRule
from psync.store.work import GradientAccumulator, ShardUpdate, Workspace

SIZE = 2 * BLOCK_ELEMENTS + 10  # three blocks


def value_of(array: BlockArray) -> np.ndarray:
    return np.concatenate([array.block(i).array for i in range(array.num_blocks)])


def slots_of(rule: UpdateRule) -> list[BlockArray]:
    return [BlockArray(SIZE, np.dtype(np.float32)) for _ in rule.own_slots()]


def drawn() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    param, grad = (rng.standard_normal(SIZE).astype(np.float32) for _ in range(2))
    return param, grad


def run(update: ShardUpdate) -> None:
    for i in range(update.pieces):
        update.piece(i)


def test_the_blocks_of_an_elementwise_rule_are_the_pieces() -> None:
    param, grad = drawn()
    values, rule = array_of(param), SGD(0.5, 0.9)
    update = ShardUpdate(rule, values, slots_of(rule), grad, 0, BlockPool(), Workspace())
    assert update.pieces == 3
    run(update)
    assert np.array_equal(value_of(values), param - np.float32(0.5) * grad)
    assert update.copies == 0


def test_a_layerwise_rule_measures_all_blocks_before_the_first_one_changes() -> None:
    param, grad = drawn()
    values, rule = array_of(param), Lamb(0.5)
    slots = slots_of(rule)
    update = ShardUpdate(rule, values, slots, grad, 0, BlockPool(), Workspace())
    assert update.pieces == 6
    for i in range(3):
        update.piece(i)
    assert np.array_equal(value_of(values), param)
    for i in range(3, 6):
        update.piece(i)
    whole, whole_slots = param.copy(), [np.zeros_like(param) for _ in slots]
    rule.apply([(whole, grad, whole_slots, whole, whole_slots)], 0, Scratch())
    assert value_of(values).tobytes() == whole.tobytes()
    assert value_of(slots[1]).tobytes() == whole_slots[1].tobytes()


def test_a_ratio_that_is_given_saves_the_measuring() -> None:
    param, grad = drawn()
    values, rule = array_of(param), Lamb(0.5)
    update = ShardUpdate(
        rule, values, slots_of(rule), grad, 0, BlockPool(), Workspace(), ratio=0.25
    )
    assert update.pieces == 3
    run(update)
    # the first update of Adam is the sign of the gradient
    np.testing.assert_allclose(value_of(values), param - 0.125 * np.sign(grad), rtol=0, atol=0.05)


def test_what_is_not_due_changes_no_block_of_the_values() -> None:
    param, grad = drawn()
    values, rule = array_of(param), Lamb(0.5)
    sums, pool, space = BlockArray(SIZE, np.dtype(np.float32)), BlockPool(), Workspace()
    seen = values.export()
    for due in (False, True):
        accumulator = GradientAccumulator(sums, 2, due, pool)
        update = ShardUpdate(rule, values, slots_of(rule), grad, 0, pool, space, accumulator)
        run(update)
        assert update.copies == (3 if due else 0)
    whole, whole_slots = param.copy(), [np.zeros_like(param) for _ in range(2)]
    rule.apply([(whole, grad, whole_slots, whole, whole_slots)], 0, Scratch())
    assert value_of(values).tobytes() == whole.tobytes()
    assert not value_of(sums).any()
    del seen


def test_blocks_are_handed_out_but_for_those_that_are_measured() -> None:
    param, grad = drawn()
    values, rule = array_of(param), Lamb(0.5)
    update = ShardUpdate(rule, values, slots_of(rule), grad, 0, BlockPool(), Workspace())
    for i in range(update.pieces):
        prepared = update.prepared(i)
        assert (prepared is None) == (i < 3)
        if prepared is None:
            update.piece(i)
        else:
            prepared.do(Workspace())
    other, expected = array_of(param), None
    again = ShardUpdate(rule, other, slots_of(rule), grad, 0, BlockPool(), Workspace())
    run(again)
    expected = value_of(other)
    assert np.array_equal(value_of(values), expected)
