"""Steps whose rule needs norms of the mean, on several ps tasks: numbers, rounds, losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inside import points_of, sync_of, work_of
from memory_cluster import until
from norm_training import Training
from ps_by_hand import PS_0, A, PsByHand, group_config
from ps_cluster import CHIEF, heard, hold, pull
from psync import IndexedSlices
from psync.errors import FencedError, ParameterServerLost, PsyncError, RemoteProtocolError
from psync.numerics.rules import SGD, Adam, Lamb, RuleOptions, UpdateRule
from psync.specs import VariableSpec
from psync.store.store import Key
from psync.testing import settle
from psync.testing.sabotage import Failpoints
from psync.wire.messages import (
    CloseStep,
    MeasureStep,
    Staged,
    StagePush,
    StepMeasured,
)
from sync_cluster import GROUP, SyncCluster

RATE = 0.25
EACH, ALL = RuleOptions(clipnorm=0.5), RuleOptions(global_clipnorm=0.5)
SHAPES = ((7, 3), (2,), ())
SHARDS = (3, 1, 1)


def arrays(rng: np.random.Generator, dtype: Any = np.float32) -> list[np.ndarray]:
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def whole(rule: UpdateRule) -> dict[str, Any]:
    return {"optimizer": rule.to_config()}


async def create(
    cluster: SyncCluster, values: Sequence[np.ndarray], shards: Sequence[int] = SHARDS
) -> list[VariableSpec]:
    return [
        await cluster.create(f"v{i}", value, count)
        for i, (value, count) in enumerate(zip(values, shards, strict=True))
    ]


RULES = {
    "sgd each": SGD(RATE).with_options(EACH),
    "sgd all": SGD(RATE).with_options(ALL),
    "adam each": Adam(RATE).with_options(EACH),
    "adam all": Adam(RATE).with_options(ALL),
    "lamb": Lamb(RATE).with_options(RuleOptions(weight_decay=0.1)),
    "lamb each": Lamb(RATE).with_options(EACH),
    "lamb all": Lamb(RATE).with_options(ALL),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
async def test_steps_are_those_of_one_process_that_sums_clips_and_applies_bit_for_bit(
    rule: UpdateRule, num_ps: int, dtype: Any
) -> None:
    rng = np.random.default_rng(5)
    if dtype is np.float16 and rule.own_slots():
        pytest.skip("slots are wider than gradients, which Training does not know")
    async with SyncCluster(num_ps) as cluster:
        values = arrays(rng, dtype)
        variables = await create(cluster, values)
        cluster.configure(3, deterministic=True, **whole(rule))
        replicas = [cluster.replica(index) for index in range(3)]
        training = Training(rule, values, variables)
        for step in range(3):
            gradients = [arrays(rng, dtype) for _ in replicas]
            training.step(gradients)
            order = [(index + step) % 3 for index in range(3)]  # of arrival
            await asyncio.gather(*(replicas[i].push(variables, gradients[i], step) for i in order))
        for i, got in enumerate(await pull(cluster.chief, *variables)):
            assert got.tobytes() == training.read(i).tobytes()
            assert got.tobytes() != values[i].tobytes()
        assert cluster.staged_bytes() == [0] * num_ps


class TestRows:
    @pytest.mark.parametrize("num_ps", [1, 2])
    @pytest.mark.parametrize("options", [EACH, ALL])
    async def test_the_norm_of_rows_is_that_of_their_mean(
        self, num_ps: int, options: RuleOptions
    ) -> None:
        async with SyncCluster(num_ps) as cluster:
            table = await cluster.create("table", np.zeros((6, 2), np.float32), shards=3)
            cluster.configure(2, **whole(SGD(1.0).with_options(options)))
            brought = ([1, 5, 1], [1.0, 2.0, 3.0]), ([5, 3], [4.0, 8.0])
            pushes = []
            for i, (rows, values) in enumerate(brought):
                made = np.repeat(np.array(values, np.float32)[:, None], 2, 1)
                slices = IndexedSlices(made, np.array(rows), (6, 2))
                replica = cluster.replica(i)
                pushes.append(
                    replica.sync.contribute(
                        replica.client.plan((table,)), [slices], group=GROUP,
                        config=replica.config, local_step=-1, closure=-1, ordinal=0, weight=1.0,
                    )
                )  # fmt: skip
            await asyncio.gather(*pushes)
            (got,) = await pull(cluster.chief, table)
            mean = np.array([0, 4, 0, 8, 0, 3])  # each row over those that have it
            norm = np.sqrt(2 * (16 + 64 + 9))
            np.testing.assert_allclose(got[:, 0], -mean * 0.5 / norm, rtol=1e-6)


class TestRounds:
    @pytest.mark.parametrize(
        ("rule", "shards", "rounds"),
        [
            (SGD(RATE), 2, []),
            (SGD(RATE).with_options(EACH), 1, []),
            (SGD(RATE).with_options(EACH), 2, ["gradients"]),
            (SGD(RATE).with_options(ALL), 1, ["gradients"]),
            (Lamb(RATE), 1, []),
            (Lamb(RATE), 2, ["updates"]),
            (Lamb(RATE).with_options(ALL), 1, ["gradients"]),
            (Lamb(RATE).with_options(EACH), 2, ["gradients", "updates"]),
        ],
    )
    async def test_there_are_as_many_as_are_needed(
        self, rule: UpdateRule, shards: int, rounds: list[str]
    ) -> None:
        async with SyncCluster(2) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=shards)
            cluster.configure(1, **whole(rule))
            asked = heard(cluster.ps[1], MeasureStep)
            closed = heard(cluster.ps[1], CloseStep)
            await cluster.replica().push((w,), (1.0,))
            assert [message.what for message in asked] == rounds
            assert len(closed) == 1

    async def test_large_shards_are_measured_with_the_loop_running_in_between(self) -> None:
        async with SyncCluster(2) as cluster:
            size = 3 << 20
            v = await cluster.create("v", np.zeros((2, size), np.float32), shards=2)
            u = await cluster.create("u", np.zeros(3, np.float32))
            cluster.configure(2, **whole(SGD(1.0).with_options(RuleOptions(clipnorm=1.0))))
            turns, measured = 0, asyncio.Event()
            asked = heard(cluster.ps[1], MeasureStep)
            points_of(cluster.ps[0]).arm("ps0.step.measured", measured.set)
            pushes = asyncio.gather(
                *(cluster.replica(i).push((v, u), (1.0 + 2 * i, 0.0)) for i in range(2))
            )
            await until(lambda: asked)
            while not measured.is_set():
                turns += 1
                await asyncio.sleep(0)
            assert turns > 2 * size * 4 // (1 << 20) // 2  # blocks
            await pushes
            (got,) = await pull(cluster.chief, v)
            np.testing.assert_allclose(got, -1 / np.sqrt(2 * size), rtol=1e-5)

    async def test_a_shard_that_is_busy_is_waited_for_where_its_value_is_measured(self) -> None:
        async with SyncCluster(2) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            cluster.configure(1, **whole(Lamb(RATE)))
            task = cluster.ps[w.shards[0].ps]
            release = hold(task, w)
            pushing = asyncio.create_task(cluster.replica().push((w,), (1.0,)))
            await until(lambda: work_of(task).waiting)
            release()
            await pushing
            (got,) = await pull(cluster.chief, w)
            np.testing.assert_allclose(got, 1 - RATE, rtol=1e-5)

    def test_factors_must_be_those_of_all_shards(self) -> None:
        ps, w, config = by_hand(SGD(RATE).with_options(EACH))
        ones = np.ones(3, np.float32)
        assert ps.ask(A, StagePush(GROUP, config, 1, -1, 1, [w]), ones.tobytes()) == Staged(False)
        message = CloseStep(GROUP, None, 0, [(*A, 1, 1.0)], scales=[(99, 1.0)])
        with pytest.raises(RemoteProtocolError, match="whose norms were not measured"):
            ps.ask(PS_0, message)
        assert (ps.value(w) == 1).all()


def by_hand(rule: UpdateRule) -> tuple[PsByHand, Key, dict[str, Any]]:
    """A ps with a variable, and the configuration of a group."""
    ps = PsByHand()
    return ps, ps.create("w", np.ones(3, np.float32)), group_config(**whole(rule))


def test_a_measuring_that_was_overtaken_by_the_closing_is_answered_with_nothing() -> None:
    ps, w, config = by_hand(SGD(RATE).with_options(EACH))
    message = MeasureStep(GROUP, config, 0, [(*A, 1, 1.0)], what="gradients")
    assert ps.ask(A, StagePush(GROUP, config, 1, -1, 1, [w]), bytes(12)) == Staged(False)
    measured = ps.ask(PS_0, message)
    assert isinstance(measured, StepMeasured)
    assert [sums[:1] for sums in measured.sums] == [w[:1]]
    assert (ps.store.version(w), ps.store.push_count(GROUP).marked) == (0, 0)  # nothing has changed
    ps.ask(PS_0, CloseStep(GROUP, config, 0, [(*A, 1, 1.0)]))
    assert ps.ask(PS_0, message) == StepMeasured([])
    assert ps.store.version(w) == 1


def clipping(cluster: SyncCluster, needed: int = 2) -> None:
    cluster.configure(needed, **whole(SGD(1.0).with_options(RuleOptions(clipnorm=1.0))))


@pytest.mark.virtual_time
class TestLosses:
    @pytest.mark.parametrize("at", ["ps0.step.decided", "ps.step.measured", "ps0.step.measured"])
    async def test_another_ps_is_lost(self, at: str) -> None:
        points = Failpoints()
        async with SyncCluster(2, failpoints=points) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            clipping(cluster)
            points.arm(at, lambda: cluster.network.partition("ps1:1"))
            pushes = [cluster.replica(index).push((w,), (5.0,)) for index in range(2)]
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, ParameterServerLost)
            # Ps 0 has closed the step that it has said to close; the coordinator rolls that back.
            assert await cluster.global_step() == (at == "ps0.step.measured")
            cluster.network.heal("ps1:1")

    @pytest.mark.parametrize("at", ["ps0.step.decided", "ps0.step.measured"])
    async def test_a_new_coordinator_ends_it(self, at: str) -> None:
        points = Failpoints()
        async with SyncCluster(2, failpoints=points) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            clipping(cluster)
            points.arm(at, lambda: cluster.network.partition("ps1:1"))
            pushes = [
                asyncio.create_task(cluster.replica(index).push((w,), (5.0,))) for index in range(2)
            ]
            await settle()
            attaching = asyncio.create_task(cluster.attach(cluster.client(CHIEF, 200), 200))
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, FencedError)
                assert "newer coordinator" in str(answer)
            cluster.network.heal("ps1:1")
            await attaching
            assert cluster.ps[0].statistics()["sync"] == {}
            for task in cluster.ps:
                assert sync_of(task).steps() == []
                assert sync_of(task).statistics()["parts"] == 0

    @pytest.mark.parametrize("at", ["ps.step.measured", "ps0.step.measured"])
    async def test_a_step_that_cannot_be_measured_ends_the_group_and_changes_nothing(
        self, at: str
    ) -> None:
        points = Failpoints()
        async with SyncCluster(2, failpoints=points) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            clipping(cluster)
            points.arm(at, _fail)
            pushes = [cluster.replica(index).push((w,), (5.0,)) for index in range(2)]
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, PsyncError)
                assert "out of patience" in str(answer)
            (got,) = await pull(cluster.chief, w)
            assert (got == 1).all()
            assert await cluster.global_step() == 0


def _fail() -> None:
    raise PsyncError("out of patience")
