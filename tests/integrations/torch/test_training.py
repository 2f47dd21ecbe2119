"""Whole trainings of torch modules: the numbers of a single process, and what torch has besides."""

from __future__ import annotations

from typing import Any

import pytest

import psync
from local_training import training

torch = pytest.importorskip("torch", reason="torch is not installed")

from psync.integrations.torch import PSModule  # noqa: E402  # needs torch


def small_net() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    )


def batch_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 4, generator=generator) * 3 + 1
    return x, (x.sum(1) > 4).long()


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(net(x), y)


def accuracy_of(net: Any) -> float:
    with torch.no_grad():
        x, y = batch_of(10**6)
        for seed in range(10):
            more = batch_of(10**6 + 1 + seed)
            x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
        return float((net(x).argmax(1) == y).float().mean())


async def train(coordinator: Any, served: PSModule, steps: int) -> None:
    def step(seed: int) -> None:
        net = psync.wait(served.pull())
        net.train()
        x, y = batch_of(seed)
        loss_of(net, x.to(next(net.parameters()).dtype), y).backward()
        psync.wait(served.push())

    for seed in range(steps):
        coordinator.schedule(step, args=(seed,))
    await coordinator.join()


@pytest.mark.parametrize("ours", ["sgd", "adam"])
async def test_one_worker_computes_what_a_single_process_does_buffers_too(ours: str) -> None:
    def build() -> Any:  # in float32 the bias before BatchNorm has a gradient of noise alone
        return small_net().double()

    alone = build()
    if ours == "sgd":
        optimizer: Any = psync.optimizers.SGD(0.1, momentum=0.9)
        of_torch: Any = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    else:
        optimizer = psync.optimizers.Adam(0.01, epsilon=1e-12)
        of_torch = torch.optim.Adam(alone.parameters(), 0.01, eps=1e-12)
    for seed in range(20):
        of_torch.zero_grad()
        x, y = batch_of(seed)
        loss_of(alone, x.double(), y).backward()
        of_torch.step()
    async with training(2, 1) as (strategy, coordinator):
        with strategy.scope():
            served = PSModule(build, optimizer)
        await train(coordinator, served, 20)
        state = await served.state_dict()
    assert state["1.num_batches_tracked"] == 20
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


async def test_a_data_loader_is_a_dataset() -> None:
    def batches(context: psync.data.InputContext) -> Any:
        x, y = batch_of(context.input_pipeline_id)
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True
        )

    async with training(1, 2) as (strategy, coordinator):
        with strategy.scope():
            served = PSModule(small_net, psync.optimizers.SGD(0.1))
        data = iter(coordinator.create_per_worker_dataset(batches))

        def step(data: Any) -> Any:
            x, y = next(data)
            net = psync.wait(served.pull())
            loss_of(net, x, y).backward()
            return type(x).__name__, psync.wait(served.push()).outcome

        results = [coordinator.schedule(step, args=(data,)) for _ in range(4)]
        await coordinator.join()
        assert set(await coordinator.fetch(results)) == {("Tensor", psync.Outcome.ACCEPTED)}


async def test_autocast_on_a_worker() -> None:
    async with training(1, 1) as (strategy, coordinator):
        with strategy.scope():
            served = PSModule(small_net, psync.optimizers.SGD(0.1))

        def step(seed: int) -> Any:
            net = psync.wait(served.pull())
            x, y = batch_of(seed)
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(x)
            torch.nn.functional.cross_entropy(logits.float(), y).backward()
            kinds = logits.dtype, net[0].weight.grad.dtype
            psync.wait(served.push())
            return [str(kind) for kind in kinds]

        kinds = coordinator.schedule(step, args=(0,))
        await coordinator.join()
        assert await kinds == ["torch.bfloat16", "torch.float32"]


async def test_a_compiled_module_is_served_under_the_names_of_the_one_in_it() -> None:
    def build() -> Any:
        return torch.compile(small_net(), backend="eager")

    async with training(1, 1) as (strategy, coordinator):
        with strategy.scope():
            served = PSModule(build, psync.optimizers.SGD(0.1))
        await train(coordinator, served, 3)
        state = await served.state_dict()
        assert state["1.num_batches_tracked"] == 3
        small_net().load_state_dict(state)
        await served.load_state_dict(build().state_dict())


@pytest.mark.processes
async def test_workers_in_processes_of_their_own() -> None:
    async with psync.LocalCluster(1, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                served = PSModule(small_net, psync.optimizers.Adam(0.02), name="net")
            await train(coordinator, served, 150)
            assert accuracy_of((await served.pull()).eval()) > 0.9


@pytest.mark.processes
async def test_what_torch_is_handed_may_be_written_though_tasks_share_memory() -> None:
    async with psync.LocalCluster(1, 1) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                served = PSModule(
                    lambda: torch.nn.Linear(512, 512), psync.optimizers.SGD(1.0), name="net"
                )
                w = psync.Variable(torch.zeros(512, 512), name="w")  # more than 64 KiB: is lent

            def loss_that_writes(value: Any, data: Any) -> Any:
                with torch.no_grad():
                    value -= 1
                    data -= 1
                return (value * data).sum()

            def step() -> float:
                net = psync.wait(served.pull())
                with torch.no_grad():
                    for tensor in net.state_dict().values():
                        tensor.sub_(1)
                pulled = psync.wait(psync.pull(w))
                return float(psync.gradients.from_torch(loss_that_writes).on(pulled)(pulled)[0])

            assert await coordinator.schedule(step) == 512 * 512
            for tensor in (await served.state_dict()).values():
                tensor.sub_(1)
            assert not (await w.read()).any()
