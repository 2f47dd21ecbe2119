"""How shards come into being on a ps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps_by_hand import COORDINATOR, PsByHand
from ps_cluster import PsCluster
from psync.client.ps_client import PsClient
from psync.errors import PartitionError, RemoteProtocolError, ValueMismatchError
from psync.wire.codec import Message
from psync.wire.messages import CreateShards, Done, Pull
from psync.wire.tensors import to_bytes_view


async def ask(client: PsClient, message: Message, segments: Any = (), ps: int = 0) -> Message:
    received = await client.links[ps].call(lambda peer: message, segments)
    return received.message


class TestCreation:
    def message(self, shape: list[int], name: str = "v") -> CreateShards:
        return CreateShards([(name, 0, 0, 0, shape, "float32")], [None])

    async def test_creating_again_keeps_the_value_and_another_shape_is_an_error(self) -> None:
        async with PsCluster() as cluster:
            ones, nines = (to_bytes_view(np.full(3, n, np.float32)) for n in (1, 9))
            for value in (ones, nines):
                assert await ask(cluster.chief, self.message([3]), [value]) == Done()
            received = await cluster.chief.links[0].call(lambda peer: Pull(1, [(0, 0)], -1, ""))
            assert bytes(received.segments[0]) == bytes(ones)
            with pytest.raises(PartitionError, match=r"already exists as .*shape \(3,\)"):
                await ask(cluster.chief, self.message([2]), [nines[:8]])

    def test_what_does_not_fit_is_refused(self) -> None:
        ps = PsByHand()
        body = bytes(12)
        for segments in ([body[:8]], [body, body]):
            with pytest.raises(ValueMismatchError, match="do not have the shards' sizes"):
                ps.ask(COORDINATOR, self.message([3]), *segments)
        with pytest.raises(ValueMismatchError, match="no initial values for 1 shards"):
            ps.ask(COORDINATOR, self.message([3]))
        with pytest.raises(RemoteProtocolError, match=r"negative numbers .* 'v'"):
            ps.ask(COORDINATOR, self.message([-3]), body)
        for sources in ([], [None, None]):
            uneven = CreateShards(self.message([3]).shards, sources)  # type: ignore[arg-type]
            with pytest.raises(RemoteProtocolError, match=f"{len(sources)} sources for 1 s"):
                ps.ask(COORDINATOR, uneven, body)
        for dtype, element in (("float32", b"123"), ("bool", b"\2"), ("int8", b"")):
            constant = CreateShards([("v", 0, 0, 0, [3], dtype)], [element])
            with pytest.raises(ValueMismatchError, match=f"expected an element of {dtype}, got b"):
                ps.ask(COORDINATOR, constant)
        copied = CreateShards(self.message([3]).shards, [(0, 1)])
        with pytest.raises(ValueMismatchError, match="do not have the shards' sizes"):
            ps.ask(COORDINATOR, copied, body)
        wrong = CreateShards([("v", 0, 0, 0, [3], "complex64")], [None])
        with pytest.raises(PartitionError, match="dtype 'complex64' is not supported"):
            ps.ask(COORDINATOR, wrong, body)
        assert not ps.store.keys()
