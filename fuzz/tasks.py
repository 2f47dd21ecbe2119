"""Any message, with any fields of the declared types, to a ps and to a worker, from a peer that
has proved itself: a worker, or the chief that is served, or a later one.

What comes out: an answer, an error of psync's own, or nothing as long as others have to come first.
The task serves others as before. A RemoteError would be an exception that nobody has thought of.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    import asyncio
    import random

    import numpy as np
    from samples import CLASSES, Draw, drawn_of, sample_of
    from templates import SHARD_BYTES, SHARDS, request

    from psync.errors import PsyncError, RemoteError
    from psync.net.endpoint import Endpoint
    from psync.net.platform import Platform, Secret
    from psync.numerics.memory import BlockPool
    from psync.numerics.rules import SGD
    from psync.ps_task import PsTask
    from psync.testing import MemoryNetwork, run_virtual
    from psync.wire.codec import Message
    from psync.wire.limits import Limits
    from psync.wire.messages import (
        AttachPs,
        Challenge,
        CreateShards,
        DefinePlan,
        Hello,
        Proof,
        Read,
        Refused,
        Shutdown,
        Update,
        Welcome,
    )
    from psync.worker_task import WorkerTask

    secret = Secret(b"a secret of at least thirty-two bytes")
    limits = Limits(
        segments=64, segment_bytes=1 << 16, body_bytes=1 << 18, gathered_bytes=1 << 20,
        staging_bytes=1 << 20,
    )  # fmt: skip
    chief, worker = "/job:chief/task:0", "/job:worker/task:0"
    # The handshake has its own target; Shutdown ends what others are asked afterwards.
    skipped = {Hello, Challenge, Proof, Welcome, Refused, Shutdown}
    config = SGD(0.5).to_config()

    def message_of(draw: Draw, kinds: list[type[Message]]) -> tuple[Message, list[bytes]]:
        if draw.below(3):
            return request(draw)
        kind = draw.of(kinds)
        message = sample_of(kind) if draw.below(4) == 0 else drawn_of(kind, draw)
        body = [bytes(draw.of((0, 1, 4, 8, 16, 32, 4096))) for _ in range(draw.below(4))]
        return message, body

    async def serve(draw: Draw) -> None:
        unhandled: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        network = MemoryNetwork()
        platform = Platform(
            network, secret, limits=limits, uniform=lambda: 0.5, new_incarnation=lambda: 7,
            threads=False,
        )  # fmt: skip
        ps, served = PsTask(platform, 0, "ps:1"), WorkerTask(platform, 0, "worker:1")
        await ps.start()
        await served.start()
        ends = []

        def end(task: str, incarnation: int) -> Endpoint:
            ends.append(Endpoint(platform, task, incarnation, {}, BlockPool()))
            return ends[-1]

        honest = await end(chief, 100).connect("ps:1", ps.task)
        await honest.call(AttachPs(100, ["ps:1"], 15.0))
        await honest.call(
            CreateShards(SHARDS, [None] * len(SHARDS)),
            [memoryview(bytes(length)) for length in SHARD_BYTES],
        )
        honest.notify(DefinePlan(1, [(0, 0)]))
        honest.notify(DefinePlan(2, [(0, 0)], 1, config))
        await honest.call(Read(1))
        push = Update(1, 1, -1, 0, 2)
        await honest.call(push, [memoryview(np.ones(4, np.float32)).cast("B")])
        name, number = draw.of(((worker, 9), (chief, 100), (chief, 101), ("/job:ps/task:0", 100)))
        lane = draw.of(("control", "bulk", "lock", "cut"))
        address, expect = draw.of((*[("ps:1", ps.task)] * 5, ("worker:1", served.task)))
        task = ps if address == "ps:1" else served
        kinds = [
            kind for kind in CLASSES if kind in task._endpoint.handlers and kind not in skipped
        ]
        attacker = end(name, number)
        for _ in range(1 + draw.below(8)):
            message, body = message_of(draw, kinds)
            try:
                async with asyncio.timeout(70):
                    peer = await attacker.connect(address, expect, lane)
                    if draw.below(4) == 0:
                        peer.notify(message, body)
                        await asyncio.sleep(0.1)
                    else:
                        await peer.call(message, body)
            except RemoteError as exc:
                raise AssertionError(f"{message}: {exc.type_name}\n{exc.traceback_text}") from exc
            except (PsyncError, TimeoutError):
                pass
        again = end("/job:chief/task:0", 10**9)  # whatever was said, a newer chief is served
        try:
            peer = await again.connect("ps:1", ps.task)
            await peer.call(AttachPs(10**9, ["ps:1"], 15.0))
        except PsyncError as exc:
            assert "newer" in str(exc) or "replaced" in str(exc), exc  # the chief has fenced it
        for one in ends:
            await one.close()
        await served.close()
        await ps.close()
        assert not unhandled, unhandled
        assert not ps.is_torn

    def one_input(data: bytes) -> None:
        run_virtual(serve, Draw(data))

    chance = random.Random(5)
    seeds = [chance.randbytes(120) for _ in range(200)]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
