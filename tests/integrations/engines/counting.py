"""What the programs of these tests share: a variable that counts closures, on two ps tasks."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

import psync


@contextlib.asynccontextmanager
async def counting(
    **options: Any,
) -> AsyncIterator[tuple[psync.ClusterCoordinator, psync.Variable]]:
    """A coordinator in the cluster that is open, and a variable with a shard on each ps."""
    strategy = psync.ParameterServerStrategy(None, psync.FixedShardsPartitioner(2), **options)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros(4), name="v")
        yield coordinator, v


def schedule(coordinator: psync.ClusterCoordinator, v: psync.Variable, times: int) -> None:
    async def step() -> None:
        await v.assign_add(np.ones(4))

    for _ in range(times):
        coordinator.schedule(step)


async def count_of(v: psync.Variable) -> float:
    """What has been counted; -1 if the shards do not agree."""
    value = await v.read()
    return float(value[0]) if (value == value[0]).all() else -1.0


def say(**values: Any) -> None:
    """Print a line for the test."""
    print("SAYS", json.dumps(values), flush=True)


def process_at(address: str) -> int:
    """The process of this machine that listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    at = "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{int(port):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()
    [inode] = [
        fields[9] for line in lines if (fields := line.split())[1] == at and fields[3] == "0A"
    ]
    for files in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for fd in os.listdir(files):
                if os.readlink(files / fd) == f"socket:[{inode}]":
                    return int(files.parent.name)
    raise LookupError(address)


def places_of(cluster: Any) -> dict[str, str]:
    """Where each task of a cluster is, as the cluster shows it: by name."""
    rows = re.findall(r">((?:ps|worker)-\d+)<.*?>runs at ([\d.:]+)", cluster._repr_html_(), re.S)
    return dict(rows)


def holds(pid: int, secret: bytes) -> bool:
    """Whether a process has these bytes in its memory."""
    folder = Path(f"/proc/{pid}")
    with open(folder / "mem", "rb", buffering=0) as memory:
        for line in (folder / "maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line.split()[1] and "[v" not in line:
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    for at in range(start, end, 1 << 24):
                        memory.seek(max(start, at - 128))
                        if secret in memory.read(min(end - at, 1 << 24) + 128):
                            return True
    return False
