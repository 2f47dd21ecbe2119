"""What of it is what, for all ps tasks at once, and what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from psync.errors import AttachError, CheckpointCorrupt
from psync.specs import ShardSpec, VariableSpec
from psync.store.ledger import HeldUpdates
from psync.store.reattach import (
    Adoption,
    HeldOptimizer,
    Holding,
    Orders,
    partial_updates,
)
from psync.store.snapshot_state import NewOptimizer
from psync.store.untrusted_json import read_json, to_json
from psync.wire.closure_numbers import PART_BITS

ADAM = {"rule": "Adam", "learning_rate": {"schedule": "constant", "value": 0.1}, "clip": None}
SGD = {"rule": "SGD", "learning_rate": {"schedule": "constant", "value": 0.1}, "clip": None}


def variable(name: str, number: int = 0, shards: int = 2, rows: int = 4) -> VariableSpec:
    """A variable of (rows, 3), its shards on one ps after the other."""
    each = rows // shards
    specs = tuple(
        ShardSpec(name, number, index, index * each, (each, 3), "float32", index % 2)
        for index in range(shards)
    )
    return VariableSpec(name, number, (rows, 3), "float32", True, specs, "train.py:7")


def holdings(
    *variables: VariableSpec, lives: tuple[int, int] = (5, 5), optimizers: Any = ()
) -> list[Holding]:
    return [
        Holding(
            lives[ps],
            tuple(shard for spec in variables for shard in spec.shards if shard.ps == ps),
            tuple(optimizers),
        )
        for ps in range(2)
    ]


def used(number: int, config: dict[str, Any] = ADAM, life: int = 5) -> HeldOptimizer:
    return HeldOptimizer((life, number), config, config["learning_rate"])


# Variables.


def test_the_same_variable_is_adopted_under_its_new_number() -> None:
    adoption = Adoption(holdings(variable("w"), variable("b", 1)))
    decision = adoption.compare([variable("b", 0), variable("w", 1)], [], last=True)
    assert decision == (Orders((("b", 0), ("w", 1))), [], [])


def test_what_is_not_there_is_created_and_what_nobody_declares_is_dropped_at_last() -> None:
    adoption = Adoption(holdings(variable("w"), variable("old", 1)))
    decision = adoption.compare([variable("w"), variable("new", 1)], [], last=False)
    assert [spec.name for spec in decision.missing] == ["new"]
    assert decision.extra == []
    adoption.done(decision.orders)
    assert adoption.compare([], [], last=True).extra == ["old"]


def test_nothing_is_noted_before_it_is_done() -> None:
    adoption = Adoption(holdings(variable("w")))
    for _ in range(2):  # a connection was lost, or whoever asked was cancelled
        orders = adoption.compare([variable("w")], [], last=True).orders
        assert orders.adopted == (("w", 0),)
    adoption.done(orders)
    assert adoption.compare([variable("v")], [], last=True).missing


def test_one_whose_program_died_while_it_was_created_is_created_anew() -> None:
    whole = variable("w", 3, shards=4)
    held = [Holding(5, holdings(whole)[0].shards[:1]), Holding(5)]
    adoption = Adoption(held)
    decision = adoption.compare([whole], [], last=True)
    assert decision.missing == [whole]
    assert decision.orders == Orders(dropped=("w",))
    adoption.done(decision.orders)
    assert adoption.compare([whole], [], last=True).orders == Orders()


@pytest.mark.parametrize(
    "other",
    [
        variable("w", shards=1),
        variable("w", shards=4),
        variable("w", rows=8),
        dataclasses.replace(
            variable("w"),
            shards=tuple(dataclasses.replace(s, dtype="float64") for s in variable("w").shards),
        ),
        dataclasses.replace(
            variable("w"),
            shards=tuple(dataclasses.replace(s, ps=1 - s.ps) for s in variable("w").shards),
        ),
    ],
    ids=["fewer shards", "more shards", "shape", "dtype", "places"],
)
def test_all_that_do_not_fit_are_named_together(other: VariableSpec) -> None:
    adoption = Adoption(holdings(variable("w"), variable("b", 1), variable("fits", 2)))
    renamed = dataclasses.replace(other, name="b", variable_id=1)
    with pytest.raises(AttachError) as info:
        adoption.compare([other, renamed, variable("fits", 2)], [], last=False)
    text = str(info.value)
    assert 'variable "w" declared at train.py:7: ' in text
    assert 'variable "b" declared at train.py:7: ' in text
    assert "the ps tasks hold float32 (2, 3) on ps 0, float32 (2, 3) on ps 1" in text
    assert "fits" not in text.replace("does not fit", "")
    assert "nothing was changed" in text
    assert "checkpoint" in text


# Lives.


def test_nothing_anywhere_is_no_error_whoever_began_when() -> None:
    for lives in ((0, 7), (9, 7)):
        assert Adoption(holdings(lives=lives)).compare([], [], last=True).extra == []


@pytest.mark.promise("failures.chief-and-ps")
@pytest.mark.parametrize("life", [0, 6])
def test_a_ps_that_was_started_again_is_named(life: int) -> None:
    whole = holdings(variable("w"), lives=(5, life))
    lost = [whole[0], Holding(life)]
    with pytest.raises(AttachError, match=r"/job:ps/task:1 has lost its shards") as info:
        Adoption(lost)
    assert "checkpoint" in str(info.value)


def test_a_cluster_in_which_another_program_has_begun_anew_is_not_attached_to() -> None:
    began = [Holding(9), holdings(variable("w"))[1]]
    with pytest.raises(AttachError, match=r"/job:ps/task:0 has lost"):
        Adoption(began)


@pytest.mark.parametrize("lives", [(0, 0), (5, 0)])
def test_what_no_program_was_told_to_be_whole_is_not_attached_to(lives: tuple[int, int]) -> None:
    with pytest.raises(AttachError, match=r"/job:ps/task:1 may be inconsistent") as info:
        Adoption(holdings(variable("w"), lives=lives))
    assert "checkpoint" in str(info.value)


# Optimizers.


def compare(held: Any, new: list[NewOptimizer], *, last: bool = True) -> Any:
    adoption = Adoption(holdings(variable("w"), optimizers=held))
    return adoption, adoption.compare([variable("w")], new, last=last).orders


def test_an_optimizer_is_known_by_its_configuration() -> None:
    held = [used(1), used(2, SGD)]
    new = [NewOptimizer(4, "Adam", dict(ADAM)), NewOptimizer(3, "SGD", dict(SGD))]
    adoption, decision = compare(held, new)
    assert decision.optimizers == (((5, 1), 4), ((5, 2), 3))
    assert adoption.rate_of((5, 1)) == ADAM["learning_rate"]
    adoption.done(decision)
    assert adoption.compare([], new, last=True).orders.optimizers == ()


def test_several_of_one_configuration_are_known_by_their_numbers_if_these_are_the_same() -> None:
    new = [NewOptimizer(2, "b", ADAM), NewOptimizer(1, "a", ADAM)]
    assert compare([used(1), used(2)], new)[1].optimizers == (((5, 1), 1), ((5, 2), 2))


def test_several_of_which_nobody_can_tell_which_is_which_are_an_error_at_last() -> None:
    new = [NewOptimizer(1, "body", ADAM), NewOptimizer(2, "head", ADAM)]
    assert compare([used(1)], new, last=False)[1].optimizers == ()
    with pytest.raises(AttachError) as info:
        compare([used(1)], new)
    text = str(info.value)
    assert "rule=Adam" in text
    assert '"body" (number 1), "head" (number 2)' in text
    with pytest.raises(AttachError, match="which is which"):
        compare([used(1), used(1, life=4)], [NewOptimizer(1, "a", ADAM)])


def test_one_that_was_used_and_is_not_there_is_an_error_at_last_that_names_the_others() -> None:
    assert compare([used(1)], [], last=False)[1].optimizers == ()
    with pytest.raises(AttachError, match=r"optimizer 1, rule=Adam.*no other optimizer"):
        compare([used(1)], [])
    with pytest.raises(AttachError, match=r'rule=Adam.*but "mine" \(rule=SGD'):
        compare([used(1)], [NewOptimizer(1, "mine", SGD)])


# Updates that some ps tasks have, and others do not.


def of_updates(*each: HeldUpdates | None) -> list[Holding]:
    return [Holding(5, updates=() if held is None else (held,)) for held in each]


def called(*calls: tuple[int, int, int], final_below: int = 0) -> HeldUpdates:
    return HeldUpdates(5, final_below, calls, (), ())


def test_calls_that_fewer_ps_tasks_have_than_they_have_parts_are_partial() -> None:
    whole, other, half = (1, 0, 3), (1, 1, 2), (2, 0, 2)
    held = of_updates(called(whole, other), called(whole, other, half), called(whole))
    assert partial_updates(held) == 1


def test_a_call_that_one_ps_has_forgotten_as_final_is_whole() -> None:
    assert partial_updates(of_updates(called((1, 0, 2)), called(final_below=2))) == 0
    assert partial_updates(of_updates(called((2, 0, 2)), called(final_below=2))) == 1


def test_a_call_of_a_shard_that_may_come_again_is_not_forgotten_and_may_be_partial() -> None:
    """Its closure lies below those that are final, but it is kept there."""
    half = called((1, 0, 2), final_below=3)._replace(kept=((1, 1),))
    lacks = called(final_below=3)._replace(kept=((1, 1),))
    assert partial_updates(of_updates(half, lacks)) == 1
    assert partial_updates(of_updates(half, half)) == 0
    assert partial_updates(of_updates(half, called(final_below=3))) == 0  # over on the other one


def test_messages_to_one_ps_belong_to_one_call() -> None:
    first, second = (1, 5 << PART_BITS, 4), (1, 5 << PART_BITS | 1, 4)
    assert partial_updates(of_updates(called(first, second), called(first, second))) == 0
    assert partial_updates(of_updates(called(first, second), called(first))) == 1
    assert partial_updates(of_updates(called(first, second), called())) == 1


def test_what_one_ps_knows_no_more_of_was_adopted_and_counted_before() -> None:
    assert partial_updates(of_updates(called((1, 0, 2)), None)) == 0


CHIEF = ("/job:chief/task:0", 7)


def sent(acked: int, **messages: list[tuple[int, int]]) -> HeldUpdates:
    """What a ps knows of the chief's own updates: by "m" and number, (ps, number there) else."""
    listed = tuple((*CHIEF, int(each[1:]), tuple(others)) for each, others in messages.items())
    return HeldUpdates(5, 0, (), ((*CHIEF, acked),), listed)


def test_updates_of_no_closure_are_known_by_their_messages() -> None:
    whole = of_updates(sent(3, m3=[(1, 8)]), sent(8, m8=[(0, 3)]))
    assert partial_updates(whole) == 0
    assert partial_updates(of_updates(sent(3, m3=[(1, 8)]), sent(8))) == 1
    assert partial_updates(of_updates(sent(3), sent(8, m8=[(0, 3)]))) == 1
    three = of_updates(sent(3, m3=[(1, 8), (2, 1)]), sent(8, m8=[(0, 3), (2, 1)]), sent(1))
    assert partial_updates(three) == 1


def test_an_answer_that_was_received_is_one_of_all_parts() -> None:
    """The client tells each ps with its next message there."""
    assert partial_updates(of_updates(sent(3, m3=[(1, 8)]), sent(9))) == 0


# On the wire.


def test_what_is_held_and_what_is_to_be_done_travel_as_json() -> None:
    holding = holdings(variable("w"), optimizers=[used(1)])[1]
    holding = holding._replace(updates=(sent(3, m3=[(1, 8)]), called((1, 0, 2))))
    assert read_json(to_json(holding), Holding, "") == holding
    orders = Orders((("w", 3),), ("b",), (((5, 1), 4),))
    assert read_json(to_json(orders), Orders, "") == orders


@pytest.mark.parametrize(
    "data", [b"", b"[1, 2]", b"{}", b'{"life": "x"}', b"[1, 2, 3]", b"[[[1]],[],[]]"]
)
def test_nonsense_is_told(data: bytes) -> None:
    for kind in (Holding, Orders):
        with pytest.raises(CheckpointCorrupt, match="nonsense: damaged: "):
            read_json(data, kind, "nonsense")


def test_an_optimizer_that_only_some_ps_tasks_had_adopted_is_one() -> None:
    """The program before died while it attached: they know it under two of its identities."""
    first, second = holdings(variable("w"))
    first = Holding(*first[:2], (used(1), used(2, SGD)))
    second = Holding(*second[:2], (used(4, life=6), used(2, SGD)))
    new = [NewOptimizer(7, "Adam", ADAM), NewOptimizer(8, "SGD", SGD)]
    adoption = Adoption([first, second])
    decision = adoption.compare([], new, last=True)
    assert set(decision.orders.optimizers) == {((5, 1), 7), ((6, 4), 7), ((5, 2), 8)}
    adoption.done(decision.orders)
    assert adoption.compare([], new, last=True).orders.optimizers == ()
