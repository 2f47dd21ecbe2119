from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import CheckpointCorrupt, CheckpointError, ConfigurationError
from psync.numerics.rules import SGD, Adam, RuleOptions
from psync.schedules import Constant, ExponentialDecay
from psync.specs import DTYPE_NAMES, STEP_BITS, dtype_of
from psync.store.push_counts import PushCount
from psync.store.snapshot_state import (
    NOTHING,
    NewOptimizer,
    OptimizerSnapshot,
    SenderState,
    ShardSnapshot,
    SnapshotState,
    pack_answer,
    unpack_answer,
)
from psync.store.sync_config import SyncConfig
from psync.wire.codec import encode
from psync.wire.messages import Done, Pushed

ADAM = Adam(ExponentialDecay(0.1, 10, 0.5))
SLOW = SGD(0.5, 0.9).with_options(RuleOptions(gradient_accumulation_steps=3))
GROUP = SyncConfig(
    name="sync", optimizer=ADAM.to_config(), replicas_to_aggregate=2, total_num_replicas=2,
    global_step=(0, 3, 0), averages=((1, 2),),
)  # fmt: skip

EPOCH = 1 << STEP_BITS
COUNT = (EPOCH + 2, 4, 3, 0, (((), 1), ((1, 2), 2)), ((1, ((0, 3), (2, 1))),))

STATE = SnapshotState(
    shards=(
        ShardSnapshot(
            variable="h", id=0, index=1, offset=2, shape=(2, 3), dtype="bfloat16", ps=1, version=7,
            slots=((1, "m", None), (1, "v", b"\0\0\x80\x3f")), pushes=((2, 4),),
        ),
        ShardSnapshot(
            variable="flags", id=3, index=0, offset=0, shape=(4,), dtype="bool", ps=1, version=0,
            fill=b"\1", slots=(), pushes=(),
        ),
    ),
    optimizers=(
        OptimizerSnapshot(1, ADAM.to_config(), Constant(0.25).to_config(), EPOCH + 9),
        OptimizerSnapshot(2, SLOW.to_config(), SLOW.learning_rate.to_config(), 31),
    ),
    counts=((1, COUNT), (2, PushCount(31).state)),
    senders=(
        SenderState("/job:worker/task:0", 21, 5, ((5, (3, 0), b"yes"), (7, None, b"no"))),
        SenderState("/job:worker/task:1", 22, 0, ()),
    ),
    variable_sets=((-77, ("h", "flags")), (12, ())),
    calls=((3, 0, 0), (3, 1, 1), (4, 0, 0)),
    final_below=3,
    kept=((1, 2), (2, 1)),
    parts=((3, 1, 2),),
    accumulators=((b"definition", 4), (b"another", -4)),
    groups=((5, GROUP.to_config() | {"global_step": [0, 3, 0], "averages": [[1, 2]]}),),
    counted=((5, 3, 2, b"\0\xff"),),
    failures=(("a call", 3, 1, b"failed"), ("/job:worker/task:0", 21, 7, b"too")),
)  # fmt: skip


def read(content: Any) -> SnapshotState:
    return SnapshotState.from_bytes(json.dumps(content).encode(), "snapshot of ps 1")


@pytest.fixture
def content() -> Any:
    made = json.loads(STATE.to_bytes())
    assert read(made) == STATE
    return made


class TestRoundTrip:
    def test_a_state_comes_back_as_it_was(self, content: Any) -> None:
        again = read(content)
        assert again == STATE
        assert again.to_bytes() == STATE.to_bytes()
        assert again.iterations == 10

    def test_closures_that_wait_for_their_step_come_back_and_may_be_missing(
        self, content: Any
    ) -> None:
        content["pending"] = [4, 7]
        assert read(content).pending == (4, 7)
        del content["pending"]  # as an earlier version has written it
        assert read(content).pending == ()

    def test_earlier_versions_have_one_number_of_pushes_for_each_optimizer(
        self, content: Any
    ) -> None:
        del content["counts"]
        of_one = dict(read(content).counts)[1]
        assert of_one == PushCount(EPOCH + 9).state
        assert PushCount.of(of_one).next_step() == 9

    def test_names_of_variables_are_written_once_for_all_calls(self) -> None:
        assert STATE.to_bytes().count(b'["h","flags"]') == 1

    @given(
        st.lists(
            st.tuples(
                st.text(min_size=1), st.lists(st.integers(0, 5), max_size=3).map(tuple),
                st.sampled_from(DTYPE_NAMES), st.booleans(), st.integers(0, 2**40),
            ),
            max_size=4,
        ),
        st.dictionaries(st.text(min_size=1), st.tuples(st.integers(0, 2**60), st.binary())),
        st.dictionaries(
            st.tuples(st.integers(0, 9), st.integers(0, 2)),
            st.tuples(st.integers(-(2**63), 2**63 - 1), st.lists(st.text(min_size=1)).map(tuple)),
        ),
    )  # fmt: skip
    def test_whatever_it_holds(
        self, shards: Any, senders: dict[str, tuple[int, bytes]], calls: dict[Any, Any]
    ) -> None:
        made = replace(
            NOTHING,
            shards=tuple(
                ShardSnapshot(
                    variable=name, id=number, index=0, offset=0, shape=shape, dtype=dtype, ps=0,
                    version=version, slots=(), pushes=(),
                    fill=np.ones(1, dtype_of(dtype)).tobytes() if constant else None,
                )
                for number, (name, shape, dtype, constant, version) in enumerate(shards)
            ),
            senders=tuple(
                SenderState(task, number, 1, ((3, None, answer + b"!"),))
                for task, (number, answer) in senders.items()
            ),
            variable_sets=tuple(calls.values()),
            calls=tuple((*call, place) for place, call in enumerate(calls)),
        )  # fmt: skip
        assert SnapshotState.from_bytes(made.to_bytes(), "here") == made


def at(*path: Any, value: Any) -> Callable[[Any], None]:
    """Put a value somewhere; a callable makes it of what is there."""

    def change(content: Any) -> None:
        *way, last = path
        for step in way:
            content = content[step]
        content[last] = value(content[last]) if callable(value) else value

    return change


def twice(listed: list[Any]) -> list[Any]:
    return [*listed, listed[0]]


SHARD = ("shards", 0)
DAMAGE = [
    (
        at("counts", 0, 1, 4, 0, 0, value=[-1]),
        r"counts\[0\]\[1\]\[4\]\[0\]\[0\]\[0\]: expected `int` >= 0, got -1",
    ),
    (at("format", value="psync checkpoint"), "format: expected 'psync image'"),
    (at("shards", value=twice), "a shard: expected each once, got '3 of 2'"),
    (at(*SHARD, "shape", value=[2**40, 2**40]), "shape of a shard of 'h': expected what fits"),
    (at(*SHARD, "dtype", value="object"), "dtype of 'h': expected dtype 'object' is not supp"),
    (at(*SHARD, "fill", value="00"), r'the element of "h/part_1": expected one of bfloat16'),
    (
        at("shards", 1, "fill", value="02"),
        r'the element of "flags/part_0": expected one of bool',
    ),
    (at(*SHARD, "slots", value=twice), r'a slot of "h/part_1": expected each once, got .3 of 2'),
    (at(*SHARD, "slots", 0, 0, value=8), r'a slot of "h/part_1": expected one that its optim'),
    (at(*SHARD, "slots", 0, 1, value="w"), r'a slot of "h/part_1": expected one that its optim'),
    (at(*SHARD, "slots", 1, 2, value="00"), r"the element of slot 'v' of \"h/part_1\": expected"),
    (at("shards", 1, "slots", value=[[1, "m", None]]), r'a slot of "flags/part_0": expected none'),
    (at(*SHARD, "pushes", value=[[8, 1]]), r'pushes to "h/part_1": expected of an optimizer'),
    (at("optimizers", value=twice), "an optimizer: expected each once, got '3 of 2'"),
    (at("optimizers", 0, 1, "beta_1", value=7), "optimizer 1: expected what fits: adam"),
    (at("optimizers", 0, 2, value={}), "optimizer 1: expected what fits: expected the config of"),
    (at("counts", value=twice), "a count: expected each once, got '3 of 2'"),
    (at("counts", 0, 0, value=7), "a count: expected of an optimizer that is there, got .7."),
    (at("counts", 0, 1, 0, value=9), "pushes of optimizer 1: expected 17592186044425, as beside"),
    (
        at("counts", 0, 1, 0, value=2 * EPOCH + 2),
        "pushes of optimizer 1: expected 17592186044425, a",
    ),
    (at("counts", 0, 1, 1, value=EPOCH - 5), f"pushes of optimizer 1: expected sums below {EPOCH}"),
    (at("counts", 0, 1, 3, value=EPOCH), f"pushes of optimizer 1: expected sums below {EPOCH}, "),
    (
        at("counts", 0, 1, 4, 0, 1, value=EPOCH),
        "pushes of optimizer 1: expected sums below 1759218",
    ),
    (
        at("counts", 0, 1, 5, 0, 1, 0, 1, value=EPOCH),
        "pushes of optimizer 1: expected sums below 17",
    ),
    (at("counts", 0, 1, 4, value=twice), "pushes of optimizer 1: expected each once, got '3 of 2'"),
    (at("counts", 0, 1, 5, value=twice), "pushes of optimizer 1: expected each once, got '2 of 1'"),
    (
        at("counts", 0, 1, 5, 0, 1, value=twice),
        "pushes of optimizer 1: expected each once, got '3 of 2",
    ),
    (at("senders", value=twice), "a sender: expected each once"),
    (at("senders", 0, 3, value=twice), "an answer to /job:worker/task:0: expected each once"),
    (at("calls", value=twice), "a call: expected each once"),
    (at("calls", 0, 2, value=2), "a call: expected the place of a variable set"),
    (at("groups", value=twice), "a group: expected each once"),
    (at("groups", 0, 1, value={}), "group 5: expected what fits: a synchronous optimizer"),
    (at("groups", 0, 1, "decay", value=10**400), "group 5: expected what fits: .*decay"),
    (at("optimizers", 0, 1, "beta_1", value=10**400), "optimizer 1: expected what fits"),
]


def test_an_item_says_what_it_is() -> None:
    half, m, v, flags = STATE.items
    assert [item.nbytes for item in STATE.items] == [12, 24, 24, 4]
    assert not m.is_constant
    assert v.is_constant
    assert str(half) == 'the value of "h/part_1"'
    assert str(v) == "slot 'v' of optimizer 1 of \"h/part_1\""
    assert flags.dtype == "bool"


class TestDamage:
    @pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[named for _, named in DAMAGE])
    def test_what_does_not_fit_is_named(
        self, content: Any, damage: Callable[[Any], None], named: str
    ) -> None:
        damage(content)
        with pytest.raises(CheckpointCorrupt, match="snapshot of ps 1: damaged: " + named):
            read(content)

    @pytest.mark.parametrize(
        ("place", "config", "unknown"),
        [
            (1, {"rule": "mypackage.sign"}, "update rule 'mypackage.sign'"),
            (1, {"rule": "sgd", "learning_rate": {"kind": "Mine"}}, "schedule 'Mine'"),
        ],
    )
    def test_what_a_plugin_would_know_is_no_damage(
        self, content: Any, place: int, config: Any, unknown: str
    ) -> None:
        content["optimizers"][0][place] = config
        expected = f"snapshot of ps 1: optimizer 1 has the {unknown}, which is not known here"
        with pytest.raises(ConfigurationError, match=expected) as caught:
            read(content)
        assert "--plugin MODULE" in str(caught.value.hint)

    def test_a_newer_version_is_no_damage(self, content: Any) -> None:
        with pytest.raises(CheckpointError, match="version 2, this psync reads 1") as caught:
            read({**content, "version": 2})
        assert not isinstance(caught.value, CheckpointCorrupt)

    def test_what_is_not_json_is_corrupt(self) -> None:
        with pytest.raises(CheckpointCorrupt, match="it is not JSON"):
            SnapshotState.from_bytes(b"\x80\x04", "here")

    @given(st.data())
    def test_anything_anywhere_is_read_or_refused(self, data: st.DataObject) -> None:
        content = json.loads(STATE.to_bytes())
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if (
                not isinstance(place[key], dict | list)
                or not place[key]
                or data.draw(st.booleans())
            ):
                break
            place = place[key]
        place[key] = data.draw(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                max_leaves=5,
            )
        )
        with contextlib.suppress(CheckpointError, ConfigurationError):  # a rule of another name
            read(content).to_bytes()


def test_the_program_says_with_which_learning_rates_its_optimizers_go_on() -> None:
    rate = Constant(0.5).to_config()
    state = STATE.with_rates(
        [
            NewOptimizer(1, "adam", ADAM.to_config(), rate),
            NewOptimizer(2, "another", ADAM.to_config(), rate),  # of another configuration
            NewOptimizer(3, "not saved", ADAM.to_config(), rate),
        ]
    )
    first, second = STATE.optimizers
    assert state.optimizers == (first._replace(learning_rate=rate), second)
    assert replace(state, optimizers=STATE.optimizers) == STATE


def test_what_is_known_of_another_coordinators_closures_means_nothing() -> None:
    """A program that was started again counts its closures anew."""
    own = replace(STATE, coordinator=50)
    assert own.for_coordinator(50) is own
    assert STATE.for_coordinator(50) is STATE  # it is not known whose they are
    other = own.for_coordinator(60)
    kept = ("shards", "optimizers", "counts", "accumulators", "groups")
    assert other == replace(NOTHING, coordinator=60, **{name: getattr(own, name) for name in kept})
    assert SnapshotState.from_bytes(other.to_bytes(), "it") == other


def test_answers_to_updates_are_kept_and_others_are_not() -> None:
    answer = Pushed("accepted", 3, None, 1)
    packed = pack_answer(answer)
    assert packed is not None
    assert unpack_answer(packed) == answer
    assert pack_answer(Done()) is None


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"\xc1", "an answer in a snapshot is damaged"), (encode(Done()), "is a Done")],
)
def test_what_is_no_answer_is_told(data: bytes, what: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=what):
        unpack_answer(data)
