"""Client of optimizer state on ps tasks: slots, steps, learning rates, norms for layer-wise rules.

A layer-wise rule (Lamb) needs norms of whole variables before a push: ``MeasurePush`` carries the
gradients to the ps tasks, which answer with sums of squares and change nothing, and the ``Push``
that follows carries one ratio for each variable. Nothing is remembered between the two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from psync.client.plans import Plan, Request, body_of
from psync.client.prefetch import Wanted
from psync.client.ps_client import PsClient, members_for
from psync.client.ps_link import Call, PsLink, always, expect, together
from psync.client.runtime import Runtime
from psync.errors import ConfigurationError, RemoteProtocolError
from psync.net.connection import Connection
from psync.numerics.rows import IndexedSlices
from psync.numerics.rules import Lamb, Sums, UpdateRule, registered_in
from psync.specs import ShardSpec, VariableSpec, count_of, dtype_of, marked_after
from psync.store.push_counts import total_of
from psync.wire.frames import SMALL_BODY_BYTES, Frame
from psync.wire.messages import (
    AskOptimizer,
    Done,
    Measured,
    MeasurePush,
    OptimizerState,
    PsAttached,
    Pushed,
    SetOptimizer,
    SetSlots,
)
from psync.wire.tensors import to_bytes_view

T = TypeVar("T")


def note_plugins(link: PsLink, received: Frame) -> None:
    """Note what a ps has answered when it was attached.

    Raises:
        RemoteProtocolError: That is something else.
    """
    attached = expect(received, PsAttached, link.task, "an attachment")
    link.plugins = attached.plugins


def check_plugins(links: Sequence[PsLink], name: str, rule: UpdateRule) -> None:
    """Check that all ps tasks know the rule and the schedules of an optimizer.

    Args:
        links: To all ps tasks; those that were never attached from here are not asked.
        name: Of the optimizer.
        rule: That it has.

    Raises:
        ConfigurationError: One does not, or in another version.
    """
    for kind, needed, version in registered_in(rule):
        asked = [link for link in links if link.plugins is not None]
        there = {
            link.task: {(each[0], each[1]): each[2] for each in link.plugins or ()}
            for link in asked
        }
        what = f"{kind} {needed!r}"
        lacking = [task for task, known in there.items() if (kind, needed) not in known]
        if lacking:
            raise ConfigurationError(
                f"optimizer {name!r}: the {what} is unknown to {', '.join(lacking)}",
                hint="start all tasks with the plugin that registers it: psync run --plugin MODULE,"
                " psync task --plugin MODULE, LocalCluster(…, plugins=[MODULE])",
            )
        for task, known in there.items():
            if known[kind, needed] != version:
                raise ConfigurationError(
                    f"optimizer {name!r}: {task} has version {known[kind, needed]} of the {what}, "
                    f"this process has version {version}",
                    hint="install one version of the plugin for all tasks",
                )


async def push_gradients(
    ps: PsClient,
    rule: UpdateRule,
    plan: Plan,
    gradients: Sequence[np.ndarray | IndexedSlices],
    *,
    optimizer: int,
    config: dict[str, Any],
    elsewhere: Mapping[int, int],
    closure: int,
    ordinal: int,
    wanted: Wanted | None = None,
    raised: ShardSpec | None = None,
) -> list[Pushed]:
    """Do ``PsClient.push`` with the ratios that the rule needs.

    Args:
        ps: All ps tasks.
        rule: Of the optimizer.
        plan: As for ``PsClient.push``, like all that follow.
        gradients: For each variable.
        optimizer: Its number.
        config: Defines it.
        elsewhere: As for ``PsClient.push``.
        closure: Id of the closure, or -1.
        ordinal: Of the call within the closure.
        wanted: Values that may come with the answers.
        raised: As for ``PsClient.push``.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: As ``PsClient.push``.
    """
    ratios: list[float] | None = None
    if rule.takes_norms:
        ratios = await trust_ratios(
            ps, rule, plan, gradients, optimizer=optimizer, config=config, elsewhere=elsewhere
        )
    return await ps.push(
        plan, gradients, optimizer=optimizer, config=config, elsewhere=elsewhere, closure=closure,
        ordinal=ordinal, ratios=ratios, wanted=wanted, raised=raised,
    )  # fmt: skip


def raised_with(plan: Plan, rule: UpdateRule, step: VariableSpec) -> ShardSpec | None:
    """Return what a push can raise by one in the same update; None: that needs one of its own.

    Args:
        plan: Of the push.
        rule: Of the optimizer. If it may raise an error, nothing else is to be done with it.
        step: The variable that is to be raised, a scalar.
    """
    if rule.may_raise:
        return None
    (shard,) = step.shards
    return shard if shard.ps in plan.ps else None


async def push_and_count(
    runtime: Runtime, push: Callable[[], Awaitable[T]], step: VariableSpec | None
) -> T:
    """Push, then raise a variable by one, if there is one that the push itself cannot raise.

    Args:
        runtime: Carries both.
        push: Pushes.
        step: Of the variable, an integer scalar; None: there is none.

    Raises:
        Exception: What ``push`` raises.
        ParameterServerLost: A ps is gone.

    Cancellation: As ``push``; if a variable is to be raised, both end in the background.
    """
    if step is None:
        return await push()
    closure, ordinal = runtime.begin_update("push")
    one = np.ones((), dtype_of(step.dtype))

    async def both() -> T:
        answers = await push()
        plan = runtime.ps.plan((step,))
        await runtime.ps.assign(plan, [one], op="add", closure=closure, ordinal=ordinal)
        return answers

    return await runtime.ps.outgoing.shielded(both)


async def trust_ratios(
    ps: PsClient,
    rule: UpdateRule,
    plan: Plan,
    gradients: Sequence[np.ndarray | IndexedSlices],
    *,
    optimizer: int,
    config: dict[str, Any],
    elsewhere: Mapping[int, int],
) -> list[float] | None:
    """Return a layerwise rule's ratio for each of a plan's variables.

    None if there is nothing to ask for: the rule is another one, or each variable lies on one ps,
    which finds the ratio itself; or there are gradients of rows, which such a rule refuses.

    Args:
        ps: All ps tasks.
        rule: Of the optimizer.
        plan: Of the push that follows.
        gradients: That it will have: whole ones, or rows. Not copied.
        optimizer: Its number.
        config: Defines it.
        elsewhere: As for ``PsClient.push``.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: Safe: nothing is changed.
    """
    if not rule.takes_norms or all(len(v.shards) == 1 for v in plan.variables):
        return None
    assert isinstance(rule, Lamb), "no others do"
    given = [to_bytes_view(each) for each in gradients if isinstance(each, np.ndarray)]
    if len(given) < len(gradients):
        return None

    def call(request: Request) -> Call[Measured]:
        def build(peer: Connection) -> MeasurePush:
            members = members_for(peer, request)
            known = elsewhere.get(request.ps, 0)
            return MeasurePush(request.set_id, members, optimizer, config, known)

        segments, _, nbytes = body_of(request, given)
        return Call(
            ps.links[request.ps], build, Measured, "a measurement", segments,
            bulk=nbytes > SMALL_BODY_BYTES, set_ids=(request.set_id,),
        )  # fmt: skip

    sums: list[list[Sums]] = [[] for _ in plan.variables]  # what its shards add to its norms
    calls = [call(request) for request in plan.requests]
    for request, answer in zip(plan.requests, await together(calls), strict=True):
        if len(answer.sums) != len(request.cuts):
            raise RemoteProtocolError(
                f"/job:ps/task:{request.ps} measured {len(answer.sums)} shards, expected "
                f"{len(request.cuts)}"
            )
        for (variable, *_), of_shard in zip(request.cuts, answer.sums, strict=True):
            sums[variable].append((of_shard[0], of_shard[1]))
    return [rule.trust_ratio(of_variable) for of_variable in sums]


async def set_slot(
    ps: PsClient,
    variable: VariableSpec,
    value: np.ndarray,
    *,
    optimizer: int,
    config: dict[str, Any],
    slot: str,
) -> None:
    """Set one slot of all shards of a variable.

    Args:
        ps: All ps tasks.
        variable: Whose slot it is.
        value: Of the variable's shape and of the slot's dtype, C-contiguous. Not copied.
        optimizer: Number of the optimizer.
        config: Defines it.
        slot: Its name.

    Raises:
        UsageError: The optimizer has no such slot.
        ParameterServerLost: A ps is gone.

    Cancellation: Some shards are set, others are not.
    """

    calls = []
    for shard in variable.shards:
        message = SetSlots(optimizer, config, [(*shard.key, slot)])
        rows = value[shard.offset : shard.offset + shard.shape[0]] if shard.shape else value
        bulk = rows.nbytes > SMALL_BODY_BYTES
        link, body = ps.links[shard.ps], [to_bytes_view(rows)]
        calls.append(Call(link, always(message), Done, "values of slots", body, bulk))
    await together(calls)


async def set_optimizer(
    ps: PsClient,
    optimizer: int,
    config: dict[str, Any],
    *,
    step: int = -1,
    learning_rate: dict[str, Any] | None = None,
) -> None:
    """Let an optimizer go on with another step or learning rate, on all ps tasks.

    Args:
        ps: All ps tasks.
        optimizer: Its number.
        config: Defines it.
        step: Pushes that it has applied; -1: as they are.
        learning_rate: Config of a schedule; None: as it is.

    Raises:
        ConfigurationError: The learning rate is none.
        ParameterServerLost: A ps is gone.

    Cancellation: Some ps tasks have heard of it, others have not.
    """
    if step >= 0:  # one mark for all, whoever of them hears of it once more
        step = marked_after(await _marked_pushes(ps, optimizer, config), step)
    message, timeline = SetOptimizer(optimizer, config, step, learning_rate), -1
    while ps.timeline != timeline:  # again, if ps tasks rolled back meanwhile: on some it is undone
        timeline = ps.timeline
        await together([Call(link, always(message), Done, "an optimizer") for link in ps.links])


async def num_pushes(ps: PsClient, optimizer: int, config: dict[str, Any]) -> int:
    """Return how many pushes of an optimizer were applied, or synchronous steps.

    Never less than have returned, and exact while none is under way.

    Args:
        ps: All ps tasks.
        optimizer: Its number.
        config: Defines it.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    return count_of(await _marked_pushes(ps, optimizer, config))


async def _marked_pushes(ps: PsClient, optimizer: int, config: dict[str, Any]) -> int:
    """Return what ``num_pushes`` does, marked."""
    ask, timeline = always(AskOptimizer(optimizer, config)), -1
    while ps.timeline != timeline:  # again, if ps tasks rolled back meanwhile
        timeline = ps.timeline
        answers = await together(
            [Call(link, ask, OptimizerState, "a question for an optimizer") for link in ps.links]
        )
    return total_of((answer.base, answer.own, answer.steps) for answer in answers)
