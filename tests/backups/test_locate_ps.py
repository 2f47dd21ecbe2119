"""Which of what claims to be a ps is the one to go on with."""

from __future__ import annotations

import pytest

from psync.backups.locate_ps import Place, places
from psync.errors import AttachError
from psync.wire.messages import Primary, ServedHere

NOTHING = ServedHere([], [])


def found(*primaries: Primary, copies: tuple[tuple[int, int, int], ...] = ()) -> ServedHere:
    return ServedHere(list(primaries), list(copies))


def paired(ps: int, host: int, epoch: int, **changed: int) -> Primary:
    return Primary(ps, "", changed.get("coordinator", 7), 0, 0, host, epoch)


def test_one_that_its_backup_has_replaced_is_where_that_serves() -> None:
    promoted = Primary(0, "ps-1:4711", 7, 0, 3)
    at_home = Primary(1, "", 7, 0, 0)
    assert places([NOTHING, found(at_home, promoted)]) == [Place(1, "ps-1:4711"), Place(1, "")]


@pytest.mark.promise("failures.chief-newest-ps")
@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (Primary(0, "b", 8, 0, 0), Primary(0, "", 7, 9, 9)),
        (Primary(0, "b", 7, 1, 0), Primary(0, "", 7, 0, 9)),
        (Primary(0, "b", 7, 1, 4), Primary(0, "", 7, 1, 3)),
    ],
    ids=["coordinator", "timeline", "epoch"],
)
def test_of_several_the_newest_counts(newer: Primary, older: Primary) -> None:
    assert places([found(older), found(newer)])[0] == Place(1, "b")
    assert places([found(newer), found(older)])[0] == Place(0, "b")


def test_one_whose_backup_is_where_it_was_has_not_been_replaced() -> None:
    both = [
        found(paired(0, 1, 5), copies=((1, 7, 6),)),
        found(paired(1, 0, 6), copies=((0, 7, 5),)),
    ]
    assert places(both) == [Place(0, ""), Place(1, "")]


@pytest.mark.parametrize(
    "there",
    [NOTHING, found(copies=((0, 7, 4),)), found(copies=((0, 6, 5),)), found(copies=((1, 7, 5),))],
    ids=["nothing", "an older one", "of another coordinator", "of another ps"],
)
def test_one_whose_backup_is_gone_may_have_been_replaced(there: ServedHere) -> None:
    with pytest.raises(AttachError, match=r"ps/task:0 may have been replaced .* of /job:ps/task:1"):
        places([found(paired(0, 1, 5)), there])


def test_one_of_which_there_is_only_a_backup_is_lost() -> None:
    with pytest.raises(AttachError, match="nobody serves /job:ps/task:0, whose backup may have"):
        places([NOTHING, found(copies=((0, 7, 5),))])


def test_all_doubts_are_told_at_once() -> None:
    with pytest.raises(AttachError) as told:
        places([found(paired(0, 2, 5)), found(paired(1, 2, 6), copies=((2, 7, 7),)), NOTHING])
    assert "task:0 may have" in told.value.message
    assert "task:1 may have" in told.value.message
    assert "nobody serves /job:ps/task:2" in told.value.message
    assert told.value.hint is not None
    assert "attach=False" in told.value.hint
