"""Sets that reach over several ps tasks, as ps 0 knows them; and pushes that come whole to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ps_by_hand import PS_0 as CLOSER
from ps_by_hand import A, PsByHand, group_config
from psync.errors import (
    PsyncError,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import BlockPool
from psync.specs import ShardSpec, VariableSpec
from psync.store.store import ShardStore
from psync.sync import cross_ps_sets
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet, whole_set_of
from psync.wire.messages import CloseStep, Contribute, DescribeSet, SetSizes
from psync.wire.tensors import to_bytes_view
from sync_cluster import GROUP, SyncCluster, SyncReplica, ask

PS_0 = "/job:ps/task:0"


def numbers(num_ps: int = 3) -> ShareNumbers:
    return ShareNumbers(num_ps, PS_0)


def store_of(*sizes: int) -> ShardStore:
    """A ps 0 with variables of float32 of so many elements, numbered from 0."""
    store = ShardStore(PS_0, BlockPool())
    for variable, size in enumerate(sizes):
        store.create(ShardSpec(f"v{variable}", variable, 0, 0, (size,), "float32", 0))
    return store


class TestSets:
    def test_what_each_ps_holds_of_a_compressed_set_is_compressed(self) -> None:
        members = [(2, -1, 1), (2, 7, 0), (0, -1, 1), (0, 0, 0), (0, 1, 0)]
        known = WholeSet(members, numbers())
        assert (known.members, known.size) == (tuple(members), 3)
        assert known.own.members == ((-1, 1), (0, 0), (1, 0))
        known.fit(store_of(2, 1), (6, 4, 2), PS_0)
        own, along = known.cut((memoryview(bytes(range(12))),))
        assert [bytes(piece) for piece in own] == [bytes(range(6, 12))]
        ((share, body),) = along
        assert (share.members, bytes(body)) == ([(-1, 1), (7, 0)], bytes(range(6)))
        known.check_share(share, [6], PS_0)
        plain = WholeSet([(0, 0, 0), (2, 7, 0)], numbers())
        assert plain.shares[0].members != share.members
        with pytest.raises(ValueMismatchError, match=r"float32 as bf16 \(4 bytes\), got 8 bytes"):
            WholeSet(members, numbers()).fit(store_of(2, 1), (6, 8, 4), PS_0)
        with pytest.raises(RemoteProtocolError, match="compressed in an unknown way: 9"):
            WholeSet([(2, -1, 9), (2, 7, 0)], numbers())

    def test_the_same_shards_have_the_same_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cross_ps_sets, "MAX_NUMBERED", 2)
        known = numbers()
        first = known.number_of(1, [(7, 0)])
        assert known.number_of(1, [[7, 0]]) == first
        assert len({first, known.number_of(2, [(7, 0)]), known.number_of(1, [(7, 1)])}) == 3
        assert known.number_of(1, [(7, 0)]) > first  # forgotten: a number is never used again

    @pytest.mark.parametrize("ps", [-1, 3])
    def test_there_must_be_such_a_ps(self, ps: int) -> None:
        with pytest.raises(RemoteProtocolError, match=f"on ps {ps}, but there are only 3 ps tasks"):
            WholeSet([(ps, 0, 0)], numbers())

    def test_the_shards_of_a_ps_lie_together(self) -> None:
        with pytest.raises(RemoteProtocolError, match="do not lie together"):
            WholeSet([(1, 0, 0), (2, 0, 0), (1, 1, 0)], numbers())

    def test_sizes_are_those_of_the_shards_here_and_of_the_first_push(self) -> None:
        known, store = WholeSet([(0, 0, 0), (1, 1, 0)], numbers()), store_of(2)
        for lengths in ((4, 4), (8,), (8, 4, 4)):
            with pytest.raises(ValueMismatchError):
                known.fit(store, lengths, PS_0)
        known.fit(store, (8, 4), PS_0)
        with pytest.raises(ValueMismatchError, match=r"of \(8, 4\) bytes"):
            known.fit(store, (8, 12), PS_0)
        known.fit(store, (8, 4), PS_0)

    def test_a_share_that_another_ps_does_not_have_so_is_an_error_and_can_be_put_right(
        self,
    ) -> None:
        known, store = WholeSet([(0, 0, 0), (1, 1, 0)], numbers()), store_of(2)
        known.fit(store, (8, 4), PS_0)
        known.check_share(known.shares[0], [4], PS_0)
        with pytest.raises(
            ValueMismatchError, match=r"shards of ps 1: expected \(12,\) bytes, got"
        ):
            known.check_share(known.shares[0], [12], PS_0)
        known.fit(store, (8, 12), PS_0)

    def test_what_is_large_is_not_handed_on(self) -> None:
        size = 1 << 14
        store = store_of(size)
        WholeSet([(0, 0, 0)], numbers()).fit(store, (4 * size,), PS_0)
        with pytest.raises(RemoteProtocolError, match="65540 bytes comes whole, at most 65536"):
            WholeSet([(0, 0, 0), (1, 1, 0)], numbers()).fit(store, (4 * size, 4), PS_0)

    def test_a_connection_calls_them_by_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cross_ps_sets, "MAX_SETS", 1)
        peer: Any = SimpleNamespace(state={}, task="/job:worker/task:0")
        known = whole_set_of(peer, 5, [(0, 0, 0)], numbers(), PS_0)
        assert whole_set_of(peer, 5, None, numbers(), PS_0) is known
        assert whole_set_of(peer, 5, [(0, 1, 0)], numbers(), PS_0) is not known
        with pytest.raises(RemoteProtocolError, match="set 6 is not defined"):
            whole_set_of(peer, 6, None, numbers(), PS_0)
        with pytest.raises(UsageError, match="too many sets"):
            whole_set_of(peer, 6, [(0, 0, 0)], numbers(), PS_0)


async def send(
    replica: SyncReplica, members: list[tuple[int, int, int]] | None, *arrays: np.ndarray
) -> Any:
    """Contribute as a worker does, but whatever the test says."""
    message = Contribute(
        GROUP, replica.config, 1, 1, -1, 0, b"digest", -1, 1.0, 1, members, -1, None
    )
    return await ask(replica.client, message, [to_bytes_view(array) for array in arrays])


def member(variable: VariableSpec) -> tuple[int, int, int]:
    (shard,) = variable.shards
    return shard.ps, *shard.key


@pytest.mark.asyncio
class TestWholePushes:
    async def test_what_does_not_fit_another_ps_is_refused_before_it_counts(self) -> None:
        async with SyncCluster(2) as cluster:
            w = await cluster.create("w", np.ones(3, np.float32))
            b = await cluster.create("b", np.ones(2, bool))
            c = await cluster.create("c", np.ones(2, bool))
            assert [v.shards[0].ps for v in (w, b, c)] == [1, 0, 1]
            cluster.configure(1)
            with pytest.raises(ValueMismatchError, match=r"expected \(12,\) bytes, got \(8,\)"):
                await send(cluster.replica(0), [member(w)], np.ones(2, np.float32))
            with pytest.raises(UnknownVariableError):
                await send(cluster.replica(1), [(1, 99, 0)], np.ones(2, np.float32))
            with pytest.raises(ValueMismatchError):
                await send(cluster.replica(2), [member(c)], np.ones(2, bool))
            with pytest.raises(RemoteProtocolError, match="there are only 2 ps tasks"):
                await send(cluster.replica(3), [(2, 0, 0)], np.ones(2, np.float32))
            with pytest.raises(RemoteProtocolError, match="not defined"):
                await send(cluster.replica(4), None, np.ones(3, np.float32))
            with pytest.raises(ValueMismatchError, match="no arrays come"):
                await send(cluster.replica(5), [member(w)])
            assert cluster.group()["counted"] == 0
            answer = await cluster.replica(6).push((w,), (1.0,))
            assert (answer.outcome, answer.count) == ("accepted", 1)


def test_only_ps_0_may_ask_and_what_it_sends_is_looked_at() -> None:
    ps = PsByHand()
    w = ps.create("w", np.ones(3, np.float32))
    config = group_config()
    describe = DescribeSet(1, [w], GROUP, config)
    with pytest.raises(UsageError, match="only /job:ps/task:0"):
        ps.ask(A, describe)
    assert ps.ask(CLOSER, describe) == SetSizes([12])
    body = to_bytes_view(np.ones(3, np.float32))
    for along, segments in (([1], [body, body]), ([1], [body[:8]]), ([2], [body])):
        with pytest.raises(PsyncError):
            ps.ask(CLOSER, CloseStep(GROUP, None, 0, [(*A, 1, 1.0)], along, [], []), *segments)
    assert (ps.value(w) == 1).all()
