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


def test_small_variables_of_a_ps_are_read_in_one_piece() -> None:
    a, b = variable(0, (3,), "int8"), variable(1, (5, 3), "float64")
    c, d = variable(2, (), "float32"), variable(3, (7,), "float16")
    plan = plan_of(a, b, c, d)
    assert plan.buffers == [3 + 120 + 4 + 14]
    assert [place.offset for place in plan.places] == [138, 0, 120, 124]
    (request,) = plan.requests
    assert request.pieces == [(0, 0, 141)]
    assert request.lengths == (120, 4, 14, 3)
    assert request.members == [(1, 0), (2, 0), (3, 0), (0, 0)]


def test_each_ps_has_arenas_of_its_own_and_they_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "ARENA_BYTES", 100)
    plan = plan_of(*(variable(number, (10,), ps=[number % 2]) for number in range(6)))
    assert plan.buffers == [80, 40, 80, 40]
    assert [request.ps for request in plan.requests] == [0, 1]
    assert [len(request.pieces) for request in plan.requests] == [2, 2]


def test_a_large_variable_has_a_buffer_of_its_own() -> None:
    large, small = variable(0, (1 << 14,)), variable(1, (3,))
    plan = plan_of(large, small)
    assert plan.buffers == [12, 1 << 16]
    assert [place.buffer for place in plan.places] == [1, 0]


def test_shards_land_in_the_rows_of_their_variable() -> None:
    plan = plan_of(variable(0, (5, 2), ps=[1, 0, 1]))
    first, second = plan.requests
    assert (first.ps, first.part, first.cuts) == (1, 0, [(0, 0, 16), (0, 32, 40)])
    assert (second.ps, second.part, second.cuts) == (0, 0, [(0, 16, 32)])
    assert first.pieces == [(0, 0, 16), (0, 32, 8)]


@pytest.mark.parametrize(("name", "limit"), [("MEMBERS_PER_REQUEST", 2), ("BODY_PER_REQUEST", 30)])
def test_a_large_set_is_split_over_several_requests(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(plans, name, limit)
    plan = plan_of(*(variable(number, (3,)) for number in range(5)))
    assert [len(request.members) for request in plan.requests] == [2, 2, 1]
    assert [(request.set_id, request.part) for request in plan.requests] == [(1, 0), (2, 1), (3, 2)]


def test_empty_shards_are_asked_for_but_take_no_memory() -> None:
    plan = plan_of(variable(0, (0, 3)), variable(1, (2, 0)))
    (request,) = plan.requests
    assert (request.lengths, request.pieces, plan.buffers) == ((0, 0), [], [0])


def test_a_plan_of_many_variables_is_made_in_linear_time() -> None:
    calls = 0

    class Counted(tuple):  # type: ignore[type-arg]
        def __getitem__(self, index: object) -> object:
            nonlocal calls
            calls += 1
            return tuple.__getitem__(self, index)  # type: ignore[index]

    many = Counted(variable(number, (3,)) for number in range(2000))
    make_plan(many, itertools.count())
    assert calls < 20_000


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
