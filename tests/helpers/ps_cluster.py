"""Ps tasks and clients of them in one process, on a network in memory, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from inside import handlers_of
from memory_cluster import until as until
from psync.chief.declarations import Creation, Declaration, split
from psync.client.ps import Plan, PsClient
from psync.net.connection import Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.numerics.memory import BlockPool
from psync.numerics.rules import SGD
from psync.partitioners import FixedShardsPartitioner
from psync.ps_task import PsTask
from psync.specs import VariableSpec, dtype_name
from psync.testing import MemoryNetwork
from psync.testing.sabotage import Failpoints, SabotagedParts
from psync.wire.codec import Message
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import AttachPs, Pushed

CHIEF = "/job:chief/task:0"
WORKER = "/job:worker/task:0"
SECRET = Secret(b"a secret of at least thirty-two bytes")

RATE = 0.5
CONFIG = SGD(RATE).to_config()


class PsCluster:
    """Ps tasks, the chief's client, and clients of workers; an async context manager.

    Everything a test sends goes through ``network``, whose check ends the test.
    """

    def __init__(
        self,
        num_ps: int = 1,
        *,
        lost_after_s: float = 15.0,
        limits: Limits = DEFAULT_LIMITS,
        **network: Any,
    ) -> None:
        self.limits = limits  # of ps tasks
        self.network = MemoryNetwork(**network)
        self.ps = [self._new_ps(index) for index in range(num_ps)]
        self.declared: list[Declaration] = []
        self.variables = itertools.count()
        self.places = itertools.cycle(range(num_ps))
        self._lost_after_s = lost_after_s
        self._incarnations = itertools.count(1000)
        self._stack = AsyncExitStack()

    def address(self, task: PsTask) -> str:
        """Where a ps listens."""
        return f"ps{self.ps.index(task)}:1"

    def _new_ps(self, index: int) -> PsTask:
        platform = self.platform()
        return platform.parts.of(PsTask)(platform, index, f"ps{index}:1")

    def platform(self, failpoints: Failpoints | None = None, incarnation: int = 7) -> Platform:
        return Platform(
            self.network,
            SECRET,
            parts=SabotagedParts(failpoints),
            limits=self.limits,
            new_incarnation=lambda: incarnation,
        )

    async def __aenter__(self) -> Self:
        for task in self.ps:
            await task.start()
            self._stack.push_async_callback(task.close)
        self.chief = self.client(CHIEF, 100)
        await self.attach(self.chief, 100)
        self.creation = Creation(self.declared, self.chief)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
        if exc is None:
            self.network.check()

    def client(
        self,
        task: str = WORKER,
        incarnation: int | None = None,
        *,
        host: str = "",
        failpoints: Failpoints | None = None,
        secret: Secret | None = SECRET,
    ) -> PsClient:
        """A task's links to all ps tasks, closed at the end."""
        network = self.network.host(host) if host else self.network
        platform = Platform(network, secret, parts=SabotagedParts(failpoints))
        pool = BlockPool()
        number = next(self._incarnations) if incarnation is None else incarnation
        endpoint = Endpoint(platform, task, number, {}, pool)
        client = platform.parts.of(PsClient)(
            endpoint, [f"ps{index}:1" for index in range(len(self.ps))], pool, self._lost_after_s
        )
        self._stack.push_async_callback(endpoint.close)
        self._stack.push_async_callback(client.close)
        return client

    async def attach(self, client: PsClient, incarnation: int) -> None:
        addresses = [link.address for link in client.links]
        for link in client.links:
            await link.call(AttachPs(incarnation, addresses, self._lost_after_s))

    def declare(self, name: str, value: Any, shards: int = 1) -> VariableSpec:
        """Declare a variable, its shards on one ps after the other."""
        array = np.asarray(value)
        whole = VariableSpec(
            name, next(self.variables), array.shape, dtype_name(array.dtype), True, (), "train.py:1"
        )
        spec = split(whole, FixedShardsPartitioner(shards), lambda nbytes: next(self.places))
        self.declared.append(Declaration(spec, array))
        return spec

    async def create(self, name: str, value: Any, shards: int = 1) -> VariableSpec:
        """Declare a variable and create it."""
        spec = self.declare(name, value, shards)
        await self.creation.ensure()
        return spec


async def pull(client: PsClient, *variables: VariableSpec, **options: Any) -> list[np.ndarray]:
    return await client.pull(client.plan(variables), **options)


async def push(
    client: PsClient,
    variables: Sequence[VariableSpec],
    gradients: Sequence[Any],
    *,
    closure: int = -1,
    ordinal: int = 0,
    optimizer: int = 1,
    config: dict[str, Any] = CONFIG,
    plan: Plan | None = None,
) -> list[Pushed]:
    """Push gradients, each an array or a number for all elements."""
    arrays = [
        gradient
        if isinstance(gradient, np.ndarray)
        else np.full(variable.shape, gradient, variable.dtype)
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    return await client.push(
        plan or client.plan(variables), arrays, optimizer=optimizer, config=config, elsewhere={},
        call=(closure, ordinal),
    )  # fmt: skip


async def assign(
    client: PsClient,
    variable: VariableSpec,
    value: Any,
    op: str = "assign",
    *,
    closure: int = -1,
    ordinal: int = 0,
) -> list[Pushed]:
    plan = client.plan((variable,))
    return await client.assign(plan, [np.asarray(value)], op=op, call=(closure, ordinal))


def heard(task: PsTask, kind: type[Message]) -> list[Any]:
    """All messages of a kind that a ps gets from now on."""
    handlers, messages = handlers_of(task), list[Message]()
    handler = handlers[kind]

    def run(request: Request[Any]) -> Any:
        messages.append(request.message)
        return handler.run(request)

    handlers[kind] = Handler(run, handler.prepare)
    return messages
