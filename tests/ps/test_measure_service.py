"""Updates measured on a ps: what it answers, that nothing changes, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inside import store_of
from ps_by_hand import A, PsByHand
from ps_cluster import PsCluster, pull
from psync.errors import RemoteProtocolError, UsageError, ValueMismatchError
from psync.numerics.rules import SGD, Lamb
from psync.wire.messages import Measured, MeasurePush

CONFIG = Lamb(0.5).to_config()


async def measured(cluster: PsCluster, message: MeasurePush, *segments: Any) -> Measured:
    received = await cluster.chief.links[0].call(lambda peer: message, segments)
    assert isinstance(received.message, Measured)
    return received.message


@pytest.mark.parametrize("size", [4, 3 << 20])  # at once, and block by block
async def test_the_sums_of_each_shard_come_back_and_nothing_has_changed(size: int) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.full(size, 2, np.float32))
        w = await cluster.create("w", np.ones(3, np.float32))
        members = [(v.variable_id, 0), (w.variable_id, 0)]
        ones = [np.ones(size, np.float32), np.ones(3, np.float32)]
        for message in (
            MeasurePush(900, members, 7, CONFIG, 0),
            MeasurePush(900, None, 7, CONFIG, 0),  # the set is known by then
        ):
            answer = await measured(cluster, message, *[memoryview(a).cast("B") for a in ones])
            # the first update of Adam is the sign of the gradient
            of_v, of_w = answer.sums
            assert list(of_v) == [4 * size, pytest.approx(size, rel=1e-4)]
            assert list(of_w) == [3, pytest.approx(3, rel=1e-4)]
        assert ((await pull(cluster.chief, v))[0] == 2).all()
        assert store_of(cluster.ps[0]).push_count(7).marked == 0


def test_what_does_not_fit_is_refused() -> None:
    ps = PsByHand()
    members = [ps.create("v", np.zeros(2, np.float32))]
    with pytest.raises(
        ValueMismatchError, match=r"expected shape \(2,\) float32 \(8 bytes\), got 4"
    ):
        ps.ask(A, MeasurePush(900, members, 7, CONFIG, 0), bytes(4))
    with pytest.raises(UsageError, match=r"optimizer 8 \(sgd\) on .* has nothing to measure"):
        ps.ask(A, MeasurePush(900, members, 8, SGD().to_config(), 0), bytes(8))
    with pytest.raises(RemoteProtocolError, match="set 77 is not defined"):
        ps.ask(A, MeasurePush(77, None, 7, CONFIG, 0), bytes(8))
    with pytest.raises(ValueMismatchError, match=r"\(2,\) float32 as f16 \(4 bytes\), got 8 bytes"):
        ps.ask(A, MeasurePush(900, [(-1, 2), *members], 7, CONFIG, 0), bytes(8))
    with pytest.raises(RemoteProtocolError, match="compressed in an unknown way: 3"):
        ps.ask(A, MeasurePush(900, [(-1, 3), *members], 7, CONFIG, 0), bytes(4))
