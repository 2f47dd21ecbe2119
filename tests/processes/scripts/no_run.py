"""A program that does not call psync.run: every task would be a chief."""

import asyncio

import psync


async def main():
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy):
        print("connected", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
