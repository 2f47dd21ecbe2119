from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from inside import pool_of, work_of
from memory_cluster import until
from ps_cluster import CHIEF, CONFIG, OTHER, WORKER, PsCluster, assign, hold, is_busy, pull, push
from psync.chief.creation import Creation
from psync.client.ps_client import PsClient
from psync.cluster import ENQUIRER
from psync.errors import (
    ConfigurationError,
    ConnectFailed,
    FencedError,
    PsyncError,
    RemoteError,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.net.endpoint import Endpoint
from psync.numerics.rules import SGD, Adam
from psync.ps import shard_sets
from psync.ps_task import PsTask
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStatistics,
    Assign,
    CreateShards,
    Done,
    Fence,
    Pull,
    Push,
    Shutdown,
    Statistics,
)
from psync.wire.tensors import to_bytes_view

MiB = 1 << 20
LARGE = 8 * MiB // 4  # elements of float32: several blocks, applied with the loop running between

NO_COORDINATOR = f"{WORKER} is not a coordinator"

pytestmark = pytest.mark.asyncio


async def ask(client: PsClient, message: Message, segments: Any = (), ps: int = 0) -> Message:
    received = await client.links[ps].call(lambda peer: message, segments)
    return received.message


async def counters(cluster: PsCluster, ps: int = 0) -> dict[str, Any]:
    answer = await ask(cluster.chief, AskStatistics(), ps=ps)
    assert isinstance(answer, Statistics)
    return answer.counters


def outcomes(answers: list[Any]) -> list[str]:
    return [answer.outcome for answer in answers]


@pytest.mark.promise("answers.asynchronous")
class TestRoundTrips:
    async def test_what_is_pushed_and_assigned_is_what_is_pulled(self) -> None:
        async with PsCluster(2) as cluster:
            w = await cluster.create("w", np.ones((7, 3), np.float32), shards=3)
            b = await cluster.create("b", np.zeros(5, np.float64))
            client = cluster.client()
            assert outcomes(await push(client, (w, b), (2.0, 4.0))) == ["accepted"] * 2
            values = await pull(client, w, b)
            assert (values[0] == 0).all()
            assert (values[1] == -2).all()
            await assign(client, w, np.arange(21, dtype=np.float32).reshape(7, 3))
            await assign(client, w, np.ones((7, 3), np.float32), "add")
            await assign(client, b, np.full(5, 3.0), "sub")
            values = await pull(client, b, w)
            assert (values[0] == -5).all()
            assert np.array_equal(values[1].ravel(), np.arange(1, 22))

    @pytest.mark.parametrize(
        "value",
        [
            np.float32(3),
            np.zeros((0, 4), np.float32),
            np.zeros((3, 0), np.float64),
            np.arange(5).astype(ml_dtypes.bfloat16),
            np.arange(5, dtype=np.float16),
            np.arange(-2, 3, dtype=np.int8),
            np.array(2**64 - 1, np.uint64),
            np.array([[True], [False], [True]]),
        ],
        ids=lambda value: f"{value.dtype}{list(value.shape)}",
    )
    async def test_every_kind_of_variable_arrives_as_it_was(self, value: np.ndarray) -> None:
        async with PsCluster(2, seed=3) as cluster:
            v = await cluster.create("v", value, shards=2)
            client = cluster.client()
            (got,) = await pull(client, v)
            assert got.dtype == np.asarray(value).dtype
            assert got.shape == value.shape
            assert np.array_equal(got, value)
            await assign(client, v, value)
            (got,) = await pull(client, v)
            assert np.array_equal(got, value)

    async def test_half_precision_is_optimized_with_slots_in_float32(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(4, ml_dtypes.bfloat16))
            config = Adam(0.5).to_config()
            await push(cluster.chief, (v,), (np.ones(4, ml_dtypes.bfloat16),), config=config)
            statistics = await counters(cluster)
            assert statistics["store"]["slot_bytes"] == 2 * 4 * 4
            (got,) = await pull(cluster.chief, v)
            assert got.dtype == ml_dtypes.bfloat16
            assert (got == 0.5).all()

    async def test_counters_tell_what_was_served(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            await pull(cluster.chief, v)
            await push(cluster.chief, (v,), (1.0,))
            await assign(cluster.chief, v, np.zeros(3, np.float32))
            got = await counters(cluster)
            assert (got["pulls"], got["pushes"], got["assigns"]) == (1, 1, 1)
            assert got["store"]["shards"] == 1
            assert got["ledger"]["fresh"] == 2
            assert got["network"]["connections"] == 2


@pytest.mark.promise("reads.never-torn")
class TestNobodySeesHalfAnUpdate:
    async def read_while_pushing(self, cluster: PsCluster) -> set[float]:
        v = await cluster.create("v", np.zeros(LARGE, np.float32))
        reader, seen, done = cluster.client(OTHER), set(), asyncio.Event()

        async def read() -> None:
            while not done.is_set():
                (got,) = await pull(reader, v)
                assert (got == got[0]).all(), "a torn read"
                seen.add(float(got[0]))

        async def write(client: PsClient) -> None:
            for _ in range(10):
                await push(client, (v,), (-2.0,))

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await asyncio.gather(write(cluster.client()), write(cluster.chief))
            done.set()
        (got,) = await pull(reader, v)
        assert (got == 20).all()
        return seen

    async def test_a_reader_sees_only_whole_versions(self) -> None:
        async with PsCluster(chunk=(1 << 18, 1 << 20)) as cluster:
            assert len(await self.read_while_pushing(cluster)) > 2

    @pytest.mark.virtual_time
    async def test_a_reader_sees_only_whole_versions_with_late_delivery(self) -> None:
        async with PsCluster(chunk=(1 << 16, 1 << 20), latency=(0.0, 0.05)) as cluster:
            assert len(await self.read_while_pushing(cluster)) > 2

    @pytest.mark.parametrize("slot", ["", "momentum"])
    async def test_a_pull_waits_for_a_busy_shard(self, slot: str) -> None:
        async with PsCluster(chunk=(1 << 20, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            config = SGD(1.0, momentum=0.5).to_config()
            await cluster.chief.define_optimizer(1, config)
            which = {"optimizer": 1, "slot": slot} if slot else {}
            client = cluster.client()
            (got,) = await pull(client, v, **which)
            assert not got.any()
            pushing = asyncio.create_task(push(cluster.chief, (v,), (1.0,), config=config))
            await until(is_busy(cluster.ps[0], v))
            (got,) = await pull(client, v, **which)
            assert (got == -1).all()
            await pushing

    async def test_pulls_of_several_shards_do_not_starve_under_steady_pushes(self) -> None:
        async with PsCluster(chunk=(1 << 20, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros((2, LARGE), np.float32), shards=2)
            pushers = [cluster.client(f"/job:worker/task:{i}") for i in range(3)]
            stop = asyncio.Event()

            async def steadily(client: PsClient) -> int:
                count = 0
                while not stop.is_set():
                    await push(client, (v,), (1.0,))
                    count += 1
                return count

            async with asyncio.TaskGroup() as group:
                counts = [group.create_task(steadily(client)) for client in pushers]
                for _ in range(3):
                    await pull(cluster.chief, v)
                stop.set()
            (got,) = await pull(cluster.chief, v)
            assert (got == -0.5 * sum(task.result() for task in counts)).all()

    async def test_a_pull_reads_each_shard_as_soon_as_it_is_idle(self) -> None:
        async with PsCluster() as cluster:
            task = cluster.ps[0]
            v = await cluster.create("v", np.zeros(2, np.float32))
            w = await cluster.create("w", np.zeros(2, np.float32))
            release_v = hold(task, v)
            reading = asyncio.create_task(pull(cluster.chief, v, w))
            await until(lambda: work_of(task).waiting)
            release_w = hold(task, w)
            release_v()
            await until(lambda: work_of(task).waiting)
            release_v = hold(task, v)  # the next update of it, before w is idle
            release_w()
            assert [value.tolist() for value in await reading] == [[0, 0], [0, 0]]
            release_v()

    async def test_small_updates_of_a_busy_shard_wait_their_turn(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(2, np.float32))
            w = await cluster.create("w", np.zeros(2, np.float32))
            release = hold(cluster.ps[0], w)
            first = asyncio.create_task(push(cluster.chief, (v, w), (2.0, 2.0)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            assert (await pull(cluster.chief, v))[0].tolist() == [0, 0]  # both at once, or none
            second = asyncio.create_task(push(cluster.chief, (w,), (2.0,)))
            reading = asyncio.create_task(pull(cluster.chief, w))
            await until(lambda: cluster.ps[0].statistics()["pushes"] == 2)
            await until(lambda: len(work_of(cluster.ps[0]).waiting) == 2)  # the read, too
            assert not reading.done()
            release()
            await asyncio.gather(first, second)
            assert float((await reading)[0][0]) in (0, -1, -2)
            assert (await pull(cluster.chief, w))[0].tolist() == [-2, -2]

    async def test_a_pull_that_is_given_up_is_not_waited_for(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(2, np.float32))
            release = hold(cluster.ps[0], v)
            reading = asyncio.create_task(pull(cluster.client(), v))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            (turn,) = work_of(cluster.ps[0]).waiting
            reading.cancel()
            await until(turn.done)
            release()
            assert not (await pull(cluster.chief, v))[0].any()
            with pytest.raises(asyncio.CancelledError):
                await reading


@pytest.mark.promise("updates.never-half-served")
class TestBadInput:
    async def test_texts_and_the_connection_stays_usable(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            n = await cluster.create("n", np.zeros(3, np.int32))
            client = cluster.client()
            await pull(client, v)
            peer = await client.links[0].peer("control")
            floats = to_bytes_view(np.zeros(3, np.float32))
            members = [(v.variable_id, 0)]

            def a_push(set_id: int = 90, sequence: int = 50, **options: Any) -> Push:
                fields = {"members": members, "optimizer": 1, "config": CONFIG} | options
                return Push(sequence, 1, -1, 0, set_id, elsewhere=0, **fields)

            cases: list[tuple[type[Exception], str, Message, list[memoryview]]] = [
                (
                    RemoteProtocolError, "/job:ps/task:0: set 77 is not defined",
                    Pull(77, None, -1, ""), [],
                ),
                (
                    UnknownVariableError, "/job:ps/task:0 holds no shard 0 of variable 9",
                    Pull(91, [(9, 0)], -1, ""), [],
                ),
                (
                    UnknownVariableError, '/job:ps/task:0 holds no shard 4 of variable 0 ("v")',
                    a_push(92, members=[(0, 4)]), [floats],
                ),
                (
                    ValueMismatchError, '"v/part_0" on /job:ps/task:0: expected shape (3,) float32 '
                    "(12 bytes), got 8 bytes", a_push(), [floats[:8]],
                ),
                (
                    ValueMismatchError, "/job:ps/task:0: 2 arrays for 1 shards", a_push(),
                    [floats, floats],
                ),
                (ValueMismatchError, "/job:ps/task:0: 0 arrays for 1 shards", a_push(), []),
                (
                    UsageError, "optimizer 3 is not defined on /job:ps/task:0",
                    a_push(optimizer=3, config=None), [floats],
                ),
                (
                    ValueMismatchError, "only floating-point variables can be optimized, got int32",
                    a_push(93, members=[(n.variable_id, 0)]), [floats],
                ),
                (
                    UsageError, "unknown operation 'mul'",
                    Assign(51, 1, -1, 0, 90, members, "mul"), [floats],
                ),
                (
                    ConfigurationError, "optimizer 1 on /job:ps/task:0 is already defined",
                    a_push(config=SGD(0.1).to_config()), [floats],
                ),
                (
                    UsageError, "optimizer 1 (sgd) on /job:ps/task:0 has no slot 'm'",
                    Pull(90, None, 1, "m"), [],
                ),
            ]  # fmt: skip
            for error, text, message, segments in cases:
                with pytest.raises(error) as caught:
                    await ask(client, message, segments)
                assert text.lower() in str(caught.value).lower()
            assert await client.links[0].peer("control") is peer
            assert peer.is_open
            assert not (await pull(client, v))[0].any()
            assert cluster.ps[0].statistics()["ledger"]["answers"] == 0

    async def test_memory_is_not_taken_for_a_body_that_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            taken: list[int] = []
            pool = pool_of(cluster.ps[0])
            for way in ("take", "lend"):
                had = getattr(pool, way)
                monkeypatch.setattr(pool, way, lambda n, had=had: (taken.append(n), had(n))[1])
            body = to_bytes_view(np.zeros(4 * MiB, np.uint8))
            message = Push(1, 1, -1, 0, 5, [(v.variable_id, 0)], 1, CONFIG, 0)
            with pytest.raises(ValueMismatchError, match="got 4194304 bytes"):
                await ask(cluster.chief, message, [body])
            assert not taken
            assert outcomes(await push(cluster.chief, (v,), (1.0,))) == ["accepted"]
            assert taken

    async def test_the_number_of_sets_of_a_connection_is_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shard_sets, "MAX_SETS", 2)
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            members = [(v.variable_id, 0)]
            for set_id in (1, 2, 1, 2):
                await ask(cluster.chief, Pull(set_id, members, -1, ""))
            with pytest.raises(UsageError, match=f"{CHIEF} has defined too many sets"):
                await ask(cluster.chief, Pull(3, members, -1, ""))
            await ask(cluster.client(), Pull(3, members, -1, ""))  # another connection's own

    async def test_a_ps_that_cannot_finish_an_update_ends(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for size in (3, LARGE):
            async with PsCluster() as cluster:
                v = await cluster.create("v", np.zeros(size, np.float32))
                task = cluster.ps[0]

                def no_memory(*_: object, **__: object) -> None:
                    raise MemoryError("no memory left")

                monkeypatch.setattr(SGD, "_update", no_memory)
                with pytest.raises(RemoteError, match="MemoryError on /job:ps/task:0: no memory"):
                    await push(cluster.chief, (v,), (1.0,))
                assert task.stopped.is_set()
                with pytest.raises(PsyncError, match="/job:ps/task:0 ends: an update failed"):
                    await pull(cluster.chief, v)
                monkeypatch.undo()
        assert "an update failed partway; the task ends" in caplog.text


@pytest.mark.promise("updates.lost-worker-refused")
class TestCoordinators:
    async def test_a_new_one_empties_the_ps_and_fences_the_older(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            newer = cluster.client(CHIEF, 101)
            await cluster.attach(newer, 101)
            await cluster.attach(newer, 101)  # again: nothing happens
            with pytest.raises(UnknownVariableError):
                await pull(newer, v)
            with pytest.raises(
                FencedError, match="serves a newer coordinator than /job:chief/task:0"
            ):
                await cluster.attach(cluster.chief, 100)
            for message in (Fence(WORKER, 5), CreateShards([], [])):
                segments = [memoryview(b"")] if isinstance(message, CreateShards) else []
                with pytest.raises(FencedError, match="serves a newer coordinator than"):
                    await ask(cluster.chief, message, segments)
            late = cluster.client(CHIEF, 100)
            with pytest.raises(
                FencedError, match="serves a newer coordinator than /job:chief/task:0"
            ):
                await pull(late, v)

    async def test_an_update_under_way_ends_with_the_variables_it_began_on(self) -> None:
        async with PsCluster(chunk=(1 << 20, 1 << 20)) as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            client = cluster.client()
            pushing = asyncio.create_task(push(client, (v,), (2.0,)))
            await until(is_busy(cluster.ps[0], v))
            newer = cluster.client(CHIEF, 101)
            await cluster.attach(newer, 101)
            assert outcomes(await pushing) == ["accepted"]
            assert cluster.ps[0].statistics()["ledger"]["answers"] == 0

    async def test_a_body_that_comes_in_while_variables_are_declared_anew_is_refused(self) -> None:
        async with PsCluster(chunk=(1 << 16, 1 << 16)) as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            client = cluster.client(host="slow")
            await pull(client, v)
            pushing = asyncio.create_task(push(client, (v,), (2.0,)))
            links = cluster.network.links
            await until(lambda: any(a.to_server.delivered_bytes > MiB for a in links("slow")))
            for link in cluster.network.links("slow"):
                link.to_server.stall()
            newer = cluster.client(CHIEF, 101)
            await cluster.attach(newer, 101)
            short = CreateShards([("v", v.variable_id, 0, 0, [3], "float32")], [None])
            await ask(newer, short, [to_bytes_view(np.zeros(3, np.float32))])
            for link in cluster.network.links("slow"):
                link.to_server.flow()
            with pytest.raises(
                ValueMismatchError, match="the variables were declared again in the meantime"
            ):
                await pushing

    @pytest.mark.parametrize(
        ("act", "told"),
        [
            (lambda cluster, client: cluster.attach(client, 2000), NO_COORDINATOR),
            (lambda cluster, client: ask(client, Shutdown("now")), NO_COORDINATOR),
            (lambda cluster, client: ask(client, Fence(OTHER, 9)), NO_COORDINATOR),
            (
                lambda cluster, client: ask(client, CreateShards([], []), [memoryview(b"")]),
                NO_COORDINATOR,
            ),
            (
                lambda cluster, _: cluster.attach(cluster.chief, 101),
                r"expected AttachPs for incarnation 100, the sender's, got 101$",
            ),
        ],
        ids=["attach", "shutdown", "fence", "create", "another chief"],
    )
    async def test_a_chief_speaks_for_itself_and_workers_do_not_do_what_it_does(
        self, act: Callable[[PsCluster, PsClient], Any], told: str
    ) -> None:
        async with PsCluster() as cluster:
            with pytest.raises(UsageError, match=told):
                await act(cluster, cluster.client())
            assert not cluster.ps[0].stopped.is_set()

    async def test_workers_wait_at_a_ps_that_is_new_until_it_serves_a_chief(self) -> None:
        """Else they would find their variables missing, before the coordinator knows of it."""
        async with PsCluster() as cluster:
            await cluster.ps[0].close()
            again = PsTask(cluster.platform(), 0, "ps0:1")
            await again.start()
            enquirer = Endpoint(cluster.platform(), WORKER, ENQUIRER, {})
            await enquirer.connect("ps0:1", "/job:ps/task:0")
            await enquirer.close()
            worker = Endpoint(cluster.platform(), WORKER, 5000, {})
            with pytest.raises(ConnectFailed, match="connection: it serves no coordinator yet"):
                await worker.connect("ps0:1", "/job:ps/task:0")
            await worker.close()
            connecting = asyncio.create_task(cluster.client().links[0].peer("control"))
            await cluster.attach(cluster.client(CHIEF, 101), 101)
            assert (await connecting).is_open
            await again.close()

    async def test_the_chief_may_stop_it_and_one_that_was_replaced_may_not(self) -> None:
        async with PsCluster() as cluster:
            successor = cluster.client(CHIEF, 101)
            await cluster.attach(successor, 101)
            with pytest.raises(FencedError, match="serves a newer coordinator than /job:chief"):
                await ask(cluster.chief, Shutdown("the end"))
            with pytest.raises(FencedError, match="serves a newer coordinator than /job:chief"):
                await ask(cluster.client(CHIEF, 100), Shutdown("the end"))
            assert not cluster.ps[0].stopped.is_set()
            assert await ask(cluster.client(CHIEF, 101), Shutdown("the end")) == Done()
            assert cluster.ps[0].stopped.is_set()

    async def test_a_fenced_worker_is_refused_at_push_and_at_the_handshake(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            old = cluster.client(WORKER, 5000)
            assert outcomes(await push(old, (v,), (1.0,))) == ["accepted"]
            await ask(cluster.chief, Fence(WORKER, 5001))
            text = "incarnation 5000 of /job:worker/task:0 has been replaced by 5001"
            with pytest.raises(FencedError, match=text):
                await push(old, (v,), (1.0,))
            with pytest.raises(FencedError, match=text):
                await push(cluster.client(WORKER, 5000), (v,), (1.0,))
            assert outcomes(await push(cluster.client(WORKER, 5001), (v,), (1.0,))) == ["accepted"]
            (got,) = await pull(cluster.chief, v)
            assert (got == -1).all()

    async def test_who_worked_for_an_earlier_coordinator_is_refused(self) -> None:
        """A session that has not noticed the new coordinator pushes into its variables."""
        async with PsCluster() as cluster:
            worker = cluster.client(WORKER, 5000)
            v = await cluster.create("v", np.zeros(3, np.float32))
            assert outcomes(await push(worker, (v,), (1.0,))) == ["accepted"]
            successor = cluster.client("/job:chief/task:0", 6000)
            await cluster.attach(successor, 6000)
            cluster.creation = Creation(cluster.declared, successor)
            v = await cluster.create("v", np.zeros(3, np.float32))
            with pytest.raises(FencedError, match=r"5000 of /job:worker/task:0 .* by 6000"):
                await push(worker, (v,), (1.0,))
