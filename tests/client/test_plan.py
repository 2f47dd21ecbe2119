from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import psync
from local_training import in_step
from memory_cluster import MemoryCluster, running
from ps_cluster import PsCluster
from psync.client import plan as plans
from psync.client import ps as client
from psync.client.plan import Landing, Plan, make_plan
from psync.numerics.memory import BlockPool
from psync.partitioners import div_split
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.wire.frames import Frame
from psync.wire.limits import Limits


def variable(
    number: int, shape: tuple[int, ...], dtype: str = "float32", ps: Sequence[int] = (0,)
) -> VariableSpec:
    name = f"v{number}"
    rows = div_split(shape[0], len(ps)) if shape else [(0, 0)]
    shards = tuple(
        ShardSpec(name, number, i, offset, (count, *shape[1:]) if shape else (), dtype, ps[i])
        for i, (offset, count) in enumerate(rows)
    )
    return VariableSpec(name, number, shape, dtype, True, shards, "train.py:1")


class Held:
    def __init__(self, spec: VariableSpec) -> None:
        self.spec = spec


def plan_of(*variables: VariableSpec) -> Plan:
    return make_plan(variables)


@pytest.mark.parametrize(("name", "limit"), [("MEMBERS_PER_REQUEST", 2), ("BODY_PER_REQUEST", 30)])
def test_a_large_set_is_split_over_several_requests(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(plans, name, limit)
    plan = plan_of(*(variable(number, (3,)) for number in range(5)))
    assert [len(request.members) for request in plan.requests] == [2, 2, 1]
    assert [request.part for request in plan.requests] == [0, 1, 2]


def test_a_plan_keeps_the_definitions_of_so_much_that_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a set that is pushed would keep whatever other sets it has ever brought."""
    monkeypatch.setattr(plans, "MAX_DEFINITIONS", 2)
    plan = plan_of(variable(0, (3,)))
    for op in ("assign", "add", "sub"):
        (made,) = plan.define(op, lambda _, op=op: {"op": op})
        assert made.op == op
    assert [*plan.defined] == ["add", "sub"]


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.sampled_from([1 << 13, 1 << 14, 20_001])),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            shapes,
            st.sampled_from(["float32", "int8", "float64"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
            st.sampled_from(["own", "lent", ""]),
        ),
        min_size=1,
        max_size=6,
    )
)
@example([((3, 2), "float32", [0], kind) for kind in ("", "lent", "own", "")])  # all alike
def test_every_byte_of_every_body_lands_where_its_variable_lies(
    drawn: list[tuple[tuple[int, ...], str, list[int], str]],
) -> None:
    variables = [
        variable(i, shape, dtype, ps if shape and shape[0] >= len(ps) else ps[:1])
        for i, (shape, dtype, ps, _) in enumerate(drawn)
    ]
    plan = make_plan(variables)
    contents = [
        np.random.default_rng(i).integers(0, 256, v.nbytes).astype(np.uint8)
        for i, v in enumerate(variables)
    ]
    own = [
        np.zeros(v.shape, v.dtype) if drawn[i][3] == "own" else None
        for i, v in enumerate(variables)
    ]
    lent = {
        i: np.ndarray(v.shape, dtype_of(v.dtype), contents[i].copy())
        for i, v in enumerate(variables)
        if drawn[i][3] == "lent"
    }
    for root in lent.values():
        root.flags.writeable = False
    came = [np.zeros_like(each) if i in lent else each for i, each in enumerate(contents)]
    landing = Landing(plan, BlockPool(), own)
    for at, request in enumerate(plan.requests):
        body = b"".join(bytes(came[i][start:end]) for i, start, end in request.cuts)
        assert len(body) == request.nbytes == sum(request.lengths)
        answer = Frame()
        answer.lengths = request.lengths
        targets = landing.into(at, answer) or []
        assert sum(map(len, targets)) == len(body)
        assert all(map(len, targets))
        for target in targets:
            target[:], body = body[: len(target)], body[len(target) :]
    for out, array, content, v in zip(own, landing.settle(lent), contents, variables, strict=True):
        assert array is out or out is None
        assert array.tobytes() == content.tobytes()
        assert array.flags.aligned
        assert (array.shape, array.dtype, array.flags.writeable) == (
            v.shape, dtype_of(v.dtype), out is not None,
        )  # fmt: skip
    assert sum(plan.buffers) == sum(v.nbytes for v in variables)


async def test_as_many_sets_as_are_kept_have_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_PLANS", 3)
    async with PsCluster() as cluster:
        sets = [(Held(variable(number, (3,))),) for number in range(3)]
        plans = [cluster.chief.plan_of(each) for each in sets]
        for each, plan in zip(sets, plans, strict=True):
            assert cluster.chief.plan_of(each) is plan
            assert cluster.chief.plan((each[0].spec,)) is plan


@pytest.mark.virtual_time
async def test_an_atomic_assign_of_several_large_messages_is_taken_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much of it waits on the ps: the lock under which it is said ends by its sender."""
    monkeypatch.setattr(plans, "BODY_PER_REQUEST", 1 << 21)
    value = np.ones((12, 1 << 17), np.float32)
    async with running(MemoryCluster(1, 1, Limits(unfinished_bytes=1 << 20))) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(12))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros_like(value), name="v")

            async def step() -> None:
                await v.assign(value, atomic=True)

            await in_step(coordinator, step)
            assert (await v.read() == 1).all()
