"""Connects, says so, and waits: for tests of what happens to a chief meanwhile."""

import asyncio
import os

import psync


async def main():
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    timeout = float(os.environ.get("CONNECT_TIMEOUT", "60"))
    async with psync.ClusterCoordinator(strategy, connect_timeout=timeout):
        print("connected", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    psync.run(main)
