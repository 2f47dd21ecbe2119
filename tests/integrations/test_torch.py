"""PSModule: pulls into a worker's own module, pushes of what backward() made."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, shared, training
from psync.errors import ConfigurationError, UsageError, ValueMismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")

from psync.integrations.torch import PSModule  # noqa: E402  # needs torch


def linear() -> Any:
    torch.manual_seed(3)
    return torch.nn.Linear(2, 3)


def served_of(
    strategy: psync.ParameterServerStrategy,
    build: Callable[[], Any] = linear,
    optimizer: Any = None,
    **options: Any,
) -> PSModule:
    with strategy.scope():
        return PSModule(build, optimizer or psync.optimizers.SGD(1.0), **options)


async def pushed_once(served: PSModule, loss_of: Callable[[Any], Any], **options: Any) -> Any:
    """A step: pull, the gradient of a loss of the module, push."""
    module = await served.pull()
    loss_of(module).backward()
    return await served.push(**options)


async def trained_once(served: PSModule, coordinator: Any, loss_of: Callable[[Any], Any]) -> Any:
    """Run such a step on a worker; return the state_dict() after it."""

    async def step() -> None:
        await pushed_once(served, loss_of)

    await in_step(coordinator, step)
    return await served.state_dict()


# --- values ------------------------------------------------------------------------------------


async def test_each_worker_builds_a_module_once_and_gets_it_again() -> None:
    shared["builds"] = 0

    def build() -> Any:
        import local_training

        local_training.shared["builds"] += 1
        return torch.nn.Linear(2, 3)

    async with training(2, 1) as (strategy, coordinator):
        served = served_of(strategy, build)
        assert shared["builds"] == 1

        def step() -> Any:
            module = psync.wait(served.pull())
            at = module.weight.data_ptr()
            assert psync.wait(served.pull()) is module
            return id(module), at, module.bias.tolist()

        async def another(given: PSModule) -> Any:
            module = await given.pull()
            return id(module), module.weight.data_ptr(), module.bias.tolist()

        first = await in_step(coordinator, step)
        await served.load_state_dict({"bias": torch.ones(3)}, strict=False)
        second = coordinator.schedule(another, args=(served,))
        await coordinator.join()
        assert first[:2] == (await second)[:2]
        assert (await second)[2] == [1, 1, 1]
        assert shared["builds"] == 2
        assert id(await served.pull()) != first[0]  # the program's own
        assert shared["builds"] == 2


async def test_a_module_ends_with_the_session_of_its_worker() -> None:
    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy)

        async def step() -> None:
            import local_training

            local_training.shared["module"] = weakref.ref(await served.pull())

        await in_step(coordinator, step)
        assert shared["module"]() is not None
    while shared["module"]() is not None:  # until the thread that built it has let go of it
        gc.collect()
        await asyncio.sleep(0)


async def test_a_gradient_of_a_frozen_parameter_is_refused() -> None:
    def build() -> Any:
        module = linear()
        module.weight.requires_grad_(False)
        return module

    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy, build)

        async def step() -> None:
            module = await served.pull()
            module.requires_grad_(True)
            module(torch.ones(1, 2)).sum().backward()
            await served.push()

        with pytest.raises(
            ValueMismatchError, match='parameter "weight" has a gradient, but was froz'
        ):
            await in_step(coordinator, step)


# --- gradients ---------------------------------------------------------------------------------


async def test_gradients_are_sent_and_dropped_or_kept() -> None:
    async with training(2, 2) as (strategy, coordinator):
        served = served_of(strategy)

        async def step(keep: bool) -> Any:
            module = await served.pull()
            module(torch.ones(1, 2)).sum().backward()
            result = await served.push(keep_grad=keep)
            return result.outcome, None if module.bias.grad is None else module.bias.grad.tolist()

        for keep, left in ((False, None), (True, [1, 1, 1])):
            outcome = coordinator.schedule(step, args=(keep,))
            await coordinator.join()
            assert await outcome == (psync.Outcome.ACCEPTED, left)
        state = await served.state_dict()
        torch.testing.assert_close(state["bias"], linear().bias.detach() - 2)


async def test_gradients_of_several_batches_add_up_until_they_are_pushed() -> None:
    def twice(net: Any) -> Any:
        net.bias.sum().backward()
        return net.bias.sum()

    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy)
        state = await trained_once(served, coordinator, twice)
        torch.testing.assert_close(state["bias"], linear().bias.detach() - 2)


async def test_sparse_gradients_change_their_rows_alone() -> None:
    def build() -> Any:
        return torch.nn.Embedding.from_pretrained(torch.zeros(6, 2), freeze=False, sparse=True)

    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        served = served_of(strategy, build, psync.optimizers.Adam(1.0))
        ids = torch.tensor([5, 1, 5])
        state = await trained_once(served, coordinator, lambda net: net(ids).sum())
        moved = state["weight"][:, 0] != 0
        assert moved.tolist() == [False, True, False, False, False, True]
        statistics = await coordinator.ps_statistics()
        assert sum(each["store"]["rows"] for each in statistics) == 2


async def test_tied_parameters_are_one_variable() -> None:
    def build() -> Any:
        module = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(4, 2), "out": torch.nn.Linear(2, 4, bias=False)}
        )
        module["out"].weight = module["table"].weight
        torch.nn.init.zeros_(module["out"].weight)
        return module

    async with training(2, 1) as (strategy, coordinator):
        served = served_of(strategy, build)
        assert len(served.variables) == 1
        state = await trained_once(
            served, coordinator, lambda net: net["table"].weight.sum() + net["out"].weight.sum()
        )
        assert list(state) == ["table.weight", "out.weight"]
        assert state["table.weight"] is state["out.weight"]
        assert (state["out.weight"] == -2).all()


async def test_without_a_gradient_or_a_pull_there_is_nothing_to_push() -> None:
    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy)

        async def without_backward() -> None:
            await served.pull()
            await served.push()

        async def without_pull() -> None:
            await served.push()

        with pytest.raises(ValueMismatchError, match="PSModule 'ps_module': no gradient to push"):
            await in_step(coordinator, without_backward)
        with pytest.raises(UsageError, match="push in a step that has not pulled"):
            await in_step(coordinator, without_pull)


# --- state, from outside -----------------------------------------------------------------------


async def test_checkpoints_have_the_names_of_the_state_dict(tmp_path: Path) -> None:
    optimizer = psync.optimizers.Adam(0.1)
    async with training(2, 1) as (strategy, coordinator):
        served = served_of(strategy, optimizer=optimizer, name="net")
        state = await trained_once(served, coordinator, lambda net: net.bias.sum())
        checkpoint = psync.Checkpoint(model=served, optimizer=optimizer)
        path = await checkpoint.save(tmp_path)
        saved = await checkpoint.read(path)
        np.testing.assert_array_equal(saved["model"]["bias"], state["bias"])
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy, optimizer=optimizer, name="other")
        await psync.Checkpoint(model=served).restore(path)
        torch.testing.assert_close(dict(await served.state_dict()), dict(state))


# --- what it is made with ----------------------------------------------------------------------


async def test_a_module_that_a_worker_builds_otherwise_is_refused() -> None:
    shared["width"] = 3

    def build() -> Any:
        import local_training

        return torch.nn.Linear(2, local_training.shared["width"])

    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy, build)
        shared["width"] = 4

        async def step() -> None:
            await served.pull()

        message = r'"weight": declared shape \(3, 2\) float32, here shape \(4, 2\) float32'
        with pytest.raises(ConfigurationError, match=message):
            await in_step(coordinator, step)


async def test_a_module_whose_buffer_grows_is_refused_in_this_step_and_in_later_ones() -> None:
    class Seen(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Any) -> Any:
            self.seen = torch.cat([self.seen, x[:, 0]])
            return super().forward(x)

    message = r'Seen.*a step has changed the tensors.*"seen": .*\(2,\) float32, here shape \(4,\)'
    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy, Seen, name="Seen")

        async def step() -> None:
            await pushed_once(served, lambda net: net(torch.ones(2, 2)).sum())

        for _ in range(2):
            with pytest.raises(ConfigurationError, match=message):
                await in_step(coordinator, step)
        assert await served.optimizer.iterations.read() == 0
