"""On another event loop than the cluster's, what is awaited says so at once, and breaks nothing.

Every coroutine function of a public name is here, or among those that need no connection.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import PsyncError, UsageError

W = np.ones((4, 2), np.float32)
ROWS = ([0, 1], W[:2])

NEED_NO_CONNECTION = {
    "Checkpoint.read", "CheckpointManager.finish", "SidecarEvaluator.__aiter__",
    "SidecarEvaluator.run", "run_task",
    # Begun on any loop; later ones are refused since it runs.
    "ClusterCoordinator.__aenter__", "ClusterCoordinator.start",
    "LocalCluster.__aenter__", "LocalCluster.start", "MonitoredTrainingSession.__aenter__",
    # They compute with what they are given.
    "ParameterServerStrategy.gather", "ParameterServerStrategy.reduce",
    "StrategyExtended.batch_reduce_to", "StrategyExtended.broadcast_to",
    "StrategyExtended.reduce_to",
    # Batches are loaded by a thread, and wake whatever loop asks for them.
    "PerWorkerIterator.next_in",
    # Methods for subclasses and hooks, which call the others.
    "SessionHook.after_create_session", "SessionHook.after_run", "SessionHook.end",
    "SyncReplicasHook.after_create_session", "SyncReplicasHook.after_run", "SyncReplicasHook.end",
    "StalenessBound.end_round", "ParameterServerStrategy.experimental_run_v2",
    # In tests/compat/test_training_sessions.py, and in replicas below.
    "MonitoredTrainingSession.run", "MonitoredTrainingSession.wait_until_stopped",
    "MonitoredTrainingSession.__aexit__", "report.__aexit__",
    "SyncReplicasOptimizer.compute_gradients",
    "ReplicaContext.all_gather", "ReplicaContext.all_reduce", "ReplicaContext.merge_call",
}  # fmt: skip


def coroutine_functions() -> set[str]:
    """The coroutine functions, methods among them, of all public names; modules left out."""
    found = set()
    for name in psync.__all__:
        thing = getattr(psync, name)
        if inspect.iscoroutinefunction(thing):
            found.add(name)
        elif inspect.isclass(thing) and thing.__module__.startswith("psync"):
            dunders = ("__aenter__", "__aexit__", "__aiter__", "__await__")
            for method in dir(thing):
                function = inspect.getattr_static(thing, method)
                if (not method.startswith("_") or method in dunders) and (
                    inspect.iscoroutinefunction(function)
                    or inspect.isasyncgenfunction(function)
                    or method == "__await__"
                ):
                    found.add(f"{name}.{method}")
    return found


class Program:
    """What a program may have, and what it may await of it."""

    def __init__(
        self,
        cluster: psync.LocalCluster,
        strategy: psync.ParameterServerStrategy,
        coordinator: psync.ClusterCoordinator,
        directory: Path,
    ) -> None:
        self.cluster, self.strategy, self.coordinator = cluster, strategy, coordinator
        self.directory = directory
        with strategy.scope():
            self.w = psync.Variable(W, name="w")
            self.step = psync.get_or_create_global_step()
            self.dense = psync.ConditionalAccumulator(np.float32, shape=(2,))
            self.sparse = psync.SparseConditionalAccumulator(np.float32, shape=(4, 2))
            self.averages = psync.ExponentialMovingAverage(0.9)
            self.averages.apply([self.w])
            self.metric = psync.metrics.Mean()
        self.sgd = psync.optimizers.SGD(0.1, momentum=0.9)
        self.sync = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.1), 1)
        self.checkpoint = psync.Checkpoint(w=self.w, optimizer=self.sgd)
        self.manager = psync.CheckpointManager(self.checkpoint, directory)
        self.data = iter(coordinator.create_per_worker_dataset([1.0, 2.0]))
        self.value = coordinator.schedule(abs, (-1,))

    async def first(self, stream: Any) -> Any:
        return await anext(stream)

    def calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        w, sgd, sync, coordinator = self.w, self.sgd, self.sync, self.coordinator
        pairs = [(W, w)]
        extended = self.strategy.extended
        for handle in ("Variable", "ShardedVariable"):
            for method in ("read", "read_value", "value"):
                yield f"{handle}.{method}", getattr(w, method)
            for method in ("assign", "assign_add", "assign_sub"):
                yield f"{handle}.{method}", lambda method=method: getattr(w, method)(W)
            for op in ("update", "add", "sub", "mul", "div", "min", "max"):
                scatter = getattr(w, f"scatter_{op}")
                yield f"{handle}.scatter_{op}", lambda scatter=scatter: scatter(ROWS)
            yield f"{handle}.batch_scatter_update", lambda: w.batch_scatter_update(ROWS)
            yield f"{handle}.gather_nd", lambda: w.gather_nd([[0, 1]])
            yield f"{handle}.sparse_read", lambda: w.sparse_read([0])
        yield "part of a variable", lambda: w[0].__await__()
        yield "pull", lambda: psync.pull([w])
        yield "pull, consistent", lambda: psync.pull([w], consistent=True)
        yield "embedding_lookup", lambda: psync.embedding_lookup(w, [0])
        ragged = (np.array([[0, 0]]), np.array([1]), (1, 1))
        yield "embedding_lookup_sparse", lambda: psync.embedding_lookup_sparse(w, ragged, None)
        safe = psync.safe_embedding_lookup_sparse
        yield "safe_embedding_lookup_sparse", lambda: safe(w, ragged, None)
        yield "ExponentialMovingAverage.update", self.averages.update
        yield "Metric.update_state", lambda: self.metric.update_state([1.0])
        yield "Metric.result", self.metric.result
        yield "Metric.reset_state", self.metric.reset_state
        for name, held in (
            ("ConditionalAccumulator", self.dense), ("SparseConditionalAccumulator", self.sparse)
        ):  # fmt: skip
            yield f"{name}.num_accumulated", held.num_accumulated
            yield f"{name}.step", held.step
            yield f"{name}.set_global_step", lambda held=held: held.set_global_step(3)
            yield f"{name}.take_grad", lambda held=held: held.take_grad(1)
        yield "ConditionalAccumulator.apply_grad", lambda: self.dense.apply_grad(W[0], 0)
        sparse = self.sparse
        yield (
            "SparseConditionalAccumulator.apply_grad",
            lambda: sparse.apply_grad([0], W[:1], None, 0),
        )
        yield (
            "SparseConditionalAccumulator.apply_indexed_slices_grad",
            lambda: sparse.apply_indexed_slices_grad(psync.IndexedSlices(W[:1], [0]), 0),
        )
        yield (
            "SparseConditionalAccumulator.take_indexed_slices_grad",
            lambda: sparse.take_indexed_slices_grad(1),
        )

        def gradients(*values: Any) -> tuple[Any, Any]:
            return 0.0, [W]

        yield "apply_gradients", lambda: sgd.apply_gradients(pairs)
        yield "compute_gradients", lambda: sgd.compute_gradients(gradients, [w])
        yield "minimize", lambda: sgd.minimize(gradients, [w])
        yield "push_pull", lambda: sgd.push_pull(pairs, pull=[w])
        yield "set_learning_rate", lambda: sgd.set_learning_rate(0.2)
        yield "iterations", lambda: sgd.iterations.read()
        yield "iterations.assign", lambda: sgd.iterations.assign(3)
        yield "slot", lambda: sgd.get_slot(w, "momentum").read()
        yield (
            "SyncReplicasOptimizer.apply_gradients",
            lambda: sync.apply_gradients(pairs, self.step),
        )
        yield (
            "SyncReplicasOptimizer.push_pull",
            lambda: sync.push_pull(pairs, pull=[w], global_step=self.step),
        )
        yield (
            "SyncReplicasOptimizer.minimize",
            lambda: sync.minimize(gradients, self.step, [w]),
        )
        yield "SyncReplicasOptimizer.set_learning_rate", lambda: sync.set_learning_rate(0.1)
        yield "SyncReplicasOptimizer.init_tokens", lambda: sync.init_tokens(self.step)
        yield "ChiefQueueRunner.run", lambda: sync.get_chief_queue_runner().run()
        yield "Checkpoint.save", lambda: self.checkpoint.save(self.directory)
        yield "CheckpointManager.save", self.manager.save
        yield "CheckpointManager.restore_or_initialize", self.manager.restore_or_initialize
        yield (
            "Checkpoint.restore",
            lambda: self.checkpoint.restore(self.manager.latest_checkpoint or ""),
        )
        yield "RemoteValue.fetch", self.value.fetch
        yield "RemoteValue.get", self.value.get
        yield "RemoteValue.__await__", self.value.__await__
        yield "PerWorkerIterator.positions", self.data.positions
        for method in ("backed_up", "close", "join", "ps_statistics", "status"):
            yield f"ClusterCoordinator.{method}", getattr(coordinator, method)
        yield "ClusterCoordinator.__aexit__", lambda: coordinator.__aexit__(None, None, None)
        yield "ClusterCoordinator.fetch", lambda: coordinator.fetch([self.value])
        yield "ClusterCoordinator.add_worker", lambda: coordinator.add_worker("worker-9:1")
        yield (
            "ClusterCoordinator.remove_worker",
            lambda: coordinator.remove_worker("/job:worker/task:0"),
        )
        yield "ClusterCoordinator.trace", lambda: coordinator.trace("t.json").__aenter__()
        yield "report.__aenter__", lambda: psync.report(self.directory / "r.html").__aenter__()
        events = coordinator.events()
        yield "events", lambda: self.first(events)
        visits = coordinator.distribute_once([1, 2])
        yield "Visits.run", lambda: visits.run(abs)
        yield "ParameterServerStrategy.run", lambda: self.strategy.run(abs, (1,))
        yield "StrategyExtended.update", lambda: extended.update(w, lambda v: v.assign(W))
        yield (
            "StrategyExtended.update_non_slot",
            lambda: extended.update_non_slot(w, lambda: w.assign(W)),
        )
        yield (
            "StrategyExtended.call_for_each_replica",
            lambda: extended.call_for_each_replica(abs, (1,)),
        )
        yield (
            "StrategyExtended.experimental_run_steps_on_iterator",
            lambda: extended.experimental_run_steps_on_iterator(
                lambda context, batch: psync.pull(w), iter([1.0]), 1
            ),
        )
        yield "LocalCluster.scale", lambda: self.cluster.scale(2)
        yield "LocalCluster.stop", self.cluster.stop
        yield "LocalCluster.__aexit__", lambda: self.cluster.__aexit__(None, None, None)

    def trainer_calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        def gradients(values: Any, batch: Any) -> tuple[Any, Any]:
            return 0.0, [W]

        trainer = psync.Trainer(self.strategy, [self.w], gradients, self.sgd)
        yield "Trainer.fit", lambda: trainer.fit([[1.0]], steps_per_epoch=1, verbose=False)
        yield "Trainer.evaluate", lambda: trainer.evaluate((W, W))
        yield "Trainer.reset_metrics", trainer.reset_metrics
        yield "Trainer.save", lambda: trainer.save(self.manager)


async def awaited(call: Callable[[], Any]) -> Any:
    made = call()
    return await (made if inspect.isawaitable(made) else _Iterated(made))


class _Iterated:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __await__(self) -> Any:
        return self._iterator


async def on_another_loop(call: Callable[[], Any]) -> Exception | None:
    """What is raised where the call is awaited in a thread with a loop of its own."""

    def run() -> Exception | None:
        try:
            asyncio.run(asyncio.wait_for(awaited(call), 10))
        except Exception as exc:
            return exc
        return None

    return await asyncio.to_thread(run)


@pytest.mark.promise("schedule.wrong-loop-fails")
async def test_it_is_said_at_once_whatever_is_awaited(tmp_path: Path) -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            program = Program(cluster, strategy, coordinator, tmp_path)
            await coordinator.join()
            await program.manager.save()
            told, wrong = set(), {}
            for name, call in (*program.calls(), *program.trainer_calls()):
                error = await on_another_loop(call)
                told.add(name)
                if not (isinstance(error, UsageError) and "psync.wait" in str(error)):
                    wrong[name] = error
            assert wrong == {}
            assert coroutine_functions() - told - NEED_NO_CONNECTION == set()
            # Nothing of it has done harm.
            assert (await program.w.read()).tolist() == W.tolist()
            assert await coordinator.fetch(coordinator.schedule(abs, (-2,))) == 2


@pytest.mark.promise("schedule.wrong-loop-fails")
async def test_a_step_that_awaits_on_a_loop_of_its_own_fails_and_harms_no_later_one() -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(W, name="w")
            sgd = psync.optimizers.SGD(0.1)

            async def pulled() -> float:
                return float((await psync.pull(w)).sum())

            async def pushed() -> None:
                await sgd.apply_gradients([(W, w)])

            def own_loop(work: Callable[[], Any]) -> Any:
                return asyncio.run(work())

            for work in (pulled, pushed):
                with pytest.raises(UsageError, match="on a different event loop than the"):
                    await coordinator.fetch(coordinator.schedule(own_loop, (work,)))
                assert await coordinator.fetch(coordinator.schedule(pulled)) == W.sum()


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "merge_call"])
async def test_so_does_a_replica_that_meets_the_others_there(what: str) -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):

            async def meet() -> Any:
                context = psync.get_replica_context()
                calls: dict[str, Callable[[], Any]] = {
                    "all_reduce": lambda: context.all_reduce("SUM", 1.0),
                    "all_gather": lambda: context.all_gather(np.ones(1), 0),
                    "merge_call": lambda: context.merge_call(lambda strategy: 1),
                }
                return await calls[what]()

            def own_loop() -> Any:
                return asyncio.run(meet())

            with pytest.raises(PsyncError, match="on a different event loop than the"):
                await strategy.run(own_loop)
            assert await strategy.run(meet) is not None


async def test_a_value_can_be_fetched_anywhere_once_its_loop_is_closed() -> None:
    values = []

    async def main() -> None:
        async with psync.LocalCluster(1, 1, processes=False) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy) as coordinator:
                values.append(coordinator.schedule(abs, (-1,)))
                await coordinator.join()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert await values[0].fetch() == 1
