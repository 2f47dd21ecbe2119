from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.client import plans
from psync.client.plans import Plan, make_plan, targets_of
from psync.partitioners import div_split
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.wire.tensors import to_bytes_view


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


def plan_of(*variables: VariableSpec) -> Plan:
    return make_plan(variables, itertools.count(1))


@pytest.mark.parametrize(("name", "limit"), [("MEMBERS_PER_REQUEST", 2), ("BODY_PER_REQUEST", 30)])
def test_a_large_set_is_split_over_several_requests(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(plans, name, limit)
    plan = plan_of(*(variable(number, (3,)) for number in range(5)))
    assert [len(request.members) for request in plan.requests] == [2, 2, 1]
    assert [(request.set_id, request.part) for request in plan.requests] == [(1, 0), (2, 1), (3, 2)]


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
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_byte_of_every_body_lands_where_its_variable_lies(
    drawn: list[tuple[tuple[int, ...], str, list[int], bool]],
) -> None:
    variables = [
        variable(i, shape, dtype, ps if shape and shape[0] >= len(ps) else ps[:1])
        for i, (shape, dtype, ps, _) in enumerate(drawn)
    ]
    plan = make_plan(variables, itertools.count())
    contents = [
        np.random.default_rng(i).integers(0, 256, v.nbytes).astype(np.uint8)
        for i, v in enumerate(variables)
    ]
    roots = [np.zeros(nbytes, np.uint8) for nbytes in plan.buffers]
    own = {i: np.zeros(v.nbytes, np.uint8) for i, v in enumerate(variables) if drawn[i][3]}
    buffers = {number: to_bytes_view(root) for number, root in enumerate(roots)}
    given_views = {i: to_bytes_view(array) for i, array in own.items()}
    for request in plan.requests:
        body = b"".join(bytes(contents[i][start:end]) for i, start, end in request.cuts)
        assert len(body) == request.nbytes == sum(request.lengths)
        targets = targets_of(plan, request, buffers, given_views)
        assert sum(map(len, targets)) == len(body)
        assert all(map(len, targets))
        for target in targets:
            target[:], body = body[: len(target)], body[len(target) :]
    for i, (place, v) in enumerate(zip(plan.places, variables, strict=True)):
        got = own[i] if i in own else roots[place.buffer][place.offset :][: v.nbytes]
        assert np.array_equal(got, contents[i])
        assert place.offset % dtype_of(v.dtype).itemsize == 0
        assert (place.shape, place.dtype) == (v.shape, dtype_of(v.dtype))
    assert sum(plan.buffers) == sum(v.nbytes for v in variables)
