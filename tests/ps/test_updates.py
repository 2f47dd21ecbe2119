"""Pushes and assigns: each is applied once, whatever is lost, repeated or run again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asked import Asked
from backup_by_hand import BackupByHand
from inside import endpoint_of, work_of
from memory_cluster import until
from ps_by_hand import A, B, PsByHand
from ps_cluster import CONFIG, OTHER, RATE, WORKER, PsCluster, hold, pull, push
from psync.client.ps_client import PsClient
from psync.errors import (
    PartitionError,
    UnknownVariableError,
    ValueMismatchError,
)
from psync.specs import VariableSpec
from psync.store.ledger import Client
from psync.store.store import Key
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStatistics,
    Assign,
    AverageShards,
    Push,
    Pushed,
    Statistics,
)

MiB = 1 << 20
LARGE = 8 * MiB // 4  # elements of float32: several blocks, applied with the loop running between


async def ask(client: PsClient, message: Message, segments: Any = (), ps: int = 0) -> Message:
    received = await client.links[ps].call(lambda peer: message, segments)
    return received.message


async def counters(cluster: PsCluster, ps: int = 0) -> dict[str, Any]:
    answer = await ask(cluster.chief, AskStatistics(), ps=ps)
    assert isinstance(answer, Statistics)
    return answer.counters


def outcomes(answers: list[Any]) -> list[str]:
    return [answer.outcome for answer in answers]


class Ps(PsByHand):
    """One ps with a variable of three zeros, and clients that number what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.v = self.create("v", np.zeros(3, np.float32))
        self._sequence = 0

    def push(self, client: Client, key: Key, gradient: float, *call: int) -> str:
        """Push to a variable; return the outcome."""
        self._sequence += 1
        closure, ordinal = (*call, 0)[:2] if call else (-1, 0)
        message = Push(self._sequence, 0, closure, ordinal, key[0], [key], 1, CONFIG, 0)
        spec = self.store.spec(key)
        answer = self.ask(client, message, np.full(spec.shape, gradient, spec.dtype).tobytes())
        assert isinstance(answer, Pushed)
        return answer.outcome

    def count(self, counter: str) -> int:
        """A counter of the ledger."""
        counters: dict[str, int] = self.services.statistics()["ledger"]
        return counters[counter]


@pytest.mark.usefixtures("turns")
def test_a_backup_gets_what_was_computed_from_although_its_sender_writes_to_it() -> None:
    """What waited while the backup was begun lies in memory of its sender's."""
    ps = Ps()
    ps.store.define_optimizer(1, CONFIG)
    backup = BackupByHand(ps)
    theirs = bytearray(np.full(3, 2, np.float32).tobytes())
    message = Push(1, 0, -1, 0, ps.v[0], [ps.v], 1, CONFIG, 0)
    handler = ps.services.handlers()[Push]
    handler.serve(Asked(ps.peer(A), message, [memoryview(theirs).toreadonly()]))
    theirs[:] = bytes(len(theirs))
    backup.catch_up()  # compares both
    assert ps.pull(ps.v)[0].tolist() == [-2 * RATE] * 3


class TestCalls:
    """Each call of a closure counts once, in whichever run."""

    def test_the_second_run_is_applied_if_the_first_is_refused(self) -> None:
        ps = Ps()
        w = ps.create("w", np.array([True, False]))
        first, second = (Assign(1, 0, 5, 0, w[0], [w], "assign") for _ in range(2))
        with pytest.raises(ValueMismatchError, match="bytes other than 0 and 1"):
            ps.ask(A, first, b"\7\0")
        assert ps.ask(B, second, b"\0\1") == Pushed("accepted", 0)
        assert ps.value(w).tolist() == [False, True]


class TestIdentity:
    """Each update is applied at most once."""

    async def value(self, cluster: PsCluster, v: VariableSpec) -> float:
        (got,) = await pull(cluster.chief, v)
        assert (got == got.flat[0]).all()
        return float(got.flat[0])

    async def test_an_update_goes_on_although_its_sender_gives_up(self) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            task = cluster.ps[0]
            v = await cluster.create("v", np.zeros((2, LARGE // 4), np.float32), shards=2)
            sender = cluster.client(WORKER)
            release = hold(task, v)
            pushing = asyncio.create_task(push(sender, (v,), (2.0,), closure=5))
            await until(lambda: work_of(task).waiting)
            (peer,) = [peer for peer in endpoint_of(task).peers if peer.task == WORKER]
            await sender.close()
            await until(lambda: peer.is_closed)
            release()
            answers = await push(cluster.client(OTHER), (v,), (8.0,), closure=5)
            assert outcomes(answers) == ["duplicate"]
            assert await self.value(cluster, v) == -1
            await asyncio.gather(pushing, return_exceptions=True)


def average_of(
    spec: VariableSpec, original: VariableSpec, decay: float = 0.5, **identity: int
) -> AverageShards:
    """What moves the first shard of ``spec`` towards that of ``original``."""
    given = {"sequence": 1, "acked_below": 0, "closure": -1, "ordinal": 0} | identity
    return AverageShards(*given.values(), [(spec.variable_id, original.variable_id, 0)], decay)


class TestAverages:
    def holding(self) -> tuple[Ps, Key, Key]:
        """An average of zeros, and its original of ones."""
        ps = Ps()
        return ps, ps.v, ps.create("original", np.ones(3, np.float32))

    def test_what_does_not_fit_is_refused_before_anything_is_averaged(self) -> None:
        ps, s, v = self.holding()
        wide = ps.create("wide", np.ones(4, np.float32))
        count = ps.create("count", np.ones(3, np.int32))
        good = (s[0], v[0], 0)

        def refused(shards: list[tuple[int, int, int]], decay: float) -> None:
            ps.ask(A, AverageShards(1, 0, -1, 0, shards, decay))

        with pytest.raises(PartitionError, match=r"expected shape \(4,\) float32, as "):
            refused([good, (s[0], wide[0], 0)], 0.5)
        with pytest.raises(ValueMismatchError, match="only floating-point variables have moving"):
            refused([good, (count[0], count[0], 0)], 0.5)
        with pytest.raises(UnknownVariableError, match="holds no shard 0 of variable 99"):
            refused([good, (s[0], 99, 0)], 0.5)
        with pytest.raises(UnknownVariableError, match="holds no shard 0 of variable 99"):
            refused([good, (99, v[0], 0)], 0.5)
        for decay in (1.0, -0.5, float("nan")):
            with pytest.raises(ValueMismatchError, match=r"expected decay in \[0, 1\), got"):
                refused([good], decay)
        assert not ps.value(s).any()
        assert ps.ask(A, AverageShards(1, 0, -1, 0, [good], 0.5)) == Pushed("accepted", 0)

    @pytest.mark.parametrize("busy", ["average", "original"])
    async def test_a_busy_shard_on_either_side_is_waited_for(self, busy: str) -> None:
        async with PsCluster() as cluster:
            s = await cluster.create("s", np.zeros(3, np.float32))
            v = await cluster.create("v", np.ones(3, np.float32))
            release = hold(cluster.ps[0], s if busy == "average" else v)
            client = cluster.client()
            averaging = asyncio.create_task(ask(client, average_of(s, v)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            assert not averaging.done()
            release()
            assert await averaging == Pushed("accepted", 0)
            assert (await pull(client, s))[0].tolist() == [0.5] * 3
