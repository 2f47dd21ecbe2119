"""Functions once, arguments inline or fetched, iterators where needed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from asked import frame_of
from local_training import strategy_of
from psync import ClusterCoordinator, DistributedDataset, PerWorkerDataset
from psync.closures.closure import Closure
from psync.errors import ClosureInputError, RemoteProtocolError
from psync.replicas.closure_messages import ScheduledCall, starting
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, pack_arguments
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import Arguments, Done, FetchArguments, FetchFunction, Function
from psync.worker import session
from psync.worker.iterators import IteratorTable
from psync.worker.session import ClosureInputs, HeldClosure


class World:
    """A coordinator that answers at once, and the inputs of a worker."""

    def __init__(self) -> None:
        self.functions = FunctionTable()
        self.calls: dict[int, ScheduledCall] = {}
        self.asked: Counter[str] = Counter()
        self.iterators = IteratorTable()
        self.inputs = ClosureInputs(self.fetch, self.iterators, 1, 0)
        self.answer: Message | None = None  # what comes instead

    async def fetch(self, message: Message) -> Frame:
        self.asked[type(message).__name__] += 1
        if self.answer is not None:
            return frame_of(self.answer)
        if isinstance(message, FetchFunction):
            function = self.functions.lookup(message.key)
            assert function is not None
            reply = Function(function.name), function.payload.segments
        else:
            assert isinstance(message, FetchArguments)
            segments, counts = self.calls[message.closure].segments()
            reply = Arguments(len(segments) - sum(counts), counts), segments
        message, segments = reply
        return frame_of(message, [memoryview(bytearray(each)) for each in segments])

    def held(self, fn: Any, *args: Any, **kwargs: Any) -> HeldClosure:
        arguments = pack_arguments("step", args, kwargs) if args or kwargs else EMPTY
        call = ScheduledCall(self.functions.register(fn), arguments)
        closure_id = len(self.calls)
        self.calls[closure_id] = call
        message, segments = starting([Closure(closure_id, call)])
        ((_, key, count, counts),) = message.closures
        return HeldClosure(closure_id, key, count, counts, [memoryview(s) for s in segments])

    def dataset(self, fn: Any) -> PerWorkerDataset:
        coordinator = ClusterCoordinator(strategy_of())
        dataset = DistributedDataset(fn, 2, None)
        return PerWorkerDataset(dataset, self.functions.register_dataset(fn), coordinator)

    async def of(self, closure: HeldClosure) -> tuple[Any, Any, Any]:
        step = self.inputs.steps.get(closure.key) or await self.inputs.load(closure.key)
        return step, *await self.inputs.arguments(closure, step)


async def test_the_function_that_was_loaded_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MAX_STEPS", 2)
    world = World()
    first, second, third = (world.held(fn).key for fn in (len, max, min))
    for key in (first, second, third):
        await world.inputs.load(key)
    assert list(world.inputs.steps) == [second, third]


async def test_a_dataset_that_cannot_be_built_is_an_input_error():
    world = World()

    class Unloadable:
        def __reduce__(self):
            return int, ("x",)

    unloadable = Unloadable()

    def broken():
        raise OSError("gone")

    for fn, text in ((broken, "OSError: gone"), (lambda: unloadable, "cannot be loaded")):
        it = iter(world.dataset(fn))
        with pytest.raises(ClosureInputError, match=text) as info:
            await world.of(world.held(lambda it: 0, it))
        assert info.value.__cause__ is not None


async def test_another_answer_than_was_asked_for_is_a_protocol_error():
    world = World()
    closure = world.held(lambda a: a, np.arange(10_000))
    step = await world.inputs.load(closure.key)
    world.answer = Done()
    with pytest.raises(RemoteProtocolError, match="expected the arguments of closure 0, got Done"):
        await world.inputs.arguments(closure, step)
    with pytest.raises(RemoteProtocolError, match="expected a function, got Done"):
        await world.inputs.load(b"k" * 16)
