"""What tests need from inside psync, in one place: a rewrite changes this file, and no test.

Tests of psync's promises (``make contract``) import public modules, the wire and ``psync.testing``
only. What they cannot do with these, such as starting one ps task on a network in memory, is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from psync import schedules
from psync.api.optimizers import optimizers_here
from psync.backups.pairing import Computation
from psync.client.context import ClosureContext, Runtime, inside
from psync.net import platform
from psync.net.platform import Parts, Platform
from psync.net.secret import Secret
from psync.net.transport import Network
from psync.numerics import rules
from psync.numerics.memory import Scratch
from psync.numerics.rules import RuleOptions, UpdateRule
from psync.ps_task import PsTask
from psync.worker_task import WorkerTask

T = TypeVar("T")


@contextlib.contextmanager
def fresh_process() -> Iterator[None]:
    """Let everything be as in a process that has just begun; afterwards it is as it was."""
    before = {id(each): each.value for each in platform.every}
    for each in platform.every:
        each.value = each.make()
    try:
        yield
    finally:
        for each in platform.every:  # a module may have been imported meanwhile
            each.value = before[id(each)] if id(each) in before else each.make()


def new_platform(network: Network, secret: bytes | Secret, **surroundings: Any) -> Platform:
    """Return the platform of one task.

    Args:
        network: Network of its host, such as ``MemoryNetwork().host("ps-0")``.
        secret: Secret of the cluster, of at least 32 bytes.
        surroundings: Other fields of ``Platform``.
    """
    known = secret if isinstance(secret, Secret) else Secret(secret)
    return Platform(network, known, **surroundings)


def new_task(platform: Platform, job: str, index: int, address: str) -> PsTask | WorkerTask:
    """Return a ps task or a worker, not started; ``start()`` and ``close()`` are coroutines."""
    if job == "ps":
        return platform.parts.of(PsTask)(platform, index, address)
    return WorkerTask(platform, index, address)


class _Unlike(Parts):
    """The parts of a ps on another machine."""

    def __init__(self, parts: Parts, **says: str) -> None:
        self._parts = parts
        self._other = type("Other", (Computation,), says)

    def of(self, cls: type[T]) -> type[T]:
        return cast(type[T], self._other) if cls is Computation else self._parts.of(cls)


def unlike(platform: Platform, **says: str) -> Platform:
    """Return the platform of a ps that computes in another way than the other ones.

    Args:
        platform: Platform to begin with.
        says: ``release``, the version of psync there; ``numerics``, how numbers are rounded there.
    """
    return dataclasses.replace(platform, parts=_Unlike(platform.parts, **says))


@contextlib.contextmanager
def inside_a_step(origin: str = "another program") -> Iterator[None]:
    """Run a block as a step of a program does on a worker in another process.

    Args:
        origin: Program whose step it is.
    """
    runtime = Runtime(cast(Any, None), origin)
    with inside(ClosureContext(worker_index=0, closure_id=1, runtime=runtime)):
        yield


def another_process() -> None:
    """Let optimizers that are made from now on be those of another process."""
    optimizers_here().begin_process()


@contextlib.contextmanager
def forgetting_rules() -> Iterator[None]:
    """Forget afterwards the rules and schedules that are registered in a block."""
    known: tuple[dict[str, Any], ...] = (rules.RULES, schedules._SCHEDULES)
    before = [dict(each) for each in known]
    try:
        yield
    finally:
        for each, as_before in zip(known, before, strict=True):
            each.clear()
            each.update(as_before)


def apply_rule(
    rule: UpdateRule,
    value: np.ndarray,
    gradient: np.ndarray,
    slots: Sequence[np.ndarray],
    step: int,
    weight_decay: float,
) -> None:
    """Change a value and its slots in place, as a ps does in one update."""
    alone = rule.with_options(RuleOptions(weight_decay=weight_decay))
    alone.apply([(value, gradient, slots, value, slots)], step, Scratch())
