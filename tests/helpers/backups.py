"""Ps tasks that back one another up, for tests: 0 in the process of 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from ps_cluster import PsCluster
from psync.wire.codec import Message
from psync.wire.messages import BackUp

W = np.arange(6, dtype=np.float32)


async def say(cluster: PsCluster, ps: int, message: Message) -> Message:
    return (await cluster.chief.links[ps].call(lambda _: message)).message


async def back_up(cluster: PsCluster, epoch: int = 1, *, lost: bool = False) -> None:
    await say(cluster, 0, BackUp(epoch, "/job:ps/task:1", "ps1:1", lost))


async def create(cluster: PsCluster) -> Any:
    cluster.places = iter([0, 0, 0])
    return await cluster.create("w", W)
