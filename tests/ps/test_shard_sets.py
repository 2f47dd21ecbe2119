from __future__ import annotations

import numpy as np
import pytest

from asked import Asked, peer_of
from psync.errors import UsageError, ValueMismatchError
from psync.numerics.compression import COMPRESSED
from psync.numerics.memory import BlockPool
from psync.numerics.rules import SGD
from psync.ps.shard_sets import ShardSet, memory_for, owned
from psync.ps.update import Update
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.wire.messages import Assign
from psync.wire.tensors import to_bytes_view

CLIENT = ("/job:worker/task:0", 5)


@pytest.fixture
def store() -> ShardStore:
    made = ShardStore("/job:ps/task:0")
    for number, shape in enumerate([(2,), (0, 3), (3,)]):
        spec = ShardSpec(f"v{number}", number, 0, 0, shape, "float32", 0)
        made.create(spec, np.ones(shape, np.float32))
    made.define_optimizer(1, SGD(0.5).to_config())
    return made


def an_assign(op: str = "add") -> Assign:
    return Assign(1, 1, -1, 0, 1, None, op)


def test_a_body_may_be_pieces_of_whole_shards(store: ShardStore) -> None:
    known = ShardSet(((2, 0), (1, 0), (0, 0))).look_up(store)
    first, last = np.array([1, 2, 3], np.float32), np.array([4, 5], np.float32)
    pieces = [to_bytes_view(first), to_bytes_view(last)]
    assert known.body_of(pieces, "ps") == pieces
    for _ in range(2):  # checked, and then known
        gradients = known.gradients(store, 1, pieces)
        assert [gradient.tolist() for gradient in gradients] == [[1, 2, 3], [], [4, 5]]
    first[0] = 9
    assert gradients[0][0] == 9  # where it lies
    assert not known.fits([4, 16])
    assert not known.fits([13, 7])
    with pytest.raises(ValueMismatchError, match="declared again"):
        known.body_of([memoryview(bytes(4)), memoryview(bytes(16))], "ps")
    with pytest.raises(ValueMismatchError, match="declared again"):
        known.body_of([memoryview(bytes(12)), memoryview(bytes(12))], "ps")


def test_what_others_could_write_to_is_copied_for_a_backup() -> None:
    pool, theirs = BlockPool(), bytearray(b"abc")
    own = memory_for(pool, 8)
    assert owned(pool, own) is own
    body = [memoryview(theirs).toreadonly(), memoryview(b"d")]
    (copied,) = owned(pool, body)
    theirs[:] = b"xyz"
    assert bytes(copied) == b"abcd"


class TestCompressedSets:
    MEMBERS = ((COMPRESSED, 1), (0, 0), (2, 0), (3, 0))

    @pytest.fixture
    def known(self, store: ShardStore) -> ShardSet:
        store.create(ShardSpec("n", 3, 0, 0, (2,), "float64", 0))
        return ShardSet.of(self.MEMBERS).look_up(store)

    @pytest.mark.parametrize(
        ("lengths", "told"),
        [
            ((8, 6, 16), r'"v0/part_0" on ps: expected shape \(2,\) float32 as bf16 \(4 bytes\)'),
            ((4, 6, 8), r'"n/part_0" on ps: expected shape \(2,\) float64 \(16 bytes\), got 8'),
            ((4, 6), "ps: 2 arrays for 3 shards"),
        ],
    )  # fmt: skip
    def test_lengths_are_those_of_the_wire(
        self, known: ShardSet, lengths: tuple[int, ...], told: str
    ) -> None:
        known.check_lengths((4, 6, 16), "ps")
        with pytest.raises(ValueMismatchError, match=told):
            known.check_lengths(lengths, "ps")

    def test_what_could_not_be_applied_is_refused(self, store: ShardStore) -> None:
        known = ShardSet.of(self.MEMBERS[:2]).look_up(store)
        with pytest.raises(UsageError, match="optimizer 2 is not defined"):
            known.gradients(store, 2, (memoryview(bytes(4)),))

    def test_values_are_not_assigned_so(self, store: ShardStore) -> None:
        known = ShardSet.of(self.MEMBERS[:2]).look_up(store)
        made = Update(
            Asked(peer_of(CLIENT), an_assign()),
            known,
            (memoryview(bytes(4)),),
            store,
            Ledger(),
            known.keys,
        )
        with pytest.raises(
            ValueMismatchError, match=r"expected shape \(2,\) float32 \(8 bytes\), got 4"
        ):
            made.begin(0)
