"""The manifest of a checkpoint, what is refused in it, and the layout of snapshots."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops import for_each
from psync.checkpoints.manifest import (
    MAX_LEVELS,
    Layout,
    Manifest,
    Place,
    Slice,
    Snapshot,
    Tensor,
    Wanted,
    WrittenFile,
    changed_rate,
    check_state,
    commit_line,
    read_manifest,
    step_of,
)
from psync.errors import CheckpointCorrupt, CheckpointError
from psync.numerics.rules import Adam
from psync.schedules import Constant
from psync.specs import ShardSpec
from psync.store.shards import Key
from psync.store.snapshot import freeze
from psync.store.snapshot_state import NOTHING, SnapshotState
from psync.store.store import ShardStore


def tensor(*cuts: int, name: str = "w", shape: tuple[int, ...] = (10, 2)) -> Tensor:
    """A tensor of int8, cut before these rows; file i holds slice i."""
    bounds = [0, *cuts, shape[0] if shape else 1]
    width = 1
    for extent in shape[1:]:
        width *= extent
    slices = tuple(
        Slice(start, stop - start, f"data-{i}", 8, (stop - start) * width, 7)
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    return Tensor(name, shape, "int8", slices)


def manifest(*tensors: Tensor) -> Manifest:
    files = {f"data-{i}": 1000 for i in range(9)}
    snapshots = (
        Snapshot("data-7", 5, "data-0", (Place(0, 8, 40, 9), Place(1, 48, 0, 0))),
        Snapshot("data-8", 6, "data-1", ()),
    )
    return Manifest(3, {t.name: t for t in tensors}, {"epoch": [1, {"a": None}]}, files, snapshots)


def read(data: bytes) -> Manifest:
    return read_manifest(data, commit_line(data), "ckpt-3")


@for_each("state", [{"a": [1, "b", None, True]}, [1.5, float("inf"), float("nan")], {}, [[]]])
def test_plain_data_may_be_a_state(state: Any) -> None:
    check_state("state", state)


@for_each("state", [(1,), {"a": (1,)}, {1: 2}, [{1: 2}], {1: 2, "1": 3}, {(1, 2): 3}, {1, 2}, 1j])
def test_what_would_not_come_back_is_no_state(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state of 'progress'"):
        check_state("progress", state)


def test_a_state_may_be_nested_so_deep_and_no_deeper() -> None:
    state: Any = 1
    for _ in range(MAX_LEVELS - 1):
        state = [state]
    check_state("progress", state)
    with pytest.raises(CheckpointError, match="at most 100 levels of nesting"):
        check_state("progress", [state])


def test_what_is_written_is_read() -> None:
    written = manifest(tensor(4, 7), tensor(name="scalar", shape=()))
    assert read(written.to_bytes()) == written


def test_the_state_of_an_object_keeps_its_order() -> None:
    written = Manifest(1, {}, {"history": {"loss": [0.5], "accuracy": [0.9]}})
    assert list(read(written.to_bytes()).states["history"]) == ["loss", "accuracy"]


def test_a_manifest_that_was_not_committed_is_refused() -> None:
    data = manifest(tensor()).to_bytes()
    with pytest.raises(CheckpointCorrupt, match=r"ckpt-3/manifest.json: not the one .* COMMIT"):
        read_manifest(data + b" ", commit_line(data), "ckpt-3")
    for commit in (b"", commit_line(data)[:-1], commit_line(data).replace(b" ", b"\xff")):
        with pytest.raises(CheckpointCorrupt, match="ckpt-3/COMMIT: expected size and checksum"):
            read_manifest(data, commit, "ckpt-3")


@given(st.integers(0, 10), st.integers(0, 10), st.sets(st.integers(1, 9), max_size=4))
def test_any_range_of_rows_is_found(start: int, stop: int, cuts: set[int]) -> None:
    found = [
        piece.offset + first + i
        for piece, first, count in tensor(*sorted(cuts)).rows_in(start, stop)
        for i in range(count)
    ]
    assert found == list(range(start, stop))


def changed(path: list[Any], value: Any) -> bytes:
    """The bytes of a manifest in which one thing is another."""
    content = json.loads(manifest(tensor(4)).to_bytes())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(content).encode()


@for_each(
    "path, value, text",
    [
        (["format"], "zip", "format: expected 'psync checkpoint', got 'zip'"),
        (["version"], "1", "version: expected `int`, got '1'"),
        (["number"], -1, "number: expected `int` >= 0, got -1"),
        (["number"], True, "number: expected `int`, got True"),
        (["files"], [], "files: expected `object`, got"),
        (["files", "../data"], 1, "name of a file: expected letters"),
        (["files", ".data"], 1, "name of a file: expected letters"),
        (["tensors"], {}, "tensors: expected `array`"),
        (["tensors", 0], 3, r"tensors\[0\]: expected `object`, got 3"),
        (["tensors", 0, "name"], "", r"tensors\[0\].name: expected `str` of length >= 1, got ''"),
        (
            ["tensors", 0, "shape"],
            [1 << 70, 2],
            r"tensors\[0\].shape\[0\]: expected `int` <= 9223",
        ),
        (["tensors", 0, "dtype"], "object", "tensor 'w': dtype 'object' is not supported"),
        (["tensors", 0, "slices", 0], [0, 4], r"slices\[0\]: expected `array` of length 6"),
        (["tensors", 0, "slices", 0, 0], 1, "expected a slice from row 0, got 1"),
        (["tensors", 0, "slices", 0, 4], 9, "expected 8 bytes for 4 rows, got 9"),
        (["tensors", 0, "slices", 0, 2], "data-77", "not that large, or is not listed"),
        (["tensors", 0, "slices", 0, 3], 5000, "not that large, or is not listed"),
        (["tensors", 0, "shape"], [11, 2], "expected 11 rows, got 10"),
        (["images"], {}, "images: expected `array`"),
        (["images", 0], 3, r"images\[0\]: expected `object`, got 3"),
        (["images", 0, "data"], "data-77", "file of a snapshot: expected one that is listed"),
        (["images", 0, "state"], "a/b", "file of a snapshot: expected one that is listed"),
        (["images", 0, "crc32"], None, r"images\[0\].crc32: expected `int`, got None"),
        (["images", 0, "places"], 3, r"images\[0\].places: expected `array`"),
        (
            ["images", 0, "places", 0],
            [0, 8, 40],
            r"images\[0\].places\[0\]: expected `array` of length 4",
        ),
        (["images", 0, "places", 0, 1], -1, r"places\[0\]\[1\]: expected `int` >= 0, got -1"),
        (["images", 0, "places", 0, 2], 993, "expected one within 1000 bytes"),
        (["states"], "x" * 200, r"states: expected `object`, got 'x+\.\.\."),
    ],
)
def test_what_is_not_as_it_must_be_is_named(path: list[Any], value: Any, text: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=text) as caught:
        read(changed(path, value))
    assert str(caught.value).startswith("ckpt-3")


def test_one_of_an_older_psync_has_no_snapshots() -> None:
    content = json.loads(manifest(tensor()).to_bytes())
    del content["images"]
    assert read(json.dumps(content).encode()).snapshots == ()


def test_a_newer_version_is_not_called_damaged() -> None:
    with pytest.raises(CheckpointError, match="format version 2, this psync reads 1") as caught:
        read(changed(["version"], 2))
    assert not isinstance(caught.value, CheckpointCorrupt)


def test_a_tensor_that_occurs_twice_is_refused() -> None:
    content = json.loads(manifest(tensor()).to_bytes())
    content["tensors"] *= 2
    with pytest.raises(CheckpointCorrupt, match="'w' occurs twice"):
        read(json.dumps(content).encode())


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_bytes_from_anywhere_end_in_a_clear_error(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        read(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(["number", "tensors", "states", "files", "images"]),
    JSON,
    st.lists(st.sampled_from(["name", "shape", "dtype", "slices"]), max_size=1),
)
def test_json_from_anywhere_ends_in_a_manifest_or_a_clear_error(
    key: str, value: Any, inner: list[str]
) -> None:
    path = ["tensors", 0, *inner] if inner else [key]
    with contextlib.suppress(CheckpointCorrupt):
        read(changed(path, value))


def shard(name: str, number: int, index: int, offset: int, rows: int, ps: int) -> ShardSpec:
    return ShardSpec(name, number, index, offset, (rows, 2), "float32", ps)


SPECS = [
    [shard("w", 0, 0, 0, 3, 0), shard("b/value", 1, 0, 0, 2, 0), shard("zero", 2, 0, 0, 4, 0)],
    [shard("w", 0, 1, 3, 2, 1)],
]


def snapshots(pushes: int = 1) -> list[SnapshotState]:
    """Two ps tasks with three variables; both shards of w have been pushed so often."""
    made = []
    for ps, specs in enumerate(SPECS):
        store = ShardStore(f"/job:ps/task:{ps}")
        store.define_optimizer(7, Adam(0.1).to_config())
        for spec in specs:
            value = None if spec.variable == "zero" else np.ones(spec.shape, np.float32)
            store.create(spec, value)
        for step in range(pushes + ps):
            spec = specs[0]
            grad = store.check_apply(7, spec.key, np.ones(spec.shape, np.float32))
            for _ in store.apply_checked(7, spec.key, grad, store.begin_push(7, step)):
                pass
        made.append(freeze(store, NOTHING).state)
    return made


def wanted(
    tensor: str, offset: int, rows: int, key: Key, optimizer: int = -1, slot: str = ""
) -> Wanted:
    return Wanted(tensor, (rows,), "float32", offset, key, optimizer, slot)


W = [wanted("model/w", 0, 3, (0, 0)), wanted("model/w", 3, 2, (0, 1))]
M = [wanted("adam/m/w", 0, 3, (0, 0), 7, "m"), wanted("adam/m/w", 3, 2, (0, 1), 7, "m")]


def test_what_is_wanted_has_its_name_and_the_rest_is_called_by_its_variable() -> None:
    never_pushed = wanted("adam/m/b", 0, 2, (1, 0), 7, "m")
    layout = Layout(snapshots(), [*W, *M, never_pushed])
    names = [[name for _, name in arrays] for arrays in layout.arrays]
    assert names == [
        ["model/w@0", "adam/m/w@0", "~/w/7-v@0", "~/b/value/value@0"],
        ["model/w@3", "adam/m/w@3", "~/w/7-v@3"],
    ]
    assert [(each.rows, each.nbytes) for each in M] == [(3, 12), (2, 8)]
    assert layout.find(M[1]) == (1, 1)
    assert layout.find(never_pushed) is None


def test_a_constant_array_is_written_only_if_it_is_wanted_and_no_part_of_the_snapshot() -> None:
    layout = Layout(snapshots(), [wanted("zero", 0, 4, (2, 0))])
    *others, last = layout.arrays[0]
    assert last[1] == "zero@0"
    written = WrittenFile(0, tuple((8 * i, 8, i) for i in range(len(others) + 1)))
    slices, places = layout.lying_in(0, "f", written)
    assert slices == [("zero", Slice(0, 4, "f", 32, 8, 4))]
    assert [place.item for place in places] == [item for item, _ in others]


def test_where_arrays_lie_is_told_of_tensors_and_of_the_snapshot() -> None:
    layout = Layout(snapshots(), W)
    written = WrittenFile(128, ((80, 16, 1), (96, 16, 2), (112, 16, 3)))
    assert layout.lying_in(1, "ps-1", written) == (
        [("model/w", Slice(3, 2, "ps-1", 80, 16, 1))],
        [Place(0, 80, 16, 1), Place(1, 96, 16, 2), Place(2, 112, 16, 3)],
    )


def test_an_array_may_be_part_of_two_tensors() -> None:
    part = wanted("part", 0, 2, (0, 1))  # a shard that is saved as a variable of its own, too
    layout = Layout(snapshots(), [*W, part])
    assert layout.arrays[1][0] == (0, "model/w@3")
    written = WrittenFile(56, ((8, 16, 5), (24, 16, 6), (40, 16, 7)))
    assert layout.lying_in(1, "f", written)[0] == [
        ("model/w", Slice(3, 2, "f", 8, 16, 5)),
        ("part", Slice(0, 2, "f", 8, 16, 5)),
    ]


def test_the_pushes_that_all_ps_tasks_have_counted_are_added_up() -> None:
    assert step_of(snapshots(pushes=4), 7) == 9
    assert step_of(snapshots(), 8) == 0


def test_a_learning_rate_is_told_if_it_is_not_the_first_one() -> None:
    made = snapshots()
    assert changed_rate(made, 7) is None
    assert changed_rate(made, 8) is None
    store = ShardStore("/job:ps/task:0")
    store.define_optimizer(7, Adam(0.1).to_config())
    store.set_learning_rate(7, Constant(0.25).to_config())
    later = freeze(store, NOTHING).state
    assert changed_rate([later, *made], 7) == Constant(0.25).to_config()
