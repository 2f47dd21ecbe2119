from __future__ import annotations

import numpy as np
import pytest

from psync.errors import UnknownVariableError, UsageError, ValueMismatchError
from psync.numerics.compression import COMPRESSED
from psync.numerics.memory import BlockPool
from psync.numerics.rules import SGD
from psync.ps.shard_sets import ShardSet, memory_for, owned
from psync.ps.update import Update
from psync.specs import ShardSpec, dtype_of
from psync.store.commit_log import LogNames
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.wire.messages import Assign, Push
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


def a_push(**changes: object) -> Push:
    fields = {
        "sequence": 1, "acked_below": 1, "closure": 7, "ordinal": 0, "set_id": 1, "members": None,
        "optimizer": 1, "config": None, "elsewhere": 0,
    }  # fmt: skip
    return Push(**(fields | changes))  # type: ignore[arg-type]


def an_assign(op: str = "add") -> Assign:
    return Assign(1, 1, -1, 0, 1, None, op)


def test_a_set_knows_where_its_shards_lie_in_a_body(store: ShardStore) -> None:
    known = ShardSet(((2, 0), (1, 0), (0, 0))).look_up(store)
    assert (known.lengths, known.nbytes) == ((12, 0, 8), 20)
    assert known.names == ["v2", "v1", "v0"]
    assert [bytes(part) for part in known.cut((memoryview(b"abcdefghijklmnopqrst"),))] == [
        b"abcdefghijkl", b"", b"mnopqrst",
    ]  # fmt: skip


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


def test_a_set_is_looked_up_once_in_a_store_and_again_in_another(store: ShardStore) -> None:
    known = ShardSet(((0, 0),))
    specs = known.look_up(store).specs
    assert known.look_up(store).specs is specs
    other = ShardStore("/job:ps/task:0")
    with pytest.raises(UnknownVariableError, match="holds no shard 0 of variable 0"):
        known.look_up(other)
    other.create(ShardSpec("w", 0, 0, 0, (9,), "float32", 0))
    assert known.look_up(other).lengths == (36,)


def test_sets_of_the_same_shards_have_the_same_digest_in_every_process(store: ShardStore) -> None:
    digests = [ShardSet(keys).look_up(store).digest for keys in (((0, 0), (2, 0)),) * 2]
    assert digests[0] == digests[1] == hash(((0, 0), (2, 0)))
    assert ShardSet(((2, 0), (0, 0))).look_up(store).digest != digests[0]


class TestCompressedSets:
    MEMBERS = ((COMPRESSED, 1), (0, 0), (2, 0), (3, 0))

    @pytest.fixture
    def known(self, store: ShardStore) -> ShardSet:
        store.create(ShardSpec("n", 3, 0, 0, (2,), "float64", 0))
        return ShardSet.of(self.MEMBERS).look_up(store)

    def test_float32_has_half_its_bytes_in_a_body_and_costs_all_of_them(
        self, known: ShardSet
    ) -> None:
        assert known.keys == ((0, 0), (2, 0), (3, 0))
        assert (known.members, known.compression) == (self.MEMBERS, "bf16")
        assert (known.lengths, known.costs, known.nbytes) == ((4, 6, 16), (8, 12, 16), 26)
        assert known.lengths_with([-1, 2, -1]) == (4, 2 * (8 + 4), 16)  # rows travel in full

    def test_other_sets_are_what_they_are(self) -> None:
        known = ShardSet.of([(0, 0)])
        assert (known.members, known.compression) == (((0, 0),), None)

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

    def test_gradients_are_widened(self, store: ShardStore, known: ShardSet) -> None:
        narrow = np.arange(5).astype(dtype_of("bfloat16"))
        body = b"".join([narrow.tobytes(), np.ones(2).tobytes()])
        for _ in range(2):
            first, second, third = known.gradients(store, 1, (memoryview(body),))
            assert [each[0:3].tolist() for each in (first, second)] == [[0, 1], [2, 3, 4]]
            assert (first[0:2].dtype, third.dtype) == (np.float32, np.float64)
        rows = known.row_gradients(store, 1, (memoryview(body),), [-1, -1, -1])
        assert [gradient[0:9].tolist() for gradient in rows] == [[0, 1], [2, 3, 4], [1, 1]]

    def test_what_could_not_be_applied_is_refused(self, store: ShardStore) -> None:
        known = ShardSet.of(self.MEMBERS[:2]).look_up(store)
        with pytest.raises(UsageError, match="optimizer 2 is not defined"):
            known.gradients(store, 2, (memoryview(bytes(4)),))

    def test_values_are_not_assigned_so(self, store: ShardStore) -> None:
        known = ShardSet.of(self.MEMBERS[:2]).look_up(store)
        made = Update(
            CLIENT, an_assign(), known, (memoryview(bytes(4)),), store, Ledger(), known.keys
        )
        with pytest.raises(
            ValueMismatchError, match=r"expected shape \(2,\) float32 \(8 bytes\), got 4"
        ):
            made.begin(0)

    def test_no_more_than_one_marker(self, store: ShardStore) -> None:
        with pytest.raises(UnknownVariableError):
            ShardSet.of([(COMPRESSED, 1), *self.MEMBERS]).look_up(store)

    def test_the_log_names_it_apart_from_the_same_shards(
        self, store: ShardStore, known: ShardSet
    ) -> None:
        names, entries = LogNames(), []
        for each in (known, ShardSet(known.keys).look_up(store), known):
            body = memoryview(bytes(each.nbytes))
            made = Update(CLIENT, a_push(), each, (body,), store, Ledger(), each.keys)
            entry = made.entry(names)
            assert isinstance(entry, Push)
            entries.append((entry.set_id, entry.members))
        assert entries == [(0, list(self.MEMBERS)), (1, list(known.keys)), (0, None)]
